"""A model of a tensor core's addition for Triton's interpreter, where products are otherwise ordinary FP32.

Terms of a group and the accumulator are aligned to the largest exponent and cut, not rounded, to 24 bits and a few
more; so is the sum. Group size and extra bits of Hopper as reported in arXiv 2512.07004. A model, not a measurement: it
has what matters here, a drift towards zero that grows with the length of the chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter

# The edit that makes a copy of the package take its products from `tl.dot` in the interpreter too.
USES_DOT = (
    "pieces.py",
    "accumulator + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)",
    'tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")',
)
GROUP = 16
EXTRA_BITS = 2


def _cut(x: np.ndarray, exponent: np.ndarray, bits: int) -> np.ndarray:
    quantum = np.ldexp(1.0, exponent - bits)
    return np.trunc(x / quantum) * quantum


def product(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray) -> np.ndarray:
    """`accumulator + a @ b`, FP32 `[m, n]`, in groups of `GROUP` terms."""
    total = accumulator.astype(np.float64)
    for start in range(0, a.shape[1], GROUP):
        terms = a[:, start : start + GROUP, None].astype(np.float64) * b[None, start : start + GROUP].astype(np.float64)
        terms = np.concatenate([total[:, None], terms], axis=1)
        exponent = np.frexp(np.abs(terms).max(axis=1, keepdims=True))[1]
        total = _cut(terms, exponent, 24 + EXTRA_BITS).sum(axis=1)
        total = _cut(total, np.frexp(np.abs(total))[1], 24)
    return total.astype(np.float32)


@contextlib.contextmanager
def modelled() -> Iterator[None]:
    """Replaces what `tl.dot` does in the interpreter by `product` for the duration of the block."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return interpreter.TensorHandle(product(a.data, b.data, d.data), d.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield
