"""The format of committed keys and values: how an FP32 value becomes one, two or three planes of the model's dtype."""

from __future__ import annotations

import torch

# Planes of the model's dtype that `MarginGateConfig.kv_dtype` stands for; three hold an FP32 value whole.
PLANES = {"auto": 1, "split": 2, "float32": 3}


def split_planes(values: torch.Tensor, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    """
    `hi = round(x)` and, of two planes, `lo = round(x - hi)`. The first of two saturates at the largest finite value, so
    that the sum is right up to twice that, see [`largest_held`].

    Args:
        values (`torch.Tensor`, float32, any shape): fresh keys or values.
        dtype (`torch.dtype`): of the planes.
        count (`int`): 1 or 2.

    Returns:
        `count` tensors of `dtype`, shape of `values`.
    """
    if count == 1:
        return (values.to(dtype),)
    limit = torch.finfo(dtype).max
    high = values.clamp(-limit, limit).to(dtype)
    return high, (values - high.float()).to(dtype)


def largest_held(dtype: torch.dtype, planes: int) -> float:
    """The largest value that `planes` planes of `dtype` represent; FP16: 65,504 in one plane, 131,008 in two."""
    whole = torch.finfo(torch.float32).max
    return whole if planes == 3 else min(whole, planes * torch.finfo(dtype).max)


def round_to_planes(values: torch.Tensor, dtype: torch.dtype, planes: int) -> torch.Tensor:
    """
    The FP32 value that `planes` planes of `dtype` represent: `hi + lo`, see [`split_planes`].

    The sum of two such planes is exact in FP32: `lo` holds at most the 16 bits that rounding to 8 left over.

    Args:
        values (`torch.Tensor`, float32, any shape): fresh keys or values.
        dtype (`torch.dtype`): the model's dtype. Float32 needs one plane and is returned unchanged.
        planes (`int`): 1, 2 or 3. Three planes hold an FP32 value whole, so 3 returns `values` itself.

    Returns:
        `torch.Tensor`, float32, shape of `values`.
    """
    if dtype == torch.float32 or planes == 3:
        return values
    high, *low = (plane.float() for plane in split_planes(values, dtype, planes))
    return high + low[0] if low else high
