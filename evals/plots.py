"""The plot of the determinism experiment: how long outputs in a batch match those alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def survival(entry: dict[str, Any], length: int) -> list[float]:
    """
    Share of outputs that still match batch size 1 after `0 ... length` tokens, mean over the other batch sizes.

    Args:
        entry (`dict`): of a system, see [`~evals.tables.summarise`].
        length (`int`): new tokens.
    """
    runs = entry["prompts"] * (len(entry["batch_sizes"]) - 1)
    indices = [found["index"] for found in entry["divergences"]]
    return [1.0 - sum(index < count for index in indices) / runs for count in range(length + 1)]


def plot_survival(summary: dict[str, Any], length: int, path: Path) -> None:
    """
    Writes a PNG file.

    Args:
        summary (`dict`): by system, see [`~evals.tables.summarise`].
        length (`int`): new tokens.
        path (`Path`): of the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for system, entry in summary.items():
        axes.plot(survival(entry, length), label=system)
    axes.set(xlabel="new tokens", ylabel="share that matches batch size 1", ylim=(-0.02, 1.02))
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
