"""One attention function for both passes, registered with transformers under our own name.

The verifier's form (`verify_attention`) cuts keys into blocks of `KV_BLOCK` anchored at position 0 and queries into
tiles of `QUERY_TILE`, so every matrix product has one shape; block results are summed in the order of the blocks. A
block that a query cannot see contributes exact zeros, so neither the company, nor the cut into windows, nor the
capacity can reach a row's bits. The fast form is SDPA, or the textbook formula where a model caps its scores or has
sinks.

Outside our passes both registered functions stand aside and call what the model used before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .fixed_plan import fixed_plan
from .geometry import (
    KV_BLOCK,
    QUERY_TILE,
    DecodeGeometry,
    Round,
    VerifyGeometry,
    current_geometry,
)

ATTENTION_NAME = "margingate"


def verify_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    geometry: VerifyGeometry,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Batch-invariant attention: `softmax(q k^T * scaling) v` over each query's own row and past.

    Reduction order: scores over `dim` in one product of fixed shape; the maximum over all visible keys (order-free);
    the sum of exponentials and the weighted values within a block by one fixed-shape reduction each, then over blocks
    in order.

    Args:
        query (`torch.Tensor` of shape `[1, heads, tokens, dim]`, float32).
        keys, values (`torch.Tensor` of shape `[rows, blocks, kv_heads, KV_BLOCK, dim]`, float32): the exact stores.
        geometry ([`VerifyGeometry`]): rows and positions of the tokens.
        scaling (`float`): factor on the scores.
        sliding_window (`int`, *optional*): keys a query sees, itself included. `None`: all.
        softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): a logit per head that takes weight and gives no value.

    Returns:
        `torch.Tensor` of shape `[1, tokens, heads, value_dim]`, float32.
    """
    heads, tokens = query.shape[1], query.shape[2]
    flat = query[0].transpose(0, 1) * scaling
    flat = torch.cat([flat, flat.new_zeros(1, heads, query.shape[3])])  # the fillers' row
    out = flat.new_empty(tokens + 1, heads, values.shape[-1])
    for part in geometry.rounds:
        k, v = _row_blocks(keys, part), _row_blocks(values, part)
        tile = flat[part.query_index]
        hidden = part.hidden(sliding_window)
        out[part.query_index.flatten()] = _attend(tile, k, v, hidden, softcap, sinks).flatten(0, 1)
    return out[None, :tokens]


def _row_blocks(store: torch.Tensor, part: Round) -> torch.Tensor:
    """
    The rows and blocks of a round, `[rows, n_blocks, kv_heads, KV_BLOCK, dim]`; a view where the rows are consecutive.
    """
    first, count = part.slots[0], len(part.slots)
    if part.slots == tuple(range(first, first + count)):
        return store[first : first + count, : part.n_blocks]
    return store[list(part.slots), : part.n_blocks]


