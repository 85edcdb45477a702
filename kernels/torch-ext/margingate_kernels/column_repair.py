"""Rounds verified keys or values into the cache's planes and writes them to their rows and positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pieces import bits_to_float, round_to_bf16

NUM_WARPS = 4


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """`x` rounded to the plane's dtype, nearest even: `(what is stored, its FP32 value)`."""
    if DTYPE == "bf16":
        bits = round_to_bf16(x)
        return bits.to(tl.int16), bits_to_float(bits)
    elif DTYPE == "fp16":
        stored = x.to(tl.float16)
        return stored, stored.to(tl.float32)
    else:
        return x, x


@triton.jit
def repair_kernel(
    states_ptr,
    high_ptr,
    low_ptr,
    slots_ptr,
    positions_ptr,
    rows,
    capacity,
    state_token_stride,
    state_head_stride,
    plane_row_stride,
    plane_head_stride,
    plane_position_stride,
    dim,
    PLANES: tl.constexpr,
    DTYPE: tl.constexpr,
    DIM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """
    One program a (token, head): `high = round(x)`; with two planes `low = round(x - float(high))`, with three
    `low = x` itself, FP32. Rounding is to nearest, ties to even. Where there is a second plane, the first saturates at
    the dtype's `LARGEST` finite value, so that the sum is right up to twice that.

    Elementwise; nothing is reduced. A slot or position outside the cache is skipped, never written beside it.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    if slot < 0 or slot >= rows or position < 0 or position >= capacity:
        return
    lanes = tl.arange(0, DIM)
    inside = lanes < dim
    x = tl.load(states_ptr + token * state_token_stride + head * state_head_stride + lanes, mask=inside, other=0.0)
    target = slot * plane_row_stride + head * plane_head_stride + position * plane_position_stride + lanes
    held = x
    if PLANES > 1:
        held = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x)  # NaN stays NaN
    stored, value = _round(held, DTYPE)
    tl.store(high_ptr + target, stored, mask=inside)
    if PLANES == 2:
        rest, _ = _round(x - value, DTYPE)
        tl.store(low_ptr + target, rest, mask=inside)
    if PLANES == 3:
        tl.store(low_ptr + target, x, mask=inside)


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _check(
    states: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None, slots: torch.Tensor, positions: torch.Tensor
) -> int:
    tokens, heads, dim = states.shape
    if states.dtype != torch.float32 or states.stride(2) != 1:
        raise ValueError(f"`states` must be float32, contiguous in dim, got {states.dtype}, strides {states.stride()}.")
    planes = [high] if low is None else [high, low]
    for name, plane in zip(("high", "low"), planes):  # noqa: B905 (Python 3.9)
        wanted = (high.dtype,) if plane is high else (high.dtype, torch.float32)
        if plane.dtype not in _NAMES or plane.dtype not in wanted or plane.dim() != 4:
            raise ValueError(
                f"`{name}` must be {' or '.join(map(str, wanted))} [rows, {heads}, capacity, {dim}], "
                f"got {plane.dtype} {tuple(plane.shape)}."
            )
        if plane.shape != (high.shape[0], heads, high.shape[2], dim):
            raise ValueError(f"`{name}` must be [rows, {heads}, capacity, {dim}], got {tuple(plane.shape)}.")
        if plane.stride() != high.stride() or plane.stride(3) != 1:
            raise ValueError(f"`{name}` must be laid out as `high`, contiguous in dim, got strides {plane.stride()}.")
    if slots.shape != (tokens,) or positions.shape != (tokens,):
        raise ValueError(f"`slots` and `positions` must have shape [{tokens}], got {tuple(slots.shape)}.")
    if low is None:
        return 1
    return 3 if low.dtype == torch.float32 else 2


def repair_columns(
    states: torch.Tensor,
    high: torch.Tensor,
    low: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """
    Writes `states` to `(slot, position)` of the planes, in place.

    Args:
        states (`torch.Tensor` of shape `[tokens, heads, dim]`, float32): verified keys or values.
        high (`torch.Tensor` of shape `[rows, heads, capacity, dim]`, bfloat16, float16 or float32): the plane the fast
            path reads.
        low (`torch.Tensor`, *optional*): laid out as `high`. In the dtype of `high` it takes what rounding left over
            (two planes); in float32, beside a 16-bit `high`, the value itself (three planes). `None` keeps one plane.
        slots, positions (`torch.Tensor` of shape `[tokens]`, int64): where each token's column lies. A token outside
            the cache is skipped.

    Raises:
        `ValueError`: shapes, dtypes or layouts that do not fit.
    """
    tokens, heads, dim = states.shape
    count = _check(states, high, low, slots, positions)
    if not tokens:
        return
    planes = [high, high if low is None else low]
    # BF16 planes are written as bits: the interpreter's own cast would truncate.
    stored = [plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane for plane in planes]
    repair_kernel[(tokens, heads)](
        states,
        *stored,
        slots,
        positions,
        high.shape[0],
        high.shape[2],
        states.stride(0),
        states.stride(1),
        high.stride(0),
        high.stride(1),
        high.stride(2),
        dim,
        PLANES=count,
        DTYPE=_NAMES[high.dtype],
        DIM=triton.next_power_of_2(dim),
        LARGEST=torch.finfo(high.dtype).max,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
