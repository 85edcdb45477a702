"""Pins the precision of float32 products for the duration of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """IEEE precision; `"medium"` would let oneDNN round float32 operands to BF16, and `"high"` a GPU to TF32."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    try:
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
