"""Time of exact decoding under each schedule, interleaved; the tokens are checked to be the same.

And the same on paper: `schedule_traces.py` plays schedules on recorded margins with several cost profiles.

OMP_NUM_THREADS=1 python -m evals schedules --batch-sizes 8,1 --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from tqdm.auto import tqdm

from margingate_hf import MarginGateConfig
from margingate_hf.analysis.compare import decode_all
from margingate_hf.cli.loading import as_ids, as_prompts
from margingate_hf.decoding.drafting import drafting_of
from margingate_hf.verifier import verifier_for

from .. import schedule_traces
from ..machine import as_text
from ..models import load
from ..prompts import load_prompts
from ..run import common, sizes

SCHEDULES: dict[str, MarginGateConfig] = {
    "cost (default)": MarginGateConfig(),
    "margin": MarginGateConfig(schedule="margin"),
    "4 tokens": MarginGateConfig(schedule="fixed", num_draft_tokens=3),
    "8 tokens": MarginGateConfig(schedule="fixed", num_draft_tokens=7),
    "16 tokens": MarginGateConfig(schedule="fixed", num_draft_tokens=15),
    "verifier alone": MarginGateConfig(num_draft_tokens=0),
    "at once on a low margin": MarginGateConfig(schedule="margin", low_margin_limit=1, num_draft_tokens=63),
}


def run(model: Any, tokenizer: Any, prompts: list[str], batch_size: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of each schedule, `repeats` interleaved runs; the first, which measures costs, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    expected = decode_all(model, tokenizer, prompts, batch_size, tokens, MarginGateConfig()).tokens
    for _ in tqdm(range(repeats), desc=f"batch {batch_size}"):
        for name, config in SCHEDULES.items():
            result = decode_all(model, tokenizer, prompts, batch_size, tokens, config)
            if result.tokens != expected:
                raise SystemExit(f"{name} gave other tokens: the times would mean nothing")
            seconds[name].append(result.seconds)
    costs = drafting_of(verifier_for(model, MarginGateConfig())).meter.costs()
    return {
        "batch_size": batch_size,
        "prompts": len(prompts),
        "seconds": seconds,
        "costs": vars(costs) if costs else None,
    }


def report(record: dict[str, Any]) -> str:
    """Medians, and each over the best fixed choice."""
    lines = [
        "# Schedules of exact decoding",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}.",
        "",
    ]
    for part in record["parts"]:
        medians = {name: statistics.median(values) for name, values in part["seconds"].items()}
        best = min(value for name, value in medians.items() if not name.startswith("cost"))
        costs = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in (part["costs"] or {}).items())
        lines += [f"Batch {part['batch_size']}, {part['prompts']} prompts; costs measured on the way: {costs}.", ""]
        lines += ["| schedule | median seconds | over the best fixed one |", "|---|---|---|"]
        lines += [f"| {name} | {value:.1f} | {value / best:.2f} |" for name, value in medians.items()]
        lines.append("")
    return "\n".join([*lines, *_on_paper(record)])


def _on_paper(record: dict[str, Any]) -> list[str]:
    """One table a profile: every schedule over the best fixed one."""
    lines = [
        "## On paper",
        "",
        f"{record['limit']} prompts of {record['dataset']}, {record['new_tokens']} new tokens: {record['flips']} flips "
        f"in {record['steps']} steps. Time over the best of the fixed schedules.",
        "",
    ]
    for profile, entry in record["on_paper"].items():
        costs = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in entry["costs"].items())
        lines += [f"### {profile}", "", f"{costs}.", ""]
        names = list(next(iter(entry["batch_sizes"].values())))
        lines += ["| batch | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for size, seconds in entry["batch_sizes"].items():
            best = min(seconds[name] for name in schedule_traces.FIXED)
            lines.append(f"| {size} | " + " | ".join(f"{seconds[name] / best:.3f}" for name in names) + " |")
        lines.append("")
    return lines


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, repeats=3, limit=16, new_tokens=96)
    parser.add_argument("--batch-sizes", type=sizes, default=[1, 8], metavar="1,8", help="of the timed runs")
    parser.add_argument("--timed-tokens", type=int, default=40, help="new tokens of the timed runs, on chat prompts")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Timed runs of every schedule, then the same schedules on recorded margins."""
    model, tokenizer = load(options.model)
    chat = as_prompts(tokenizer, load_prompts("chat", 8))
    parts = [
        run(model, tokenizer, chat if size > 1 else chat[:3], size, options.timed_tokens, options.repeats)
        for size in options.batch_sizes
    ]
    prompts = as_ids(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
    recorded = schedule_traces.record_traces(model, prompts, 16, options.new_tokens)
    return {
        "parts": parts,
        "dataset": options.dataset,
        "limit": options.limit,
        "new_tokens": options.new_tokens,
        "steps": sum(map(len, recorded.traces)),
        "flips": sum(flipped for trace in recorded.traces for _, flipped in trace),
        "on_paper": schedule_traces.played(recorded, (1, 4, 8, 16)),
    }
