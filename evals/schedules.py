"""Time of certified decoding under each schedule, interleaved; the tokens are checked to be the same.

OMP_NUM_THREADS=1 python -m evals.schedules --batch-sizes 8,1 --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from margingate_hf import MarginGateConfig
from margingate_hf.analysis.compare import decode_all
from margingate_hf.cli.loading import as_prompts, load
from margingate_hf.decoding.drafting import drafting_of
from margingate_hf.verifier import verifier_for

from .machine import as_text, describe
from .prompts import load_prompts
from .reports import write

SCHEDULES: dict[str, MarginGateConfig] = {
    "cost (default)": MarginGateConfig(),
    "margin, window 8": MarginGateConfig(schedule="margin"),
    "window 4": MarginGateConfig(schedule="fixed", num_draft_tokens=3),
    "window 8": MarginGateConfig(schedule="fixed", num_draft_tokens=7),
    "window 16": MarginGateConfig(schedule="fixed", num_draft_tokens=15),
    "verifier alone": MarginGateConfig(num_draft_tokens=0),
    "at once on a low margin": MarginGateConfig(schedule="margin", low_margin_limit=1, num_draft_tokens=63),
}


def run(model: Any, tokenizer: Any, texts: list[str], batch_size: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of each schedule, `repeats` interleaved runs; the first, which measures costs, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    expected = decode_all(model, tokenizer, texts, batch_size, tokens, MarginGateConfig()).tokens
    for _ in tqdm(range(repeats), desc=f"batch {batch_size}"):
        for name, config in SCHEDULES.items():
            result = decode_all(model, tokenizer, texts, batch_size, tokens, config)
            if result.tokens != expected:
                raise SystemExit(f"{name} gave other tokens: the times would mean nothing")
            seconds[name].append(result.seconds)
    costs = drafting_of(verifier_for(model, MarginGateConfig())).meter.costs()
    return {
        "batch_size": batch_size,
        "prompts": len(texts),
        "seconds": seconds,
        "costs": vars(costs) if costs else None,
    }


def as_markdown(record: dict[str, Any]) -> str:
    """Medians, and each over the best fixed choice."""
    lines = [
        "# Schedules of certified decoding",
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
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="local folder or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--batch-sizes", default="8,1")
    parser.add_argument("--limit", type=int, default=8, help="prompts; batch 1 uses the first three")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    options = parser.parse_args()
    model, tokenizer = load(options.model, progress=True)
    texts = as_prompts(tokenizer, load_prompts("chat", options.limit))
    parts = [
        run(model, tokenizer, texts if size > 1 else texts[:3], size, options.new_tokens, options.repeats)
        for size in map(int, options.batch_sizes.split(","))
    ]
    command = f"python -m evals.schedules --batch-sizes {options.batch_sizes} --repeats {options.repeats}"
    record = {"command": command, "machine": describe(), "parts": parts}
    write(options.out, "schedules", record, as_markdown(record))


if __name__ == "__main__":
    main()
