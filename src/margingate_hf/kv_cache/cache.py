"""A ragged, left-aligned K/V cache: slot == position in every row, so rollback is a length and repair is a write.

Each layer keeps keys and values in a [`KVStore`] each, in the format of the device's backend. A draft step writes
what the draft path reads; a verify forward writes over it, which is the column repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from ..forward.context import whole_blocks
from .formats import PLANES, round_to_planes
from .identity import CacheIdentity
from .layer import MarginGateLayer
from .stores import KVStore, cpu_store


class MarginGateCache(DynamicCache):
    """
    Ragged K/V cache of a margin-gated `generate` call.

    Args:
        n_layers (`int`): attention layers of the model.
        rows (`int`): rows to hold.
        dtype (`torch.dtype`): the model's dtype.
        kv_dtype (`str`, *optional*, defaults to `"split"`): format of committed entries, see [`MarginGateConfig`].
        new_store (`Callable`, *optional*): makes a [`KVStore`], by default the one for exact runs on CPU.

    Attributes:
        tokens (`list[list[int]]`): ids of the entries each row holds.
        verified (`list[int]`): leading entries of each row that a verify forward has written.
        high_water (`list[int]`): largest length of each row since it was last cleared; everything beyond it is zero.
        long_rows (`list[bool]`): rows whose keys are rotated by the long table, see `rope.py`.
        broken (`list[int | None]`): the first entry of each row that holds a replacement for a key or value that was
            NaN or too large; nothing from there on is canonical.
        adapters (`list[str | None]`): the PEFT adapter of each row, where a call gives each its own.
        identity ([`CacheIdentity`]): what the entries were computed with.
    """

    def __init__(
        self,
        n_layers: int,
        rows: int,
        dtype: torch.dtype,
        kv_dtype: str = "split",
        new_store: Callable[..., KVStore] = cpu_store,
    ):
        super().__init__()
        if rows < 1:
            raise ValueError(f"`rows` must be at least 1, got {rows}.")
        if kv_dtype not in PLANES:
            raise ValueError(f"`kv_dtype` must be one of {', '.join(map(repr, PLANES))}, got {kv_dtype!r}.")
        self.rows = rows
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.planes = PLANES[kv_dtype]
        self.new_store = new_store
        self.capacity = 0
        self.identity: CacheIdentity | None = None
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.verified: list[int] = [0] * rows
        self.high_water: list[int] = [0] * rows
        self.long_rows: list[bool] = [False] * rows
        self.broken: list[int | None] = [None] * rows
        self.adapters: list[str | None] = [None] * rows
        self.layers = [MarginGateLayer(self) for _ in range(n_layers)]

    @property
    def batch_size(self) -> int:
        """Rows, as transformers names them."""
        return self.rows

    @property
    def lengths(self) -> list[int]:
        """Entries each row holds, drafts included."""
        return [len(ids) for ids in self.tokens]

    def reserve(self, length: int) -> None:
        """Makes room for `length` entries a row, by whole blocks."""
        if length > self.capacity:
            self.capacity = whole_blocks(length)
            for layer in self.layers:
                layer.grow()

    def extend(self, slot: int, start: int, tokens: Sequence[int], verified: bool) -> None:
        """
        Records that entries `start ...` of a row now hold `tokens`; called once the verify forward that wrote them has
        returned.

        Raises:
            `ValueError`: `start` would leave a hole, or a draft would overwrite a verified entry.
        """
        ids = self.tokens[slot]
        if start > len(ids):
            raise ValueError(f"`start` {start} leaves a hole: row {slot} holds {len(ids)} entries.")
        if start < self.verified[slot]:
            raise ValueError(f"`start` {start} would overwrite a verified entry of row {slot}.")
        if verified and start != self.verified[slot]:
            raise ValueError(
                f"row {slot} is verified up to {self.verified[slot]}, a verify forward cannot start at {start}."
            )
        del ids[start:]
        ids.extend(tokens)
        self.high_water[slot] = max(self.high_water[slot], len(ids))
        if verified:
            self.verified[slot] = len(ids)

    def touch(self, slot: int, length: int) -> None:
        """Notes that a forward is about to write a row's entries up to `length`, whether or not it will return."""
        self.high_water[slot] = max(self.high_water[slot], length)

    def mark_broken(self, slot: int, position: int) -> None:
        """Notes that an entry of a row holds a replacement for what could not be held."""
        first = self.broken[slot]
        self.broken[slot] = position if first is None else min(first, position)

    def sound(self, slot: int) -> int:
        """Verified entries of a row before the first that holds a replacement."""
        first = self.broken[slot]
        return self.verified[slot] if first is None else min(first, self.verified[slot])

    def rollback(self, slot: int, length: int) -> None:
        """
        Drops a row's entries from `length` on. They are zeroed: a later query masks them, and only a finite number
        survives that.

        Raises:
            `ValueError`: the row is shorter than `length`.
        """
        if not 0 <= length <= len(self.tokens[slot]):
            raise ValueError(f"`length` must be between 0 and {len(self.tokens[slot])}, got {length}.")
        del self.tokens[slot][length:]
        self.verified[slot] = min(self.verified[slot], length)
        broken = self.broken[slot]
        self.broken[slot] = None if broken is None or broken >= length else broken
        if self.high_water[slot] > length:
            for store in self._stores():
                store.clear(slot, length, self.high_water[slot])
            self.high_water[slot] = length

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one row over all layers; 0 before the first verify forward."""
        return sum(store.nbytes for store in self._stores()) // max(1, self.rows * self.capacity)

    def clear(self, slot: int) -> None:
        """Empties a row for another sequence."""
        self.rollback(slot, 0)

    def reset(self) -> None:
        """Empties every row."""
        for slot in range(self.rows):
            self.clear(slot)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Drops the last entries of every row.

        Args:
            tokens_to_remove (`int`): minus their number, as in transformers; a row that has fewer is emptied.

        Raises:
            `ValueError`: a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove` must be 0 or negative, got {tokens_to_remove}: rows have lengths of their own, so "
                "they are not cut to one. Pass minus the number of entries to drop from each."
            )
        for slot, length in enumerate(self.lengths):
            self.rollback(slot, max(0, length + tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row `i` becomes a copy of row `beam_idx[i]`, int64 `[rows]`; as `batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` copies of itself, one behind the other."""
        self._select_rows([slot for slot in range(self.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps copies of the rows that `indices`, int64 `[n]` or bool `[rows]`, name, in that order."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select_rows(indices.tolist())

    def _select_rows(self, rows: list[int]) -> None:
        if not rows or not all(-self.rows <= row < self.rows for row in rows):
            raise ValueError(f"`indices` must name at least one of the cache's {self.rows} rows, got {rows}.")
        rows = [row % self.rows for row in rows]
        for layer in self.layers:
            layer.select_rows(rows)
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.verified = [self.verified[row] for row in rows]
        self.high_water = [self.high_water[row] for row in rows]
        self.long_rows = [self.long_rows[row] for row in rows]
        self.broken = [self.broken[row] for row in rows]
        self.adapters = [self.adapters[row] for row in rows]
        self.rows = len(rows)

    def export_entries(self, slot: int, start: int, stop: int) -> list[torch.Tensor]:
        """Copies of a row's committed entries in the stores' own format: for each layer keys, then values."""
        return [store.export(slot, start, stop) for store in self._stores()]

    def _stores(self) -> list[KVStore]:
        """For each layer keys, then values; none before the first verify forward."""
        return [store for layer in self.layers for store in layer.stores or ()]

    def load_entries(self, slot: int, start: int, columns: Sequence[torch.Tensor]) -> None:
        """
        Writes entries that a cache of the same identity has exported; `extend` records them.
        """
        for index, layer in enumerate(self.layers):
            keys, values = columns[2 * index : 2 * index + 2]
            if layer.stores is None:
                layer.lazy_initialization(keys, values)
            assert layer.stores is not None
            layer.stores[0].load(slot, start, keys)
            layer.stores[1].load(slot, start, values)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchanges two rows, so that the rows still decoding stay the first ones."""
        if a == b:
            return
        for layer in self.layers:
            layer.swap_rows(a, b)
        self.tokens[a], self.tokens[b] = self.tokens[b], self.tokens[a]
        self.verified[a], self.verified[b] = self.verified[b], self.verified[a]
        self.high_water[a], self.high_water[b] = self.high_water[b], self.high_water[a]
        self.long_rows[a], self.long_rows[b] = self.long_rows[b], self.long_rows[a]
        self.broken[a], self.broken[b] = self.broken[b], self.broken[a]
        self.adapters[a], self.adapters[b] = self.adapters[b], self.adapters[a]

    def long_flags(self, slots: Sequence[int], device: torch.device) -> torch.Tensor | None:
        """Which of some rows use the long rotary table, bool `[len(slots)]`, or `None` if none does."""
        if not any(self.long_rows):
            return None
        return torch.tensor([self.long_rows[slot] for slot in slots], device=device)

    def variant(self, slot: int) -> tuple:
        """What a row's entries depend on beside the cache's identity and its tokens: rotary table and adapter."""
        return self.long_rows[slot], self.adapters[slot]

    def common_prefix(self, slot: int, tokens: Sequence[int]) -> int:
        """How many leading `tokens` a row's verified entries already hold."""
        held = self.tokens[slot][: self.sound(slot)]
        for index, (mine, theirs) in enumerate(zip(held, tokens, strict=False)):
            if mine != theirs:
                return index
        return min(len(held), len(tokens))

    def committed(self, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All committed keys and values of a row, float32 `[heads, verified, dim]` each. For tests and audits."""
        stores = self.layers[layer].stores
        assert stores is not None, "nothing was written yet"
        return stores[0].committed(slot, self.verified[slot]), stores[1].committed(slot, self.verified[slot])

    def check(self) -> None:
        """
        Checks the state that every verify forward must leave behind.

        Raises:
            `AssertionError`: a row is longer than the stores, more entries are verified than held, a committed entry
            is not in its format, or the draft path would read something else than the committed value.
        """
        for slot in range(self.rows):
            held, verified = len(self.tokens[slot]), self.verified[slot]
            assert verified <= held <= self.capacity, (slot, verified, held, self.capacity)
            for index, layer in enumerate(self.layers):
                if not layer.is_initialized:
                    continue
                for store, exact in zip(layer.stores or (), self.committed(index, slot), strict=True):
                    where = f"layer {index}, row {slot}"
                    assert torch.isfinite(exact).all(), f"{where}: a committed entry is not finite"
                    again = round_to_planes(exact, self.dtype, self.planes)
                    assert torch.equal(again, exact), f"{where}: a committed entry is not in its planes' format"
                    assert store.repaired(slot, verified), (
                        f"{where}: the draft path reads an entry that was not repaired"
                    )

    def to_dynamic_cache(self) -> tuple[DynamicCache, torch.Tensor]:
        """
        A stock, left-padded copy of the entries, in the model's dtype.

        Returns:
            `(cache, attention_mask)`: a [`~transformers.DynamicCache`] of `max(lengths)` entries, and its int64 mask
            `[rows, max(lengths)]`, 0 on padding.
        """
        lengths = self.lengths
        width = max(lengths)
        mask = torch.zeros(self.rows, width, dtype=torch.long)
        for slot, length in enumerate(lengths):
            mask[slot, width - length :] = 1
        cache = DynamicCache()
        for index, layer in enumerate(self.layers):
            padded = []
            for store in (layer.keys, layer.values):
                out = torch.zeros_like(store[:, :, :width], dtype=self.dtype)
                for slot, length in enumerate(lengths):
                    out[slot, :, width - length :] = store[slot, :, :length]
                padded.append(out)
            cache.update(padded[0], padded[1], index)
        return cache, mask.to(cache.layers[0].keys.device)
