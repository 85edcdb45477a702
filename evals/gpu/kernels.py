"""The kernels on a device: bits, errors and times. Part of `evals gpu`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import margingate_kernels as kernels

from ..faulty_kernels import with_fault

Row = dict[str, Any]


@dataclass(frozen=True)
class Shapes:
    """
    What to run on.

    Attributes:
        linear: `(name, out, in)` of weights; `rows`: activations to check bits with; `timed_rows`: to time.
        heads, kv_heads, dim: of attention; `contexts`: keys of the rows; `queries`: of a row.
        vocabulary: of the top-2 and softmax rows.
    """

    linear: tuple[tuple[str, int, int], ...]
    rows: tuple[int, ...]
    timed_rows: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    contexts: tuple[int, ...]
    queries: int
    vocabulary: int


FULL = Shapes(
    linear=(
        ("llama-8b qkv", 6144, 4096),
        ("llama-8b o", 4096, 4096),
        ("llama-8b gate+up", 28672, 4096),
        ("llama-8b down", 4096, 14336),
        ("llama-8b head", 128256, 4096),
        ("qwen-14b qkv", 7168, 5120),
        ("qwen-14b gate+up", 27648, 5120),
        ("qwen-14b down", 5120, 13824),
    ),
    rows=(1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 257),
    timed_rows=(1, 8, 16, 32, 64),
    heads=32,
    kv_heads=8,
    dim=128,
    contexts=(4000, 2111, 1500, 257, 256, 255, 40),
    queries=32,
    vocabulary=128256,
)
TINY = Shapes(
    linear=(("tiny", 40, 584),),
    rows=(1, 17),
    timed_rows=(1, 17),
    heads=4,
    kv_heads=2,
    dim=64,
    contexts=(261, 37),
    queries=3,
    vocabulary=1500,
)


class Clock:
    """Times calls on a device; on a CPU (the dry run) calls once and gives NaN."""

    def __init__(self, device: torch.device):
        self.device = device

    def microseconds(self, function: Callable[[], object]) -> float:
        """Median time of a call, caches cold."""
        if self.device.type != "cuda":
            function()
            return math.nan
        from triton.testing import do_bench

        return float(do_bench(function, warmup=10, rep=50, return_mode="median")) * 1e3


def ceilings(shapes: Shapes, device: torch.device) -> list[Row]:
    """What the device reaches: bytes a second of a copy, BF16 products a second."""
    clock = Clock(device)
    size = (1 << 30) if device.type == "cuda" else 1 << 10
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copied = clock.microseconds(lambda: target.copy_(source))
    side = 8192 if device.type == "cuda" else 16
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    product = clock.microseconds(lambda: a @ a)
    return [
        {"what": "copy, TB/s", "value": 2 * size / copied / 1e6},
        {"what": "BF16 matmul, TFLOP/s", "value": 2 * side**3 / product / 1e6},
    ]


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def linear_bits(shapes: Shapes, device: torch.device) -> list[Row]:
    """Are a tensor-core product's columns independent of their neighbours? Bits over rows, order, NaN, repeats."""
    found = []
    largest = max(shapes.rows)
    for name, outputs, inputs in shapes.linear:
        weight = (torch.randn(outputs, inputs, device=device) * 0.02).bfloat16()
        x = torch.randn(largest, inputs, device=device) * torch.randn(inputs, device=device).exp()
        for precision in ("float32", "bfloat16"):
            whole = kernels.linear(x, weight, precision=precision)
            counts = [n for n in shapes.rows if not torch.equal(_linear(x[:n], weight, precision), whole[:n])]
            order = torch.randperm(largest, device=device)
            poisoned = x.clone()
            poisoned[1:] = math.nan
            found.append(
                {
                    "weight": f"{name} {outputs}x{inputs}",
                    "precision": precision,
                    "row counts that differ": counts or "none",
                    "any order": torch.equal(_linear(x[order], weight, precision), whole[order]),
                    "NaN neighbours": torch.equal(_linear(poisoned, weight, precision)[0], whole[0]),
                    "repeats": all(torch.equal(_linear(x, weight, precision), whole) for _ in range(5)),
                }
            )
    return found


