"""Time of every system, interleaved in one process: the median over stock BF16, and the latency increment over it.

OMP_NUM_THREADS=2 python -m evals cost --batch-size 8 --limit 8 --new-tokens 32 --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from tqdm.auto import tqdm

from margingate_hf.cli.loading import as_prompts
from margingate_hf.verifier import verifier_for

from ..decoding import Run, decode
from ..machine import as_text
from ..models import load
from ..prompts import load_prompts
from ..run import common
from ..systems import SYSTEMS

DEFAULT = (
    "off",
    "fp32",
    "paper",
    "always",
    "always-together",
    "grouped",
    "layercast",
    "invariant",
    "exact",
    "exact-bf16",
)


PARTS = {
    "setup_seconds": "weights' checksum and set-up",
    "prefill_seconds": "prefill by the verifier",
    "decode_seconds": "draft steps",
    "wasted_seconds": "of it, drafts that were dropped",
    "verify_seconds": "verify forwards",
}
COUNTS = ("draft_steps", "drafted_tokens", "low_margin_steps", "verify_forwards", "verified_tokens", "flips")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, repeats=3, new_tokens=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(DEFAULT))


def result(options: argparse.Namespace) -> str:
    """Name of the result's files."""
    return f"cost_b{options.batch_size}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each system, one entry a round; systems take turns within a round. The first round warms up."""
    models: dict[Any, tuple[Any, Any]] = {}
    for system in options.systems:
        dtype = SYSTEMS[system].dtype
        if dtype not in models:
            models[dtype] = load(options.model, dtype)
    seconds: dict[str, list[float]] = {system: [] for system in options.systems}
    counts: dict[str, dict[str, float]] = {}
    for repeat in tqdm(range(options.repeats + 1), desc="rounds"):
        for system in options.systems:
            model, tokenizer = models[SYSTEMS[system].dtype]
            gate = SYSTEMS[system].gate()
            if gate is not None:
                verifier_for(model, gate)
            prompts = as_prompts(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
            run = Run(system, options.dataset, options.batch_size)
            decode(model, tokenizer, prompts, run, options.new_tokens, gate)
            if repeat:
                # Outputs differ in length among systems that give other tokens: compare time a token.
                seconds[system].append(run.seconds / sum(map(len, run.tokens)))
                counts[system] = run.counts
    return {
        "dataset": options.dataset,
        "limit": options.limit,
        "batch_size": options.batch_size,
        "new_tokens": options.new_tokens,
        "seconds": seconds,
        "counts": counts,
    }


def report(record: dict[str, Any]) -> str:
    """Medians of per-token time; each ratio is of the same round."""
    seconds = record["seconds"]
    lines = [
        "# Cost of every system",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}. {record['limit']} prompts of {record['dataset']}, batch "
        f"{record['batch_size']}, {record['new_tokens']} new tokens, prompts included in the time. Medians of "
        f"{len(seconds['off'])} interleaved rounds.",
        "",
        "| system | ms a token | over stock BF16 | over stock FP32 | increment over `off`, ms | `always` / this | "
        "`always-together` / this |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, values in seconds.items():
        cells = [system, f"{1000 * statistics.median(values):.1f}"]
        cells += [_ratio(values, seconds.get(name)) for name in ("off", "fp32")]
        increment = statistics.median(a - b for a, b in zip(values, seconds["off"], strict=True))
        cells.append(f"{1000 * increment:+.1f}")
        cells += [_increments(seconds, name, increment) for name in ("always", "always-together")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "`increment ratio` (MarginGate's latency increment): what a baseline adds to plain BF16 over what the system "
        "adds; `none` where one of the two adds nothing, being faster than plain BF16 on this machine.",
        "",
        *(f"- `{system}`: {SYSTEMS[system].about}" for system in seconds),
        *(_parts(record["counts"]["exact"]) if record["counts"].get("exact") else []),
        "",
    ]
    return "\n".join(lines)


def _ratio(values: list[float], reference: list[float] | None) -> str:
    if reference is None:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(values, reference, strict=True)):.2f}"


def _increments(seconds: dict[str, list[float]], baseline: str, mine: float) -> str:
    if baseline not in seconds:
        return "-"
    theirs = statistics.median(a - b for a, b in zip(seconds[baseline], seconds["off"], strict=True))
    return f"{theirs / mine:.1f}" if mine > 0 and theirs > 0 else "none"


def _parts(counts: dict[str, float]) -> list[str]:
    """Where the time of the default system went, in the last round."""
    lines = ["", "Where the time of `exact` goes, last round:", "", "| part | seconds |", "|---|---|"]
    lines += [f"| {words} | {counts[name]:.2f} |" for name, words in PARTS.items()]
    lines += ["", ", ".join(f"{counts[name]:.0f} {name.replace('_', ' ')}" for name in COUNTS) + "."]
    return lines