def _attend(
    tile: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """
    One round.

    Args:
        tile (`[rows, QUERY_TILE, heads, dim]`): scaled queries.
        keys, values (`[rows, blocks, kv_heads, KV_BLOCK, dim]`).
        hidden (bool `[rows, blocks, 1, QUERY_TILE, 1, KV_BLOCK]`).

    Returns:
        `[rows, QUERY_TILE, heads, value_dim]`.
    """
    rows, blocks, kv_heads, _, dim = keys.shape
    group = tile.shape[2] // kv_heads
    size = rows * blocks * kv_heads
    q = tile.view(rows, 1, QUERY_TILE, kv_heads, group, dim).permute(0, 1, 3, 2, 4, 5)
    q = q.reshape(rows, 1, kv_heads, QUERY_TILE * group, dim).expand(-1, blocks, -1, -1, -1)
    scores = torch.bmm(q.reshape(size, -1, dim), keys.reshape(size, KV_BLOCK, dim).transpose(1, 2))
    scores = scores.view(rows, blocks, kv_heads, QUERY_TILE, group, KV_BLOCK)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill_(hidden, float("-inf"))
    top = scores.amax(dim=(1, 5), keepdim=True)
    if sinks is not None:
        sinks = sinks.float().view(1, 1, kv_heads, 1, group, 1)
        top = torch.maximum(top, sinks)
    weights = scores.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    parts = torch.bmm(weights.view(size, -1, KV_BLOCK), values.reshape(size, KV_BLOCK, -1))
    parts = parts.view(rows, blocks, kv_heads, QUERY_TILE, group, -1)
    # Adding 0.0 turns a -0.0 of the first block into the +0.0 that one further, empty block would make of it.
    total, weighted = sums[:, 0] + 0.0, parts[:, 0] + 0.0
    for block in range(1, blocks):
        total = total + sums[:, block]
        weighted = weighted + parts[:, block]
    if sinks is not None:
        total = total + (sinks - top)[:, 0].exp()
    out = weighted / total
    return out.transpose(1, 2).reshape(rows, QUERY_TILE, kv_heads * group, -1)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    geometry: DecodeGeometry,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of a fast step. Drafts only: nothing it computes is committed without the verifier's agreement.

    Args:
        query (`torch.Tensor` of shape `[rows, heads, 1, dim]`, the model's dtype).
        keys, values (`torch.Tensor` of shape `[rows, kv_heads, length, dim]`): the draft stores.
        geometry ([`DecodeGeometry`]): positions of the step. The rest as in [`verify_attention`].

    Returns:
        `torch.Tensor` of shape `[rows, 1, heads, value_dim]`.
    """
    rows, heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    mask = geometry.mask(sliding_window, query.dtype)
    if softcap is None and sinks is None:
        # Query heads of one K/V head become queries of one head: no copy of the keys a group.
        grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return out.reshape(rows, 1, heads, -1)
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    scores = (grouped @ keys.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask.float()
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(values.dtype) @ values).reshape(rows, 1, heads, -1)


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
) -> tuple[torch.Tensor, None]:
    """
    The function registered with transformers' `AttentionInterface`; arguments as its own integrations take them.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, length, dim]`).
        key, value: what `MarginGateCache.update` returned.
        attention_mask: unused in our passes, geometry replaces it.

    Returns:
        `(output, None)` with `output` of shape `[batch, length, heads, dim]`.
    """
    geometry = current_geometry()
    if geometry is None:
        return _stock_attention(module)(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
            **kwargs,
        )
    layer = int(getattr(module, "layer_idx", -1))
    geometry.calls[layer] = geometry.calls.get(layer, 0) + 1
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with fixed_plan():
        if isinstance(geometry, VerifyGeometry):
            out = verify_attention(query, key, value, geometry, scaling, sliding_window, softcap, s_aux)
        else:
            out = decode_attention(query, key, value, geometry, scaling, sliding_window, softcap, s_aux)
        return out.contiguous(), None


def _margingate_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """
    No mask inside our passes (geometry travels beside the model); otherwise that of the implementation before ours.
    """
    if current_geometry() is not None:
        return None
    config = kwargs.get("config")
    name = _installed.original(config) if config is not None else None
    stock = ALL_MASK_ATTENTION_FUNCTIONS[name] if name in ALL_MASK_ATTENTION_FUNCTIONS else None
    return stock(*args, **kwargs) if stock is not None else None


def _stock_attention(module: torch.nn.Module) -> Callable:
    """The implementation a module used before ours was installed."""
    name = _installed.original(getattr(module, "config", None))
    if name is not None and name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    return sys.modules[type(module).__module__].eager_attention_forward


class _Installed:
    """Which configs point at our attention now, how often, and what they pointed at before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_config: dict[int, tuple[str | None, int]] = {}

    def original(self, config: Any) -> str | None:
        entry = self._by_config.get(id(config))
        return entry[0] if entry else None

    def add(self, config: Any) -> None:
        with self._lock:
            name, count = self._by_config.get(id(config), (config._attn_implementation_internal, 0))
            self._by_config[id(config)] = (name, count + 1)
            config._attn_implementation_internal = ATTENTION_NAME

    def remove(self, config: Any) -> None:
        with self._lock:
            name, count = self._by_config[id(config)]
            if count > 1:
                self._by_config[id(config)] = (name, count - 1)
                return
            config._attn_implementation_internal = name
            del self._by_config[id(config)]


_installed = _Installed()


def attention_configs(model: torch.nn.Module) -> list[Any]:
    """Every distinct config among a model's modules that names an attention implementation."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


@contextlib.contextmanager
def installed_attention(model: PreTrainedModel) -> Iterator[None]:
    """
    Points the model at [`margingate_attention`] for the duration of the block. Nests, also across threads; another
    thread's stock call meanwhile still gets the implementation it had.
    """
    configs = attention_configs(model)
    added: list[Any] = []
    try:
        for config in configs:
            _installed.add(config)
            added.append(config)
        yield
    finally:
        for config in added:
            _installed.remove(config)


AttentionInterface.register(ATTENTION_NAME, margingate_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _margingate_mask)
