"""How the time of a fast step and of a verifier pass grows with rows (1 to 64) and with text (128 to 4,096 tokens).

OMP_NUM_THREADS=2 python -m evals.growth --repeats 5
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
from margingate_hf.cli.loading import load
from margingate_hf.decoding.drafting import drafting_of
from margingate_hf.forward.context import DecodeContext, Segment, context_scope
from margingate_hf.verifier import Verifier, verifier_for

from .machine import as_text, describe
from .reports import write

ROWS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
ROWS_OF_LENGTHS = 8
LENGTH_OF_ROWS = 256
WINDOW = 8


def filled(verifier: Verifier, rows: int, length: int) -> MarginGateCache:
    """A cache that holds `length` columns a row, noise: memory that was never written would be read from one page."""
    cache = verifier.new_cache(rows, MarginGateConfig.kv_dtype)
    verifier.run(cache, [Segment(slot, 0, [1]) for slot in range(rows)])
    cache.reserve(length + WINDOW)
    for slot in range(rows):
        columns = cache.export_entries(slot, 0, 1)
        cache.load_entries(slot, 1, [torch.randn(*c.shape[:-2], length - 1, c.shape[-1]) for c in columns])
        cache.extend(slot, 1, [1] * (length - 1), verified=True)
    return cache


def step(verifier: Verifier, cache: MarginGateCache, length: int) -> None:
    """One fast step of all rows at position `length`."""
    positions = torch.full((cache.rows,), length)
    context = DecodeContext(positions, length + 1, product=drafting_of(verifier).product, backend=verifier.backend)
    with context_scope(context):
        ids = torch.ones(cache.rows, 1, dtype=torch.long)
        verifier.twin_for()(input_ids=ids, position_ids=positions[:, None], cache=cache, use_cache=True)


def one_pass(verifier: Verifier, cache: MarginGateCache, length: int, window: int) -> None:
    """One pass over `window` tokens a row, rolled back."""
    verifier.run(cache, [Segment(slot, length, [1] * window) for slot in range(cache.rows)])
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


def measure(verifier: Verifier, rows: int, length: int, repeats: int) -> dict[str, float]:
    """Seconds of a fast step and of passes over one and over `WINDOW` tokens a row."""
    cache = filled(verifier, rows, length)
    return {
        "rows": rows,
        "length": length,
        "step": median(lambda: step(verifier, cache, length), repeats),
        "pass_1": median(lambda: one_pass(verifier, cache, length, 1), repeats),
        "pass_window": median(lambda: one_pass(verifier, cache, length, WINDOW), repeats),
        "entry_bytes": cache.entry_bytes,
    }


def as_markdown(record: dict[str, Any]) -> str:
    """One table a dimension; time a token beside it."""
    lines = [
        "# Growth of a step and of a pass",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}. SmolLM2-135M-Instruct. Milliseconds, medians of {record['repeats']}; a pass "
        f"over 1 and over {WINDOW} tokens a row.",
        "",
    ]
    for name, entries in (("rows", record["rows"]), ("length", record["lengths"])):
        fixed = f"texts of {LENGTH_OF_ROWS} tokens" if name == "rows" else f"{ROWS_OF_LENGTHS} rows"
        lines += [
            f"| {name} ({fixed}) | BF16 step | pass, 1 | pass, {WINDOW} | step a token | pass, {WINDOW}, a token |"
        ]
        lines += ["|---" * 6 + "|"]
        for entry in entries:
            step_, one, window = (1000 * entry[key] for key in ("step", "pass_1", "pass_window"))
            each, every = step_ / entry["rows"], window / (entry["rows"] * WINDOW)
            lines.append(f"| {entry[name]} | {step_:.0f} | {one:.0f} | {window:.0f} | {each:.1f} | {every:.1f} |")
        lines.append("")
    lines += [f"A column takes {record['rows'][0]['entry_bytes']} bytes.", "", "![growth](growth.png)", ""]
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
            ("step", "BF16 step"),
            ("pass_1", "pass, 1 token"),
            ("pass_window", f"pass, {WINDOW} tokens"),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="local folder or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    options = parser.parse_args()
    model, _ = load(options.model, progress=True)
    verifier = verifier_for(model, MarginGateConfig())
    with torch.no_grad():
        rows = [measure(verifier, count, LENGTH_OF_ROWS, options.repeats) for count in tqdm(ROWS, desc="rows")]
        lengths = [
            measure(verifier, ROWS_OF_LENGTHS, length, options.repeats) for length in tqdm(LENGTHS, desc="length")
        ]
    record = {
        "command": f"python -m evals.growth --repeats {options.repeats}",
        "machine": describe(),
        "repeats": options.repeats,
        "rows": rows,
        "lengths": lengths,
    }
    write(options.out, "growth", record, as_markdown(record))
    plot(record, options.out / "growth.png")


if __name__ == "__main__":
    main()
