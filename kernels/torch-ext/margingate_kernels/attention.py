"""Attention of any window of queries against a ragged, left-aligned K/V cache, FP32 quality, batch-invariant.

Serves both passes: the verifier's (FP32 queries in three pieces, K/V in one, two or more planes) and, with one piece
and one plane, the fast path's decode step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch_table import attention_launch, interpreted, launch_for, padded_dim
from .pieces import bits_to_float, dot_pieces, round_to_bf16, split3

QUERY_ROWS = 16  # (position, head) pairs of one tensor-core product

# tanh(x) / x in powers of x^2 on |x| <= 0.6: least squares at Chebyshev nodes, relative error 2.6e-9.
C0, C1, C2 = tl.constexpr(0.9999999974), tl.constexpr(-0.33333282105), tl.constexpr(0.13331663695)
C3, C4, C5 = tl.constexpr(-0.05376675837), tl.constexpr(0.02074749396), tl.constexpr(-0.00584538962)


@triton.jit
def _load_planes(pointer, plane_stride, mask, PLANES: tl.constexpr):
    """The FP32 value that the planes add up to; exact, two 16-bit planes hold at most 22 bits."""
    x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if PLANES == 2:
        x += tl.load(pointer + plane_stride, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _product(hi, mid, lo, pointer, plane_stride, mask, zero, PIECES: tl.constexpr, PLANES: tl.constexpr,
             BF16: tl.constexpr, TENSOR_CORES: tl.constexpr):  # fmt: skip
    """`(hi + mid + lo) @ tile`, the tile of keys or values read from its planes; BF16 planes are the pieces."""
    if BF16:
        first = tl.load(pointer, mask=mask, other=0.0)
        if PLANES == 2:
            second = tl.load(pointer + plane_stride, mask=mask, other=0.0)
            return dot_pieces(hi, mid, lo, first, second, second, zero, PIECES, 2, TENSOR_CORES)
        else:
            return dot_pieces(hi, mid, lo, first, first, first, zero, PIECES, 1, TENSOR_CORES)
    else:
        first, second, third = split3(_load_planes(pointer, plane_stride, mask, PLANES))
        return dot_pieces(hi, mid, lo, first, second, third, zero, PIECES, 3, TENSOR_CORES)


@triton.jit
def _pieces(x, PIECES: tl.constexpr):
    if PIECES == 1:
        only = bits_to_float(round_to_bf16(x))
        return only, only, only
    else:
        return split3(x)


@triton.jit
def _tanh(x):
    """`tanh`: a polynomial near 0, `1 - 2 / (exp(2|x|) + 1)` beyond, where nothing cancels."""
    z = x * x
    small = x * (C0 + z * (C1 + z * (C2 + z * (C3 + z * (C4 + z * C5)))))
    size = tl.abs(x)
    large = 1.0 - tl.div_rn(tl.full(x.shape, 2.0, tl.float32), tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.6, small, tl.where(x < 0, -large, large))


@triton.jit(do_not_specialize=["n_splits", "window"])
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    slots_ptr,
    positions_ptr,
    weighted_ptr,
    top_ptr,
    total_ptr,
    heads,
    n_splits,
    window,
    scaling,
    softcap,
    q_token_stride,
    q_head_stride,
    k_plane_stride,
    k_row_stride,
    k_head_stride,
    v_plane_stride,
    v_row_stride,
    v_head_stride,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PIECES: tl.constexpr,
    PLANES: tl.constexpr,
    BF16: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
):
    """
    One program a (query tile, K/V head and part of its group, split of the keys).

    Formula, over the keys `p` of one split that a query at position `t` sees (`t - window < p <= t`):
    `top = max s_p`, `total = sum exp(s_p - top)`, `weighted = sum exp(s_p - top) v_p`, `s_p = scaling * q . k_p`,
    soft-capped where asked.

    Order: the products over `DIM` in a fresh accumulator, pieces smallest first; keys in blocks of `BLOCK` anchored at
    position 0, ascending, each block's sum added to the running one after that is rescaled to the new maximum.

    Invariance: a query tile always has 16 rows (positions x heads of a group), a block and a split always begin at a
    multiple of their size, and each query masks by its own position. A block in which a query sees nothing leaves its
    sums as they are (`alpha = 1`, weights 0), so it does not matter which other queries made the program read it;
    blocks that no query of the tile sees are not read at all, since they may hold anything, NaN included.
    """
    tile = tl.program_id(0)
    head_part = tl.program_id(1)
    split = tl.program_id(2)
    PARTS: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = head_part // PARTS
    first = tl.load(tiles_ptr + 2 * tile)
    count = tl.load(tiles_ptr + 2 * tile + 1)
    lanes = tl.arange(0, 16)
    in_group = (head_part % PARTS) * GROUP_TILE + lanes % GROUP_TILE
    used = (lanes // GROUP_TILE < count) & (in_group < GROUP)
    token = first + lanes // GROUP_TILE
    query = tl.load(positions_ptr + token, mask=used, other=-1).to(tl.int32)
    last = tl.max(query, 0)
    # The earliest key any query of the tile sees, rounded down to a block.
    nearest = tl.min(tl.where(used, query, 2147483647), 0)
    begin = tl.maximum(nearest - window + 1, 0) // BLOCK * BLOCK
    begin = tl.maximum(begin, split * SPLIT)
    end = tl.minimum((split + 1) * SPLIT, last + 1)
    if begin >= end:
        return  # the combination never reads this split
    head = kv_head * GROUP + in_group
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    q_at = q_ptr + token[:, None].to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    q = tl.load(q_at, mask=used[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32) * scaling
    q_hi, q_mid, q_lo = _pieces(q, PIECES)
    slot = tl.load(slots_ptr + first).to(tl.int64)
    k_row = k_ptr + slot * k_row_stride + kv_head * k_head_stride
    v_row = v_ptr + slot * v_row_stride + kv_head * v_head_stride
    top = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    weighted = tl.zeros((16, DV), tl.float32)
    for start in range(begin, end, BLOCK):
        p = start + tl.arange(0, BLOCK)
        exists = p <= last  # a slot beyond may hold NaN, and 0 * NaN is NaN
        k_at = k_row + p[None, :] * DIM + d[:, None]
        k_mask = exists[None, :] & (d < DIM)[:, None]
        zero = tl.zeros((16, BLOCK), tl.float32)
        scores = _product(q_hi, q_mid, q_lo, k_at, k_plane_stride, k_mask, zero, PIECES, PLANES, BF16, TENSOR_CORES)
        if SOFTCAP:
            scores = softcap * _tanh(tl.div_rn(scores, tl.zeros_like(scores) + softcap))
        seen = (p[None, :] <= query[:, None]) & (p[None, :] > query[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        alpha = tl.exp(top - base)
        weights = tl.exp(scores - base[:, None])
        total = total * alpha + tl.sum(weights, 1)
        w_hi, w_mid, w_lo = _pieces(weights, PIECES)
        v_at = v_row + p[:, None] * VALUE_DIM + dv[None, :]
        v_mask = exists[:, None] & (dv < VALUE_DIM)[None, :]
        zero_v = tl.zeros((16, DV), tl.float32)
        add = _product(w_hi, w_mid, w_lo, v_at, v_plane_stride, v_mask, zero_v, PIECES, PLANES, BF16, TENSOR_CORES)
        weighted = weighted * alpha[:, None] + add
        top = new_top
    at = (token.to(tl.int64) * heads + head) * n_splits + split
    tl.store(top_ptr + at, top, mask=used)
    tl.store(total_ptr + at, total, mask=used)
    tl.store(
        weighted_ptr + at[:, None] * VALUE_DIM + dv[None, :], weighted, mask=used[:, None] & (dv < VALUE_DIM)[None, :]
    )


@triton.jit(do_not_specialize=["n_splits", "window"])
def combine_kernel(
    weighted_ptr,
    top_ptr,
    total_ptr,
    positions_ptr,
    sinks_ptr,
    out_ptr,
    heads,
    n_splits,
    window,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """
    One program a (token, head): `out = sum_s e_s weighted_s / sum_s e_s total_s`, `e_s = exp(top_s - max top)`.

    Order: splits ascending, exactly those that hold a key the query sees, a function of its own position; a sink's
    weight, `exp(sink - max)`, last. Neither capacity nor batch nor `n_splits` enters.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int32)
    dv = tl.arange(0, DV)
    inside = dv < VALUE_DIM
    at = (token * heads + head) * n_splits
    begin = tl.maximum(position - window + 1, 0) // SPLIT
    end = position // SPLIT + 1
    top = tl.load(top_ptr + at + begin)
    for split in range(begin + 1, end):
        top = tl.maximum(top, tl.load(top_ptr + at + split))
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    scale = tl.exp(tl.load(top_ptr + at + begin) - top)
    total = tl.load(total_ptr + at + begin) * scale
    weighted = tl.load(weighted_ptr + (at + begin) * VALUE_DIM + dv, mask=inside, other=0.0) * scale
    for split in range(begin + 1, end):
        scale = tl.exp(tl.load(top_ptr + at + split) - top)
        total += tl.load(total_ptr + at + split) * scale
        weighted += tl.load(weighted_ptr + (at + split) * VALUE_DIM + dv, mask=inside, other=0.0) * scale
    if HAS_SINKS:
        total += tl.exp(sink - top)
    out = tl.div_rn(weighted, tl.zeros_like(weighted) + total)
    tl.store(out_ptr + (token * heads + head) * VALUE_DIM + dv, out, mask=inside)


