"""Matrix products of the draft step on a CPU, from weights that were packed once.

torch's own 16-bit product brings the weight into oneDNN's layout at every call, which for a step of a few rows costs as
much as the product; a processor without 16-bit products takes its time row by row. No draft is committed without the
verifier's agreement, so a step may multiply by whatever is fastest: the choice can move no token, only how many drafts
the verifier replaces. A gated run trusts drafts, and keeps to the model's own products.
"""

from __future__ import annotations

import torch

from .plans import PrepackedPlan, reordered_product
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

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """
        Args:
            rows (`torch.Tensor` of shape `[n, in]`).
            weight (`torch.Tensor` of shape `[out, in]`).

        Returns:
            `torch.Tensor` of shape `[n, out]` in the dtype of `rows`, or `None`: use torch's own product.
        """
        store = self.store
        if not self._prepacked or not store.resident or rows.dtype != weight.dtype or not store.stays(weight):
            return None
        if store.keeps_short(weight):
            return reordered_product(rows, store.short(weight))
        if rows.shape[0] < UPCAST_ROWS:
            return None
        return store.plan.linear(rows.float(), store.packed(weight)).to(rows.dtype)
