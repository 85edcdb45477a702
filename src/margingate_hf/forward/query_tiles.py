"""One tile of queries against blocks of keys, and how many queries a tile may hold without changing a bit.

The bits of a query are those of a tile of `QUERY_TILE`. BLAS may pick a different kernel, and summation order, for a
different row count. `tile_sizes` probes which sizes give bit-identical results, and only those are used. Small tiles
spare short inputs their padding; large ones spare a prompt its many calls.
"""

from __future__ import annotations

import functools

import torch

from .context import KV_BLOCK, QUERY_TILE

CANDIDATES = (2, 4, 32)
# Matrices in one batched product, `rows * blocks * kv_heads`: the library shares one, few and many out in other ways.
BATCHES = ((1, 1, 1), (1, 2, 1), (3, 1, 1), (1, 1, 4), (5, 1, 2), (3, 4, 3))


def attend(
    tile: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """
    Softmax attention of one tile a row, block by block.

    Args:
        tile (`torch.Tensor` of shape `[rows, queries, heads, dim]`, float32): scaled queries.
        keys, values (`torch.Tensor` of shape `[rows, kv_heads, blocks, KV_BLOCK, dim]`, float32).
        hidden (bool `torch.Tensor` of shape `[rows, 1, masked, queries, 1, KV_BLOCK]`): keys a query must not see in
            the last `masked` blocks.
        softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): a logit per head that takes weight and gives no value.

    Returns:
        `torch.Tensor` of shape `[rows, queries, heads, value_dim]`, float32.
    """
    rows, kv_heads, blocks, _, dim = keys.shape
    queries, group = tile.shape[1], tile.shape[2] // kv_heads
    size = rows * blocks * kv_heads
    q = tile.view(rows, queries, kv_heads, group, dim).transpose(1, 2)
    q = q.reshape(rows, kv_heads, 1, queries * group, dim).expand(-1, -1, blocks, -1, -1)
    scores = torch.bmm(q.reshape(size, -1, dim), keys.reshape(size, KV_BLOCK, dim).transpose(1, 2))
    scores = scores.view(rows, kv_heads, blocks, queries, group, KV_BLOCK)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores[:, :, blocks - hidden.shape[2] :].masked_fill_(hidden, float("-inf"))
    top = scores.amax(dim=(2, 5), keepdim=True)
    if sinks is not None:
        sinks = sinks.float().view(1, kv_heads, 1, 1, group, 1)
        top = torch.maximum(top, sinks)
    weights = scores.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    parts = torch.bmm(weights.view(size, -1, KV_BLOCK), values.reshape(size, KV_BLOCK, -1))
    parts = parts.view(rows, kv_heads, blocks, queries, group, -1)
    # Adding 0.0 turns a -0.0 of the first block into the +0.0 that one further, empty block would make of it.
    total, weighted = sums[:, :, 0] + 0.0, parts[:, :, 0] + 0.0
    for block in range(1, blocks):
        total = total + sums[:, :, block]
        weighted = weighted + parts[:, :, block]
    if sinks is not None:
        total = total + (sinks - top)[:, :, 0].exp()
    out = weighted / total
    return out.transpose(1, 2).reshape(rows, queries, kv_heads * group, -1)


def tile_sizes(group: int, dim: int, value_dim: int, device: torch.device) -> tuple[int, ...]:
    """
    Queries a tile may hold, ascending; `QUERY_TILE` is always among them.

    Args:
        group (`int`): query heads that share a K/V head.
        dim, value_dim (`int`): of a head.
        device (`torch.device`): where.
    """
    return _probed(group, dim, value_dim, device, torch.get_num_threads())


@functools.lru_cache
def _probed(group: int, dim: int, value_dim: int, device: torch.device, threads: int) -> tuple[int, ...]:
    agreeing = [size for size in CANDIDATES if _agrees(size, group, dim, value_dim, device)]
    return tuple(sorted((QUERY_TILE, *agreeing)))


def _agrees(size: int, group: int, dim: int, value_dim: int, device: torch.device) -> bool:
    """Whether every query of two full tiles gets the bits of `QUERY_TILE`, in batches of several sizes."""
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    count = 2 * max(size, QUERY_TILE)
    for rows, blocks, kv_heads in BATCHES:
        queries = normal(rows, count, kv_heads * group, dim).to(device) * dim**-0.5
        keys = normal(rows, kv_heads, blocks, KV_BLOCK, dim).to(device)
        values = normal(rows, kv_heads, blocks, KV_BLOCK, value_dim).to(device)
        hidden = normal(rows, 1, blocks, count, 1, KV_BLOCK).to(device) < -0.7
        found = []
        for step in (size, QUERY_TILE):
            tiles = zip(queries.split(step, 1), hidden.split(step, 3), strict=True)
            found.append(torch.cat([attend(q.contiguous(), keys, values, mask, None, None) for q, mask in tiles], 1))
        if not torch.equal(*found):
            return False
    return True
