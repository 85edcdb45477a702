"""The plot of the determinism experiment: how long outputs in a batch match those alone."""

from __future__ import annotations

from pathlib import Path

from . import metrics
from .decoding import Run


def plot_survival(runs: dict[str, list[Run]], path: Path) -> None:
    """
    Share of outputs that still match batch size 1, by new token, mean over batch sizes.

    Args:
        runs: by system, the first of each at batch size 1.
        path (`Path`): of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for system, parts in runs.items():
        length = max(len(row) for row in parts[0].tokens)
        curves = [metrics.survival(parts[0], run, length) for run in parts[1:]]
        if curves:
            axes.plot([sum(values) / len(values) for values in zip(*curves, strict=True)], label=system)
    axes.set(xlabel="new tokens", ylabel="share that matches batch size 1", ylim=(-0.02, 1.02))
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
