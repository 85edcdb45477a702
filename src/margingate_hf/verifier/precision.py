"""What this processor multiplies in 16 bits, and whether FP32 products here are whole.

The setting behind `torch.set_float32_matmul_precision` belongs to the process. The gate never changes it: it looks, and
refuses to compute canonical values where FP32 operands would be rounded.
"""

from __future__ import annotations

import functools

import torch


class LoweredPrecisionError(ValueError):
    """A setting of the process rounds the operands of FP32 products."""


def lowered_precision() -> str | None:
    """
    The name and value of a process-wide setting that rounds the operands of FP32 products on this processor, or `None`.
    """
    setting: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # made at run time
    if setting in ("ieee", "none") or not (torch.cpu._is_amx_tile_supported() or _rounds(setting)):
        return None
    return f"torch.backends.mkldnn.matmul.fp32_precision={setting!r}"


def check_precision() -> None:
    """
    Raises:
        `LoweredPrecisionError`: FP32 products would be rounded; names the setting and what to do.
    """
    lowered = lowered_precision()
    if lowered is not None:
        raise LoweredPrecisionError(
            f"`{lowered}` lets this processor round FP32 operands, so no canonical value can be computed. It is a "
            "setting of the whole process, which the margin gate leaves alone: call "
            '`torch.set_float32_matmul_precision("highest")` '
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
def _rounds(setting: str) -> bool:
    """
    Whether products under the setting that is in force, `setting`, are less than FP32's. A rounded operand moves a
    product of 768 terms by 2^-9 of a term or more; FP32 sums by 768 * 2^-24 at most.
    """
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(256, 768, generator=generator, dtype=torch.float32) for _ in range(2))
    product = torch.nn.functional.linear(rows, weight).double()
    exact = rows.double() @ weight.double().T
    return bool((product - exact).abs().max() > 1e-3)
