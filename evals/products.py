"""Ways to multiply a few FP32 rows by a BF16 weight on this processor: time, and error against float64.

    OMP_NUM_THREADS=2 python -m evals.products --repeats 9

Which of them the verifier and the fast step take is written in `verifier/plans.py` and `verifier/draft_products.py`;
this is what the choice stands on. Ways take turns within a round, over thirty weights of a shape, so that no weight
is left in a cache.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from margingate_hf.verifier.plans import PrepackedPlan, reorder, reordered_product
from margingate_hf.verifier.precision import multiplies_bfloat16

from .machine import as_text, describe
from .reports import write

SHAPES = ((576, 576), (1536, 576), (576, 1536))  # of SmolLM2-135M: attention, up and gate, down
ROWS = (2, 8, 32, 128)
WEIGHTS = 30
Way = Callable[[torch.Tensor, Any], torch.Tensor]


def three_terms(rows: torch.Tensor) -> torch.Tensor:
    """`rows` `[n, in]` as three BF16 values whose sum it is, one below the other: float32 `[3 n, in]`."""
    high = rows.bfloat16().float()
    middle = (rows - high).bfloat16().float()
    return torch.cat([high, middle, rows - high - middle])


@contextlib.contextmanager
def rounding_allowed() -> Iterator[None]:
    """Lets oneDNN round FP32 operands, for the whole process: a measurement may, the package never does."""
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def _by_terms(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Three products whose operands are BF16 values, which oneDNN may then multiply as such; smallest first."""
    with rounding_allowed():
        high, middle, low = reordered_product(three_terms(rows), weight).chunk(3)
    return low + middle + high


def _packed_for_terms(weight: torch.Tensor) -> torch.Tensor:
    with rounding_allowed():
        return reorder(weight.float())


def ways() -> dict[str, tuple[Callable[[torch.Tensor], Any], Way]]:
    """By name: how a BF16 weight `[out, in]` is prepared, and the product of float32 rows with it."""
    plan = PrepackedPlan()
    found: dict[str, tuple[Callable[[torch.Tensor], Any], Way]] = {
        "FP32, `F.linear`": (torch.Tensor.float, F.linear),
        "FP32, packed, whole": (lambda weight: reorder(weight.float()), reordered_product),
        "FP32, packed, the verifier's": (plan.pack, plan.linear),
        "BF16, `F.linear`": (lambda weight: weight, lambda rows, weight: F.linear(rows.bfloat16(), weight)),
    }
    if multiplies_bfloat16():
        found["BF16, packed, the fast step's"] = (
            reorder,
            lambda rows, weight: reordered_product(rows.bfloat16(), weight),
        )
        found["three BF16 terms"] = (_packed_for_terms, _by_terms)
    return found


def measure(shape: tuple[int, int], count: int, repeats: int) -> list[dict[str, Any]]:
    """One entry a way: median milliseconds of a product, and its relative error against float64."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, shape[1], generator=generator)
    weights = [torch.randn(shape, generator=generator).bfloat16() for _ in range(WEIGHTS)]
    exact = rows.double() @ weights[0].double().T
    prepared = {name: ([pack(weight) for weight in weights], work) for name, (pack, work) in ways().items()}
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(repeats + 1):
        for name, (operands, work) in prepared.items():
            began = time.perf_counter()
            for operand in operands:
                work(rows, operand)
            seconds[name].append((time.perf_counter() - began) / WEIGHTS)
    return [
        {
            "way": name,
            "shape": list(shape),
            "rows": count,
            "milliseconds": 1000 * statistics.median(seconds[name][1:]),
            "error": float((work(rows, operands[0]).double() - exact).norm() / exact.norm()),
        }
        for name, (operands, work) in prepared.items()
    ]


def as_markdown(record: dict[str, Any]) -> str:
    """A row for each way; milliseconds by shape and rows, the error at the most rows of the last shape."""
    entries = record["entries"]
    columns = [(shape, rows) for shape in map(list, SHAPES) for rows in ROWS]
    lines = [
        "# Products of a few rows",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}. Milliseconds, medians of {record['repeats']} rounds; the error is relative, "
        f"against float64, over {SHAPES[-1][1]} terms.",
        "",
        "| way | " + " | ".join(f"{o}x{i}, {rows}" for (o, i), rows in columns) + " | error |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for way in dict.fromkeys(entry["way"] for entry in entries):
        mine = {(tuple(entry["shape"]), entry["rows"]): entry for entry in entries if entry["way"] == way}
        cells = [f"{mine[tuple(shape), rows]['milliseconds']:.3f}" for shape, rows in columns]
        lines.append(f"| {way} | " + " | ".join(cells) + f" | {mine[SHAPES[-1], ROWS[-1]]['error']:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    options = parser.parse_args()
    cases = [(shape, rows) for shape in SHAPES for rows in ROWS]
    record = {
        "command": shlex.join(["python", "-m", "evals.products", *sys.argv[1:]]),
        "machine": describe(),
        "repeats": options.repeats,
        "entries": [entry for case in tqdm(cases) for entry in measure(*case, options.repeats)],
    }
    write(options.out, "products", record, as_markdown(record))


if __name__ == "__main__":
    main()
