"""The model's stock eager FP32 forward, with weights up-cast at use: what a verifier's logits must come close to.

Ordinary library kernels, so *not* batch-invariant: it measures correctness, and stands in for "FP32 alone" in tests
that must fail without fixed plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..forward.adapters import activate
from ..forward.devices import execution_device
from ..forward.lengths import shorten
from ..forward.twin import twin_of
from .backends import backend_for

OUTPUTS = 8192  # of a linear layer, up-cast at a time
_UPCAST = frozenset(
    {
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        F.layer_norm,
        torch.layer_norm,
        F.rms_norm,
    }
)


_CASTS = frozenset({torch.Tensor.to, torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.type, torch.Tensor.type_as})


def _rounds_activation(before: torch.Tensor, after: Any) -> bool:
    halves = isinstance(after, torch.Tensor) and after.dtype in (torch.bfloat16, torch.float16)
    wide = before.dtype in (torch.float32, torch.float64)
    return halves and wide and not isinstance(before, torch.nn.Parameter)


def _wide(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _linear(
    dtype: torch.dtype, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    `F.linear` in `dtype`, `[..., in]` with a weight `[out, in]`, a part of the outputs at a time: an output embedding
    up-cast whole would be most of the self-test's memory.
    """
    parts = [F.linear(input.to(dtype), part.to(dtype)) for part in weight.split(OUTPUTS)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return out if bias is None else out + bias.to(dtype)


class PlainMode(TorchFunctionMode):
    """
    Up-casts the operands of products and norms to `dtype` and otherwise leaves torch alone. In float64, only what the
    model computes from positions and constants (the rotary tables) stays FP32, as it is part of the checkpoint's
    definition.

    Args:
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): float32 or float64.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, torch.embedding):
            return func(*args, **kwargs).to(self.dtype)
        if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args):
            if args[0].dtype == torch.float64:
                return args[0]  # a norm that asks for FP32 must not round the float64 reference
        if func in _CASTS and _rounds_activation(args[0], result := func(*args, **kwargs)):
            return args[0]  # the verifier leaves such a cast out as well
        elif func in _CASTS:
            return result
        if self.dtype == torch.float64 and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is F.linear:
            return _linear(self.dtype, *args, **kwargs)
        if func in _UPCAST:
            args = tuple(_wide(value, self.dtype) for value in args)
            kwargs = {name: _wide(value, self.dtype) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def eager_twin(model: torch.nn.Module, short: bool = False, adapter: str | None = None) -> Any:
    """
    A [`twin`] of a model with its own eager attention and experts.

    Args:
        model (`torch.nn.Module`): the model; not changed.
        short (`bool`, *optional*, defaults to `False`): with lengths lowered for the self-test, see [`shorten`].
        adapter (`str`, *optional*): the PEFT adapter that acts; by default those active in the model.
    """
    twin = twin_of(model, "eager")
    activate(twin, adapter)
    if short:
        shorten(twin)
    return twin


def reference_logits(
    model: Any,
    tokens: list[int],
    dtype: torch.dtype = torch.float32,
    short: bool = False,
    adapter: str | None = None,
) -> torch.Tensor:
    """
    Logits of one sequence alone, no cache, no padding.

    Args:
        model (`PreTrainedModel`): the model; its own forward runs on a copy that shares its weights.
        tokens (`list[int]`): the sequence.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): float32 or float64.
        short (`bool`, *optional*, defaults to `False`), adapter (`str`, *optional*): see [`eager_twin`].

    Returns:
        `torch.Tensor` of shape `[len(tokens), vocabulary]`, `dtype`.

    Raises:
        `ValueError`: FP32 products would be rounded.
    """
    device = execution_device(model)
    backend_for(device).check_settings()
    ids = torch.tensor([tokens], device=device)
    with torch.autocast(ids.device.type, enabled=False), PlainMode(dtype):
        return eager_twin(model, short, adapter)(input_ids=ids, use_cache=False).logits[0].to(dtype)
