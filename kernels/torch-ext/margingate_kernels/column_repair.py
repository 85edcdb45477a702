"""Rounds verified keys or values into the cache's planes and writes them to their rows and positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_WARPS = 4


@triton.jit
def _round_to_bf16_bits(x: tl.tensor) -> tl.tensor:
    """
    The 16 bits of `x` rounded to nearest, ties to even, in integers: `.to(bfloat16)` truncates in Triton's
    interpreter, and a column must have the same bits there and on a device. Infinities stay, NaN stays NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, (bits >> 16) | 0x40, rounded)


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
    TWO_PLANES: tl.constexpr,
    DIM: tl.constexpr,
):
    """
    One program a (token, head): `high = bf16(x)`, `low = bf16(x - float(high))`, both to nearest even.

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
    high = _round_to_bf16_bits(x)
    target = slot * plane_row_stride + head * plane_head_stride + position * plane_position_stride + lanes
    tl.store(high_ptr + target, high.to(tl.int16), mask=inside)
    if TWO_PLANES:
        rest = x - (high << 16).to(tl.float32, bitcast=True)
        tl.store(low_ptr + target, _round_to_bf16_bits(rest).to(tl.int16), mask=inside)


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
        high (`torch.Tensor` of shape `[rows, heads, capacity, dim]`, bfloat16): the plane the fast path reads.
        low (`torch.Tensor`, *optional*): as `high`, what rounding left over; `None` keeps one plane.
        slots, positions (`torch.Tensor` of shape `[tokens]`, int64): where each token's column lies. A token outside
            the cache is skipped.

    Raises:
        `ValueError`: shapes, dtypes or layouts that do not fit.
    """
    tokens, heads, dim = states.shape
    if states.dtype != torch.float32 or states.stride(2) != 1:
        raise ValueError(f"`states` must be float32, contiguous in dim, got {states.dtype}, strides {states.stride()}.")
    planes = [high] if low is None else [high, low]
    for name, plane in zip(("high", "low"), planes):  # noqa: B905 (Python 3.9)
        if plane.dtype != torch.bfloat16 or plane.dim() != 4 or plane.shape[1] != heads or plane.shape[3] != dim:
            raise ValueError(
                f"`{name}` must be bfloat16 [rows, {heads}, capacity, {dim}], got {plane.dtype} {tuple(plane.shape)}."
            )
        if plane.stride() != high.stride() or plane.stride(3) != 1:
            raise ValueError(f"`{name}` must be laid out as `high`, contiguous in dim, got strides {plane.stride()}.")
    if slots.shape != (tokens,) or positions.shape != (tokens,):
        raise ValueError(f"`slots` and `positions` must have shape [{tokens}], got {tuple(slots.shape)}.")
    if not tokens:
        return
    repair_kernel[(tokens, heads)](
        states,
        high.view(torch.int16),
        (high if low is None else low).view(torch.int16),
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
        TWO_PLANES=low is not None,
        DIM=triton.next_power_of_2(dim),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
