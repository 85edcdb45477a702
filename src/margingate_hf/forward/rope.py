"""Rotary tables that look at the batch, pinned to each row.

`longrope` and `dynamic` RoPE choose their frequencies by the largest position in the batch, and keep them in a buffer:
a long row beside it, or an earlier call, changes a short row's logits. In our forwards every row has its own table: the
short one if its prompt and all tokens it may get fit the original length, else the long one (`dynamic` has no fixed
long table: such rows are refused). Stock calls keep the model's own behaviour.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .context import current_context

PINNED_TYPES = ("longrope", "dynamic")


def rotary_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose frequencies would follow the batch."""
    return [module for module in model.modules() if getattr(module, "rope_type", None) in PINNED_TYPES]


def original_length(model: torch.nn.Module) -> int | None:
    """Positions the short table serves, or `None` where no table depends on the length."""
    lengths = [_original(module) for module in rotary_modules(model)]
    return min(lengths, default=None)


def _original(module: Any) -> int:
    if module.rope_type == "longrope":
        return int(module.config.rope_parameters["original_max_position_embeddings"])
    return int(module.original_max_seq_len)


class PinnedRotary:
    """
    Stands in for a rotary module's forward in a [`twin`].

    Args:
        module (`torch.nn.Module`): the rotary module; not changed.
    """

    def __init__(self, module: Any):
        self._short = _with_table(module, module.original_inv_freq)
        self._long = None
        if module.rope_type == "longrope":
            device = module.original_inv_freq.device
            table, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=_original(module) + 1)
            self._long = _with_table(module, table)

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            x (`torch.Tensor`): only its dtype and device are read.
            position_ids (`torch.Tensor` of shape `[batch, length]`).

        Returns:
            `(cos, sin)`, each `[batch, length, dim]`, every token's from its own row's table.
        """
        context = current_context()
        short = self._short(x, position_ids)
        if context is None or context.long is None or self._long is None:
            return short
        long = self._long(x, position_ids)
        chosen = context.long.view(position_ids.shape)[..., None]
        return torch.where(chosen, long[0], short[0]), torch.where(chosen, long[1], short[1])


def _with_table(module: Any, inv_freq: torch.Tensor) -> Any:
    """A shallow copy of a rotary module that computes from one table and updates nothing."""
    twin = copy.copy(module)
    twin.__dict__["_buffers"] = {**module._buffers, "inv_freq": inv_freq}
    twin.__dict__.pop("forward", None)
    twin.rope_type = "default"
    return twin
