"""How the time of a draft step and of a verify forward grows with rows (1 to 64) and context (128 to 4,096 tokens).

OMP_NUM_THREADS=2 python -m evals growth --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from margingate_hf import MarginGateCache, MarginGateConfig
from margingate_hf.decoding.drafting import drafting_of
from margingate_hf.forward.context import DecodeContext, Segment, context_scope
from margingate_hf.verifier import Verifier, verifier_for

from ..machine import as_text
from ..models import load
from ..run import common

ROWS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
ROWS_OF_LENGTHS = 8
LENGTH_OF_ROWS = 256
DRAFTS = 8


def filled(verifier: Verifier, rows: int, length: int) -> MarginGateCache:
    """A cache that holds `length` entries a row, noise: memory that was never written would be read from one page."""
    cache = verifier.new_cache(rows, MarginGateConfig.kv_dtype)
    verifier.run(cache, [Segment(slot, 0, [1]) for slot in range(rows)])
    cache.reserve(length + DRAFTS)
    for slot in range(rows):
        entries = cache.export_entries(slot, 0, 1)
        cache.load_entries(slot, 1, [torch.randn(*c.shape[:-2], length - 1, c.shape[-1]) for c in entries])
        cache.extend(slot, 1, [1] * (length - 1), verified=True)
    return cache


def step(verifier: Verifier, cache: MarginGateCache, length: int) -> None:
    """One draft step of all rows at position `length`."""
    positions = torch.full((cache.rows,), length)
    context = DecodeContext(positions, length + 1, product=drafting_of(verifier).product, backend=verifier.backend)
    with context_scope(context):
        ids = torch.ones(cache.rows, 1, dtype=torch.long)
        verifier.twin_for()(input_ids=ids, position_ids=positions[:, None], cache=cache, use_cache=True)


def verify(verifier: Verifier, cache: MarginGateCache, length: int, count: int) -> None:
    """One verify forward over `count` tokens a row, rolled back."""
    verifier.run(cache, [Segment(slot, length, [1] * count) for slot in range(cache.rows)])
    for slot in range(cache.rows):
        cache.rollback(slot, length)


def median(work: Callable[[], None], repeats: int) -> float:
    """Seconds, the first call left out."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def times(verifier: Verifier, rows: int, length: int, repeats: int) -> dict[str, float]:
    """Seconds of a draft step and of verify forwards over one and over `DRAFTS` tokens a row."""
    cache = filled(verifier, rows, length)
    return {
        "rows": rows,
        "length": length,
        "draft": median(lambda: step(verifier, cache, length), repeats),
        "verify_one": median(lambda: verify(verifier, cache, length, 1), repeats),
        "verify_many": median(lambda: verify(verifier, cache, length, DRAFTS), repeats),
        "entry_bytes": cache.entry_bytes,
    }


def report(record: dict[str, Any]) -> str:
    """One table a dimension; time a token beside it."""
    lines = [
        "# Growth of a draft step and of a verify forward",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}. SmolLM2-135M-Instruct. Milliseconds, medians of {record['repeats']}; a verify "
        f"forward over 1 and over {DRAFTS} tokens a row.",
        "",
    ]
    for name, entries in (("rows", record["rows"]), ("length", record["lengths"])):
        fixed = f"{LENGTH_OF_ROWS} tokens of context" if name == "rows" else f"{ROWS_OF_LENGTHS} rows"
        lines += [
            f"| {name} ({fixed}) | draft step | verify 1 | verify {DRAFTS} | draft, a token "
            f"| verify {DRAFTS}, a token |"
        ]
        lines += ["|---" * 6 + "|"]
        for entry in entries:
            step_, one, many = (1000 * entry[key] for key in ("draft", "verify_one", "verify_many"))
            each, every = step_ / entry["rows"], many / (entry["rows"] * DRAFTS)
            lines.append(f"| {entry[name]} | {step_:.0f} | {one:.0f} | {many:.0f} | {each:.1f} | {every:.1f} |")
        lines.append("")
    lines += [f"An entry takes {record['rows'][0]['entry_bytes']} bytes.", "", "![growth](growth.png)", ""]
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Both tables, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    for axes, (name, entries) in zip(panels, (("rows", record["rows"]), ("length", record["lengths"])), strict=True):
        for key, label in (
            ("draft", "draft step"),
            ("verify_one", "verify forward, 1 token"),
            ("verify_many", f"verify forward, {DRAFTS} tokens"),
        ):
            axes.plot([e[name] for e in entries], [1000 * e[key] for e in entries], marker="o", label=label)
        axes.set(xscale="log", yscale="log", xlabel=name, ylabel="ms")
        axes.set_xticks([e[name] for e in entries], [str(e[name]) for e in entries])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, repeats=5)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times by rows and by length, and their plot."""
    model, _ = load(options.model)
    verifier = verifier_for(model, MarginGateConfig())
    with torch.no_grad():
        rows = [times(verifier, count, LENGTH_OF_ROWS, options.repeats) for count in tqdm(ROWS, desc="rows")]
        lengths = [times(verifier, ROWS_OF_LENGTHS, length, options.repeats) for length in tqdm(LENGTHS, desc="length")]
    record = {"repeats": options.repeats, "rows": rows, "lengths": lengths}
    options.out.mkdir(parents=True, exist_ok=True)
    plot(record, options.out / "growth.png")
    return record
