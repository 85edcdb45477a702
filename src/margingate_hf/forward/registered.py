"""The attention, mask and experts functions of our forwards, registered with transformers under one name.

Only the configs of a [`twin`] carry that name, so these functions run inside a verify forward of ours and nowhere else.
Called without one they raise: attention without a mask would be a wrong answer that looks like a right one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from .context import AttentionOptions, Context, VerifyContext, current_context
from .fixed_plan import fixed_plan
from .lengths import declared_window
from .twin import STOCK_EXPERTS

NAME = "margingate"


def _context() -> Context:
    context = current_context()
    if context is None:
        raise RuntimeError(
            "attention of the margin gate was called outside a forward of the margin gate. A copy of a model that was "
            "taken from inside one of its forwards cannot be used; copy the model that was passed to `enable`."
        )
    return context


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
        attention_mask: unused, context replaces it.

    Returns:
        `(output, None)` with `output` of shape `[batch, length, heads, dim]`.
    """
    context = _context()
    sliding_window = declared_window(module) if sliding_window is None else sliding_window
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    backend = context.backend
    assert backend is not None, "a forward of ours names its backend"
    with fixed_plan():
        if isinstance(context, VerifyContext):
            if context.record is not None:
                context.record.called(int(getattr(module, "layer_idx", -1)), key, value)
            out = backend.verify_attention(query, key, value, context, options)
        else:
            out = backend.decode_attention(query, key, value, context, options)
        return out.contiguous(), None


def margingate_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: context travels beside the model."""
    _context()


def margingate_experts(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """
    Mixture-of-experts forward: in a verify forward the model's own eager loop, expert by expert, whose linears the
    operator mode routes (the grouped form rounds FP32 activations to the weights' dtype); in a draft step the
    implementation that the model itself uses.

    Args:
        args, kwargs: as the model calls its experts: hidden states `[tokens, hidden]`, indices and weights `[tokens,
        k]`.

    Returns:
        `torch.Tensor` of shape `[tokens, hidden]`.
    """
    eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    if isinstance(_context(), VerifyContext):
        return eager(module, *args, **kwargs)
    stock = getattr(module.config, STOCK_EXPERTS, None)
    return ALL_EXPERTS_FUNCTIONS.get(stock, eager)(module, *args, **kwargs)


AttentionInterface.register(NAME, margingate_attention)
AttentionMaskInterface.register(NAME, margingate_mask)
ExpertsInterface.register(NAME, margingate_experts)
