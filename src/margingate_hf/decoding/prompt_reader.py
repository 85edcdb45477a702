"""What a verify forward reads: pending tokens of decoding rows, and chunks of prompts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..kv_cache.cache import MarginGateCache
from ..kv_cache.prefix_cache import PREFIX_BLOCK, block_keys
from .request import DecodeRequest
from .rows import Row


@dataclass(frozen=True)
class Part:
    """
    Input of a verify forward for one row.

    Attributes:
        tokens: what follows the row's verified entries.
        num_logits: trailing tokens whose logits are wanted.
        of_prompt: whether they are prompt tokens.
    """

    row: Row
    tokens: list[int]
    num_logits: int
    of_prompt: bool


class PromptReader:
    """
    Hands out the parts of the next verify forward, and takes prompt blocks from the prefix cache where it has them.

    Args:
        request ([`DecodeRequest`]): its `chunk`, `prefixes` and `shared`.
        cache ([`MarginGateCache`]): where prompts are read into.
    """

    def __init__(self, request: DecodeRequest, cache: MarginGateCache):
        self.cache = cache
        self.chunk = request.chunk
        self.prefixes = request.prefixes
        self.shared = request.shared
        if self.prefixes is not None:
            self.prefixes.bind(cache)

    def parts(self, active: Sequence[Row], beyond: bool) -> list[Part]:
        """
        Inputs of the next verify forward.

        Prompts are read in the order of admission, `chunk` tokens in all. A row whose next block of prompt another row
        reads in this very forward waits, and takes the block from the prefix cache afterwards.

        Args:
            active (`Sequence[Row]`): rows in their slots.
            beyond (`bool`): whether decoding rows want a token behind their last draft.
        """
        parts: list[Part] = []
        room = self.chunk or sum(len(row.prompt) for row in active)
        claimed: set[int] = set()
        for row in active:
            if row.committed:
                tokens = row.pending(beyond)
                parts.append(Part(row, tokens, len(tokens), of_prompt=False))
                continue
            self._load(row)
            left = self._unclaimed(row, claimed)
            whole_blocks = (row.num_read + room) // PREFIX_BLOCK * PREFIX_BLOCK - row.num_read
            take = left if left <= room else max(0, whole_blocks)
            if take:
                room -= take
                last = row.num_read + take == len(row.prompt)
                parts.append(Part(row, row.prompt[row.num_read : row.num_read + take], int(last), of_prompt=True))
        return parts

    def done(self, part: Part) -> None:
        """A verify forward has read a part."""
        if part.of_prompt:
            part.row.num_read += len(part.tokens)
            if self.prefixes is not None:
                self.prefixes.missed(len(part.tokens))
                self.keep(part.row)

    def keep(self, row: Row) -> None:
        """Offers a row's verified entries to the prefix cache."""
        if self.prefixes is not None:
            self.prefixes.insert(self.cache, row.slot, self.shared)

    def _load(self, row: Row) -> None:
        """Copies the blocks that the prefix cache holds of what a row has left of its prompt."""
        if self.prefixes is None or row.num_read % PREFIX_BLOCK:
            return
        # The last prompt token is always read: its logits are needed.
        blocks = self.prefixes.find(self.cache, row.slot, row.prompt, len(row.prompt) - 1)
        copied = self.prefixes.load(self.cache, row.slot, blocks, row.num_read)
        row.num_read += copied
        row.counts.reused += copied

    def _unclaimed(self, row: Row, claimed: set[int]) -> int:
        """Prompt tokens a row has left to read itself in this forward; claims its blocks."""
        if self.prefixes is not None:
            mine = block_keys(row.prompt, row.num_read)
            if mine and mine[0] in claimed:
                return 0
            claimed.update(mine)
        return len(row.prompt) - row.num_read
