"""What the Triton backend is made of, over `margingate_kernels`: linear plans, stores, attention."""

from __future__ import annotations

from typing import Any

import torch

import margingate_kernels as kernels

from ..forward.context import AttentionOptions, DecodeContext, VerifyContext
from ..kv_cache.stores import PlaneStore
from .plans import LinearPlan


class TritonPlan:
    """
    The Triton linear: weights stay in their own dtype and are up-cast in registers; one instruction shape for every
    number of rows, so any number may be issued. `sizes` are those the probe compares: both sides of every tile edge.

    Args:
        sums_planes (`bool`, *optional*, defaults to `False`): for models that compute with what the cache returns
            before they call attention (latent attention, as DeepSeek-V3's); slower, for the planes are added into a
            copy.
    """

    sizes = (2, 16, 17, 33)
    copies_weights = False

    def __init__(self, sums_planes: bool = False):
        self.sums_planes = sums_planes
        self.name = "triton-linear-summed-kv" if sums_planes else "triton-linear"

    def available(self) -> bool:
        """Always; [`Triton.fits`] has looked for Triton and a GPU."""
        return True

    def pack(self, weight: torch.Tensor) -> Any:
        """The weight `[out, in]` itself, contiguous."""
        return weight.contiguous()

    pack_once = pack

    def linear(self, rows: torch.Tensor, packed: Any, precision: str = "float32") -> torch.Tensor:
        """`rows @ weight.T`, float32 `[n, in]` to `[n, out]`."""
        return kernels.linear(rows.contiguous(), packed, precision=precision)


# The ordinary form of K/V first.
TRITON_PLANS: tuple[LinearPlan, ...] = (TritonPlan(), TritonPlan(sums_planes=True))


def describe(device: torch.device) -> str:
    """Kernel version, architecture, Triton version and every launch parameter that takes part in a bit."""
    return kernels.describe(device)


class DevicePlaneStore(PlaneStore):
    """Planes in device memory, added into a copy for a verify forward."""

    zeros = staticmethod(torch.zeros)
    looks_first = False


class TritonPlaneStore(DevicePlaneStore):
    """For CUDA: the kernels add the planes as they read, and never read an entry beyond a row's last query."""

    def write_draft(self, states: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        """See [`KVStore`]; as it is, finite or not."""
        self.draft[context.slots, :, context.positions] = states
        return self.drafted(context)

    def repair(self, states: torch.Tensor, context: VerifyContext) -> torch.Tensor:
        """See [`KVStore`]; returns `[planes, rows, heads, capacity, dim]`."""
        low = self.whole[0] if self.whole is not None else self._planes[1] if self._planes.shape[0] == 2 else None
        states = states if states.stride(-1) == 1 else states.contiguous()
        kernels.repair_columns(states, self._planes[0], low, context.slots, context.positions)
        return self._kept

    def drafted(self, context: DecodeContext) -> torch.Tensor:
        """See [`KVStore`]; returns `[1, rows, heads, capacity, dim]`."""
        return self._planes[:1]


def verify_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: VerifyContext,
    options: AttentionOptions,
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
    flat, tiles = query[0].transpose(0, 1), context.tiles(together)
    return _attend(flat, keys, values, context, tiles, "float32", options)[None]


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: DecodeContext,
    options: AttentionOptions,
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
    flat, tiles = query[:, :, 0], context.tiles
    out = _attend(flat, keys, values, context, tiles, precision, options)
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
    context: VerifyContext | DecodeContext,
    tiles: torch.Tensor,
    precision: str,
    options: AttentionOptions,
) -> torch.Tensor:
    """The kernel on flat queries `[tokens, heads, dim]`."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    slots, positions, length = context.slots, context.positions, context.length
    return kernels.ragged_attention(
        query,
        keys,
        values,
        tiles,
        slots,
        positions,
        length,
        options.scaling,
        options.sliding_window,
        options.softcap,
        options.sinks,
        precision,
    )


def top2_margin(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`~margingate_hf.verifier.top2.top2_margin`], in one read of the scores `[..., vocabulary]`."""
    if scores.dtype == torch.float64:
        scores = scores.float()
    found = kernels.top2(scores.reshape(-1, scores.shape[-1]).contiguous())
    return found.tokens.reshape(scores.shape[:-1]), found.margins.reshape(scores.shape[:-1])
