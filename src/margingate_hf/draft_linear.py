"""Lets a fast step take its matrix products from elsewhere than torch; `verifier/draft_products.py` has them."""

from __future__ import annotations

import torch

from .geometry import DecodeGeometry, current_geometry


class DraftLinear:
    """
    Stands in for a `torch.nn.Linear`'s forward while a fast step of ours runs; elsewhere it stands aside.

    Args:
        module (`torch.nn.Linear`): the layer; not changed.
    """

    def __init__(self, module: torch.nn.Linear):
        self._module = module
        self._stock = module.forward

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input (`torch.Tensor` of shape `[..., in]`, the model's dtype).

        Returns:
            `torch.Tensor` of shape `[..., out]`, the model's dtype.
        """
        geometry = current_geometry()
        if torch.compiler.is_compiling() or not isinstance(geometry, DecodeGeometry) or geometry.product is None:
            return self._stock(input)
        weight, bias = self._module.weight, self._module.bias
        out = geometry.product(input.reshape(-1, input.shape[-1]), weight)
        if out is None:
            return self._stock(input)
        out = out.view(*input.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias


def plain_linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """Linear layers on CPU with torch's own forward, or ours over it: no subclass, nothing hooked onto it."""
    return [
        module
        for module in model.modules()
        if type(module) is torch.nn.Linear
        and module.weight.device.type == "cpu"
        and isinstance(module.__dict__.get("forward"), DraftLinear | None)
    ]
