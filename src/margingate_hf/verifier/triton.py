"""The Triton backend: what `dispatch.TABLE` names, in the table's signatures, over `margingate_kernels`."""

from __future__ import annotations

from typing import Any

import torch

import margingate_kernels as kernels

from ..forward.context import DecodeGeometry, VerifyGeometry
from ..kv_cache.stores import PlaneStore
from .plans import LinearPlan


class TritonPlan:
    """
    The Triton linear: weights stay in their own dtype and are up-cast in registers; one instruction shape for every
    number of rows, so any number may be issued. `sizes` are those the probe compares: both sides of every tile edge.

    Args:
        column_store (`str`, *optional*): `"summed_store"` for models that compute with what the cache returns before
            they call attention (latent attention, as DeepSeek-V3's); slower, for the planes are added into a copy.
    """

    sizes = (2, 16, 17, 33)
    copies_weights = False

    def __init__(self, column_store: str = "column_store"):
        self.column_store = column_store
        self.name = "triton-linear" if column_store == "column_store" else "triton-linear-summed-kv"

    def available(self) -> bool:
        """Always; `dispatch.missing` has looked for Triton and a GPU."""
        return True

    def pack(self, weight: torch.Tensor) -> Any:
        """The weight `[out, in]` itself, contiguous."""
        return weight.contiguous()

    pack_once = pack

    def linear(self, rows: torch.Tensor, packed: Any, precision: str = "float32") -> torch.Tensor:
        """`rows @ weight.T`, float32 `[n, in]` to `[n, out]`."""
        return kernels.linear(rows.contiguous(), packed, precision=precision)


def triton_plans() -> tuple[LinearPlan, ...]:
    """Planes first. Where the kernel fails its probe, no library product is trusted in its place."""
    return TRITON_PLANS


TRITON_PLANS: tuple[LinearPlan, ...] = (TritonPlan(), TritonPlan("summed_store"))


def describe(device: torch.device) -> str:
    """Kernel version, architecture, Triton version and every launch parameter that takes part in a bit."""
    return kernels.describe(device)


class TritonPlaneStore(PlaneStore):
    """For CUDA: the kernels add the planes as they read, and never read a column beyond a row's last query."""

    def write_draft(self, states: torch.Tensor, geometry: DecodeGeometry) -> torch.Tensor:
        """See [`ColumnStore`]; as it is, finite or not."""
        self.draft[geometry.slots, :, geometry.positions] = states
        return self.drafted(geometry)

    def repair(self, states: torch.Tensor, geometry: VerifyGeometry) -> torch.Tensor:
        """See [`ColumnStore`]; returns `[planes, rows, heads, capacity, dim]`."""
        low = self.whole[0] if self.whole is not None else self._planes[1] if self._planes.shape[0] == 2 else None
        states = states if states.stride(-1) == 1 else states.contiguous()
        kernels.repair_columns(states, self._planes[0], low, geometry.slots, geometry.positions)
        return self._kept

    def drafted(self, geometry: DecodeGeometry) -> torch.Tensor:
        """See [`ColumnStore`]; returns `[1, rows, heads, capacity, dim]`."""
        return self._planes[:1]


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
    As [`~margingate_hf.forward.attention.verify_attention`], over planes.

    Args:
        query (`torch.Tensor` of shape `[1, heads, tokens, dim]`, float32).
        keys, values (`torch.Tensor` of shape `[planes, rows, kv_heads, capacity, dim]`): of a
            [`TritonPlaneStore`]; without the first dimension, of a [`PlaneStore`] or what a model made of it.

    Returns:
        `torch.Tensor` of shape `[1, tokens, heads, value_dim]`, float32.
    """
    keys, values = _planes(keys), _planes(values)
    together = kernels.attention.QUERY_ROWS // kernels.group_tile(query.shape[1] // keys.shape[2])
    flat, tiles = query[0].transpose(0, 1), geometry.tiles(together)
    return _attend(flat, keys, values, geometry, tiles, "float32", scaling, sliding_window, softcap, sinks)[None]


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
    As [`~margingate_hf.forward.attention.decode_attention`]: drafts only. BF16 models multiply BF16 by BF16; others
    keep the query whole.

    Args:
        query (`torch.Tensor` of shape `[rows, heads, 1, dim]`, the model's dtype).
        keys, values (`torch.Tensor` of shape `[1, rows, kv_heads, capacity, dim]`): the draft plane; the first
            dimension may be missing, as above.

    Returns:
        `torch.Tensor` of shape `[rows, 1, heads, value_dim]`, the model's dtype.
    """
    keys, values = _planes(keys), _planes(values)
    precision = "bfloat16" if keys.dtype == torch.bfloat16 else "float32"
    flat, tiles = query[:, :, 0], geometry.tiles
    out = _attend(flat, keys, values, geometry, tiles, precision, scaling, sliding_window, softcap, sinks)
    return out.to(query.dtype)[:, None]


def _planes(store: torch.Tensor) -> torch.Tensor:
    if store.dim() == 5:
        return store
    fits = store.stride(3) == 1 and store.stride(2) == store.shape[3]
    return (store if fits else store.contiguous())[None]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    geometry: VerifyGeometry | DecodeGeometry,
    tiles: torch.Tensor,
    precision: str,
    scaling: float,
    *options: Any,
) -> torch.Tensor:
    """The kernel on flat queries `[tokens, heads, dim]`; `options` are sliding window, soft cap and sinks."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    window, softcap, sinks = options
    slots, positions, length = geometry.slots, geometry.positions, geometry.length
    return kernels.ragged_attention(
        query, keys, values, tiles, slots, positions, length, scaling, window, softcap, sinks, precision
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; float32 `[..., n]`, weight `[n]`."""
    return kernels.rms_norm(x, weight, eps)[0]


def top2_margin(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`~margingate_hf.decoding.margin.top2_margin`], in one read of the scores `[..., vocabulary]`."""
    if scores.dtype == torch.float64:
        scores = scores.float()
    found = kernels.top2(scores.reshape(-1, scores.shape[-1]).contiguous())
    return found.tokens.reshape(scores.shape[:-1]), found.margins.reshape(scores.shape[:-1])
