"""Draft steps: the model's own forward on one token of each row, in the model's dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from ..forward.context import DecodeContext, context_scope
from ..kv_cache.cache import MarginGateCache
from ..verifier import Verifier
from .rows import Row


class DraftSteps:
    """
    Args:
        verifier ([`Verifier`]): whose copy of the model is run.
        cache ([`MarginGateCache`]): where the steps write.
        product (`Callable`, *optional*): stands in for torch's linear product, see [`DraftLinear`].
    """

    def __init__(
        self,
        verifier: Verifier,
        cache: MarginGateCache,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None,
    ):
        self.verifier = verifier
        self.cache = cache
        self.product = product

    def step(self, rows: Sequence[Row]) -> torch.Tensor:
        """
        One more token in the cache of every row.

        Args:
            rows (`Sequence[Row]`): in the first slots, in order.

        Returns:
            `torch.Tensor` of shape `[rows, vocabulary]`, the model's dtype.
        """
        positions = [row.verified + len(row.drafts) for row in rows]
        tokens = [row.last for row in rows]
        self.cache.reserve(max(positions) + 1)
        for row, position in zip(rows, positions, strict=True):
            self.cache.touch(row.slot, position + 1)
        parts = []
        steps = zip(rows, tokens, positions, strict=True)
        for adapter, run in itertools.groupby(steps, key=lambda step: step[0].request.adapter):
            members, inputs, places = zip(*run, strict=True)
            parts.append(self.forward(members[0].slot, inputs, places, adapter, self.product))
        for row, position, token in zip(rows, positions, tokens, strict=True):
            self.cache.extend(row.slot, position, [token], verified=False)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forward(
        self,
        slot: int,
        tokens: Sequence[int],
        positions: Sequence[int],
        adapter: str | None,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """
        The model's forward on one token of each of consecutive slots, from `slot` on; the cache's lengths stay.

        Args:
            slot (`int`): the first slot.
            tokens, positions (`Sequence[int]`): one of each a slot.
            adapter (`str`, *optional*): the PEFT adapter of all of them.
            product (`Callable`, *optional*): see [`DraftLinear`].

        Returns:
            `torch.Tensor` of shape `[tokens, vocabulary]`, the model's dtype.
        """
        device = self.verifier.device
        context = DecodeContext(
            torch.tensor(positions, device=device),
            max(positions) + 1,
            self.cache.long_flags(range(slot, slot + len(tokens)), device),
            first=slot,
            product=product,
            backend=self.verifier.backend,
        )
        twin = self.verifier.twin_for(adapter)
        with context_scope(context):
            logits: torch.Tensor = twin(
                input_ids=torch.tensor(tokens, device=device)[:, None],
                position_ids=context.positions[:, None],
                cache=self.cache,
                use_cache=True,
            ).logits[:, -1]
        return logits