def _linear(x: torch.Tensor, weight: torch.Tensor, precision: str = "float32") -> torch.Tensor:
    return kernels.linear(x.contiguous(), weight, precision=precision)


def linear_errors(shapes: Shapes, device: torch.device) -> list[Row]:
    """Against float64: ours, a chained accumulator, the library's FP32, BF16 activations; bits of wider shapes."""
    variants = {
        "chained": ("matmul.py", "sums[tile] + _product(w, x, zero,", "_product(w, x, sums[tile],"),
        "32 columns": ("matmul.py", "TILE = tl.constexpr(16)", "TILE = tl.constexpr(32)"),
        "64 columns": ("matmul.py", "TILE = tl.constexpr(16)", "TILE = tl.constexpr(64)"),
    }
    found = []
    with tempfile.TemporaryDirectory() as folder:
        changed = {name: with_fault(Path(folder), edit) for name, edit in variants.items()}
        for name, outputs, inputs in shapes.linear:
            if outputs > 60_000:
                continue
            weight = (torch.randn(outputs, inputs, device=device) * 0.02).bfloat16()
            x = torch.randn(33, inputs, device=device) * torch.randn(inputs, device=device).exp()
            exact = x.double() @ weight.double().t()
            ours = kernels.linear(x, weight)
            row: Row = {"weight": f"{name} {outputs}x{inputs}", "ours": _relative(ours, exact)}
            row["library FP32"] = _relative(x @ weight.float().t(), exact)
            row["BF16 activations"] = _relative((x.bfloat16() @ weight.t()).float(), exact)
            for label, module in changed.items():
                try:
                    other = module.linear(x, weight)
                except Exception as error:
                    row[label] = f"{type(error).__name__}"
                    continue
                row[label] = _relative(other, exact) if label == "chained" else f"same bits: {torch.equal(other, ours)}"
            found.append(row)
    return found


def linear_times(shapes: Shapes, device: torch.device) -> list[Row]:
    """Times against the weight's read at the measured copy bandwidth, weights cold; the library's BF16 beside."""
    clock = Clock(device)
    bandwidth = ceilings(shapes, device)[0]["value"]
    found = []
    for name, outputs, inputs in shapes.linear:
        weight = (torch.randn(outputs, inputs, device=device) * 0.02).bfloat16()
        floor = 2 * outputs * inputs / bandwidth / 1e6
        for rows in shapes.timed_rows:
            x = torch.randn(rows, inputs, device=device)
            half = x.bfloat16()
            ours = clock.microseconds(lambda x=x, weight=weight: kernels.linear(x, weight))
            one = clock.microseconds(lambda x=x, weight=weight: kernels.linear(x, weight, precision="bfloat16"))
            stock = clock.microseconds(lambda half=half, weight=weight: F.linear(half, weight))
            found.append(
                {
                    "weight": f"{name} {outputs}x{inputs}",
                    "rows": rows,
                    "ours, us": ours,
                    "share of copy bandwidth": floor / ours,
                    "one piece, us": one,
                    "stock BF16, us": stock,
                }
            )
    return found


