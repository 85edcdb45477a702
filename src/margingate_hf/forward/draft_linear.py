"""Lets a draft step take its matrix products from elsewhere than torch; `verifier/draft_products.py` has them."""

from __future__ import annotations

import torch

from .context import DecodeContext, current_context


class DraftLinear(torch.nn.Linear):
    """The class of a plain linear layer in a [`twin`]: in a draft step the context's product stands in for torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input (`torch.Tensor` of shape `[..., in]`, the model's dtype).

        Returns:
            `torch.Tensor` of shape `[..., out]`, the model's dtype.
        """
        context = current_context()
        if not isinstance(context, DecodeContext) or context.product is None:
            return super().forward(input)
        out = context.product(input.reshape(-1, input.shape[-1]), self.weight)
        if out is None:
            return super().forward(input)
        out = out.view(*input.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias


def is_plain_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer with torch's own forward: no subclass, nothing put in its place."""
    return type(module) is torch.nn.Linear and "forward" not in module.__dict__
