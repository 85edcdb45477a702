"""Which loop decodes a request, and running it to the end."""

from __future__ import annotations

from typing import Any

import torch

from ..kv_cache.cache import MarginGateCache
from ..outputs import MarginGateStatistics
from ..verifier import Verifier
from .gated import GatedLoop
from .loop import DecodeLoop, DecodeRequest

LOOPS: dict[str, type[DecodeLoop]] = {"full": DecodeLoop, "gated": GatedLoop}


def loop_for(model: Any, verifier: Verifier, request: DecodeRequest) -> DecodeLoop:
    """The loop of the request's `coverage`."""
    return LOOPS[request.config.coverage](model, verifier, request)


def decode(model: Any, verifier: Verifier, request: DecodeRequest) -> tuple[MarginGateCache, MarginGateStatistics]:
    """
    Runs the rows of `request` to their ends; their `committed` lists hold the result.

    Args:
        model (`PreTrainedModel`): the model; its own forward is the fast path.
        verifier ([`Verifier`]): self-tested verifier of the same model.

    Returns:
        `(cache, statistics)`, the cache's rows in the order of `request.rows`.
    """
    loop = loop_for(model, verifier, request)
    try:
        with torch.no_grad():
            while loop.unfinished:
                loop.step()
    finally:
        loop.restore_cache()
    return loop.cache, loop.totals()
