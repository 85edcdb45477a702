"""Sums, norms and softmax over the last dimension, one program a row: a row's bits depend on that row alone.

The library's forms choose their launch by the number of rows (vLLM's RMSNorm did so within batch-invariant mode, its
issue 48271), and with the launch the order of summation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch_table import launch_for

SUM, RMS_NORM, LAYER_NORM, SOFTMAX, LOG_SOFTMAX = (tl.constexpr(i) for i in range(5))


@triton.jit
def _row_sum(x_ptr, n, shift, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """
    `sum_j f(x_j)`: `x`, `(x - shift)^2` or `exp(x - shift)` by `KIND` 0, 1, 2. Each lane adds its own elements in
    ascending order; the lanes are then added by one tree whose form `BLOCK` and the number of warps fix.
    """
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lanes < n
        x = tl.load(x_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        if KIND == 1:
            x = (x - shift) * (x - shift)
        if KIND == 2:
            x = tl.exp(x - shift)
        sums += tl.where(inside, x, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _divide(x, by):
    """Correctly rounded `x / by` for a tensor and a scalar."""
    return tl.div_rn(x, tl.zeros_like(x) + by)


@triton.jit
def row_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    out_ptr,
    n,
    x_stride,
    eps,
    OPERATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """
    One program a row of `n` elements, by `OPERATION`:

    - `SUM`: `sum_j x_j`
    - `RMS_NORM`: `y = x (+ residual)`; `y / sqrt(sum y^2 / n + eps) * w`, and `y` to `sum_ptr` if there is a residual
    - `LAYER_NORM`: `c = x - mean(x)`; `c / sqrt(sum c^2 / n + eps) * w + b`
    - `SOFTMAX`, `LOG_SOFTMAX`: `exp(x - max) / sum exp(x - max)` and `x - max - log sum exp(x - max)`

    Order: as in `_row_sum`; a maximum has none. Divisions and square roots are correctly rounded.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x_ptr += row * x_stride
    out_ptr += row * n
    if OPERATION == SUM:
        tl.store(sum_ptr + row, _row_sum(x_ptr, n, 0.0, 0, BLOCK))
    else:
        shift = 0.0
        if HAS_RESIDUAL:
            sum_ptr += row * n
            residual_ptr += row * n
            for start in range(0, n, BLOCK):
                inside = start + lanes < n
                x = tl.load(x_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
                x += tl.load(residual_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
                tl.store(sum_ptr + start + lanes, x, mask=inside)
            tl.debug_barrier()  # the row is read back below
            x_ptr = sum_ptr
        if OPERATION == LAYER_NORM:
            shift = tl.sum(_divide(tl.zeros((1,), tl.float32) + _row_sum(x_ptr, n, 0.0, 0, BLOCK), n * 1.0), 0)
        if OPERATION == SOFTMAX or OPERATION == LOG_SOFTMAX:
            top = tl.full((BLOCK,), float("-inf"), tl.float32)
            for start in range(0, n, BLOCK):
                x = tl.load(x_ptr + start + lanes, mask=start + lanes < n, other=float("-inf")).to(tl.float32)
                top = tl.maximum(top, x)
            shift = tl.max(top, 0)
            by = _row_sum(x_ptr, n, shift, 2, BLOCK)
        else:
            mean = tl.sum(_divide(tl.zeros((1,), tl.float32) + _row_sum(x_ptr, n, shift, 1, BLOCK), n * 1.0), 0)
            by = tl.sqrt_rn(mean + eps)
        for start in range(0, n, BLOCK):
            at = start + lanes
            inside = at < n
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - shift
            if OPERATION == SOFTMAX:
                y = _divide(tl.exp(x), by)
            elif OPERATION == LOG_SOFTMAX:
                y = x - tl.log(by)
            else:
                y = _divide(x, by)
            if HAS_WEIGHT:
                y = y * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                y = y + tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + at, y, mask=inside)


def _launch(
    operation: int,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != (n,) or not vector.is_contiguous()):
            raise ValueError(f"`{name}` must be contiguous [{n}], got {tuple(vector.shape)}.")
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"`residual` must be contiguous {list(x.shape)}, got {tuple(residual.shape)}.")
    launch = launch_for(x.device).rows
    one_each = operation == SUM.value
    out = torch.empty(1 if one_each else x.shape, dtype=torch.float32, device=x.device)
    wanted = [*x.shape[:-1], 1] if one_each else x.shape if residual is not None else (1,)
    sums = torch.empty(wanted, dtype=torch.float32, device=x.device)
    if rows.shape[0]:
        row_kernel[(rows.shape[0],)](
            rows,
            rows if residual is None else residual,
            rows if weight is None else weight,
            rows if bias is None else bias,
            sums,
            out,
            n,
            rows.stride(0),
            eps,
            OPERATION=operation,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )
    return out, sums


def _check(x: torch.Tensor) -> None:
    if x.dim() < 1 or not x.is_floating_point() or x.dtype == torch.float64 or not x.shape[-1]:
        raise ValueError(
            f"`x` must be float32, bfloat16 or float16 [..., n] with n > 0, got {x.dtype} {tuple(x.shape)}."
        )


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """
    Sum over the last dimension, kept as size 1.

    Args:
        x (`torch.Tensor` of shape `[..., n]`, float32, bfloat16 or float16).

    Returns:
        `torch.Tensor` of shape `[..., 1]`, float32.

    Raises:
        `ValueError`: another dtype, or `n` is 0.
    """
    _check(x)
    return _launch(SUM.value, x)[1]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Root-mean-square norm over the last dimension, the residual stream's addition fused.

    Args:
        x (`torch.Tensor` of shape `[..., n]`, float32, bfloat16 or float16).
        weight (`torch.Tensor` of shape `[n]`, any floating dtype, *optional*).
        eps (`float`, *optional*, defaults to 1e-6): added under the root.
        residual (`torch.Tensor` of the shape of `x`, *optional*): added to `x` first.

    Returns:
        `(normed, summed)`, float32, shape of `x`; `summed` is `x + residual`, `None` without one.

    Raises:
        `ValueError`: a shape, dtype or layout that does not fit.
    """
    _check(x)
    out, sums = _launch(RMS_NORM.value, x, weight, None, residual, eps)
    return out, None if residual is None else sums


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """
    Layer norm over the last dimension.

    Args:
        x (`torch.Tensor` of shape `[..., n]`, float32, bfloat16 or float16).
        weight, bias (`torch.Tensor` of shape `[n]`, any floating dtype, *optional*).
        eps (`float`, *optional*, defaults to 1e-5): added under the root.

    Returns:
        `torch.Tensor`, float32, shape of `x`.

    Raises:
        `ValueError`: a shape, dtype or layout that does not fit.
    """
    _check(x)
    return _launch(LAYER_NORM.value, x, weight, bias, None, eps)[0]


def softmax(x: torch.Tensor) -> torch.Tensor:
    """
    Softmax over the last dimension.

    Args:
        x (`torch.Tensor` of shape `[..., n]`, float32, bfloat16 or float16).

    Returns:
        `torch.Tensor`, float32, shape of `x`; a row with NaN, or with no finite element, is NaN.

    Raises:
        `ValueError`: another dtype, or `n` is 0.
    """
    _check(x)
    return _launch(SOFTMAX.value, x)[0]


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """
    Logarithm of the softmax over the last dimension.

    Args:
        x (`torch.Tensor` of shape `[..., n]`, float32, bfloat16 or float16).

    Returns:
        `torch.Tensor`, float32, shape of `x`; a row with NaN, or with no finite element, is NaN.

    Raises:
        `ValueError`: another dtype, or `n` is 0.
    """
    _check(x)
    return _launch(LOG_SOFTMAX.value, x)[0]
