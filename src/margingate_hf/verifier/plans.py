"""Linear plans for CPUs: ways to multiply FP32 rows by a weight so that a row's bits do not depend on the other rows.

A plan fixes how rows are grouped into matrix products. Which groupings keep their bits is a property of the BLAS, the
processor and the weight's shape, so no plan is trusted: `probe_linear` compares every product size that the plan can
issue, bit for bit, before the plan is used.

`precision="bfloat16"` rounds the operands and multiplies them in FP32, where they are exact. oneDNN could multiply them
in 16 bits, but only by a setting of the whole process, and with AMX its sums then depend on the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

ALIGNMENT = 64  # bytes; torch's own CPU allocations
COLUMN_BLOCK = 768  # terms that one oneDNN product may add up
OUTPUT_BLOCK = 8192  # rows of a weight in one oneDNN product: bounds what an up-cast head takes while it is made


class LinearPlan(Protocol):
    """
    Attributes:
        name: part of the fingerprint.
        sizes: every row count of a matrix product that `linear` may issue.
        copies_weights: whether `pack` wants float32 and makes something new of it; otherwise it takes the weight's own
            dtype and keeps no copy.
        sums_planes: whether it is for models that need the K/V cache as one tensor of values; see [`Backend.store`].
    """

    @property
    def name(self) -> str: ...

    @property
    def copies_weights(self) -> bool: ...

    @property
    def sums_planes(self) -> bool: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def available(self) -> bool:
        """Whether this build of torch has what the plan needs."""

    def pack(self, weight: torch.Tensor) -> Any:
        """Prepares a weight `[out, in]`, any floating dtype, for `linear`; in float32 if the plan copies weights."""

    def pack_once(self, weight: torch.Tensor) -> Any:
        """As `pack`, for one call of `linear`; may hold less at once."""

    def linear(self, rows: torch.Tensor, packed: Any, precision: str = "float32") -> torch.Tensor:
        """
        `rows @ weight.T`: float32 `[n, in]` to float32 `[n, out]`, any `n >= 1`; with `precision="bfloat16"` of rows
        rounded to BF16.
        """


def _operand(rows: torch.Tensor, count: int) -> torch.Tensor:
    """
    `rows` zero-padded to `count` rows, aligned: a row's alignment would otherwise be its place in the batch.
    """
    missing = count - rows.shape[0]
    return F.pad(rows, (0, 0, 0, missing)) if missing else _aligned(rows)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """
    `x` itself, or a copy at an address a fresh tensor has; a BLAS may treat the head of an unaligned buffer apart.
    """
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def reorder(weight: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """A weight `[out, in]`, float32 or BF16, in oneDNN's own layout; `rows`: how many a product is expected to have."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed


