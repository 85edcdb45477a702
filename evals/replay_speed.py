"""Time to replay stored texts over the time to generate them again, interleaved.

OMP_NUM_THREADS=2 python -m evals.replay_speed --limit 8 --new-tokens 256 --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from margingate_hf import MarginGateConfig, Transcript, replay_all
from margingate_hf.cli.loading import as_ids, load

from .machine import as_text, describe
from .prompts import DATASETS, load_prompts
from .reports import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="local folder or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", choices=DATASETS, default="chat")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    options = parser.parse_args()
    model, tokenizer = load(options.model, progress=True)
    prompts = as_ids(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
    seconds: dict[str, list[float]] = {"one by one": [], "in a batch": [], "replay": []}
    for _ in range(options.repeats + 1):
        stored = []
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
        if not all(result.canonical for result in results):
            raise SystemExit("a generated text did not replay as canonical")
    kept = {name: values[1:] for name, values in seconds.items()}  # the first round warms up
    record = {
        "command": f"python -m evals.replay_speed --limit {options.limit} --new-tokens {options.new_tokens} "
        f"--repeats {options.repeats}",
        "machine": describe(),
        "tokens": sum(len(one.output) for one in stored),
        "prompt_tokens": sum(len(one.prompt) for one in stored),
        "seconds": kept,
    }
    ratios = {
        name: statistics.median(a / b for a, b in zip(kept[name], kept["replay"], strict=True))
        for name in ("one by one", "in a batch")
    }
    lines = [
        "# Replay against generating again",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(describe())}. {options.limit} texts, {record['tokens']} new tokens behind {record['prompt_tokens']} "
        f"of prompts. Medians of {options.repeats} interleaved rounds.",
        "",
        "| | seconds | over replay |",
        "|---|---|---|",
        *(
            f"| generate again, {name} | {statistics.median(kept[name]):.1f} | {ratio:.1f} |"
            for name, ratio in ratios.items()
        ),
        f"| replay, all in passes of up to 512 tokens | {statistics.median(kept['replay']):.1f} | 1 |",
        "",
    ]
    write(options.out, "replay_speed", record, "\n".join(lines))


if __name__ == "__main__":
    main()
