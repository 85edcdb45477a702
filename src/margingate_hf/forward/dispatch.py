"""Which implementation runs an operation: one table, (operation, backend) -> home, and the backend of a device.

`torch` is plain torch, used on CPU. `triton` is the kernels in `margingate_kernels`, used on CUDA. `MARGINGATE_BACKEND`
forces one, for tests: with `TRITON_INTERPRET=1` the Triton path runs on CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "MARGINGATE_BACKEND"
BACKENDS = {"cpu": "torch", "cuda": "triton"}

# Homes are imported on first use: Triton is not installed everywhere.
TABLE: dict[tuple[str, str], str] = {
    ("plans", "torch"): "margingate_hf.verifier.plans:cpu_plans",
    ("plans", "triton"): "margingate_hf.verifier.triton:triton_plans",
    ("describe", "torch"): "margingate_hf.forward.attention:describe",
    ("describe", "triton"): "margingate_hf.verifier.triton:describe",
    ("verify_attention", "torch"): "margingate_hf.forward.attention:verify_attention",
    ("verify_attention", "triton"): "margingate_hf.verifier.triton:verify_attention",
    ("decode_attention", "torch"): "margingate_hf.forward.attention:decode_attention",
    ("decode_attention", "triton"): "margingate_hf.verifier.triton:decode_attention",
    ("column_store", "torch"): "margingate_hf.kv_cache.stores:column_store",
    ("column_store", "triton"): "margingate_hf.verifier.triton:TritonPlaneStore",
    # For models that compute with what the cache returns: a fast step reads the model's dtype, a pass the planes' sum.
    ("summed_store", "torch"): "margingate_hf.kv_cache.stores:PlaneStore",
    ("summed_store", "triton"): "margingate_hf.kv_cache.stores:PlaneStore",
    # What the fast path writes is what the verifier reads; one plane of the model's own dtype does so as it is.
    ("column_store/gated", "torch"): "margingate_hf.kv_cache.stores:PlaneStore",
    ("column_store/gated", "triton"): "margingate_hf.verifier.triton:TritonPlaneStore",
    ("summed_store/gated", "torch"): "margingate_hf.kv_cache.stores:PlaneStore",
    ("summed_store/gated", "triton"): "margingate_hf.kv_cache.stores:PlaneStore",
    ("row_sum", "torch"): "margingate_hf.verifier.arithmetic:row_sum",
    ("row_sum", "triton"): "margingate_kernels:row_sum",
    ("softmax", "torch"): "margingate_hf.verifier.arithmetic:softmax",
    ("softmax", "triton"): "margingate_kernels:softmax",
    ("log_softmax", "torch"): "margingate_hf.verifier.arithmetic:log_softmax",
    ("log_softmax", "triton"): "margingate_kernels:log_softmax",
    ("layer_norm", "torch"): "margingate_hf.verifier.arithmetic:layer_norm",
    ("layer_norm", "triton"): "margingate_kernels:layer_norm",
    ("rms_norm", "torch"): "margingate_hf.verifier.arithmetic:rms_norm",
    ("rms_norm", "triton"): "margingate_hf.verifier.triton:rms_norm",
    ("top2_margin", "torch"): "margingate_hf.decoding.margin:top2_margin",
    ("top2_margin", "triton"): "margingate_hf.verifier.triton:top2_margin",
}


def backend_for(device: torch.device) -> str:
    """
    The backend that runs on a device: `"torch"` or `"triton"`.

    Raises:
        `ValueError`: `MARGINGATE_BACKEND` names no backend.
        `NotImplementedError`: no backend for this kind of device.
    """
    forced = os.environ.get(VARIABLE)
    if forced:
        if forced not in BACKENDS.values():
            raise ValueError(
                f"{VARIABLE} must be one of {sorted(BACKENDS.values())}, got {forced!r}. Unset or correct it."
            )
        return forced
    if device.type not in BACKENDS:
        raise NotImplementedError(f"no verifier runs on {device}; move the model to {' or '.join(BACKENDS)}.")
    return BACKENDS[device.type]


def missing(device: torch.device) -> str | None:
    """What a device's backend lacks here, in words, or `None` if it can run."""
    if backend_for(device) == "torch":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; `pip install triton`"
    from margingate_kernels.launch_table import launch_for

    try:
        launch_for(device)
    except RuntimeError as error:
        return str(error)
    return None


def implementation(operation: str, device: torch.device) -> Callable[..., Any]:
    """
    The function or class that runs an operation for tensors on a device.

    Looked up anew at each call, so a test can replace one where it lives.

    Args:
        operation (`str`): the first half of a key of `TABLE`.
        device (`torch.device`): where the tensors lie.
    """
    home, name = TABLE[operation, backend_for(device)].split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(home), name)
    return found
