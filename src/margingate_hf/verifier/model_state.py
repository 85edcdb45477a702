"""What a forward reads beside tensors: configs, numbers in modules, adapters, hooks. Part of a model's identity.

Two strings. The *state* tells everything that can move a logit; it goes into the fingerprint of K/V entries and
receipts. The *structure* tells what the self-test's verdict rests on: classes, shapes, dtypes, what is hooked onto the
model, which adapters act; a change of a number in it asks for no new self-test, another layer class or shape does.
"""

from __future__ import annotations

import enum
import functools
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..forward.adapters import hands_out_adapters
from ..forward.rope import PINNED_TYPES
from ..forward.twin import configs_of
from .hashing import stamp

# Config fields that name where a checkpoint came from or what a call returns.
_VOLATILE = frozenset(
    "transformers_version name_or_path architectures dtype torch_dtype use_cache return_dict output_attentions "
    "output_hidden_states id2label label2id problem_type finetuning_task tokenizer_class".split()
)
# Module attributes that a stock call or a move to another device changes and that no logit depends on.
_IGNORED = frozenset("training gradient_checkpointing name_or_path warnings_issued hf_device_map".split())
_SCALARS = (bool, int, float, str, type(None), torch.dtype)
_DEPTH = 4
_LARGEST = 1024  # entries of a list or a dict that are looked at


def describe_state(model: torch.nn.Module) -> str:
    """Everything beside tensors that a forward of the model may read, the same in every process."""
    lines = [json.dumps(_config_fields(config), sort_keys=True, default=str) for config in configs_of(model)]
    for name, module in model.named_modules():
        lines.append(f"{name}:{_class_of(module)}{_numbers(module)}{_adapters(module)}{_attached(module)}")
    return "\n".join(lines)


def describe_structure(model: torch.nn.Module) -> str:
    """What a verdict of the self-test holds for."""
    lines = [json.dumps(_config_fields(config), sort_keys=True, default=str) for config in configs_of(model)]
    for name, module in model.named_modules():
        tensors = [
            (key, tuple(tensor.shape), str(tensor.dtype))
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        lines.append(f"{name}:{_class_of(module)}{tensors}{_acting(module)}{_attached(module)}")
    return "\n".join(lines)


def _class_of(module: torch.nn.Module) -> str:
    kind = getattr(type(module), "_margin_gate_stock_class", type(module))
    return f"{kind.__module__}.{kind.__qualname__}"


def _config_fields(config: Any) -> dict[str, Any]:
    values = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return {name: value for name, value in values.items() if not name.startswith("_") and name not in _VOLATILE}


def _numbers(module: torch.nn.Module) -> str:
    """A module's plain attributes."""
    follows_batch = getattr(module, "rope_type", None) in PINNED_TYPES  # a stock call rewrites its lengths
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in _IGNORED or (follows_batch and isinstance(value, int)):
            continue
        plain = _plain(value)
        if plain is not None:
            found[name] = plain
    return repr(sorted(found.items()))


def _plain(value: Any) -> str | None:
    """Text of a value made of scalars, `None` of any other."""
    if isinstance(value, enum.Enum) or type(value) in _SCALARS:
        return repr(value)
    if isinstance(value, (list, tuple, Mapping)) and len(value) > _LARGEST:
        return f"{type(value).__qualname__} of {len(value)}"  # the tables of a grammar, a vocabulary
    if isinstance(value, (list, tuple)):
        parts = [_plain(item) for item in value]
        return None if any(part is None for part in parts) else f"[{','.join(map(str, parts))}]"
    if isinstance(value, Mapping) and not isinstance(value, torch.nn.Module):
        pairs = [(repr(key), _plain(item)) for key, item in value.items()]
        return None if any(item is None for _, item in pairs) else repr(sorted(pairs))
    return value.__qualname__ if isinstance(value, types.FunctionType) else None


def _adapters(module: Any) -> str:
    """State of a PEFT layer that is in no tensor: which adapters act, merged or not."""
    if not (hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")):
        return ""
    return repr((module.active_adapters, module.merged_adapters, module.disable_adapters))


def _acting(module: Any) -> str:
    """As `_adapters` without names: how many act, of which rank, and whether weights are merged."""
    if not (hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")):
        return ""
    ranks, dora = getattr(module, "r", {}), getattr(module, "use_dora", {})
    acting = [(ranks.get(name), bool(dora.get(name))) for name in module.active_adapters if isinstance(ranks, dict)]
    return repr((acting, len(module.merged_adapters), module.disable_adapters))


def _attached(module: torch.nn.Module) -> str:
    """Hooks, and a forward of the module's own, described as far as they can be seen."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    found = [hook for hook in hooks if not hands_out_adapters(hook)]  # each row's own are part of its columns' identity
    own = vars(module).get("forward")
    return "" if not found and own is None else repr([describe_callable(item) for item in (*found, own)])


def describe_callable(value: Any, depth: int = _DEPTH) -> str:
    """A function and what it carries along: arguments of a partial, defaults, closure, the object of a method."""
    if isinstance(value, torch.nn.Module) or depth == 0:
        return type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}:{stamp(value)}"
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *(item for _, item in sorted(value.keywords.items()))]
        return f"partial({', '.join(describe_callable(item, depth - 1) for item in inner)})"
    if isinstance(value, types.MethodType):
        return f"{value.__func__.__qualname__} of {describe_callable(value.__self__, depth - 1)}"
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}({', '.join(_carried(value, depth))})"
    plain = _plain(value)
    if plain is not None:
        return plain
    own = getattr(value, "__dict__", {})
    inside = {name: describe_callable(item, depth - 1) for name, item in sorted(own.items()) if not callable(item)}
    return f"{type(value).__qualname__}({inside})"


def _carried(function: types.FunctionType, depth: int) -> Iterator[str]:
    for default in function.__defaults__ or ():
        yield describe_callable(default, depth - 1)
    for cell in function.__closure__ or ():
        try:
            yield describe_callable(cell.cell_contents, depth - 1)
        except ValueError:  # not filled yet
            yield "?"
