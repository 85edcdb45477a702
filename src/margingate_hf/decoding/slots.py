"""The batch slots of a cache: rows are admitted to free ones, and the active rows are always the first ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..forward.architecture import Architecture
from ..kv_cache.cache import MarginGateCache
from .rows import Row


class BatchSlots:
    """
    Since a row's bits depend on its own tokens alone, admitting or retiring one cannot change another's.

    Args:
        rows (`Sequence[Row]`): in the order of admission.
        cache ([`MarginGateCache`]): one cache row a slot.
        architecture ([`Architecture`]): of the model.
        reused (`bool`): whether a slot is given to the next row once its row has ended.

    Attributes:
        waiting, active: rows before and in their slots; `active[i].slot == i`.
    """

    def __init__(self, rows: Sequence[Row], cache: MarginGateCache, architecture: Architecture, reused: bool):
        self.rows = rows
        self.cache = cache
        self.architecture = architecture
        self.reused = reused
        self.waiting = deque(rows)
        self.active: list[Row] = []

    def admit(self) -> None:
        """Gives free slots to waiting rows."""
        while self.waiting and len(self.active) < self.cache.rows:
            row = self.waiting.popleft()
            row.slot = len(self.active)
            if self.reused:
                self.cache.clear(row.slot)
            self.cache.long_rows[row.slot] = self.architecture.needs_long_table(row.request.length)
            self.cache.adapters[row.slot] = row.request.adapter
            row.num_read = row.counts.reused = row.request.reused
            self.active.append(row)

    def retire(self, row: Row, keep: Callable[[Row], None]) -> None:
        """
        Drops a row's drafts, lets `keep` have its verified entries, and swaps the last active row into its slot. A row
        that is still waiting just leaves.
        """
        row.drop_drafts()
        if row in self.waiting:
            self.waiting.remove(row)
            return
        self.cache.rollback(row.slot, row.verified)
        keep(row)
        last = self.active[-1]
        self.cache.swap_rows(row.slot, last.slot)
        self.active[row.slot] = last
        self.active.pop()
        row.slot, last.slot = last.slot, row.slot

    def restore(self, kept: Callable[[int], int]) -> None:
        """
        Puts the cache's rows back into the caller's order, also after an error, and cuts each to the entries that
        `kept(slot)` says outlive the call.
        """
        if self.reused:
            return
        for index, row in enumerate(self.rows):
            if row.slot < 0:
                row.slot = index  # never admitted
        for row in self.rows:
            while row.slot != row.index:
                other = next(other for other in self.rows if other.slot == row.index)
                self.cache.swap_rows(row.slot, other.slot)
                row.slot, other.slot = other.slot, row.slot
            self.cache.rollback(row.slot, kept(row.slot))
