"""Attention of the torch backend, for verify forwards and draft steps.

The verifier's form (`verify_attention`) cuts keys into blocks of `KV_BLOCK` anchored at position 0 and queries into
tiles, so that every matrix product has the bits of one shape (`query_tiles.py`); block results are summed in the order
of the blocks. A block that a query cannot see contributes exact zeros, so neither the rest of the batch, nor the cut
into forwards, nor the capacity can reach a row's bits. The fast form is SDPA, or the textbook formula where a model
caps its scores or has sinks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .context import (
    KV_BLOCK,
    QUERY_TILE,
    AttentionOptions,
    DecodeContext,
    Round,
    VerifyContext,
)
from .query_tiles import attend, tile_sizes


def describe(device: torch.device) -> str:
    """The constants of this form that take part in a bit, for the plan's fingerprint."""
    return f"{device.type}/kv{KV_BLOCK}/q{QUERY_TILE}"


def verify_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: VerifyContext,
    options: AttentionOptions,
) -> torch.Tensor:
    """
    Batch-invariant attention: `softmax(q k^T * scaling) v` over each query's own row and past.

    Reduction order: scores over `dim` in one product of fixed shape; the maximum over all visible keys (order-free);
    the sum of exponentials and the weighted values within a block by one fixed-shape reduction each, then over blocks
    in order.

    Args:
        query (`torch.Tensor` of shape `[1, heads, tokens, dim]`, float32).
        keys, values (`torch.Tensor` of shape `[rows, kv_heads, length, dim]`, float32): the exact stores, `length` a
            multiple of `KV_BLOCK`.
        context ([`VerifyContext`]): rows and positions of the tokens.
        options ([`AttentionOptions`]): scaling, sliding window, soft cap, sinks.

    Returns:
        `torch.Tensor` of shape `[1, tokens, heads, value_dim]`, float32.
    """
    heads, tokens = query.shape[1], query.shape[2]
    flat = query[0].transpose(0, 1) * options.scaling
    flat = torch.cat([flat, flat.new_zeros(1, heads, query.shape[3])])  # the fillers' row
    out = flat.new_empty(tokens + 1, heads, values.shape[-1])
    sizes = tile_sizes(heads // keys.shape[1], query.shape[3], values.shape[3], query.device)
    for part in context.rounds(sizes):
        k, v = _row_blocks(keys, part), _row_blocks(values, part)
        tile = flat[part.query_index]
        hidden = part.hidden(options.sliding_window)
        out[part.query_index.flatten()] = attend(tile, k, v, hidden, options.softcap, options.sinks).flatten(0, 1)
    return out[None, :tokens]


def _row_blocks(store: torch.Tensor, part: Round) -> torch.Tensor:
    """
    The rows and blocks of a round, `[rows, kv_heads, n_blocks, KV_BLOCK, dim]`; a view where the rows are consecutive.
    """
    first, count = part.slots[0], len(part.slots)
    consecutive = part.slots == tuple(range(first, first + count))
    rows = store[first : first + count] if consecutive else store[list(part.slots)]
    return rows[:, :, : part.n_blocks * KV_BLOCK].unflatten(2, (part.n_blocks, KV_BLOCK))


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: DecodeContext,
    options: AttentionOptions,
) -> torch.Tensor:
    """
    Attention of a draft step. Drafts only: nothing it computes is committed without the verifier's agreement.

    Args:
        query (`torch.Tensor` of shape `[rows, heads, 1, dim]`, the model's dtype).
        keys, values (`torch.Tensor` of shape `[rows, kv_heads, length, dim]`): what the stores hand a draft step, in
            the model's dtype or float32, in which the products are then taken.
        context ([`DecodeContext`]): positions of the step. The rest as in [`verify_attention`].

    Returns:
        `torch.Tensor` of shape `[rows, 1, heads, value_dim]`, the model's dtype.
    """
    rows, heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    mask = context.mask(options.sliding_window, keys.dtype)
    softcap, sinks = options.softcap, options.sinks
    # Query heads of one K/V head become queries of one head: no copy of the keys a group.
    grouped = query.to(keys.dtype).view(rows, kv_heads, heads // kv_heads, dim)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=options.scaling)
        return out.to(query.dtype).reshape(rows, 1, heads, -1)
    scores = (grouped @ keys.transpose(-1, -2)).float() * options.scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask.float()
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(values.dtype) @ values).to(query.dtype).reshape(rows, 1, heads, -1)
