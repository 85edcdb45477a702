"""Time to replay stored outputs over the time to generate them again, interleaved.

OMP_NUM_THREADS=2 python -m evals replay --limit 8 --new-tokens 256 --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from margingate_hf import MarginGateConfig, Transcript, replay_all
from margingate_hf.cli.loading import as_ids

from ..machine import as_text
from ..models import load
from ..prompts import load_prompts
from ..run import common


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, repeats=3, dataset="chat", new_tokens=256)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of generating and of replaying, `--repeats` rounds; the first round warms up."""
    model, tokenizer = load(options.model)
    prompts = as_ids(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
    seconds: dict[str, list[float]] = {"one by one": [], "in a batch": [], "replay": []}
    stored: list[Transcript] = []
    for _ in range(options.repeats + 1):
        for name, rows in (("one by one", 1), ("in a batch", len(prompts))):
            began = time.perf_counter()
            outputs = model.generate_batch(
                prompts,
                max_new_tokens=options.new_tokens,
                do_sample=False,
                margin_gate=MarginGateConfig(receipt=True),
                max_batch_size=rows,
            )
            seconds[name].append(time.perf_counter() - began)
            stored = [Transcript(o.prompt_ids, o.generated_tokens, o.receipt) for o in outputs.values()]
        began = time.perf_counter()
        results = list(replay_all(model, stored))
        seconds["replay"].append(time.perf_counter() - began)
        if not all(found.canonical for found in results):
            raise SystemExit("a generated output did not replay as canonical")
    return {
        "prompts": len(prompts),
        "tokens": sum(len(one.output) for one in stored),
        "prompt_tokens": sum(len(one.prompt) for one in stored),
        "seconds": {name: values[1:] for name, values in seconds.items()},
    }


def report(record: dict[str, Any]) -> str:
    """One row a way."""
    kept = record["seconds"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(kept[name], kept["replay"], strict=True))
        for name in ("one by one", "in a batch")
    }
    lines = [
        "# Replay against generating again",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}. {record['prompts']} outputs, {record['tokens']} new tokens behind "
        f"{record['prompt_tokens']} of prompts. Medians of {len(kept['replay'])} interleaved rounds.",
        "",
        "| | seconds | over replay |",
        "|---|---|---|",
        *(
            f"| generate again, {name} | {statistics.median(kept[name]):.1f} | {ratio:.1f} |"
            for name, ratio in ratios.items()
        ),
        f"| replay, in forwards of up to 512 tokens | {statistics.median(kept['replay']):.1f} | 1 |",
        "",
    ]
    return "\n".join(lines)
