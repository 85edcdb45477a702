"""Layers for the `kernels` library: drop-in forwards for modules that have the named attributes."""

from __future__ import annotations

import torch
from torch import nn

from .matmul import linear
from .rows import rms_norm


class RMSNorm(nn.Module):
    """Batch-invariant forward for a Llama-style RMSNorm, computed in FP32, returned in the input's dtype."""

    can_torch_compile = False
    has_backward = False
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[..., hidden]`, float32, bfloat16 or float16).

        Returns:
            `torch.Tensor`, shape and dtype of `hidden_states`.
        """
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)[0].to(hidden_states.dtype)


class Linear(nn.Module):
    """Batch-invariant forward for `nn.Linear`, computed to FP32 quality, returned in the input's dtype."""

    can_torch_compile = False
    has_backward = False
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input (`torch.Tensor` of shape `[..., in]`, float32, bfloat16 or float16).

        Returns:
            `torch.Tensor` of shape `[..., out]`, dtype of `input`.
        """
        rows = input.reshape(-1, input.shape[-1]).float().contiguous()
        out = linear(rows, self.weight, self.bias)
        return out.view(*input.shape[:-1], -1).to(input.dtype)
