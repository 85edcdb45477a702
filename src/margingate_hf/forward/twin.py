"""A private copy of a model's module tree that shares its weights; our forwards run on it, never on the user's model.

Transformers chooses attention by a name in a config that all threads share, and a forward of ours also needs other
linear layers and rotary tables than the stock one. Nothing of this is written into the user's model: a *twin* has its
own module objects, dicts and configs, and the very same parameter and buffer tensors. So a stock call in another
thread, a `copy.deepcopy` in a callback or an interrupt in the middle of a forward cannot meet anything of ours.

A twin is made for each call and shows the model as it stands then: adapters that are added, switched or merged, hooks,
and accelerate's off-loading all come along.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

ATTENTION = "_attn_implementation_internal"
EXPERTS = "_experts_implementation_internal"
# Where a twin's config keeps the name of the experts implementation that the model itself uses.
STOCK_EXPERTS = "_margin_gate_stock_experts"
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.nn.Parameter, torch.Tensor})


def twin_of(model: torch.nn.Module, implementation: str) -> Any:
    """
    Copies a model's module tree around its own tensors.

    Args:
        model (`torch.nn.Module`): the model; not changed.
        implementation (`str`): name of the attention and experts implementation that the copy's configs select.

    Returns:
        The copy, of the same classes. Regionally compiled modules are copied uncompiled.
    """
    return _Builder(model, implementation).build()


def configs_of(model: torch.nn.Module) -> list[Any]:
    """The distinct configs of a model's modules."""
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return list(found.values())


class _Builder:
    """One copy in the making."""

    def __init__(self, model: torch.nn.Module, implementation: str):
        self._model = model
        self._configs = {id(config): copy.copy(config) for config in configs_of(model)}
        for config in self._configs.values():
            self._select(config, implementation)
        self._twins: dict[int, torch.nn.Module] = {}

    def build(self) -> torch.nn.Module:
        """The copy of the whole tree: first every module empty, then each filled with copies in place of originals."""
        modules = list(self._model.modules())
        for module in modules:
            opaque = isinstance(module, torch.jit.ScriptModule)  # the self-test sees what it does
            self._twins[id(module)] = module if opaque else object.__new__(type(module))
        for module in modules:  # a compiled wrapper stands for what it wraps
            inner = module.__dict__.get("_modules", {}).get("_orig_mod")
            if inner is not None:
                self._twins[id(module)] = self._twins[id(inner)]
        for module in modules:
            twin = self._twins[id(module)]
            if type(twin) is type(module) and twin is not module:
                twin.__dict__.update(self._state(module))
        return self._twins[id(self._model)]

    def _select(self, config: Any, implementation: str) -> None:
        """Points a copied config, and the copied configs inside it, at an implementation."""
        state = config.__dict__
        if state.get(EXPERTS) is not None:
            state[STOCK_EXPERTS] = state[EXPERTS]
        for attribute in (ATTENTION, EXPERTS):
            if state.get(attribute) is not None:
                state[attribute] = implementation
        for name, value in state.items():
            if isinstance(value, PreTrainedConfig) and id(value) in self._configs:
                state[name] = self._configs[id(value)]

    def _state(self, module: torch.nn.Module) -> dict[str, Any]:
        # Dicts are the copy's own: a forward that registers a buffer anew changes the copy alone.
        state = {name: self._bound(value) for name, value in module.__dict__.items()}
        if state.get("_compiled_call_impl") is not None:
            state["_compiled_call_impl"] = None
        return state

    def _bound(self, value: Any) -> Any:
        """A module's attribute with configs and modules of the tree replaced by their copies."""
        if type(value) in _PLAIN or isinstance(value, torch.Tensor):
            return value
        if type(value) is OrderedDict and not value:
            return OrderedDict()  # most hooks
        if isinstance(value, torch.nn.Module):
            return self._twins.get(id(value), value)
        if isinstance(value, PreTrainedConfig):
            return self._configs.get(id(value), value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._bound(value.__self__))
        if isinstance(value, functools.partial):
            return self._bound_partial(value)
        if isinstance(value, dict):
            bound = value.copy()
            if value and self._holds_ours(value.values()):
                bound.update((name, self._bound(item)) for name, item in value.items())
            return bound
        if type(value) in (list, tuple) and self._holds_ours(value):
            return type(value)(self._bound(item) for item in value)
        return value.copy() if type(value) is list else value

    def _bound_partial(self, value: functools.partial) -> functools.partial:
        if not self._holds_ours([value.func, *value.args, *value.keywords.values()]):
            return value
        keywords = {name: self._bound(item) for name, item in value.keywords.items()}
        return functools.partial(self._bound(value.func), *map(self._bound, value.args), **keywords)

    def _holds_ours(self, values: Any) -> bool:
        kinds = (torch.nn.Module, PreTrainedConfig, types.MethodType, functools.partial, Mapping)
        return any(isinstance(value, kinds) for value in values)
