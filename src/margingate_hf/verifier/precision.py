"""What this processor multiplies in 16 bits, and whether FP32 products here are whole.

The setting behind `torch.set_float32_matmul_precision` belongs to the process. The gate never changes it: it looks, and
refuses to compute canonical values where FP32 operands would be rounded.
"""

from __future__ import annotations

import functools

import torch


def lowered_precision(device: torch.device) -> str | None:
    """
    The name and value of a process-wide setting that rounds the operands of FP32 products on a device, or `None`.

    On CUDA the kernels of this package do not read it.
    """
    if device.type != "cpu":
        return None
    setting = torch.backends.mkldnn.matmul.fp32_precision
    rounds = (setting == "bf16" and multiplies_bfloat16()) or (setting == "tf32" and multiplies_tf32())
    return f"torch.backends.mkldnn.matmul.fp32_precision={setting!r}" if rounds else None


def check_precision(device: torch.device) -> None:
    """
    Raises:
        `ValueError`: FP32 products would be rounded; names the setting and what to do.
    """
    lowered = lowered_precision(device)
    if lowered is not None:
        raise ValueError(
            f"`{lowered}` lets this processor round FP32 operands, so no canonical value can be computed. It is a "
            'setting of the whole process, which the margin gate leaves alone: call `torch.set_float32_matmul_precision("highest")` '
            "(BF16 products are not affected by it)."
        )


@functools.cache
def multiplies_bfloat16() -> bool:
    """
    Whether this processor has BF16 products (AVX512-BF16 or AMX) and oneDNN takes BF16 at all: `ONEDNN_MAX_CPU_ISA` can
    forbid it.
    """
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    takes = getattr(getattr(torch.ops, "mkldnn", None), "_is_mkldnn_bf16_supported", None)
    return bool(has and takes is not None and takes())


@functools.cache
def multiplies_tf32() -> bool:
    """Whether oneDNN may take TF32 products on this processor (AMX-FP16 and later)."""
    return bool(torch.cpu._is_amx_fp16_supported())
