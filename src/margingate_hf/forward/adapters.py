"""PEFT adapters that a call gives to each row (`adapter_names=`), decoded exactly, since rows are independent.

PEFT hands the names to its layers by hooks for the duration of one call, in the order of the batch. Our forwards hold
other rows in another order, so the hooks are left out of a [`twin`] and each row's forward runs on a twin on which that
row's adapter is the active one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

BASE = "__base__"  # PEFT's name for a row without an adapter


def _peft_arguments(hook: Any) -> dict[str, Any]:
    """What a hook of PEFT's passes to its layer, `{}` for any other hook."""
    ours = isinstance(hook, functools.partial) and getattr(hook.func, "__module__", "").startswith("peft.")
    return dict(hook.keywords) if ours else {}


def hands_out_adapters(hook: Any) -> bool:
    """Whether a hook passes `adapter_names` to a layer."""
    return "adapter_names" in _peft_arguments(hook)


def row_adapters(model: torch.nn.Module) -> list[str] | None:
    """
    The adapter of each row of the call that is under way, or `None` where it gives none.

    Raises:
        `ValueError`: the call passes `alora_offsets`, which depend on each row's own prompt.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            arguments = _peft_arguments(hook)
            if arguments.get("alora_offsets") is not None:
                raise ValueError(
                    "`alora_offsets` does not work with `margin_gate`: they count from the end of each padded prompt; "
                    "use an ordinary LoRA adapter."
                )
            if "adapter_names" in arguments:
                return [str(name) for name in arguments["adapter_names"]]
    return None


def has_adapter(model: torch.nn.Module, name: str) -> bool:
    """Whether any layer of a model has an adapter of that name, or for `"__base__"` any at all."""
    if name == BASE:
        return any("_active_adapter" in vars(module) for module in model.modules())
    return any(name in path.split(".") for path, _ in model.named_modules())


def activate(twin: torch.nn.Module, adapter: str | None) -> None:
    """
    Takes PEFT's per-row hooks out of a [`twin`] and makes one adapter the active one, in place.

    Args:
        twin (`torch.nn.Module`): the copy.
        adapter (`str`, *optional*): its name or `"__base__"` for none; `None` leaves what is active.
    """
    for module in twin.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hands_out_adapters(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        state = vars(module)
        if adapter is None or "_active_adapter" not in state:
            continue
        if adapter == BASE:
            state["_disable_adapters"] = True
        else:
            state["_active_adapter"], state["_disable_adapters"] = [adapter], False