def group_tile(group: int) -> int:
    """Query heads of one K/V head that share a tile; `QUERY_ROWS // group_tile(group)` positions fit beside them."""
    return min(QUERY_ROWS, triton.next_power_of_2(group))


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    if query.dim() != 3 or query.stride(2) != 1:
        raise ValueError(f"`query` must be [tokens, heads, dim], contiguous in dim, got {tuple(query.shape)}.")
    for name, store in (("keys", keys), ("values", values)):
        if store.dim() != 5 or store.shape[0] > 2 or store.dtype not in (
            torch.bfloat16, torch.float16, torch.float32,
        ):  # fmt: skip
            raise ValueError(
                f"`{name}` must be [1 or 2 planes, rows, kv_heads, capacity, dim] of a floating dtype, "
                f"got {store.dtype} {tuple(store.shape)}."
            )
        if store.stride(4) != 1 or store.stride(3) != store.shape[4]:
            raise ValueError(f"`{name}` must be contiguous in its last two dimensions, got strides {store.stride()}.")
    if keys.shape[:4] != values.shape[:4] or keys.dtype != values.dtype:
        raise ValueError(f"`values` must match `keys` {tuple(keys.shape)} but for dim, got {tuple(values.shape)}.")
    if keys.shape[4] != query.shape[2] or query.shape[1] % keys.shape[2]:
        raise ValueError(
            f"`query` {tuple(query.shape)} does not fit keys of {keys.shape[2]} heads and dim {keys.shape[4]}."
        )
    tokens = query.shape[0]
    if slots.shape != (tokens,) or positions.shape != (tokens,) or tiles.dim() != 2 or tiles.shape[1] != 2:
        raise ValueError(
            f"`slots` and `positions` must have shape [{tokens}] and `tiles` [n, 2], "
            f"got {tuple(slots.shape)}, {tuple(positions.shape)}, {tuple(tiles.shape)}."
        )


