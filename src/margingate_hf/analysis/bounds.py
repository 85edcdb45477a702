"""Exact binomial bounds, and the smallest gate threshold that such a bound allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def binomial_upper_bound(misses: int, trials: int, confidence: float) -> float:
    """
    Clopper-Pearson upper bound: the rate at which `misses` or fewer of `trials` are seen with probability
    `1 - confidence`.

    Raises:
        `ValueError`: more misses than trials, or a confidence outside (0, 1).
    """
    if not 0 <= misses <= trials:
        raise ValueError(f"`misses` must be between 0 and `trials`={trials}, got {misses}.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1, both excluded, got {confidence}.")
    if misses == trials:
        return 1.0
    low, high = misses / trials, 1.0
    while high - low > 1e-12 + 1e-9 * high:
        middle = (low + high) / 2
        if _at_most(misses, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(misses: int, trials: int, rate: float) -> float:
    """P(X <= misses) for X binomial."""
    if rate <= 0:
        return 1.0
    if rate >= 1:
        return float(misses >= trials)
    log, log1m, all_ = math.log(rate), math.log1p(-rate), math.lgamma(trials + 1)
    terms = [
        all_ - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log + (trials - k) * log1m
        for k in range(misses + 1)
    ]
    top = max(terms)
    return math.exp(top) * math.fsum(math.exp(term - top) for term in terms)


@dataclass(frozen=True)
class Threshold:
    """
    Attributes:
        value: steps with a margin below it are verified.
        misses: flips of the sample at or above it; `bound`: upper bound on their rate.
        sufficient: whether the bound is what was asked for.
    """

    value: float
    misses: int
    bound: float
    sufficient: bool


def smallest_threshold(
    margins: Sequence[float], flipped: Sequence[bool], miss_rate: float, confidence: float
) -> Threshold:
    """
    The smallest threshold whose rate of missed flips a step is bounded.

    Thresholds are tried from the largest down, and the search stops at the first whose exact bound exceeds
    `miss_rate`. Misses only grow on the way, so this is fixed-sequence testing of nested hypotheses, and the bound of
    the last one that passed holds at `confidence` without a correction for having looked (Learn then Test,
    arXiv 2110.01052, section 4). Steps are taken as independent.

    Args:
        margins (`Sequence[float]`): of each step; NaN counts as a tie.
        flipped (`Sequence[bool]`): whether its token was wrong.
        miss_rate, confidence (`float`): what the bound must reach.

    Raises:
        `ValueError`: no steps.
    """
    if not margins:
        raise ValueError("`margins` must hold at least one step.")
    held = [0.0 if math.isnan(margin) else margin for margin in margins]
    flips = sorted((margin for margin, flip in zip(held, flipped, strict=True) if flip), reverse=True)
    steps = len(held)
    bound = binomial_upper_bound(0, steps, confidence)
    if bound > miss_rate:
        return Threshold(_above(flips[0], held) if flips else 0.0, 0, bound, False)
    allowed = 0
    while allowed < len(flips) and binomial_upper_bound(allowed + 1, steps, confidence) <= miss_rate:
        allowed += 1
    value = _above(flips[allowed], held) if allowed < len(flips) else 0.0
    misses = sum(margin >= value for margin in flips)
    return Threshold(value, misses, binomial_upper_bound(misses, steps, confidence), True)


def _above(margin: float, seen: Sequence[float]) -> float:
    """The next margin that was seen, so that everything up to `margin` lies below it; a little more if none was."""
    larger = [value for value in seen if value > margin and math.isfinite(value)]
    return min(larger) if larger else margin * 1.5 + 1e-6
