"""Prefix cache: verified K/V blocks keyed by their token ids.

A committed entry depends on the tokens up to it and on nothing else, so reusing a copy changes no bit. Each block is
found under its parent block and its own token ids, so sequences that share a beginning share its blocks. The least
recently used leaves are dropped first.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .cache import CacheIdentity, MarginGateCache

PREFIX_BLOCK = 32  # entries of a block; what is left over at the end of a shared prefix is read again


@dataclass(eq=False)
class Block:
    """
    Attributes:
        parent: the block before it, or the root.
        tokens: its token ids.
        entries: for each layer keys, then values: what [`~margingate_hf.kv_cache.stores.KVStore.export`] gave.
        children: blocks behind it, by their tokens.
        used: when it was last looked up; larger is later.
    """

    parent: Block | None
    tokens: tuple[int, ...]
    entries: list[torch.Tensor] = field(default_factory=list)
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)
    used: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its entries."""
        return sum(entry.numel() * entry.element_size() for entry in self.entries)


class PrefixCache:
    """
    Blocks of verified entries. May be used by several threads at once.

    Args:
        budget (`int`): bytes it may hold; 0 keeps nothing.

    Attributes:
        hits, misses: prompt tokens that were found, and that were not.
        nbytes: bytes held.
    """

    def __init__(self, budget: int):
        if budget < 0:
            raise ValueError(f"`budget` must be 0 or more bytes, got {budget}.")
        self.budget = budget
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._identity: tuple[CacheIdentity | None, str] | None = None
        self._roots: dict[tuple, Block] = {}  # by what else a row's entries depend on, see `MarginGateCache.variant`
        self._clock = itertools.count(1)
        self._lock = threading.RLock()

    def bind(self, cache: MarginGateCache) -> None:
        """
        Makes the prefix cache fit a K/V cache; blocks of other weights, another plan or another format are dropped.
        """
        with self._lock:
            if not self._fits(cache):
                self._identity = (cache.identity, cache.kv_dtype)
                self.clear()

    def _fits(self, cache: MarginGateCache) -> bool:
        """Whether it holds what this cache's entries are. Another run may have bound it to other weights."""
        return self._identity == (cache.identity, cache.kv_dtype)

    def clear(self) -> None:
        """Drops every block."""
        with self._lock:
            self._roots = {}
            self.nbytes = 0

    def missed(self, count: int) -> None:
        """Counts prompt tokens that were read."""
        with self._lock:
            self.misses += count

    def find(self, cache: MarginGateCache, slot: int, tokens: Sequence[int], limit: int) -> list[Block]:
        """The blocks that hold the leading `tokens` of a row, at most `limit` of them, in order."""
        found: list[Block] = []
        with self._lock:
            block = self._roots.get(cache.variant(slot)) if self._fits(cache) else None
            for start in range(0, limit - PREFIX_BLOCK + 1, PREFIX_BLOCK):
                block = None if block is None else block.children.get(tuple(tokens[start : start + PREFIX_BLOCK]))
                if block is None:
                    break
                block.used = next(self._clock)
                found.append(block)
        return found

    def load(self, cache: MarginGateCache, slot: int, blocks: Sequence[Block], held: int) -> int:
        """
        Copies blocks into a row that already holds its first `held` entries, a whole number of blocks.

        Returns:
            Entries copied.
        """
        fresh = blocks[held // PREFIX_BLOCK :]
        if not fresh:
            return 0
        stop = held + len(fresh) * PREFIX_BLOCK
        cache.reserve(stop)
        entries = [torch.cat(parts, dim=-2) for parts in zip(*(block.entries for block in fresh), strict=True)]
        cache.touch(slot, stop)
        cache.load_entries(slot, held, entries)
        cache.extend(slot, held, [token for block in fresh for token in block.tokens], verified=True)
        with self._lock:
            self.hits += stop - held
        return stop - held

    def insert(self, cache: MarginGateCache, slot: int, wanted: frozenset[int] | None = None) -> None:
        """
        Takes up the full blocks of a row's verified entries that are not held yet.

        Args:
            cache ([`MarginGateCache`]): nothing is taken from one that the store is not bound to.
            slot (`int`): the row.
            wanted (`frozenset[int]`, *optional*): the only blocks to take up, see [`shared_blocks`]; `None`: all.
        """
        tokens, count = cache.tokens[slot], cache.sound(slot)
        with self._lock:
            if not self._fits(cache):
                return
            block = self._roots.setdefault(cache.variant(slot), Block(None, ()))
            for index, (key, number) in enumerate(_numbered(tokens, count)):
                child = block.children.get(key)
                if child is None:
                    if wanted is not None and number not in wanted:
                        return
                    start = index * PREFIX_BLOCK
                    child = Block(block, key, cache.export_entries(slot, start, start + PREFIX_BLOCK))
                    if not self._make_room(child.nbytes, block):
                        return
                    block.children[key] = child
                    self.nbytes += child.nbytes
                child.used = next(self._clock)
                block = child

    def _make_room(self, nbytes: int, wanted: Block) -> bool:
        """Drops least recently used leaves, never `wanted` or a block it stands on, until `nbytes` fit."""
        while self.nbytes + nbytes > self.budget:
            leaves = [block for block in self._blocks() if not block.children and block is not wanted]
            if not leaves:
                return False
            oldest = min(leaves, key=lambda block: block.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens]
            self.nbytes -= oldest.nbytes
        return True

    def _blocks(self) -> list[Block]:
        found: list[Block] = []
        pending = list(itertools.chain.from_iterable(root.children.values() for root in self._roots.values()))
        while pending:
            block = pending.pop()
            found.append(block)
            pending.extend(block.children.values())
        return found


def _numbered(tokens: Sequence[int], count: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each full block of the first `count` tokens, and a number that stands for all tokens up to the block's end."""
    number = hash(())
    for start in range(0, count - PREFIX_BLOCK + 1, PREFIX_BLOCK):
        key = tuple(tokens[start : start + PREFIX_BLOCK])
        number = hash((number, key))
        yield key, number


def shared_blocks(prompts: Sequence[Sequence[int]]) -> frozenset[int]:
    """The [`block_keys`] that more than one prompt has."""
    counts = Counter(key for prompt in prompts for key in block_keys(prompt, 0))
    return frozenset(key for key, count in counts.items() if count > 1)


def block_keys(tokens: Sequence[int], start: int) -> list[int]:
    """
    The numbers of a prompt's full blocks from `start` on, a whole number of blocks, the last token left out: equal for
    equal beginnings. A hash collision only delays a row; it never changes output.
    """
    return [number for _, number in _numbered(tokens, len(tokens) - 1)][start // PREFIX_BLOCK :]
