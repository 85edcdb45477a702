"""Matrix products of the fast step on a CPU, from weights that were packed once.

torch's own 16-bit product brings the weight into oneDNN's layout at every call, which for a step of a few rows costs as
much as the product; a processor without 16-bit products takes its time row by row. No draft is committed without the
verifier's agreement, so a step may multiply by whatever is fastest: the choice can move no token, only how many drafts
the verifier replaces. A gated run trusts drafts, and keeps to the model's own products.
"""

from __future__ import annotations

from typing import Any

import torch

from .plans import PrepackedPlan
from .weights import WeightStore

# Below so many rows an up-cast product reads twice the weights for too little: measured to break even at about 6.
UPCAST_ROWS = 8


class DraftProducts:
    """
    Called by [`DraftLinear`].

    Args:
        store ([`WeightStore`]): where packed weights are kept, and dropped when they change.
    """

    def __init__(self, store: WeightStore):
        self.store = store
        self._prepacked = isinstance(store.plan, PrepackedPlan)
        self._short: dict[int, Any] = {}  # what `store.short` gave, by the weight's identity: a lookup a layer a step
        self._version = -1

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """
        Args:
            rows (`torch.Tensor` of shape `[n, in]`).
            weight (`torch.Tensor` of shape `[out, in]`).

        Returns:
            `torch.Tensor` of shape `[n, out]` in the dtype of `rows`, or `None`: use torch's own product.
        """
        store = self.store
        if not self._prepacked or not store.resident or rows.dtype != weight.dtype:
            return None
        if self._version != store.version:
            self._short, self._version = {}, store.version
        short = self._short.get(id(weight))
        if short is None and store.keeps_short(weight):
            short = self._short[id(weight)] = store.short(weight)
        if short is not None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, short, None, "none", [], "")
            return out
        if rows.shape[0] < UPCAST_ROWS:
            return None
        return store.plan.linear(rows.float(), store.packed(weight)).to(rows.dtype)
