"""Top-1, top-2 and their gap in one read of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Scores a program holds per step of its loop. A maximum has no order of summation, so no constant here can change a
# result.
BLOCK = 1024
NUM_WARPS = 4
NO_ID = tl.constexpr(2147483647)


class Top2(NamedTuple):
    """
    Attributes:
        tokens: int64 `[rows]`, best id, the lowest among equals.
        runners_up: int64 `[rows]`, second-best id, the lowest among equals; -1 if the vocabulary has one token.
        values: float32 `[rows, 2]`, their scores.
        margins: float32 `[rows]`, first minus second; NaN in a row that holds NaN or has no finite score.
    """

    tokens: torch.Tensor
    runners_up: torch.Tensor
    values: torch.Tensor
    margins: torch.Tensor


@triton.jit
def top2_kernel(logits_ptr, ids_ptr, values_ptr, margins_ptr, row_stride, vocabulary, BLOCK: tl.constexpr):
    """
    One program a row.

    Formula: `m1 = max_j x_j`, `i1 = min{j: x_j = m1}`, the same over `j != i1` for the second, `margin = m1 - m2`. NaN
    ranks above everything, so that it is seen, and makes the margin NaN.

    Each lane keeps the two best of its own columns in ascending order of id, so a strict `>` keeps the lowest id; the
    lanes are merged once at the end. Arithmetic is FP32 whatever the logits' dtype: a 16-bit value is exact in it.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), float("-inf"), tl.float32)
    second = tl.full((BLOCK,), float("-inf"), tl.float32)
    first_id = tl.full((BLOCK,), NO_ID, tl.int32)
    second_id = tl.full((BLOCK,), NO_ID, tl.int32)
    has_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        inside = columns < vocabulary
        x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        is_nan = x != x
        has_nan = has_nan | is_nan.to(tl.int32)
        x = tl.where(is_nan, float("inf"), x)
        # A free place is taken even by -inf, so that a row of -inf still names its lowest ids.
        beats_first = inside & ((x > first) | (first_id == NO_ID))
        beats_second = inside & ((x > second) | (second_id == NO_ID))
        second = tl.where(beats_first, first, tl.where(beats_second, x, second))
        second_id = tl.where(beats_first, first_id, tl.where(beats_second, columns, second_id))
        first = tl.where(beats_first, x, first)
        first_id = tl.where(beats_first, columns, first_id)
    best = tl.max(first, 0)
    best_id = tl.min(tl.where((first == best) & (first_id != NO_ID), first_id, NO_ID), 0)
    # Every lane offers its best, the winner's lane its second best.
    is_winner = first_id == best_id
    offered = tl.where(is_winner, second, first)
    offered_id = tl.where(is_winner, second_id, first_id)
    next_best = tl.max(tl.where(offered_id != NO_ID, offered, float("-inf")), 0)
    next_id = tl.min(tl.where((offered == next_best) & (offered_id != NO_ID), offered_id, NO_ID), 0)
    margin = best - next_best
    margin = tl.where(tl.max(has_nan, 0) > 0, float("nan"), margin)
    tl.store(ids_ptr + 2 * row, best_id.to(tl.int64))
    tl.store(ids_ptr + 2 * row + 1, tl.where(next_id == NO_ID, -1, next_id).to(tl.int64))
    tl.store(values_ptr + 2 * row, best)
    tl.store(values_ptr + 2 * row + 1, next_best)
    tl.store(margins_ptr + row, margin)


def top2(logits: torch.Tensor) -> Top2:
    """
    Best and second-best token of each row.

    Args:
        logits (`torch.Tensor` of shape `[rows, vocabulary]`, float32, bfloat16 or float16; last dimension contiguous).

    Returns:
        [`Top2`], on the device of `logits`. A NaN among the scores counts as `inf` in `values` and makes the margin
        NaN.

    Raises:
        `ValueError`: another shape, dtype or layout.
    """
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"`logits` must have shape [rows, vocabulary], got {tuple(logits.shape)}.")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"`logits` must be float32, bfloat16 or float16, got {logits.dtype}.")
    if logits.stride(1) != 1:
        raise ValueError(f"`logits` must be contiguous in its last dimension, got strides {logits.stride()}.")
    rows = logits.shape[0]
    ids = torch.empty(rows, 2, dtype=torch.long, device=logits.device)
    values = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    margins = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        top2_kernel[(rows,)](
            logits,
            ids,
            values,
            margins,
            logits.stride(0),
            logits.shape[1],
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return Top2(ids[:, 0], ids[:, 1], values, margins)