def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    length: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    precision: str = "float32",
) -> torch.Tensor:
    """
    `softmax(q k^T * scaling) v` of each query over its own cache row, up to its own position.

    Args:
        query (`torch.Tensor` of shape `[tokens, heads, dim]`, any floating dtype).
        keys, values (`torch.Tensor` of shape `[planes, rows, kv_heads, capacity, dim]`): one plane, or two whose sum is
            the value. Column `p` of a row is position `p`.
        tiles (`torch.Tensor` of shape `[n, 2]`, int32): first token and count of tokens that are worked on together:
            consecutive in `query`, of one row, at most `16 // group_tile(heads // kv_heads)`.
        slots, positions (`torch.Tensor` of shape `[tokens]`, int64): each token's row and position.
        length (`int`): more than every position; keys beyond are not read.
        scaling (`float`): factor on the scores.
        sliding_window (`int`, *optional*): keys a query sees, itself included. `None`: all.
        softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): a logit per head that takes weight and gives no value.
        precision (`str`, *optional*, defaults to `"float32"`): `"bfloat16"` rounds queries and weights to BF16.

    Returns:
        `torch.Tensor` of shape `[tokens, heads, value_dim]`, float32. A token's bits depend on its query and the keys
        and values it sees, not on the window, the company, the tile it is in or the capacity.

    Raises:
        `ValueError`: shapes, dtypes or layouts that do not fit.
    """
    _check(query, keys, values, tiles, slots, positions)
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f'`precision` must be "float32" or "bfloat16", got {precision!r}.')
    tokens, heads, dim = query.shape
    kv_heads, value_dim, device = keys.shape[2], values.shape[4], query.device
    group = heads // kv_heads
    together = group_tile(group)
    table = attention_launch(launch_for(device), max(dim, value_dim), keys.dtype)
    out = torch.empty(tokens, heads, value_dim, dtype=torch.float32, device=device)
    n_splits = -(-min(length, keys.shape[3]) // table.split)
    window = 2**30 if sliding_window is None else sliding_window
    weighted = torch.empty(tokens, heads, n_splits, value_dim, dtype=torch.float32, device=device)
    top = torch.empty(tokens, heads, n_splits, dtype=torch.float32, device=device)
    total = torch.empty_like(top)
    attend_kernel[(tiles.shape[0], kv_heads * -(-group // together), n_splits)](
        query,
        keys,
        values,
        tiles,
        slots,
        positions,
        weighted,
        top,
        total,
        heads,
        n_splits,
        window,
        scaling,
        1.0 if softcap is None else softcap,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        GROUP=group,
        GROUP_TILE=together,
        DIM=dim,
        VALUE_DIM=value_dim,
        D=padded_dim(dim),
        DV=padded_dim(value_dim),
        BLOCK=table.block,
        SPLIT=table.split,
        PIECES=3 if precision == "float32" else 1,
        PLANES=keys.shape[0],
        BF16=keys.dtype == torch.bfloat16,
        SOFTCAP=softcap is not None,
        TENSOR_CORES=not interpreted(),
        num_warps=table.num_warps,
        num_stages=table.num_stages,
        enable_fp_fusion=False,
    )
    combine_kernel[(tokens, heads)](
        weighted,
        top,
        total,
        positions,
        out if sinks is None else sinks,
        out,
        heads,
        n_splits,
        window,
        VALUE_DIM=value_dim,
        DV=padded_dim(value_dim),
        SPLIT=table.split,
        HAS_SINKS=sinks is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out
