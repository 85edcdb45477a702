"""Schedules on recorded margins and flips with fixed costs, so that the noise of a machine does not decide.

Drafts on canonical outputs are recorded once, every step's margin and flip. Then each schedule decodes them on paper:
`should_verify` decides as in the loop, draft steps and verify forwards cost what a profile says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from margingate_hf import MarginGateConfig, MarginGateEngine
from margingate_hf.analysis.calibrate import flip_curve, observe
from margingate_hf.decoding.drafting import drafting_of
from margingate_hf.decoding.rows import Row, RowRequest
from margingate_hf.decoding.schedule import Costs, FlipCurve, Pending, flip_probability, should_verify
from margingate_hf.verifier import verifier_for

Trace = Sequence[tuple[float, bool]]  # an output: (margin, flipped) of each step behind its first token

FIXED: dict[str, MarginGateConfig] = {
    "4 tokens": MarginGateConfig(schedule="fixed", num_draft_tokens=3),
    "8 tokens": MarginGateConfig(schedule="fixed", num_draft_tokens=7),
    "16 tokens": MarginGateConfig(schedule="fixed", num_draft_tokens=15),
    "32 tokens": MarginGateConfig(schedule="fixed", num_draft_tokens=31),
    "at once on a low margin": MarginGateConfig(schedule="margin", low_margin_limit=1, num_draft_tokens=63),
}
COST = MarginGateConfig()

# Seconds. `measured` is filled in from this machine; the others from figures in the documentation of this project.
PROFILES: dict[str, Costs] = {
    # AVX-512/AMX CPU, SmolLM2-135M: one stock step 62 ms; verify forwards of 1, 8, 16, 32 tokens 92, 100, 128, 194 ms.
    "AMX CPU": Costs(0.058, 0.0005, 0.080, 0.0035),
    # A GPU whose draft step and verify forward are each one read of the weights: FP32 arithmetic doubles it, tokens are
    # nearly free.
    "GPU, bandwidth-bound": Costs(0.010, 0.00001, 0.020, 0.00005),
    # A verify forward at five draft steps, as a kernel launched eagerly may cost.
    "dear verify forwards": Costs(0.010, 0.0, 0.050, 0.0002),
}


@dataclass(frozen=True)
class Recorded:
    """Traces of outputs, the flip curve they give, and costs measured on this machine."""

    traces: list[Trace]
    curve: FlipCurve
    costs: Costs | None


@dataclass
class Played:
    """Seconds of one schedule on paper, and what it did."""

    seconds: float = 0.0
    steps: int = 0
    forwards: int = 0
    wasted: int = 0


def play(traces: Sequence[Trace], config: MarginGateConfig, costs: Costs, flips: FlipCurve | None = None) -> Played:
    """
    Decodes recorded outputs under a schedule, all rows together.

    Args:
        traces: one a row.
        config ([`MarginGateConfig`]): the schedule.
        costs ([`Costs`]): of draft steps and verify forwards; also what the cost schedule believes.
        flips ([`FlipCurve`], *optional*): what it believes of margins; by default the prior.
    """
    rows = [Row(RowRequest(index, [0], len(trace) + 1), committed=[0]) for index, trace in enumerate(traces)]
    active = list(rows)
    done = Played()
    while active:
        while not should_verify([_pending(row) for row in active], config, costs):
            for row in active:
                margin, _ = traces[row.index][len(row.committed) - 1 + len(row.drafts)]
                row.add_draft(0, margin, config.threshold, flips or flip_probability)
            done.seconds += costs.draft_fixed + costs.draft_row * len(active)
            done.steps += 1
        done.seconds += costs.verify_fixed + costs.verify_token * sum(len(row.drafts) + 1 for row in active)
        done.forwards += 1
        for row in active:
            done.wasted += _commit(row, traces[row.index])
        active = [row for row in active if len(row.committed) < row.request.limit]
    return done


def _pending(row: Row) -> Pending:
    would_end = len(row.committed) + len(row.drafts) + 1 >= row.request.limit
    return Pending(len(row.drafts), row.num_low, would_end, row.survival, row.expected)


def _commit(row: Row, trace: Trace) -> int:
    """Commits up to the first flip, or all drafts and one token more; returns the drafts thrown away."""
    first = len(row.committed) - 1
    agreed = next((i for i in range(len(row.drafts)) if trace[first + i][1]), len(row.drafts))
    wasted = max(0, len(row.drafts) - agreed - 1)
    row.committed += [0] * min(agreed + 1, row.request.limit - len(row.committed))
    row.drop_drafts()
    return wasted


def compare(traces: Sequence[Trace], costs: Costs, flips: FlipCurve | None) -> dict[str, float]:
    """Seconds of every schedule, and of the cost schedule with the prior and with a calibrated curve."""
    found = {name: play(traces, config, costs).seconds for name, config in FIXED.items()}
    found["cost, prior"] = play(traces, COST, costs).seconds
    if flips is not None:
        found["cost, calibrated"] = play(traces, COST, costs, flips).seconds
    return found


def record_traces(model: Any, prompts: list[list[int]], batch_size: int, new_tokens: int) -> Recorded:
    """Margins and flips of drafts on canonical outputs, the curve they give, and the costs measured on the way."""
    # Both halves of a group of drafts: costs need draft steps and verify forwards of several sizes.
    gate = MarginGateConfig(schedule="fixed", num_draft_tokens=3)
    engine = MarginGateEngine(model, gate, max_batch_size=batch_size)
    outputs = engine.generate(prompts, max_new_tokens=new_tokens, do_sample=False)
    found = [output.generated_tokens for output in outputs.values()]
    steps = observe(model, prompts, found, batch_size, "float32")
    traces = [[(s.margin, s.flipped) for s in steps if s.prompt == prompt][1:] for prompt in range(len(prompts))]
    return Recorded(traces, flip_curve(steps), drafting_of(verifier_for(model, gate)).meter.costs())


def played(recorded: Recorded, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Seconds of every schedule by cost profile and batch size; rows decode in groups of the batch size."""
    measured = {} if recorded.costs is None else {"measured on this machine": recorded.costs}
    found: dict[str, Any] = {}
    for name, costs in {**measured, **PROFILES}.items():
        by_size = {}
        for size in batch_sizes:
            groups = [recorded.traces[start : start + size] for start in range(0, len(recorded.traces), size)]
            seconds = [compare(group, costs, recorded.curve) for group in groups]
            by_size[size] = {key: sum(group[key] for group in seconds) for key in seconds[0]}
        found[name] = {"costs": dataclasses.asdict(costs), "batch_sizes": by_size}
    return found
