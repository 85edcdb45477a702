"""One layer of the cache: it hands what the model computes to its stores, and what they hold to attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import DynamicLayer

from ..forward.context import VerifyContext, current_context
from ..forward.fixed_plan import fixed_plan
from .stores import KVStore


class Owner(Protocol):
    """What a layer reads of its [`MarginGateCache`]."""

    rows: int
    capacity: int
    dtype: torch.dtype
    planes: int
    high_water: list[int]
    new_store: Callable[..., KVStore]

    @property
    def lengths(self) -> list[int]: ...


class MarginGateLayer(DynamicLayer):
    """
    One layer's keys and values.

    Args:
        cache ([`MarginGateCache`]): the owner, for rows, capacity and format.
    """

    def __init__(self, cache: Owner):
        super().__init__()
        self._cache = cache
        self.stores: tuple[KVStore, KVStore] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """
        Allocates the stores for the head counts and dims of `key_states`/`value_states` `[..., heads, length, dim]`.
        """
        cache = self._cache
        self.device = key_states.device
        keys, values = (
            cache.new_store(
                cache.rows,
                states.shape[-3],
                cache.capacity,
                states.shape[-1],
                cache.dtype,
                cache.planes,
                self.device,
            )
            for states in (key_states, value_states)
        )
        self._hold(keys, values)
        self.is_initialized = True

    def _hold(self, keys: KVStore, values: KVStore) -> None:
        self.stores = keys, values
        self.keys, self.values = keys.draft, values.draft  # where transformers' own code looks for them

    def grow(self) -> None:
        """Extends the stores to the owner's capacity, keeping what they hold."""
        if self.stores is not None:
            cache = self._cache
            keys, values = (store.grown(cache.capacity, cache.high_water) for store in self.stores)
            self._hold(keys, values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes the entries of the verify forward that this thread is in.

        Args:
            key_states, value_states (`torch.Tensor` of shape `[1, heads, tokens, dim]` in a verify forward, float32, or
                `[rows, heads, 1, dim]` in a draft step, the model's dtype).

        Returns:
            What the registered attention reads, see [`KVStore`]. Views, no copies.

        Raises:
            `RuntimeError`: called outside a verify forward of ours; a ragged cache means nothing to stock code.
        """
        context = current_context()
        if context is None:
            raise RuntimeError(
                "A MarginGateCache is ragged and only the margin gate can write to it. "
                "Call `cache.to_dynamic_cache()` to continue with stock transformers."
            )
        with fixed_plan():
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            assert self.stores is not None
            keys, values = self.stores
            if isinstance(context, VerifyContext):
                return context.noted(
                    self._repair(keys, key_states, context), self._repair(values, value_states, context)
                )
            return keys.write_draft(key_states[:, :, 0], context), values.write_draft(value_states[:, :, 0], context)

    @staticmethod
    def _repair(store: KVStore, states: torch.Tensor, context: VerifyContext) -> torch.Tensor:
        """
        Writes keys or values, float32 `[1, heads, tokens, dim]`. Tokens whose values the store cannot hold are marked:
        whatever is computed from them ends its row by an error, and nothing else is touched.
        """
        held, replaced = store.held(states[0].transpose(0, 1))
        if replaced is not None:
            context.mark_broken(replaced)
        return store.repair(held, context)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchanges two rows in place."""
        count = max(self._cache.high_water[a], self._cache.high_water[b])
        for store in self.stores or ():
            store.swap_rows(a, b, count)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Makes the layer hold copies of the given rows, in that order."""
        if self.stores is not None:
            keys, values = (store.taken(rows) for store in self.stores)
            self._hold(keys, values)

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "a layer of a MarginGateCache cannot be changed by itself, since its rows' lengths belong to the cache: "
            "call `reset`, `crop`, `reorder_cache`, `batch_select_indices` or `batch_repeat_interleave` of the cache, "
            "or `cache.to_dynamic_cache()` for a stock one that can be off-loaded."
        )

    # What a stock layer does to its own tensors would leave the cache's lengths and its verified entries untrue.
    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse

    def get_seq_length(self) -> int:
        """Entries of the longest row."""
        return max(self._cache.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Transformers' own mask code sees one rectangular cache; our attention does not use it."""
        return self.get_seq_length() + query_length, 0
