"""The backend of CPUs: plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..forward import attention
from ..kv_cache.stores import KVStore, PlaneStore, cpu_store
from . import arithmetic
from .draft_products import DraftProducts
from .plans import CPU_PLANS, LinearPlan
from .precision import check_precision
from .top2 import top2_margin
from .weights import WeightStore


class TorchCPU:
    """See [`Backend`]."""

    name = "torch"
    device_types = ("cpu",)

    def fits(self, device: torch.device) -> str | None:
        """See [`Backend`]; always."""
        return None

    def check_settings(self) -> None:
        """See [`Backend`]."""
        check_precision()

    def describe(self, device: torch.device) -> str:
        """See [`Backend`]."""
        return attention.describe(device)

    def plans(self) -> Sequence[LinearPlan]:
        """See [`Backend`]."""
        return CPU_PLANS

    def store(self, summed: bool, gated: bool) -> Callable[..., KVStore]:
        """See [`Backend`]; one plane of the model's own dtype is read as it is written."""
        return PlaneStore if summed or gated else cpu_store

    def draft_product(self, store: WeightStore) -> Callable[[torch.Tensor, torch.Tensor], Any] | None:
        """See [`Backend`]."""
        return DraftProducts(store)

    verify_attention = staticmethod(attention.verify_attention)
    decode_attention = staticmethod(attention.decode_attention)
    row_sum = staticmethod(arithmetic.row_sum)
    softmax = staticmethod(arithmetic.softmax)
    log_softmax = staticmethod(arithmetic.log_softmax)
    layer_norm = staticmethod(arithmetic.layer_norm)
    rms_norm = staticmethod(arithmetic.rms_norm)
    top2_margin = staticmethod(top2_margin)
