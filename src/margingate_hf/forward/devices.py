"""Where a model computes and where its weights lie, also when accelerate has moved them off the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .rope import PINNED_TYPES


def execution_device(model: Any) -> torch.device:
    """
    The device the model's forward runs on.

    Weights that accelerate has off-loaded are placeholders on the `meta` device; their hooks know where they will be
    used.
    """
    device = model.device
    if device.type != "meta":
        return device
    for module in model.modules():
        for hook in _hooks(module):
            found = getattr(hook, "execution_device", None)
            if found is not None:
                return torch.device(found)
    return device


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """
    Every distinct parameter and non-empty buffer with its values, off-loaded ones from where accelerate keeps them.

    Yields:
        `(name, tensor, stable)`; not `stable`: read from disk, at another address at every read.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        weights = _off_loaded(module)
        follows_batch = getattr(module, "rope_type", None) in PINNED_TYPES
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.numel() or id(tensor) in seen:
                continue
            if follows_batch and name.endswith("inv_freq"):
                continue  # a stock call rewrites it; ours never read it
            seen.add(id(tensor))
            stable = True
            if tensor.is_meta and name in weights:
                tensor, again = weights[name], weights[name]
                stable = tensor.data_ptr() == again.data_ptr()
            yield f"{prefix}.{name}" if prefix else name, tensor, stable


def _hooks(module: torch.nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", [hook])) if hook is not None else []


def _off_loaded(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    for hook in _hooks(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            return _Weights(weights)
    return {}


class _Weights(Mapping[str, torch.Tensor]):
    """A hook's weights by the module's own names; accelerate's maps do not say which they hold."""

    def __init__(self, source: Any):
        self._source = source

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[name]

    def __contains__(self, name: object) -> bool:
        try:
            self._source[name]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)