def reordered_product(rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """`rows @ weight.T`, `[n, in]` to `[n, out]`, with what [`reorder`] made of a weight of the same dtype."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    return out


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    """`rows` rounded to BF16, in float32."""
    return rows.bfloat16().float()


def _width(terms: int) -> int:
    """Of equal column blocks of at most `COLUMN_BLOCK`."""
    return -(-terms // -(-terms // COLUMN_BLOCK))


def _blocks(weight: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """For each block of rows of a weight `[out, in]` its column blocks, up-cast and reordered."""
    for rows in weight.split(OUTPUT_BLOCK):
        yield [reorder(part.float(), 16) for part in rows.split(_width(weight.shape[1]), dim=1)]


def _sum(parts: list[torch.Tensor], columns: list[torch.Tensor]) -> torch.Tensor:
    """The products of column blocks, added in order; `[n, out]`."""
    out = reordered_product(parts[0], columns[0])
    for part, block in zip(parts[1:], columns[1:], strict=True):
        out.add_(reordered_product(part, block))
    return out


class PrepackedPlan:
    """
    oneDNN's FP32 inner product on a weight it has reordered once.

    Rows are padded up to the next of a few sizes: fewer kernels to generate, and few enough that the probe can compare
    all of them. A single row is padded to 2, since oneDNN switches to a matrix-vector kernel with other bits at 1. The
    inner dimension is cut into equal blocks of at most `COLUMN_BLOCK`, whose products are added in order: oneDNN
    accumulates a whole row in one register, whose rounding grows with the terms. Blocks of 768 keep SmolLM2's
    logits within 1.7e-6 of float64, below what two planes keep of a K/V entry. Large weights are cut into blocks of
    rows too, which add nothing up. The operators are private to torch (its inductor uses them), hence `available` and
    the plans behind this one.
    """

    name = f"onednn-prepacked-k{COLUMN_BLOCK}"
    sizes = (2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    copies_weights = True
    sums_planes = False

    def available(self) -> bool:
        """Whether this torch was built with oneDNN and has its packing operators. For CPU tensors only."""
        ops = getattr(torch.ops, "mkldnn", None)
        return (
            torch.backends.mkldnn.is_available()
            and hasattr(ops, "_reorder_linear_weight")
            and hasattr(ops, "_linear_pointwise")
        )

    def pack(self, weight: torch.Tensor) -> Any:
        """
        Blocks of a weight `[out, in]`, each up-cast and reordered once: a block at a time, so that the largest matrix
        is not in memory twice in float32.
        """
        return weight.shape, list(_blocks(weight))

    def pack_once(self, weight: torch.Tensor) -> Any:
        """As `pack`, a block of rows at a time while `linear` multiplies by them."""
        return weight.shape, _blocks(weight)

    def linear(self, rows: torch.Tensor, packed: Any, precision: str = "float32") -> torch.Tensor:
        """
        `rows @ weight.T`, float32 `[n, in]` to `[n, out]`, at most 128 rows a product.
        """
        rows = _rounded(rows) if precision == "bfloat16" else rows
        (outputs, terms), blocks = packed
        largest = self.sizes[-1]
        operands = [self._columns(part, _width(terms)) for part in rows.split(largest)]
        if len(operands) == 1 and outputs <= OUTPUT_BLOCK:
            return _sum(operands[0], next(iter(blocks)))[: rows.shape[0]]
        out = rows.new_empty(rows.shape[0], outputs)
        for columns, part in zip(blocks, out.split(OUTPUT_BLOCK, dim=1), strict=True):
            for operand, target in zip(operands, part.split(largest), strict=True):
                target.copy_(_sum(operand, columns)[: target.shape[0]])
        return out

    def _columns(self, rows: torch.Tensor, width: int) -> list[torch.Tensor]:
        """Up to 128 rows `[n, in]`, padded to a size that was probed, as column blocks."""
        padded = _operand(rows, next(size for size in self.sizes if size >= rows.shape[0]))
        return [part.contiguous() for part in padded.split(width, dim=1)]


class TilePlan:
    """
    `F.linear` on tiles of one fixed row count, the last tile zero-padded: the BLAS always sees the same shape.

    Args:
        rows (`int`): rows of a tile.
    """

    copies_weights = True
    sums_planes = False

    def __init__(self, rows: int):
        self.rows = rows
        self.name = f"tile-{rows}"
        self.sizes = (rows,)

    def available(self) -> bool:
        """Always."""
        return True

    def pack(self, weight: torch.Tensor) -> Any:
        """The weight `[out, in]` in float32, contiguous and aligned."""
        return _aligned(weight.float().contiguous())

    pack_once = pack

    def linear(self, rows: torch.Tensor, packed: Any, precision: str = "float32") -> torch.Tensor:
        """`rows @ weight.T`, float32 `[n, in]` to `[n, out]`, tile by tile."""
        rows = _rounded(rows) if precision == "bfloat16" else rows
        parts = [F.linear(_operand(part, self.rows), packed)[: part.shape[0]] for part in rows.split(self.rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


# In order of speed. One row at a time is last: slow, and independent of other rows by construction.
CPU_PLANS: tuple[LinearPlan, ...] = (PrepackedPlan(), TilePlan(16), TilePlan(1))


# Rounded operands are exact in FP32, so two ways to add up their products differ by FP32 rounding alone: 2^-24 times a
# few roots of the number of terms.
ROUNDED_TOLERANCE = 1e-5


def probe_linear(plan: LinearPlan, weight: torch.Tensor, precision: str = "float32") -> str | None:
    """
    Compares bits of the same row in every product the plan can issue, at both ends of it, among other neighbours.

    Args:
        plan ([`LinearPlan`]): the plan.
        weight (`torch.Tensor` of shape `[out, in]`): a weight of a dtype the plan takes; only its shape matters. With
            `precision="bfloat16"` BF16 values.
        precision (`str`, *optional*, defaults to `"float32"`): of the products; `"bfloat16"` is also compared with
            the `"float32"` product of rounded rows.

    Returns:
        `None` if all bits agree, otherwise one sentence that says where they do not.
    """
    packed = plan.pack(weight)
    product = functools.partial(plan.linear, packed=packed, precision=precision)
    generator = torch.Generator().manual_seed(0)
    largest = max(plan.sizes)
    rows = torch.randn(largest, weight.shape[1], generator=generator, dtype=torch.float32).to(weight.device)
    whole = product(rows)
    shape = f"{weight.shape[0]}x{weight.shape[1]}"
    for count in sorted({1, *plan.sizes, *(size - 1 for size in plan.sizes if size > 2)}):
        if not torch.equal(product(rows[:count]), whole[:count]):
            return f"weight {shape}: a row's bits change between {count} and {largest} rows"
        if not torch.equal(product(rows[:count].flip(0)), whole[:count].flip(0)):
            return f"weight {shape}: a row's bits depend on its place among {count} rows"
    poisoned = rows[: plan.sizes[0]].clone()
    poisoned[1:] = float("nan")
    if not torch.equal(product(poisoned)[:1], whole[:1]):
        return f"weight {shape}: a row's bits depend on NaN neighbours"
    if not torch.isfinite(whole).all():
        return f"weight {shape}: a product of finite numbers is not finite"
    if precision == "bfloat16":
        wide = plan.linear(_rounded(rows), packed)
        error = float((whole - wide).norm() / wide.norm())
        if not error <= ROUNDED_TOLERANCE:
            return f"weight {shape}: a product of rounded rows is {error:.1e} (relative) away from FP32's"
    return None
