"""The plots of `evals.determinism`: margins of flips, survival of equal prefixes, determinism against time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from . import metrics
from .decoding import Run


def plot_all(runs: dict[str, list[Run]], summary: dict[str, Any], out: Path, name: str) -> None:
    """Writes `NAME_margins.png`, `NAME_survival.png` and `NAME_tradeoff.png` into a folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for kind, draw in (("margins", _margins), ("survival", _survival), ("tradeoff", _tradeoff)):
        figure, axes = plt.subplots(figsize=(7, 4))
        draw(axes, runs, summary)
        figure.tight_layout()
        figure.savefig(out / f"{name}_{kind}.png", dpi=110)
        plt.close(figure)


def _margins(axes: Any, runs: dict[str, list[Run]], summary: dict[str, Any]) -> None:
    """Margins of plain BF16 where the batch changed the token, and where it did not, on shared prefixes."""
    parts = runs.get("off") or next(iter(runs.values()))
    flipped, kept = [], []
    for run in parts[1:]:
        parted = {parting.prompt: parting.index for parting in metrics.partings(parts[0], run)}
        for prompt, margins in enumerate(run.margins):
            stop = parted.get(prompt, len(margins))
            kept += margins[:stop]
            flipped += margins[stop : stop + 1] if prompt in parted else []
    top = min(10.0, max([*kept, *flipped, 1.0]))
    edges = [top * index / 40 for index in range(41)]
    axes.hist(kept, edges, label=f"same token ({len(kept)} steps)", color="#9aa5b1")
    axes.hist(flipped, edges, label=f"flipped ({len(flipped)} steps)", color="#c0392b")
    axes.set(xlabel=f"top-1/top-2 margin, {parts[0].system} (logits)", ylabel="steps", yscale="log")
    axes.legend()


def _survival(axes: Any, runs: dict[str, list[Run]], summary: dict[str, Any]) -> None:
    for system, parts in runs.items():
        length = max(len(row) for row in parts[0].tokens)
        curves = [metrics.survival(parts[0], run, length) for run in parts[1:]]
        if curves:
            axes.plot([sum(values) / len(values) for values in zip(*curves, strict=True)], label=system)
    axes.set(xlabel="new tokens", ylabel="texts still as alone, mean over batch sizes", ylim=(-0.02, 1.02))
    axes.legend(fontsize=7)


def _tradeoff(axes: Any, runs: dict[str, list[Run]], summary: dict[str, Any]) -> None:
    for system, entry in summary.items():
        rows = [row for row in entry["batch_sizes"][1:] if row["time_over_off"] is not None]
        if not rows:
            continue
        time = math.exp(sum(math.log(row["time_over_off"]) for row in rows) / len(rows))
        rate = sum(row["determinism_rate"] for row in rows) / len(rows)
        axes.scatter([time], [100 * rate])
        axes.annotate(system, (time, 100 * rate), textcoords="offset points", xytext=(4, 4), fontsize=8, rotation=35)
    axes.set(xlabel="time over stock BF16, mean over batch sizes", ylabel="texts as alone (%)", xscale="log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-3, 118)
