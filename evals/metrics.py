"""Measures of determinism over runs of one system; pure functions of recorded tokens. Defined in `docs/metrics.md`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from margingate_hf.analysis.compare import first_difference

from .decoding import Run


@dataclass(frozen=True)
class Divergence:
    """
    An output that differs from the same prompt alone.

    Attributes:
        prompt: its index.
        batch_size: of the run it diverged in.
        index: of the first token that differs.
        margin: the batched run's margin there, in logits; `None` where that output had ended.
    """

    prompt: int
    batch_size: int
    index: int
    margin: float | None


def divergences(alone: Run, batched: Run) -> list[Divergence]:
    """Outputs of `batched` that differ from `alone`."""
    found = []
    for prompt, (a, b) in enumerate(zip(alone.tokens, batched.tokens, strict=True)):
        index = first_difference(a, b)
        if index is not None:
            margins = batched.margins[prompt]
            margin = margins[index] if index < len(margins) else None
            found.append(Divergence(prompt, batched.batch_size, index, margin))
    return found


def determinism_rate(alone: Run, batched: Run) -> float:
    """Share of prompts whose tokens are those of the prompt alone (MarginGate's sequence-level determinism)."""
    return 1.0 - len(divergences(alone, batched)) / len(alone.tokens)


def divergence_rate(alone: Run, batched: Run) -> float:
    """First divergences over steps with a shared prefix: the rate of divergence a step."""
    ends = {found.prompt: found.index for found in divergences(alone, batched)}
    shared = sum(ends[prompt] + 1 if prompt in ends else len(row) for prompt, row in enumerate(alone.tokens))
    return len(ends) / shared if shared else 0.0


def division_indices(runs: Sequence[Run]) -> list[int | None]:
    """Div_Index (LayerCast): for each prompt the first token that differs among runs, `None` where none does."""
    found: list[int | None] = []
    for texts in zip(*(run.tokens for run in runs), strict=True):
        indices = [first_difference(texts[0], text) for text in texts[1:]]
        found.append(min((index for index in indices if index is not None), default=None))
    return found


def spread_of_top1(runs: Sequence[Run]) -> float:
    """Avg_Std@top1_prob (LayerCast): mean over shared steps of the deviation over runs of the top-1 probability."""
    deviations = []
    for prompt, index in enumerate(division_indices(runs)):
        length = min(len(run.top1[prompt]) for run in runs) if index is None else index + 1
        for step in range(length):
            values = [run.top1[prompt][step] for run in runs if step < len(run.top1[prompt])]
            if len(values) == len(runs):
                deviations.append(statistics.pstdev(values))
    return statistics.fmean(deviations) if deviations else 0.0


def spread_of_length(runs: Sequence[Run]) -> float:
    """Deviation over runs of a prompt's output length, averaged over prompts."""
    return statistics.fmean(
        statistics.pstdev([len(text) for text in texts]) for texts in zip(*(run.tokens for run in runs), strict=True)
    )


def spread_of_accuracy(rights: Sequence[Sequence[bool]]) -> float:
    """Std@Acc (LayerCast): deviation of the accuracy over runs, in points; `rights[run][prompt]`."""
    return statistics.pstdev([100.0 * statistics.fmean(map(float, right)) for right in rights])


def agreement(run: Run, reference: Run) -> float:
    """Share of prompts with the tokens of another system's run."""
    same = sum(a == b for a, b in zip(run.tokens, reference.tokens, strict=True))
    return same / len(run.tokens)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; NaN without values."""
    if not values:
        return (math.nan,) * 3
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
