"""One row a system from its runs: what the determinism experiment writes as JSON and Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from . import metrics
from .answers import judged, load_answers
from .decoding import Run
from .machine import as_text
from .systems import SYSTEMS


def summarise(
    runs: dict[str, list[Run]], dataset: str, limit: int, data_dir: str | None, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """
    Measures of every system.

    Args:
        runs: by system, the first of each at batch size 1.
        decode (`Callable`): token ids to text, for the answers.
    """
    answers = load_answers(dataset, limit, data_dir)
    found: dict[str, Any] = {}
    for system, parts in runs.items():
        rights = judged(dataset, parts, answers, decode)
        indices = [index for index in metrics.division_indices(parts) if index is not None]
        found[system] = {
            "plan": parts[0].plan,
            "prompts": len(parts[0].tokens),
            "prompts_that_diverge": len(indices),
            "div_index_quartiles": [None if math.isnan(v) else v for v in metrics.quartiles(indices)],
            "avg_std_top1": metrics.spread_of_top1(parts),
            "std_length": metrics.spread_of_length(parts),
            "std_accuracy": None if rights is None else metrics.spread_of_accuracy(rights),
            "accuracy": None if rights is None else [100.0 * statistics.fmean(map(float, r)) for r in rights],
            "divergences": [vars(found) for run in parts[1:] for found in metrics.divergences(parts[0], run)],
            "batch_sizes": [_one(run, parts[0], runs) for run in parts],
        }
    return found


def _one(run: Run, alone: Run, runs: dict[str, list[Run]]) -> dict[str, Any]:
    new_tokens = sum(map(len, run.tokens))
    off = next((other for other in runs.get("off", []) if other.batch_size == run.batch_size), None)
    parted = metrics.divergences(alone, run)
    counts = run.counts
    drafts = counts.get("drafted_tokens", 0)
    trigger = counts["low_margin_steps"] / drafts if drafts else None
    row: dict[str, Any] = {
        "system": run.system,
        "batch_size": run.batch_size,
        "determinism_rate": metrics.determinism_rate(alone, run),
        "divergence_rate": metrics.divergence_rate(alone, run),
        "trigger_rate": trigger,
        # Over a whole batch a step is triggered by any of its rows; rows taken as independent.
        "triggered_steps": None if trigger is None else 1 - (1 - trigger) ** run.batch_size,
        "missed_flips": len(parted),
        "flips": counts.get("flips"),
        "repaired_columns": counts.get("repaired_columns"),
        "wasted_tokens": counts.get("wasted_tokens"),
        "seconds": run.seconds,
        "time_over_off": None if off is None else run.seconds / off.seconds,
        "tokens_per_second": new_tokens / run.seconds,
        "peak_gib": run.peak_bytes / 2**30,
    }
    for name in ("off", "fp32"):
        reference = runs.get(name)
        row[f"agrees_with_{name}_alone"] = None if reference is None else metrics.agreement(run, reference[0])
    return row


def _cell(value: Any, form: str = "{:.3g}") -> str:
    return "-" if value is None else form.format(value)


def _worst(entry: dict[str, Any], name: str, choose: Callable[[list[float]], float]) -> float | None:
    values = [row[name] for row in entry["batch_sizes"][1:] if row[name] is not None]
    return choose(values) if values else None


def _over_systems(summary: dict[str, Any]) -> list[str]:
    lines = [
        "| system | outputs that diverge | determinism, worst batch | divergences a shared step | trigger rate "
        "| Div_Index (quartiles) | Avg_Std@top1 | Std length | Std@Acc |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for system, entry in summary.items():
        quarters = entry["div_index_quartiles"]
        cells = [
            system,
            f"{entry['prompts_that_diverge']} of {entry['prompts']}",
            _cell(_worst(entry, "determinism_rate", min), "{:.0%}"),
            _cell(_worst(entry, "divergence_rate", max), "{:.2%}"),
            _cell(_worst(entry, "trigger_rate", max), "{:.1%}"),
            "-" if quarters[1] is None else " / ".join(f"{value:.0f}" for value in quarters),
            _cell(entry["avg_std_top1"], "{:.1e}") if entry["avg_std_top1"] else "0",
            _cell(entry["std_length"], "{:.2f}"),
            _cell(entry["std_accuracy"], "{:.2f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _over_batches(summary: dict[str, Any]) -> list[str]:
    lines = [
        "| system | batch | same as alone | flips found | missed | repaired columns | wasted | seconds | over off | "
        "peak GiB | same as BF16 alone | same as FP32 alone |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in summary.values():
        for row in entry["batch_sizes"]:
            cells = [
                row["system"],
                str(row["batch_size"]),
                f"{row['determinism_rate']:.0%}",
                _cell(row["flips"], "{:.0f}"),
                str(row["missed_flips"]),
                _cell(row["repaired_columns"], "{:.0f}"),
                _cell(row["wasted_tokens"], "{:.0f}"),
                f"{row['seconds']:.1f}",
                _cell(row["time_over_off"], "{:.2f}"),
                f"{row['peak_gib']:.2f}",
                _cell(row["agrees_with_off_alone"], "{:.0%}"),
                _cell(row["agrees_with_fp32_alone"], "{:.0%}"),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def as_markdown(record: dict[str, Any]) -> str:
    """Both tables, the plot, and how they came about."""
    chosen = record["settings"]
    summary = record["systems"]
    legend: Sequence[str] = [f"- `{system}`: {SYSTEMS[system].about}" for system in summary]
    return "\n".join(
        [
            f"# Determinism: {chosen['model']} on {chosen['dataset']}",
            "",
            f"`{record['command']}`",
            "",
            f"{as_text(record['machine'])}. {chosen['limit']} prompts, {chosen['new_tokens']} new tokens. Columns are "
            "defined in `docs/metrics.md`. Each time is one run in a process of its own, other work beside it: compare "
            "times in `evals/results/cost_b8.md` instead.",
            "",
            *_over_systems(summary),
            "",
            *_over_batches(summary),
            "",
            *legend,
            "",
            f"![outputs that match batch size 1, by new token]({record['name']}_survival.png)",
            "",
        ]
    )
