"""What a device brings: the operations of a verify forward and of a draft step, behind one protocol.

A backend is chosen once, when a verifier is made (`verifier/backends.py`), and travels with it: in the forward context
to attention, in the operator mode to sums and norms, in the cache as the factory of its stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .context import AttentionBackend


class Backend(AttentionBackend, Protocol):
    """
    Operations on float32 tensors unless said otherwise. All but `decode_attention` are batch-invariant: the bits of a
    row depend on that row alone.
    """

    @property
    def name(self) -> str:
        """For `MARGINGATE_BACKEND` and the verifier's key."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """`torch.device.type` of the devices it serves."""

    def fits(self, device: torch.device) -> str | None:
        """`None` if it can run on a device, otherwise what is missing, in words."""

    def check_settings(self) -> None:
        """
        Raises:
            `ValueError`: a setting of the process would round FP32 products.
        """

    def describe(self, device: torch.device) -> str:
        """Every constant that takes part in a bit, in one line."""

    def plans(self) -> Sequence[Any]:
        """Its linear plans, fastest first."""

    def store(self, summed: bool, gated: bool) -> Callable[..., Any]:
        """
        How a layer keeps keys, or values.

        Args:
            summed (`bool`): the model computes with what the cache returns before it calls attention (latent
                attention), so that must be one tensor of values.
            gated (`bool`): for `coverage="gated"`: what a draft step writes is what the verifier reads.
        """

    def draft_product(self, store: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None:
        """The linear product of draft steps over a weight store, or `None`: the model's own."""

    def row_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the last dimension: `[..., n]` to `[..., 1]`."""

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of `[..., n]`."""

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of `[..., n]`."""

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Over the last dimension of `[..., n]`; weight and bias `[n]`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Over the last dimension of `[..., n]`; weight `[n]`."""

    def top2_margin(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best token and its lead over the second best, of scores `[..., vocabulary]`, any floating dtype."""
