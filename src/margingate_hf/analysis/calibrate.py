"""Measures how often the draft path's token is not the canonical one, by margin, and picks the gate's threshold."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from ..config import MarginGateConfig
from ..decoding.calibration_record import BatchSizeCounts, MarginGateCalibration, fingerprint
from ..decoding.gated import GatedCoverage, Step
from ..decoding.loop import DecodeLoop
from ..decoding.prepare import prepare
from ..decoding.schedule import FlipCurve
from ..engine import MarginGateEngine
from ..errors import refuse
from ..verifier import Verifier, verifier_for
from ..verifier.top2 import is_low
from .bounds import binomial_upper_bound, smallest_threshold

# Lower edges of the flip curve's bins, in logits.
CURVE_EDGES = (0.0, 0.03125, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Observation:
    """
    One draft step behind a canonical prefix.

    Attributes:
        prompt, batch_size, index: which prompt, at which batch size, which of its new tokens.
        margin: the draft path's top-1/top-2 gap, in logits.
        top: its top logit.
        flipped: whether its token is not the canonical one.
    """

    prompt: int
    batch_size: int
    index: int
    margin: float
    top: float
    flipped: bool

    @property
    def steps(self) -> float:
        """The margin in steps of BF16 at the top logit, whose significand has 8 bits."""
        spacing = 2.0 ** (math.floor(math.log2(abs(self.top))) - 7) if self.top else 2.0**-133
        return self.margin / spacing


def calibrate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    miss_rate: float = 1e-4,
    confidence: float = 0.95,
    max_new_tokens: int = 128,
    precision: str = "float32",
    progress_bar: bool = False,
) -> MarginGateCalibration:
    """
    Finds the smallest threshold whose rate of missed flips is bounded, and the flip probability by margin.

    Each prompt's canonical output is decoded once; then the draft path reads it again at every batch size, prompt and
    steps in BF16, and every step's margin and token are compared with the output. (MarginGate, arXiv 2605.30218,
    calibrates on MATH500; how, its abstract does not say.)

    Args:
        model (`PreTrainedModel`): an enabled model.
        prompts (`Sequence[Sequence[int]]`): token ids of each prompt, no padding.
        batch_sizes (`Sequence[int]`): the batch sizes that the threshold is to hold for.
        miss_rate (`float`): missed flips a step that are acceptable.
        confidence (`float`): of the bound.
        max_new_tokens (`int`): length of the outputs.
        precision (`str`): of the verifier, see [`MarginGateConfig`].

    Returns:
        [`MarginGateCalibration`].

    Raises:
        `ValueError`: an argument outside its range, named.
    """
    for name, value in (("miss_rate", miss_rate), ("confidence", confidence)):
        if not 0 < value < 1:
            raise refuse(name, value, "it must be between 0 and 1, both excluded")
    if not prompts or not batch_sizes or min(batch_sizes) < 1:
        raise refuse("prompts" if not prompts else "batch_sizes", list(batch_sizes), "at least one, and positive sizes")
    seen = collect(model, prompts, batch_sizes, max_new_tokens, precision, progress_bar)
    verifier = verifier_for(model, MarginGateConfig(precision=precision))
    return _record(verifier, seen, batch_sizes, miss_rate, confidence, max_new_tokens)


def collect(
    model: Any,
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    precision: str = "float32",
    progress_bar: bool = False,
) -> list[Observation]:
    """Decodes the canonical outputs and observes the draft path on them; arguments as for [`calibrate`]."""
    engine = MarginGateEngine(model, MarginGateConfig(precision=precision), max_batch_size=max(batch_sizes))
    with tqdm(total=1 + len(batch_sizes), disable=not progress_bar, desc="calibrating", unit="run") as bar:
        bar.set_postfix_str("canonical outputs")
        found = engine.generate(prompts, max_new_tokens=max_new_tokens, do_sample=False)
        outputs = [output.generated_tokens for output in found.values()]
        bar.update()
        seen: list[Observation] = []
        for size in batch_sizes:
            bar.set_postfix_str(f"batch {size}")
            seen += observe(model, prompts, outputs, size, precision)
            bar.update()
    return seen


def observe(
    model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], batch_size: int, precision: str
) -> list[Observation]:
    """
    Reads canonical `outputs` by the draft path, `batch_size` prompts at a time.

    Args:
        model (`PreTrainedModel`): an enabled model.
        prompts, outputs (`Sequence[Sequence[int]]`): token ids; `outputs[i]` follows `prompts[i]`.
    """
    gate = MarginGateConfig(coverage="gated", threshold=0.0, precision=precision)
    seen: list[Observation] = []
    for start in range(0, len(prompts), batch_size):
        part = list(prompts[start : start + batch_size])
        longest = max(len(output) for output in outputs[start : start + batch_size])
        request = prepare(model, part, gate, max_new_tokens=longest, do_sample=False).request
        forced = [list(output) for output in outputs[start : start + batch_size]]
        rows = (replace(row, limit=len(forced[row.index])) for row in request.rows)
        forcing = _Forcing(forced)
        verifier = verifier_for(model, gate)
        loop = DecodeLoop(
            model,
            verifier,
            replace(request, rows=tuple(rows)),
            partial(GatedCoverage, judge=forcing),
        )
        with torch.no_grad():
            while loop.unfinished:
                loop.step()
        seen += [
            Observation(start + prompt, batch_size, index, margin, top, flipped)
            for prompt, index, margin, top, flipped in forcing.seen
        ]
    return seen


class _Forcing:
    """Judges no step of the draft path: records each, and commits the given output's own token."""

    def __init__(self, outputs: list[list[int]]):
        self.outputs = outputs
        self.seen: list[tuple[int, int, float, float, bool]] = []

    def __call__(self, steps: list[Step]) -> None:
        for step in steps:
            index = len(step.row.committed)
            token = self.outputs[step.row.index][index]
            top = float(step.logits.float().max())
            self.seen.append((step.row.index, index, step.margin, top, step.token != token))
            step.token = token


