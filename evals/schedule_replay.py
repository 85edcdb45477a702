"""Schedules on recorded margins and flips with fixed costs, so that the noise of a machine does not decide.

OMP_NUM_THREADS=1 python -m evals.schedule_replay --dataset math500 --limit 16 --new-tokens 96

The fast path reads canonical texts once and every step's margin and flip are kept. Then each schedule decodes them on
paper: `should_verify` decides as in the loop, steps and passes cost what a profile says.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from margingate_hf import MarginGateConfig, MarginGateEngine
from margingate_hf.analysis.calibrate import flip_curve, observe
from margingate_hf.cli.loading import as_ids, load
from margingate_hf.decoding.drafting import drafting_of
from margingate_hf.decoding.rows import Row, RowRequest
from margingate_hf.decoding.schedule import Costs, FlipCurve, Pending, flip_probability, should_verify
from margingate_hf.verifier import verifier_for

from .machine import as_text, describe
from .prompts import DATASETS, load_prompts
from .reports import write

Trace = Sequence[tuple[float, bool]]  # a text: (margin, flipped) of each step behind its first token

FIXED: dict[str, MarginGateConfig] = {
    "window 4": MarginGateConfig(schedule="fixed", num_draft_tokens=3),
    "window 8": MarginGateConfig(schedule="fixed", num_draft_tokens=7),
    "window 16": MarginGateConfig(schedule="fixed", num_draft_tokens=15),
    "window 32": MarginGateConfig(schedule="fixed", num_draft_tokens=31),
    "at once on a low margin": MarginGateConfig(schedule="margin", low_margin_limit=1, num_draft_tokens=63),
}
COST = MarginGateConfig()

# Seconds. `measured` is filled in from this machine; the others from figures in the documentation of this project.
PROFILES: dict[str, Costs] = {
    # AVX-512/AMX CPU, SmolLM2-135M: one stock step 62 ms; passes of 1, 8, 16, 32 tokens 92, 100, 128, 194 ms.
    "AMX CPU": Costs(0.058, 0.0005, 0.080, 0.0035),
    # A GPU whose step and pass are each one read of the weights: FP32 arithmetic doubles it, tokens are nearly free.
    "GPU, bandwidth-bound": Costs(0.010, 0.00001, 0.020, 0.00005),
    # A pass at five steps, as a kernel launched eagerly may cost.
    "dear passes": Costs(0.010, 0.0, 0.050, 0.0002),
}


@dataclass
class Played:
    """Seconds of one schedule on paper, and what it did."""

    seconds: float = 0.0
    steps: int = 0
    passes: int = 0
    wasted: int = 0


def play(traces: Sequence[Trace], config: MarginGateConfig, costs: Costs, flips: FlipCurve | None = None) -> Played:
    """
    Decodes recorded texts under a schedule, all rows together.

    Args:
        traces: one a row.
        config ([`MarginGateConfig`]): the schedule.
        costs ([`Costs`]): of steps and passes; also what the cost schedule believes.
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
        done.passes += 1
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


def record_traces(options: argparse.Namespace) -> tuple[list[Trace], FlipCurve, Costs | None]:
    """Margins and flips of the fast path on canonical texts, the curve they give, and the costs measured on the way."""
    model, tokenizer = load(options.model, progress=True)
    prompts = as_ids(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
    # Both halves of the drafts of a window: costs need steps and passes of several sizes.
    engine = MarginGateEngine(
        model, MarginGateConfig(schedule="fixed", num_draft_tokens=3), max_batch_size=options.batch_sizes[-1]
    )
    outputs = engine.generate(prompts, max_new_tokens=options.new_tokens, do_sample=False)
    found = [output.generated_tokens for output in outputs.values()]
    steps = observe(model, prompts, found, options.batch_sizes[-1], "float32")
    traces = [[(s.margin, s.flipped) for s in steps if s.prompt == prompt][1:] for prompt in range(len(prompts))]
    return traces, flip_curve(steps), drafting_of(verifier_for(model, engine.gate)).meter.costs()


def as_markdown(record: dict) -> str:
    """One table a profile: every schedule over the best fixed one."""
    lines = [
        "# Schedules on paper",
        "",
        f"`{record['command']}`",
        "",
        f"Margins and flips recorded on {as_text(record['machine'])}, SmolLM2-135M-Instruct, "
        f"{record['limit']} prompts of {record['dataset']}, {record['new_tokens']} new tokens "
        f"({record['flips']} flips in {record['steps']} steps). "
        "Time over the best of the fixed schedules; rows decode in groups of the batch size.",
        "",
    ]
    for profile, entry in record["profiles"].items():
        costs = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in entry["costs"].items())
        lines += [f"## {profile}", "", f"{costs}.", ""]
        names = list(next(iter(entry["batch_sizes"].values())))
        lines += ["| batch | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for size, seconds in entry["batch_sizes"].items():
            best = min(seconds[name] for name in FIXED)
            lines.append(f"| {size} | " + " | ".join(f"{seconds[name] / best:.3f}" for name in names) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="local folder or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", choices=DATASETS, default="math500")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-sizes", type=lambda text: [int(p) for p in text.split(",")], default=[1, 4, 8, 16])
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    options = parser.parse_args()
    traces, curve, measured = record_traces(options)
    profiles = {**({"measured on this machine": measured} if measured else {}), **PROFILES}
    record = {
        "command": f"python -m evals.schedule_replay --dataset {options.dataset} --limit {options.limit} "
        f"--new-tokens {options.new_tokens}",
        "machine": describe(),
        "dataset": options.dataset,
        "limit": options.limit,
        "new_tokens": options.new_tokens,
        "steps": sum(map(len, traces)),
        "flips": sum(flipped for trace in traces for _, flipped in trace),
        "profiles": {},
    }
    for name, costs in profiles.items():
        sizes = {}
        for size in options.batch_sizes:
            groups = [traces[start : start + size] for start in range(0, len(traces), size)]
            found = [compare(group, costs, curve) for group in groups]
            sizes[size] = {key: sum(group[key] for group in found) for key in found[0]}
        record["profiles"][name] = {"costs": dataclasses.asdict(costs), "batch_sizes": sizes}
    write(options.out, "schedule_replay", record, as_markdown(record))


if __name__ == "__main__":
    main()
