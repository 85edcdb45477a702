"""What the gate costs: stock BF16 `generate` and certified `generate` on the same prompts, paired and interleaved.

python -m evals.overhead --dataset math500 --limit 16 --batch-size 8 --new-tokens 128 --repeats 3 --out evals/results
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from margingate_hf import MarginGateConfig
from margingate_hf.analysis.compare import Decoded, decode_all, divergence
from margingate_hf.cli.loading import as_prompts, load
from margingate_hf.config import SCHEDULES
from margingate_hf.verifier import verifier_for

from .machine import as_text, describe
from .prompts import DATASETS, load_prompts
from .reports import write

PARTS = ("prefill_seconds", "decode_seconds", "verify_seconds", "setup_seconds", "wasted_seconds")


COUNTS = ("draft_steps", "drafted_tokens", "verify_forwards", "verified_tokens", "flips", "wasted_tokens")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the pairs and returns the record that is written to disk."""
    gate = MarginGateConfig(
        num_draft_tokens=options.num_draft_tokens, threshold=options.threshold, schedule=options.schedule
    )
    model, tokenizer = load(options.model, progress=True)
    texts = as_prompts(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
    verifier = verifier_for(model, gate)
    pairs: list[tuple[Decoded, Decoded]] = []
    for _ in tqdm(range(options.repeats), desc="pairs"):
        plain, gated = (
            decode_all(model, tokenizer, texts, options.batch_size, options.new_tokens, config)
            for config in (None, gate)
        )
        pairs.append((plain, gated))
    alone = decode_all(model, tokenizer, texts, 1, options.new_tokens, gate)
    plain, gated = pairs[-1]
    if divergence(alone, gated).prompts:
        raise SystemExit("a gated text differs from the same prompt alone: the times below would mean nothing")
    return {
        "command": f"python -m evals.overhead --dataset {options.dataset} --limit {options.limit} "
        f"--batch-size {options.batch_size} --new-tokens {options.new_tokens} "
        f"--num-draft-tokens {options.num_draft_tokens} --schedule {options.schedule}",
        "machine": describe(),
        "model": options.model or "SmolLM2-135M-Instruct, BF16",
        "verifier": verifier.name,
        "plain_seconds": [pair[0].seconds for pair in pairs],
        "gated_seconds": [pair[1].seconds for pair in pairs],
        "ratios": [pair[1].seconds / pair[0].seconds for pair in pairs],
        "parts": {part: statistics.median(_total(pair[1], part) for pair in pairs) for part in PARTS},
        "plain_tokens": plain.new_tokens,
        "gated_tokens": gated.new_tokens,
        "counts": {
            name: sum(getattr(record, name) for record in gated.statistics)
            for name in (
                "draft_steps",
                "drafted_tokens",
                "verify_forwards",
                "verified_tokens",
                "flips",
                "wasted_tokens",
            )
        },
        "trigger_rate": _total(gated, "low_margin_steps") / max(1, _total(gated, "drafted_tokens")),
    }


def _total(decoded: Decoded, name: str) -> float:
    return sum(getattr(record, name) for record in decoded.statistics)


def as_markdown(record: dict[str, Any]) -> str:
    """A table a reader can check against the JSON beside it."""
    plain = statistics.median(record["plain_seconds"])
    gated = statistics.median(record["gated_seconds"])
    counts, parts = record["counts"], record["parts"]
    plain_rate, gated_rate = record["plain_tokens"] / plain, record["gated_tokens"] / gated
    rest = gated - sum(parts[name] for name in PARTS[:4])
    return "\n".join(
        [
            "# Time of certified `generate` against stock BF16 `generate`",
            "",
            f"`{record['command']}`",
            "",
            f"{as_text(record['machine'])}. Model: {record['model']}. Verifier: `{record['verifier']}`.",
            f"Medians of {len(record['ratios'])} interleaved pairs; every gated text equals the same prompt alone.",
            "",
            "| | stock BF16 | certified |",
            "|---|---|---|",
            f"| seconds | {plain:.1f} | {gated:.1f} |",
            f"| new tokens | {record['plain_tokens']} | {record['gated_tokens']} |",
            f"| tokens/s | {plain_rate:.1f} | {gated_rate:.1f} |",
            f"| time over stock, median of pairs | 1 | {statistics.median(record['ratios']):.2f} |",
            f"| time per token over stock | 1 | {plain_rate / gated_rate:.2f} |",
            "",
            "| part of the certified run | seconds | |",
            "|---|---|---|",
            f"| prefill by the verifier | {parts['prefill_seconds']:.1f} | |",
            f"| fast steps | {parts['decode_seconds']:.1f} | {counts['draft_steps']} steps, "
            f"{counts['drafted_tokens']} drafts |",
            f"| of it, drafts that were dropped | {parts['wasted_seconds']:.1f} | {counts['wasted_tokens']} drafts |",
            f"| verifier passes | {parts['verify_seconds']:.1f} | {counts['passes']} passes, "
            f"{counts['verified_tokens']} tokens, {counts['flips']} flips |",
            f"| weights' checksum and set-up | {parts['setup_seconds']:.1f} | |",
            f"| rest of `generate` | {rest:.1f} | |",
            "",
            f"Low-margin drafts: {record['trigger_rate']:.1%}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="local folder or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", choices=DATASETS, default="math500")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=MarginGateConfig.num_draft_tokens)
    parser.add_argument("--threshold", type=float, default=MarginGateConfig.threshold)
    parser.add_argument("--schedule", choices=SCHEDULES, default=MarginGateConfig.schedule)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    options = parser.parse_args()
    record = run(options)
    write(options.out, f"overhead_{options.dataset}_b{options.batch_size}", record, as_markdown(record))


if __name__ == "__main__":
    main()