class Ragged:
    """Rows of keys and values with NaN beyond their ends, and queries for their last positions."""

    def __init__(self, shapes: Shapes, device: torch.device):
        self.shapes, self.device = shapes, device
        make = lambda *size: torch.randn(*size, device=device)  # noqa: E731
        self.keys = [make(shapes.kv_heads, n, shapes.dim) for n in shapes.contexts]
        self.values = [make(shapes.kv_heads, n, shapes.dim) for n in shapes.contexts]
        self.queries = [make(n, shapes.heads, shapes.dim) * 2 for n in shapes.contexts]

    def store(self, parts: list[torch.Tensor], rows: list[int], capacity: int) -> torch.Tensor:
        """Two BF16 planes `[2, rows, kv_heads, capacity, dim]`."""
        size = (2, len(rows), self.shapes.kv_heads, capacity, self.shapes.dim)
        out = torch.full(size, math.nan, device=self.device, dtype=torch.bfloat16)
        for place, row in enumerate(rows):
            high = parts[row].bfloat16()
            out[0, place, :, : high.shape[1]] = high
            out[1, place, :, : high.shape[1]] = (parts[row] - high.float()).bfloat16()
        return out

    def run(self, rows: list[int], offset: int, count: int, capacity: int, **options: Any) -> torch.Tensor:
        """Queries `offset ... offset + count` of each row's window, `[rows, count, heads, dim]`."""
        return self.prepared(rows, offset, count, capacity, **options)().unflatten(0, (len(rows), count))

    def prepared(
        self, rows: list[int], offset: int, count: int, capacity: int, **options: Any
    ) -> Callable[[], torch.Tensor]:
        """The same as a call whose inputs are there already, for timing."""
        together = 16 // kernels.group_tile(self.shapes.heads // self.shapes.kv_heads)
        starts = [self.shapes.contexts[row] - self.shapes.queries + offset for row in rows]
        tiles = [
            (place * count + i, min(together, count - i))
            for place in range(len(rows))
            for i in range(0, count, together)
        ]
        positions = torch.cat([torch.arange(start, start + count, device=self.device) for start in starts])
        query = torch.cat([self.queries[row][start : start + count] for row, start in zip(rows, starts, strict=True)])
        keys, values = self.store(self.keys, rows, capacity), self.store(self.values, rows, capacity)
        if options.get("precision") == "bfloat16":  # the fast path reads the first plane alone
            keys, values = keys[:1], values[:1]
        tiled = torch.tensor(tiles, dtype=torch.int32, device=self.device)
        slots = torch.arange(len(rows), device=self.device).repeat_interleave(count)
        length, scaling = max(starts) + count, self.shapes.dim**-0.5
        return lambda: kernels.ragged_attention(
            query, keys, values, tiled, slots, positions, length, scaling, **options
        )


def attention_bits(shapes: Shapes, device: torch.device) -> list[Row]:
    """A query's bits over windows, company and capacity; error against float64."""
    ragged = Ragged(shapes, device)
    everyone = list(range(len(shapes.contexts)))
    capacity = max(shapes.contexts) + 64
    found = []
    for options in ({}, {"sliding_window": 200}, {"softcap": 20.0}, {"precision": "bfloat16"}):
        whole = ragged.run(everyone, 0, shapes.queries, capacity, **options)
        cuts = {
            size: torch.equal(
                torch.cat(
                    [
                        ragged.run(everyone, at, min(size, shapes.queries - at), capacity, **options)
                        for at in range(0, shapes.queries, size)
                    ],
                    dim=1,
                ),
                whole,
            )
            for size in ((1, 3) if shapes.queries < 8 else (1, 3, 5, 8, 16))
        }
        alone = [
            torch.equal(ragged.run([r], 0, shapes.queries, shapes.contexts[r], **options)[0], whole[r])
            for r in everyone
        ]
        row: Row = {"options": str(options) if options else "none", "finite": bool(torch.isfinite(whole).all())}
        row |= {"windows": all(cuts.values()) or f"differ: {cuts}", "alone": all(alone)}
        row["more capacity"] = torch.equal(ragged.run(everyone, 0, shapes.queries, capacity + 512, **options), whole)
        if not options:
            row["error"] = max(_attention_error(ragged, whole, r) for r in everyone)
        found.append(row)
    return found


def _attention_error(ragged: Ragged, whole: torch.Tensor, row: int) -> float:
    length, shapes = ragged.shapes.contexts[row], ragged.shapes
    group = shapes.heads // shapes.kv_heads
    k, v = (
        ragged.store(parts, [row], length).double().sum(0)[0].repeat_interleave(group, 0)
        for parts in (ragged.keys, ragged.values)
    )
    query = ragged.queries[row][length - 1].double()
    weights = (torch.einsum("hd,hkd->hk", query, k) * shapes.dim**-0.5).softmax(-1)
    return _relative(whole[row, -1], torch.einsum("hk,hkd->hd", weights, v))


