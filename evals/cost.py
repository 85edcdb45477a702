"""Time of every system, interleaved in one process: the median over stock BF16, and the latency increment over it.

OMP_NUM_THREADS=2 python -m evals.cost --batch-size 8 --limit 8 --new-tokens 32 --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from margingate_hf.cli.loading import as_prompts
from margingate_hf.verifier import verifier_for

from .decoding import Run, decode
from .determinism import load
from .machine import as_text, describe
from .prompts import DATASETS, load_prompts
from .reports import write
from .systems import SYSTEMS

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


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each system, one list entry a round; systems take turns within a round. The first round warms up."""
    models: dict[Any, tuple[Any, Any]] = {}
    for system in options.systems:
        models.setdefault(SYSTEMS[system].dtype, load(options.model, system))
    seconds: dict[str, list[float]] = {system: [] for system in options.systems}
    for repeat in tqdm(range(options.repeats + 1), desc="rounds"):
        for system in options.systems:
            model, tokenizer = models[SYSTEMS[system].dtype]
            gate = SYSTEMS[system].gate()
            if gate is not None:
                verifier_for(model, gate)
            texts = as_prompts(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
            run = Run(system, options.dataset, options.batch_size)
            decode(model, tokenizer, texts, run, options.new_tokens, gate)
            if repeat:
                # Texts differ in length among systems that give other tokens: compare time a token.
                seconds[system].append(run.seconds / sum(map(len, run.tokens)))
    return seconds


def as_markdown(record: dict[str, Any]) -> str:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dataset", choices=DATASETS, default="math500")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(DEFAULT))
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    options = parser.parse_args()
    command = (
        f"python -m evals.cost --dataset {options.dataset} --limit {options.limit} --batch-size {options.batch_size} "
        f"--new-tokens {options.new_tokens} --repeats {options.repeats}"
    )
    record = {
        "command": command,
        "machine": describe(),
        "dataset": options.dataset,
        "limit": options.limit,
        "batch_size": options.batch_size,
        "new_tokens": options.new_tokens,
        "seconds": measure(options),
    }
    write(options.out, f"cost_b{options.batch_size}", record, as_markdown(record))


if __name__ == "__main__":
    main()