def flip_curve(seen: Sequence[Observation]) -> FlipCurve:
    """
    Flip probability by margin: shares in bins, `(flips + 1/2) / (steps + 1)`, made non-increasing by isotonic
        regression.
    """
    pooled: list[list[float]] = []  # edge, flips, steps
    for low, high in zip(CURVE_EDGES, (*CURVE_EDGES[1:], math.inf), strict=True):
        inside = [one for one in seen if low <= (0.0 if math.isnan(one.margin) else one.margin) < high]
        if not inside:
            continue
        pooled.append([low, sum(one.flipped for one in inside), len(inside)])
        while len(pooled) > 1 and _share(pooled[-2]) < _share(pooled[-1]):
            _, flips, steps = pooled.pop()
            pooled[-1][1] += flips
            pooled[-1][2] += steps
    pooled[0][0] = 0.0
    return FlipCurve(tuple(entry[0] for entry in pooled), tuple(_share(entry) for entry in pooled))


def _share(entry: list[float]) -> float:
    return (entry[1] + 0.5) / (entry[2] + 1)


def _record(
    verifier: Verifier,
    seen: Sequence[Observation],
    batch_sizes: Sequence[int],
    miss_rate: float,
    confidence: float,
    new_tokens: int,
) -> MarginGateCalibration:
    flipped = [one.flipped for one in seen]
    found = smallest_threshold([one.margin for one in seen], flipped, miss_rate, confidence)
    in_steps = smallest_threshold([one.steps for one in seen], flipped, miss_rate, confidence)
    missed = {one.prompt for one in seen if one.flipped and one.margin >= found.value}
    prompts = len({one.prompt for one in seen})
    return MarginGateCalibration(
        threshold=found.value,
        threshold_steps=in_steps.value,
        miss_rate=miss_rate,
        confidence=confidence,
        miss_bound=found.bound,
        sufficient=found.sufficient,
        trigger_rate=sum(is_low(one.margin, found.value) for one in seen) / len(seen),
        steps=len(seen),
        flips=sum(flipped),
        prompts=prompts,
        new_tokens=new_tokens,
        prompts_missed_bound=binomial_upper_bound(len(missed), prompts, confidence),
        curve=flip_curve(seen),
        batch_sizes=[_counts(size, seen, found.value) for size in batch_sizes],
        fingerprint={
            **fingerprint(verifier),
            "batch_sizes": list(batch_sizes),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
    )


def _counts(batch_size: int, seen: Sequence[Observation], threshold: float) -> BatchSizeCounts:
    here = [one for one in seen if one.batch_size == batch_size]
    flips = [one.margin for one in here if one.flipped]
    confident = sum(margin >= threshold for margin in flips)
    largest = max(flips, default=None)
    return BatchSizeCounts(batch_size, len(here), len(flips), len(flips) - confident, confident, largest)
