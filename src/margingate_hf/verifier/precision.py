"""Pins the precision of float32 products for the duration of a block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Torch's process-wide float32 product precision, put back on every way out."""
    before = torch.get_float32_matmul_precision()
    if before == name:
        yield
        return
    try:
        torch.set_float32_matmul_precision(name)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def full_precision() -> contextlib.AbstractContextManager[None]:
    """IEEE precision; `"medium"` would let oneDNN round float32 operands to BF16, and `"high"` a GPU to TF32."""
    return matmul_precision("highest")


def short_products() -> contextlib.AbstractContextManager[None]:
    """Lets oneDNN multiply operands that hold BF16 values as BF16, where the processor can; exact in the operands."""
    return matmul_precision("medium") if multiplies_bfloat16() else contextlib.nullcontext()


@functools.cache
def multiplies_bfloat16() -> bool:
    """
    Whether this processor has BF16 products (AVX512-BF16 or AMX) and oneDNN takes BF16 at all: `ONEDNN_MAX_CPU_ISA` can
    forbid it.
    """
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    takes = getattr(getattr(torch.ops, "mkldnn", None), "_is_mkldnn_bf16_supported", None)
    return bool(has and takes is not None and takes())
