"""The forward context: which tokens one forward covers, and where their keys lie. Made once, read by every layer.

A verify forward hands the model only token ids and position ids; everything that depends on the batch (which cache row
a token belongs to, how far it may look back) travels beside the model in a thread-local `Context`, so the model's own
forward stays unmodified and a stock call in another thread sees nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

# Keys and values are cut into blocks of this many positions, anchored at position 0. Part of the verifier's plan.
KV_BLOCK = 128
# Queries of one row share one matrix product with the bits of exactly this many rows. Part of the plan.
QUERY_TILE = 8


@dataclass(frozen=True)
class AttentionOptions:
    """
    What a layer asks of its attention.

    Attributes:
        scaling (`float`): factor on the scores.
        sliding_window (`int`, *optional*): keys a query sees, itself included. `None`: all.
        softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): a logit per head that takes weight and gives no value.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def _address(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def whole_blocks(length: int) -> int:
    """`length` positions rounded up to whole K/V blocks."""
    return -(-length // KV_BLOCK) * KV_BLOCK


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one cache row: `tokens[i]` stands at position `start + i`."""

    slot: int
    start: int
    tokens: Sequence[int]

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)


# `(slot, first flat index, first position, tokens)`, as the spans of a verify forward.
_Tile = tuple[int, int, int, int]


@dataclass(frozen=True)
class Round:
    """
    At most one query tile of one size for each of several rows.

    Attributes:
        slots: cache rows, in the order of the leading dimension below.
        query_index: int64 `[rows, queries]`, index into the verify forward's flat tokens; fillers point one past the
            end.
        query_position: int64 `[rows, queries]`; fillers sit at position 0, and what they give is dropped.
        n_blocks: KV blocks that the furthest query of the round needs.
        clear: leading blocks of which every query sees all keys.
    """

    slots: tuple[int, ...]
    query_index: torch.Tensor
    query_position: torch.Tensor
    n_blocks: int
    clear: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict, compare=False)

    def hidden(self, sliding_window: int | None) -> torch.Tensor:
        """
        Keys a query must not see in the last blocks: bool `[rows, 1, blocks, queries, 1, KV_BLOCK]`, built once a
        window size. Without a window blocks that are clear have no mask.
        """
        mask = self.masks.get(sliding_window)
        if mask is None:
            device = self.query_position.device
            first = self.clear if sliding_window is None else 0
            keys = torch.arange(first * KV_BLOCK, self.n_blocks * KV_BLOCK, device=device)
            keys = keys.view(1, 1, self.n_blocks - first, 1, 1, KV_BLOCK)
            queries = self.query_position[:, None, None, :, None, None]
            mask = keys > queries
            if sliding_window is not None:
                mask = mask | (keys <= queries - sliding_window)
            self.masks[sliding_window] = mask
        return mask


@dataclass
class AttentionRecord:
    """
    How one forward called attention; the self-test reads it.

    Attributes:
        calls: attention calls by layer index.
        transforms_cached_kv: whether attention was called with anything but what the cache returned: latent attention
            computes with it first.
    """

    calls: dict[int, int] = field(default_factory=dict)
    transforms_cached_kv: bool = False
    _returned: set[tuple[int, torch.Size]] = field(default_factory=set)

    def returned(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The cache gave a layer these, any shape."""
        self._returned |= {_address(keys), _address(values)}

    def called(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Attention of a layer was called with these, any shape."""
        self.calls[layer] = self.calls.get(layer, 0) + 1
        self.transforms_cached_kv |= not {_address(keys), _address(values)} <= self._returned


@dataclass
class VerifyContext:
    """
    A verify forward over the flat tokens of several segments (model batch 1, length `n_tokens`).

    Attributes:
        slots, positions: int64 `[n_tokens]`, cache row and position of each token.
        spans: `(slot, first flat index, first position, tokens)` of each segment.
        n_rows: leading cache rows that the verify forward reads; `length`: one past the furthest position.
        long: bool `[n_tokens]`, tokens of rows that use the long rotary table; `None` if there are none.
        backend: what runs the operations of this forward.
        record: filled in by the self-test's own forward, `None` in all others.
        broken: bool `[n_tokens]`, tokens with a key or value, in any layer, that the cache cannot hold: NaN or too
            large. `None` if there are none.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    spans: tuple[tuple[int, int, int, int], ...]
    n_rows: int
    length: int
    long: torch.Tensor | None = None
    backend: AttentionBackend | None = None
    record: AttentionRecord | None = None
    broken: torch.Tensor | None = None
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    _rounds: dict[tuple[int, ...], tuple[Round, ...]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Tokens of the verify forward."""
        return self.slots.shape[0]

    @property
    def n_blocks(self) -> int:
        """KV blocks that the verify forward reads."""
        return -(-self.length // KV_BLOCK)

    def noted(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache gives a layer of the model, any shape, unchanged; the self-test's record takes note of it."""
        if self.record is not None:
            self.record.returned(keys, values)
        return keys, values

    def mark_broken(self, tokens: torch.Tensor) -> None:
        """Notes tokens, bool `[n_tokens]`, whose keys or values cannot be held."""
        self.broken = tokens if self.broken is None else self.broken | tokens

    def rounds(self, sizes: tuple[int, ...]) -> tuple[Round, ...]:
        """
        Query tiles for the torch form, one of each segment at a time, built once for all layers of one shape.

        Args:
            sizes (`tuple[int, ...]`): queries a tile may hold, ascending.
        """
        found = self._rounds.get(sizes)
        if found is None:
            parts = (part for members in self._ranks(sizes[-1]) for part in _by_size(members, sizes))
            found = self._rounds[sizes] = tuple(
                _round(size, members, self.n_tokens, self.slots.device) for size, members in parts
            )
        return found

    def _ranks(self, largest: int) -> Iterator[list[_Tile]]:
        """
        The next tile of every segment that has tokens left.
        """
        left = list(self.spans)
        while left:
            taken = [(*span[:3], _take(span[3], largest)) for span in left]
            yield taken
            left = [
                (slot, base + took, start + took, tokens - took)
                for (slot, base, start, tokens), (*_, took) in zip(left, taken, strict=True)
                if tokens > took
            ]

    def tiles(self, size: int) -> torch.Tensor:
        """First flat index and count of up to `size` consecutive tokens of a row, int32 `[n, 2]`, built once a size."""
        found = self._tiles.get(size)
        if found is None:
            cut = [
                (base + offset, min(size, tokens - offset))
                for _, base, _, tokens in self.spans
                for offset in range(0, tokens, size)
            ]
            found = self._tiles[size] = torch.tensor(cut, dtype=torch.int32, device=self.slots.device)
        return found


@dataclass
class DecodeContext:
    """
    A draft step: one token for each of `n_rows` consecutive cache rows (model batch `n_rows`, length 1).

    Attributes:
        positions: int64 `[n_rows]`, the position each row's token takes.
        length: keys to read, one past the furthest position.
        long: bool `[n_rows]`, rows that use the long rotary table; `None` if there are none.
        first: the first of the cache rows.
        product: takes the place of torch's own linear product, see [`DraftLinear`]; `None` leaves it.
        backend: what runs the operations of this step.
    """

    positions: torch.Tensor
    length: int
    long: torch.Tensor | None = None
    first: int = 0
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None
    backend: AttentionBackend | None = None
    masks: dict[tuple, torch.Tensor] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """Rows of the step."""
        return self.positions.shape[0]

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        """Cache row of each token, int64 `[n_rows]`."""
        return torch.arange(self.first, self.first + self.n_rows, device=self.positions.device)

    @functools.cached_property
    def tiles(self) -> torch.Tensor:
        """One tile a row, int32 `[n_rows, 2]`, as [`VerifyContext.tiles`]."""
        tokens = torch.arange(self.n_rows, device=self.positions.device)
        return torch.stack([tokens, torch.ones_like(tokens)], dim=1).int()

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[n_rows, 1, 1, length]` in `dtype`, 0 where a key is visible, built once a window size."""
        key = (sliding_window, dtype)
        mask = self.masks.get(key)
        if mask is None:
            keys = torch.arange(self.length, device=self.positions.device)[None]
            queries = self.positions[:, None]
            hidden = keys > queries
            if sliding_window is not None:
                hidden = hidden | (keys <= queries - sliding_window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = zeros.masked_fill_(hidden, float("-inf"))[:, None, None]
            self.masks[key] = mask
        return mask


class AttentionBackend(Protocol):
    """The attention of a backend, see [`~margingate_hf.forward.backend.Backend`]."""

    def verify_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context: VerifyContext,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Query `[1, heads, tokens, dim]`, keys and values as the stores return them; `[1, tokens, heads, dim]`."""

    def decode_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context: DecodeContext,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Query `[rows, heads, 1, dim]`, the model's dtype; `[rows, 1, heads, dim]`, the model's dtype."""


Context = VerifyContext | DecodeContext


def verify_context(
    segments: Sequence[Segment], device: torch.device, backend: AttentionBackend | None = None
) -> VerifyContext:
    """Lays the segments out one after the other."""
    slots: list[int] = []
    positions: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    for segment in segments:
        spans.append((segment.slot, len(slots), segment.start, len(segment.tokens)))
        slots.extend([segment.slot] * len(segment.tokens))
        positions.extend(range(segment.start, segment.stop))
    return VerifyContext(
        slots=torch.tensor(slots, device=device),
        positions=torch.tensor(positions, device=device),
        spans=tuple(spans),
        n_rows=max(slots) + 1,
        length=max(positions) + 1,
        backend=backend,
    )


def _take(tokens: int, largest: int) -> int:
    """Tokens of a segment's next tile; what is left of a prompt fills up a large one rather than take three small."""
    return min(tokens, largest if tokens > 2 * QUERY_TILE else QUERY_TILE)


def _by_size(members: list[_Tile], sizes: tuple[int, ...]) -> Iterator[tuple[int, list[_Tile]]]:
    """
    Members of one rank, the full large tiles apart from the rest. The rest shares the smallest size that holds them
    all: rows cut apart by small differences would no longer be a view of the cache.
    """
    large = [member for member in members if member[3] > QUERY_TILE]
    small = [member for member in members if member[3] <= QUERY_TILE]
    if large:
        yield sizes[-1], large
    if small:
        longest = max(count for *_, count in small)
        yield min(size for size in sizes if size >= longest), small


def _round(size: int, members: list[_Tile], n_tokens: int, device: torch.device) -> Round:
    members = sorted(members)
    index = [[first + i if i < count else n_tokens for i in range(size)] for _, first, _, count in members]
    position = [[start + i if i < count else 0 for i in range(size)] for _, _, start, count in members]
    furthest = max(start + count for _, _, start, count in members)
    return Round(
        slots=tuple(slot for slot, *_ in members),
        query_index=torch.tensor(index, device=device),
        query_position=torch.tensor(position, device=device),
        n_blocks=-(-furthest // KV_BLOCK),
        clear=(min(start for _, _, start, _ in members) + 1) // KV_BLOCK,
    )


_state = threading.local()


def current_context() -> Context | None:
    """The context of the verify forward that this thread is in, or `None` outside our forwards."""
    return getattr(_state, "context", None)


@contextlib.contextmanager
def context_scope(context: Context) -> Iterator[Context]:
    """Makes `context` current in this thread for the duration of one forward pass."""
    before = current_context()
    _state.context = context
    try:
        yield context
    finally:
        _state.context = before
