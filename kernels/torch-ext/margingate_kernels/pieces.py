"""FP32-quality products on BF16 tensor cores: exact splitting into BF16 pieces, and the order their products are added.

An FP32 number has 24 significant bits, a BF16 number 8. Cutting the bit pattern twice gives three pieces whose sum is
the number exactly, so `x * w` is a sum of products of pieces, each exact in FP32. Tensor cores truncate when they add,
so a chain of additions inside one accumulator drifts; callers start a fresh accumulator for every 32 to 128 terms and
add the results with ordinary, correctly rounded additions.

Triton's interpreter multiplies the raw bits of BF16 operands, and its FP32 products come from a BLAS that may give a
row other bits by its place in the tile. With `TENSOR_CORES=False` the same values are multiplied and summed term by
term.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upper_bits(x):
    """`x` cut (not rounded) to its upper 16 bits, a BF16 value held as FP32."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(x):
    """
    `x` rounded to BF16, nearest even, as the 16 bits of a uint32, in integers: `.to(bfloat16)` truncates in Triton's
    interpreter, and a value must have the same bits there and on a device. Infinities stay, NaN stays NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, (bits >> 16) | 0x40, rounded)


@triton.jit
def bits_to_float(bits):
    """The FP32 value of 16 BF16 bits held in a uint32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def split3(x):
    """`(hi, mid, lo)`, each a BF16 value held as FP32, `hi + mid + lo == x` exactly (short of underflow)."""
    hi = upper_bits(x)
    rest = x - hi
    mid = upper_bits(rest)
    return hi, mid, rest - mid


@triton.jit
def multiply(a, b, accumulator, TENSOR_CORES: tl.constexpr):
    """`accumulator + a @ b` of 16-bit operands, FP32 accumulation."""
    if TENSOR_CORES:
        return tl.dot(a, b, accumulator)
    else:
        return accumulator + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)


@triton.jit
def dot(a, b, accumulator, TENSOR_CORES: tl.constexpr):
    """`accumulator + a @ b` of operands that hold BF16 values, whatever they hold them in."""
    if TENSOR_CORES:
        return multiply(a.to(tl.bfloat16), b.to(tl.bfloat16), accumulator, TENSOR_CORES)
    else:
        return multiply(a, b, accumulator, TENSOR_CORES)


@triton.jit
def dot_pieces(
    a_hi, a_mid, a_lo, b_hi, b_mid, b_lo, zero, A: tl.constexpr, B: tl.constexpr, TENSOR_CORES: tl.constexpr
):
    """
    `a @ b` for operands of `A` and `B` pieces (1 to 3 each), in a fresh accumulator that starts at `zero`.

    Order: smallest products first. Products of pieces whose ranks (hi 0, mid 1, lo 2) add up to more than 2 are below
    2^-24 of the largest one and left out. Pieces that do not exist are passed as any tensor and never read.
    """
    t = zero
    if A == 3:
        t = dot(a_lo, b_hi, t, TENSOR_CORES)
    if B == 3:
        t = dot(a_hi, b_lo, t, TENSOR_CORES)
    if A >= 2 and B >= 2:
        t = dot(a_mid, b_mid, t, TENSOR_CORES)
    if A >= 2:
        t = dot(a_mid, b_hi, t, TENSOR_CORES)
    if B >= 2:
        t = dot(a_hi, b_mid, t, TENSOR_CORES)
    return dot(a_hi, b_hi, t, TENSOR_CORES)
