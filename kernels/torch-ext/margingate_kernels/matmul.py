"""`x @ weight.T` with FP32 activations and 16-bit (or FP32) weights, a row's bits independent of every other row.

The weight is read once, in its own dtype, and never copied to FP32 (after LayerCast, "Understanding and Mitigating
Numerical Sources of Nondeterminism in LLM Inference", NeurIPS 2025, which up-casts to a buffer).
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl

from .launch_table import LinearLaunch, interpreted, launch_for
from .pieces import bits_to_float, dot, dot_pieces, multiply, round_to_bf16, split3

TILE = tl.constexpr(16)  # rows of activations in one tensor-core product
WEIGHT_PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@triton.jit
def _product(w, x, zero, W_PIECES: tl.constexpr, X_PIECES: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """One block: weights `[BLOCK_N, BLOCK_K]`, activations `[BLOCK_K, TILE]`, a fresh accumulator."""
    if X_PIECES == 1:
        if W_PIECES == 2:  # an FP16 checkpoint keeps FP16 operands
            return multiply(w, x.to(tl.float16), zero, TENSOR_CORES)
        else:
            return dot(w, bits_to_float(round_to_bf16(x)), zero, TENSOR_CORES)
    else:
        hi, mid, lo = split3(x)
        if W_PIECES == 1:
            return dot_pieces(w, w, w, hi, mid, lo, zero, 1, 3, TENSOR_CORES)
        else:
            w_hi, w_mid, w_lo = split3(w.to(tl.float32))
            return dot_pieces(w_hi, w_mid, w_lo, hi, mid, lo, zero, W_PIECES, 3, TENSOR_CORES)


@triton.jit
def _finish(total, bias_ptr, residual_ptr, out_ptr, offsets, mask, rn, mn, HAS_BIAS: tl.constexpr,
            HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    if HAS_BIAS:
        total = total + tl.load(bias_ptr + rn, mask=mn, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        total = total + tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit(do_not_specialize=["M", "blocks", "splits"])
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    locks_ptr,
    M,
    N,
    K,
    blocks,
    splits,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    W_PIECES: tl.constexpr,
    X_PIECES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
):
    """
    Formula: `out[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]) (+ residual[m, n])`.

    Order: blocks of `BLOCK_K` terms, each in a fresh tensor-core accumulator (pieces smallest first), added in
    ascending `k` by ordinary FP32 additions; then the `splits` partial sums in ascending order; then bias, then
    residual.

    Invariance: `BLOCK_K`, `blocks` (of one split) and `splits` follow the weight's shape. The weight is the tensor
    core's row operand and the tokens its column operand, always `TILE` wide, so one instruction shape serves every
    `M`, and a column of such a product does not depend on the other columns. The program that arrives last at an
    output tile adds the partial sums; whichever that is, the order is the same.

    `partials`: FP32 `[splits, M, N]`, unused with one split. `locks`: int32, zero on entry and on exit.
    """
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    split = tl.program_id(2)
    rn = pn * BLOCK_N + tl.arange(0, BLOCK_N)
    mn = rn < N
    lanes = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, TILE)
    zero = tl.zeros((BLOCK_N, TILE), tl.float32)
    w_rows = w_ptr + rn[:, None].to(tl.int64) * K
    sums = (zero,) * TILES
    for block in range(blocks):
        # A multiple of BLOCK_K whatever `blocks` is: the compiler needs to see that to copy 16 bytes at a time.
        rk = (split * blocks + block) * BLOCK_K + lanes
        mk = rk < K
        w = tl.load(w_rows + rk[None, :], mask=mn[:, None] & mk[None, :], other=0.0, eviction_policy="evict_first")
        grown = ()
        for tile in tl.static_range(TILES):
            rm = (pm * TILES + tile) * TILE + columns
            x = tl.load(
                x_ptr + rm[None, :].to(tl.int64) * K + rk[:, None],
                mask=(rm < M)[None, :] & mk[:, None],
                other=0.0,
                eviction_policy="evict_last",
            )
            grown = grown + (sums[tile] + _product(w, x, zero, W_PIECES, X_PIECES, TENSOR_CORES),)  # type: ignore[assignment]
        sums = grown
    if splits == 1:
        for tile in tl.static_range(TILES):
            rm = (pm * TILES + tile) * TILE + columns
            mask = (rm < M)[None, :] & mn[:, None]
            offsets = rm[None, :].to(tl.int64) * N + rn[:, None]
            _finish(sums[tile], bias_ptr, residual_ptr, out_ptr, offsets, mask, rn, mn, HAS_BIAS, HAS_RESIDUAL)
    else:
        size = M.to(tl.int64) * N
        for tile in tl.static_range(TILES):
            rm = (pm * TILES + tile) * TILE + columns
            offsets = rm[None, :].to(tl.int64) * N + rn[:, None]
            tl.store(partials_ptr + split * size + offsets, sums[tile], mask=(rm < M)[None, :] & mn[:, None])
        tl.debug_barrier()  # all of the program's stores come before its arrival is seen
        lock = locks_ptr + pm * tl.num_programs(1) + pn
        if tl.atomic_add(lock, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.atomic_xchg(lock, 0, sem="relaxed", scope="gpu")
            for tile in tl.static_range(TILES):
                rm = (pm * TILES + tile) * TILE + columns
                mask = (rm < M)[None, :] & mn[:, None]
                offsets = rm[None, :].to(tl.int64) * N + rn[:, None]
                partial = partials_ptr + offsets
                total = tl.load(partial, mask=mask, other=0.0, cache_modifier=".cg")
                for _ in range(splits - 1):
                    partial += size
                    total += tl.load(partial, mask=mask, other=0.0, cache_modifier=".cg")
                _finish(total, bias_ptr, residual_ptr, out_ptr, offsets, mask, rn, mn, HAS_BIAS, HAS_RESIDUAL)


def split_plan(outputs: int, inputs: int, launch: LinearLaunch) -> tuple[int, int]:
    """
    How a weight `[outputs, inputs]` is cut along its inner dimension: by its shape alone, never by the rows at hand or
    the processors of a chip.

    Returns:
        `(blocks of a split, splits)`, blocks of `launch.block_k` terms.
    """
    tiles = -(-outputs // launch.block_n)
    wanted = min(launch.max_splits, launch.target_programs // tiles, inputs // (4 * launch.block_k))
    blocks = -(-inputs // launch.block_k)
    per_split = -(-blocks // max(1, wanted))
    return per_split, -(-blocks // per_split)


class _Locks:
    """Arrival counters of split products: zero between launches, one set a stream (a thread, in the interpreter)."""

    def __init__(self) -> None:
        self._held: dict[tuple, torch.Tensor] = {}
        self._guard = threading.Lock()

    def get(self, device: torch.device, count: int) -> torch.Tensor:
        """At least `count` int32 zeros."""
        if device.type == "cuda":
            key: tuple = (device.index, torch.cuda.current_stream(device).cuda_stream)
        else:
            key = (device.type, threading.get_ident())
        with self._guard:
            found = self._held.get(key)
            if found is None or found.numel() < count:
                found = self._held[key] = torch.zeros(max(4096, count), dtype=torch.int32, device=device)
        return found


_locks = _Locks()


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    if x.dim() != 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"`x` must be contiguous float32 [rows, in], got {x.dtype} {tuple(x.shape)}.")
    if weight.dtype not in WEIGHT_PIECES or weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(
            "`weight` must be contiguous [out, in], bfloat16, float16 or float32, "
            f"got {weight.dtype} {tuple(weight.shape)}."
        )
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"`weight` must have {x.shape[1]} columns, as `x`, got {tuple(weight.shape)}.")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"`bias` must be contiguous [{weight.shape[0]}], got {tuple(bias.shape)}.")
    wanted = (x.shape[0], weight.shape[0])
    if residual is not None and (
        residual.shape != wanted or residual.dtype != torch.float32 or not residual.is_contiguous()
    ):
        raise ValueError(
            f"`residual` must be contiguous float32 {list(wanted)}, got {residual.dtype} {tuple(residual.shape)}."
        )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    precision: str = "float32",
) -> torch.Tensor:
    """
    `x @ weight.T (+ bias) (+ residual)` in one launch.

    Args:
        x (`torch.Tensor` of shape `[rows, in]`, float32, contiguous): activations.
        weight (`torch.Tensor` of shape `[out, in]`, bfloat16, float16 or float32, contiguous).
        bias (`torch.Tensor` of shape `[out]`, any floating dtype, *optional*).
        residual (`torch.Tensor` of shape `[rows, out]`, float32, *optional*).
        precision (`str`, *optional*, defaults to `"float32"`): `"float32"` keeps activations whole, in three pieces;
            `"bfloat16"` rounds them to the weight's 16-bit dtype (one product instead of three, as invariant).

    Returns:
        `torch.Tensor` of shape `[rows, out]`, float32. A row's bits depend on that row and the weight alone.

    Raises:
        `ValueError`: a shape, dtype, layout or precision that does not fit.
    """
    _check(x, weight, bias, residual)
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f'`precision` must be "float32" or "bfloat16", got {precision!r}.')
    if precision == "bfloat16" and weight.dtype == torch.float32:
        raise ValueError('`precision="bfloat16"` needs a 16-bit weight, got float32.')
    launch = launch_for(x.device).linear
    rows, outputs = x.shape[0], weight.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    if not rows:
        return out
    blocks, splits = split_plan(outputs, x.shape[1], launch)
    grid = (-(-rows // launch.tokens), -(-outputs // launch.block_n), splits)
    partials, locks = out, out
    if splits > 1:
        partials = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
        locks = _locks.get(x.device, grid[0] * grid[1])
    linear_kernel[grid](
        x,
        weight,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        partials,
        locks,
        rows,
        outputs,
        x.shape[1],
        blocks,
        splits,
        TILES=launch.tokens // 16,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        W_PIECES=WEIGHT_PIECES[weight.dtype],
        X_PIECES=3 if precision == "float32" else 1,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        TENSOR_CORES=not interpreted(),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )
    return out


__all__ = ["linear", "linear_kernel", "split_plan"]