def other_bits(shapes: Shapes, device: torch.device) -> list[Row]:
    """Row reductions, top-2 and column repair against torch, and their rows alone against all together."""
    x = torch.randn(65, shapes.vocabulary, device=device) * 4
    functions = {
        "row_sum": (kernels.row_sum, lambda x: x.sum(-1, keepdim=True)),
        "softmax": (kernels.softmax, lambda x: x.softmax(-1)),
        "log_softmax": (kernels.log_softmax, lambda x: x.log_softmax(-1)),
        "rms_norm": (lambda x: kernels.rms_norm(x)[0], lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
        "layer_norm": (kernels.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:])),
    }
    found = []
    for name, (ours, exact) in functions.items():
        whole = ours(x)
        same = all(torch.equal(ours(x[:n]), whole[:n]) for n in (1, 2, 16, 33))
        found.append({"kernel": name, "rows alone": same, "error": _relative(whole, exact(x.double()))})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = x.to(dtype)
        best = kernels.top2(logits)
        values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
        same = torch.equal(best.tokens, ids[:, 0]) and torch.equal(best.margins, values[:, 0] - values[:, 1])
        found.append({"kernel": f"top2 {dtype}", "rows alone": same, "error": 0.0 if same else math.nan})
    states = torch.randn(5, shapes.kv_heads, shapes.dim, device=device)
    slots, positions = (torch.tensor(t, device=device) for t in ([0, 1, 2, 2, 0], [3, 0, 39, 5, 4]))
    for dtype in (torch.bfloat16, torch.float16):
        planes = torch.zeros(2, 3, shapes.kv_heads, 40, shapes.dim, device=device, dtype=dtype)
        expected = planes.clone()
        kernels.repair_columns(states, planes[0], planes[1], slots, positions)
        expected[0][slots, :, positions] = states.to(dtype)
        expected[1][slots, :, positions] = (states - states.to(dtype).float()).to(dtype)
        same = torch.equal(planes, expected)
        found.append({"kernel": f"repair_columns {dtype}", "rows alone": same, "error": 0.0 if same else math.nan})
    return found


def other_times(shapes: Shapes, device: torch.device) -> list[Row]:
    """Attention, row kernels, top-2 and column repair: time, and its share of reading and writing what must be."""
    clock = Clock(device)
    bandwidth = ceilings(shapes, device)[0]["value"]
    found: list[Row] = []

    def add(name: str, nbytes: int, work: Callable[[], object]) -> None:
        microseconds = clock.microseconds(work)
        share = nbytes / bandwidth / 1e6 / microseconds
        found.append({"kernel": name, "us": microseconds, "share of copy bandwidth": share})

    ragged = Ragged(shapes, device)
    rows = [max(range(len(shapes.contexts)), key=lambda r: shapes.contexts[r])]
    context = shapes.contexts[rows[0]]
    for batch, queries in ((1, 1), (1, 8), (8, 1), (8, 8)):
        count = min(queries, shapes.queries)
        planes = batch * context * shapes.kv_heads * shapes.dim * 2 * 2  # keys and values, BF16
        for precision, read in (("float32", 2 * planes), ("bfloat16", planes)):
            work = ragged.prepared(rows * batch, 0, count, context, precision=precision)
            add(f"attention, {precision}, {batch} rows of {context}, {count} queries", read, work)
    x = torch.randn(8, shapes.vocabulary, device=device)
    size = x.numel() * 4
    add(f"top2, 8 rows of {shapes.vocabulary}", size, lambda: kernels.top2(x))
    add(f"torch.topk, 8 rows of {shapes.vocabulary}", size, lambda: x.topk(2))
    add(f"softmax, 8 rows of {shapes.vocabulary}", 2 * size, lambda: kernels.softmax(x))
    add(f"log_softmax, 8 rows of {shapes.vocabulary}", 2 * size, lambda: kernels.log_softmax(x))
    hidden = torch.randn(64, 32 * shapes.dim, device=device)
    add(f"rms_norm, 64 rows of {hidden.shape[1]}", 2 * hidden.numel() * 4, lambda: kernels.rms_norm(hidden))
    add(f"layer_norm, 64 rows of {hidden.shape[1]}", 2 * hidden.numel() * 4, lambda: kernels.layer_norm(hidden))
    states = torch.randn(64, shapes.kv_heads, shapes.dim, device=device)
    cache = torch.zeros(2, 8, shapes.kv_heads, 256, shapes.dim, device=device, dtype=torch.bfloat16)
    places = torch.arange(64, device=device)
    add(
        "repair_columns, 64 tokens, two planes",
        states.numel() * 8,
        lambda: kernels.repair_columns(states, cache[0], cache[1], places % 8, places),
    )
    return found
