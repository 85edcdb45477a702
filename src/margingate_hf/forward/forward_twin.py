"""The twin that forwards of ours run on: registered functions, pinned rotary tables, linear layers for draft steps."""

from __future__ import annotations

from typing import Any

import torch

from .adapters import activate
from .draft_linear import DraftLinear, is_plain_linear
from .lengths import shorten
from .registered import NAME
from .rope import PINNED_TYPES, PinnedRotary
from .twin import twin_of


def forward_twin(model: torch.nn.Module, short: bool = False, adapter: str | None = None) -> Any:
    """
    A [`twin`] of a model that our forwards run on: our attention, the rotary tables pinned to each row, and linear
    layers that a draft step may take from packed weights.

    Args:
        model (`torch.nn.Module`): the model; not changed.
        short (`bool`, *optional*, defaults to `False`): with lengths lowered for the self-test, see [`shorten`].
        adapter (`str`, *optional*): the PEFT adapter that acts; by default those active in the model.
    """
    twin = twin_of(model, NAME)
    activate(twin, adapter)
    if short:
        shorten(twin)
    for module in list(twin.modules()):
        if is_plain_linear(module):
            module.__class__ = DraftLinear
        elif getattr(module, "rope_type", None) in PINNED_TYPES:
            module.__dict__["forward"] = PinnedRotary(module)
    return twin
