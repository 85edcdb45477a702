"""Points a model at our attention, at eager experts and at pinned rotary tables for a while, and back.

Transformers looks an implementation up by a name in the model's config at every forward. Ours is registered once,
under one name; `installed` writes that name into every config of a model for the duration of a block. A config is
shared by all threads, so the registered functions ask a thread-local geometry whether they are in a pass of ours, and
otherwise stand aside and call what the model used before.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .dispatch import implementation
from .draft_linear import DraftLinear, plain_linears
from .fixed_plan import fixed_plan
from .geometry import VerifyGeometry, current_geometry
from .rope import PinnedRotary, rotary_modules

NAME = "margingate"
ATTENTION = "_attn_implementation_internal"
EXPERTS = "_experts_implementation_internal"


def margingate_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """
    The attention function registered with transformers; arguments as its own integrations take them.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, length, dim]`).
        key, value: what `MarginGateCache.update` returned.
        attention_mask: unused in our passes, geometry replaces it.

    Returns:
        `(output, None)` with `output` of shape `[batch, length, heads, dim]`.
    """
    geometry = current_geometry()
    if geometry is None:
        options = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        given = {name: option for name, option in options.items() if option is not None}
        return _stock_attention(module)(module, query, key, value, attention_mask, scaling=scaling, **given, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with fixed_plan():
        if isinstance(geometry, VerifyGeometry):
            geometry.count(int(getattr(module, "layer_idx", -1)), key, value)
            attend = implementation("verify_attention", query.device)
        else:
            attend = implementation("decode_attention", query.device)
        out = attend(query, key, value, geometry, scaling, sliding_window, softcap, s_aux)
        return out.contiguous(), None


def margingate_mask(*args: Any, **kwargs: Any) -> Any:
    """No mask in our passes (geometry travels beside the model); otherwise that of the implementation before ours."""
    if current_geometry() is not None:
        return None
    name = _installed.original(kwargs.get("config"), ATTENTION)
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs) if name in ALL_MASK_ATTENTION_FUNCTIONS else None


def margingate_experts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """
    Mixture-of-experts forward: in a verifier pass the model's own eager loop, expert by expert, whose linears the
    operator
    mode routes (the grouped form rounds FP32 activations to the weights' dtype); otherwise the implementation before
    ours.

    Args:
        args, kwargs: as the model calls its experts: hidden states `[tokens, hidden]`, indices and weights `[tokens,
        k]`.

    Returns:
        `torch.Tensor` of shape `[tokens, hidden]`.
    """
    eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    if isinstance(current_geometry(), VerifyGeometry):
        return eager(module, *args, **kwargs)
    name = _installed.original(getattr(module, "config", None), EXPERTS)
    return ALL_EXPERTS_FUNCTIONS.get(name, eager)(module, *args, **kwargs)


def _stock_attention(module: torch.nn.Module) -> Callable:
    """The attention a module used before ours was installed."""
    name = _installed.original(getattr(module, "config", None), ATTENTION)
    if name is not None and name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    return sys.modules[type(module).__module__].eager_attention_forward


_ABSENT = object()


class _Installed:
    """Which attributes hold something of ours now, how often, and what they held before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, str], tuple[Any, int]] = {}

    def original(self, owner: Any, attribute: str) -> Any:
        """What an attribute held before ours, `None` if ours is not there."""
        entry = self._held.get((id(owner), attribute))
        return entry[0] if entry else None

    def add(self, owner: Any, attribute: str, make: Callable[[], Any]) -> None:
        """Puts `make()` into an attribute, or counts one more user of what is there."""
        key = (id(owner), attribute)
        with self._lock:
            if key in self._held:
                before, count = self._held[key]
                self._held[key] = (before, count + 1)
                return
            ours = make()
            self._held[key] = (owner.__dict__.get(attribute, _ABSENT), 1)
            setattr(owner, attribute, ours)

    def remove(self, owner: Any, attribute: str) -> None:
        """Takes one user off; the last one puts back what was there."""
        key = (id(owner), attribute)
        with self._lock:
            before, count = self._held[key]
            if count > 1:
                self._held[key] = (before, count - 1)
                return
            if before is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)
            del self._held[key]


_installed = _Installed()
_state = threading.local()


def implementation_slots(model: torch.nn.Module) -> list[tuple[Any, str]]:
    """Every `(config, attribute)` among a model's modules that names an attention or experts implementation."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [
        (config, attribute)
        for config in configs.values()
        for attribute in (ATTENTION, EXPERTS)
        if getattr(config, attribute, None) is not None
    ]


@contextlib.contextmanager
def installed(model: torch.nn.Module) -> Iterator[None]:
    """
    Points the model at our implementations for the duration of the block. Nests, also across threads; another thread's
    stock call meanwhile still gets the implementation it had.
    """
    held = _state.__dict__.setdefault("models", [])
    if any(model is other for other in held):  # by this thread, around this block
        yield
        return
    added: list[tuple[Any, str]] = []
    wanted: list[tuple[Any, str, Callable[[], Any]]] = [(*slot, lambda: NAME) for slot in implementation_slots(model)]
    wanted += [(module, "forward", functools.partial(PinnedRotary, module)) for module in rotary_modules(model)]
    wanted += [(module, "forward", functools.partial(DraftLinear, module)) for module in plain_linears(model)]
    held.append(model)
    try:
        for owner, attribute, make in wanted:
            _installed.add(owner, attribute, make)
            added.append((owner, attribute))
        yield
    finally:
        held.remove(model)
        for slot in added:
            _installed.remove(*slot)


@contextlib.contextmanager
def eager(model: torch.nn.Module) -> Iterator[None]:
    """Selects the model's own eager attention and experts for the duration of the block."""
    before = [(config, attribute, getattr(config, attribute)) for config, attribute in implementation_slots(model)]
    try:
        for config, attribute, _ in before:
            setattr(config, attribute, "eager")
        yield
    finally:
        for config, attribute, name in before:
            setattr(config, attribute, name)


AttentionInterface.register(NAME, margingate_attention)
AttentionMaskInterface.register(NAME, margingate_mask)
ExpertsInterface.register(NAME, margingate_experts)
