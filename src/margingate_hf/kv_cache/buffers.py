"""Zeroed tensors that take memory only where they are written, and give it back at once."""

from __future__ import annotations

import math
import mmap

import torch


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """
    A tensor of zeros in the host's memory.

    Its pages come from the operating system, not from the C library's heap: what is never written is never
    resident, and a cache that has outgrown its buffer leaves no hole behind. (The heap keeps what it once had: growing
    a cache of 30 layers layer by layer left up to its whole former size unused.)

    Args:
        shape (`tuple[int, ...]`): of the tensor.
        dtype (`torch.dtype`), device (`torch.device`): likewise.
    """
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = count * dtype.itemsize
    private = getattr(mmap, "MAP_PRIVATE", None)
    # A mapping shared with child processes would not be copied when one of them writes.
    pages = mmap.mmap(-1, nbytes) if private is None else mmap.mmap(-1, nbytes, flags=private | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
