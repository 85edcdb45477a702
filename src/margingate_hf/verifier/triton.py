"""The backend of CUDA devices: the kernels in `margingate_kernels`, which are imported when it is first used."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..forward.context import AttentionOptions, DecodeContext, VerifyContext
from .plans import LinearPlan


class Triton:
    """See [`Backend`]. With `TRITON_INTERPRET=1` it runs on CPU tensors, for tests."""

    name = "triton"
    device_types = ("cuda",)

    @functools.cached_property
    def _ops(self) -> Any:
        from . import triton_ops  # Triton is not installed everywhere

        return triton_ops

    def fits(self, device: torch.device) -> str | None:
        """See [`Backend`]."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed; `pip install triton`"
        try:
            self._ops.describe(device)
        except RuntimeError as error:
            return str(error)
        return None

    def check_settings(self) -> None:
        """See [`Backend`]; the kernels read no setting of the process."""

    def describe(self, device: torch.device) -> str:
        """See [`Backend`]."""
        return str(self._ops.describe(device))

    def plans(self) -> Sequence[LinearPlan]:
        """See [`Backend`]; no library product is trusted where the kernel fails its probe."""
        plans: Sequence[LinearPlan] = self._ops.TRITON_PLANS
        return plans

    def store(self, summed: bool, gated: bool) -> Callable[..., Any]:
        """See [`Backend`]."""
        found: Callable[..., Any] = self._ops.DevicePlaneStore if summed else self._ops.TritonPlaneStore
        return found

    def draft_product(self, store: Any) -> None:
        """See [`Backend`]; the model's own product."""

    def verify_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context: VerifyContext,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See [`Backend`]."""
        out: torch.Tensor = self._ops.verify_attention(query, keys, values, context, options)
        return out

    def decode_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context: DecodeContext,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See [`Backend`]."""
        out: torch.Tensor = self._ops.decode_attention(query, keys, values, context, options)
        return out

    def row_sum(self, x: torch.Tensor) -> torch.Tensor:
        """See [`Backend`]."""
        out: torch.Tensor = self._ops.kernels.row_sum(x)
        return out

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        """See [`Backend`]."""
        out: torch.Tensor = self._ops.kernels.softmax(x)
        return out

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        """See [`Backend`]."""
        out: torch.Tensor = self._ops.kernels.log_softmax(x)
        return out

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """See [`Backend`]."""
        out: torch.Tensor = self._ops.kernels.layer_norm(x, weight, bias, eps)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """See [`Backend`]."""
        out: torch.Tensor = self._ops.kernels.rms_norm(x, weight, eps)[0]
        return out

    def top2_margin(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Backend`]; one read of the scores."""
        found: tuple[torch.Tensor, torch.Tensor] = self._ops.top2_margin(scores)
        return found
