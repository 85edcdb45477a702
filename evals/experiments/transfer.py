"""A threshold calibrated on one dataset, used unchanged on the others: what it triggers and what it misses there.

OMP_NUM_THREADS=1 python -m evals transfer --dataset math500 --targets gsm8k,humaneval,chat --limit 12
"""

from __future__ import annotations

import argparse
from typing import Any

from tqdm.auto import tqdm

from margingate_hf.analysis.bounds import binomial_upper_bound
from margingate_hf.analysis.calibrate import calibrate, collect
from margingate_hf.cli.loading import as_ids
from margingate_hf.verifier.top2 import is_low

from ..machine import as_text
from ..models import load
from ..prompts import load_prompts
from ..run import common, sizes


def judge(model: Any, prompts: list[list[int]], threshold: float, options: argparse.Namespace) -> dict[str, Any]:
    """Trigger rate and misses of a threshold on prompts it was not calibrated on."""
    seen = collect(model, prompts, options.batch_sizes, options.new_tokens)
    flips = [one for one in seen if one.flipped]
    missed = [one for one in flips if one.margin >= threshold]
    return {
        "steps": len(seen),
        "flips": len(flips),
        "missed": len(missed),
        "miss_bound": binomial_upper_bound(len(missed), len(seen), options.confidence),
        "trigger_rate": sum(is_low(one.margin, threshold) for one in seen) / len(seen),
        "largest_flip": max((one.margin for one in flips), default=None),
        "prompts": len(prompts),
        "prompts_missed": len({one.prompt for one in missed}),
    }


def report(record: dict[str, Any]) -> str:
    """The calibration and one row a dataset."""
    found = record["calibration"]
    lines = [
        "# Transfer of a calibrated threshold",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}. SmolLM2-135M-Instruct in BF16 unless the command says otherwise.",
        "",
        f"Calibrated on {record['source']}: threshold {found['threshold']:.4g} logits ({found['threshold_steps']:.3g} "
        f"BF16 steps), asked for at most {found['miss_rate']:.0e} missed flips a step at {found['confidence']:.0%}; "
        f"bound reached {found['miss_bound']:.1e}" + ("." if found["sufficient"] else " (**sample too small**)."),
        "",
        "| batch size | steps | flips | near ties | confident | largest margin of a flip |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["batch_sizes"]:
        cells = [row["batch_size"], row["steps"], row["flips"], row["near_ties"], row["confident"], row["largest_flip"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "| dataset | steps | flips | flip rate | trigger rate | missed | upper bound | prompts with a miss | largest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in record["datasets"].items():
        lines.append(
            f"| {name} | {row['steps']} | {row['flips']} | {row['flips'] / row['steps']:.2%} "
            f"| {row['trigger_rate']:.1%} | {row['missed']} | {row['miss_bound']:.1e} "
            f"| {row['prompts_missed']} of {row['prompts']} | "
            f"{row['largest_flip']} |"
        )
    edges, shares = found["curve"]["edges"], found["curve"]["probabilities"]
    lines += ["", "| margin from | flip probability |", "|---|---|"]
    lines += [f"| {edge} | {share:.2g} |" for edge, share in zip(edges, shares, strict=True)]
    return "\n".join([*lines, ""])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, limit=12, new_tokens=96)
    parser.add_argument("--targets", default="gsm8k,humaneval,chat")
    parser.add_argument("--batch-sizes", type=sizes, default=[1, 2, 4, 8], metavar="1,2,...")
    parser.add_argument("--miss-rate", type=float, default=1e-3)
    parser.add_argument("--confidence", type=float, default=0.95)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A calibration on `--dataset`, and its threshold on the targets."""
    model, tokenizer = load(options.model)

    def prompts_of(dataset: str) -> list[list[int]]:
        return as_ids(tokenizer, load_prompts(dataset, options.limit, options.data_dir))

    found = calibrate(
        model,
        prompts_of(options.dataset),
        options.batch_sizes,
        options.miss_rate,
        options.confidence,
        options.new_tokens,
        progress_bar=True,
    )
    datasets = {
        name: judge(model, prompts_of(name), found.threshold, options)
        for name in tqdm(options.targets.split(","), desc="transfer")
    }
    return {"source": options.dataset, "calibration": found.to_dict(), "datasets": datasets}
