"""Twelve runtime configurations of one machine: batch size x threads x instruction set, a process each.

python -m evals configurations --dataset math500 --limit 16 --new-tokens 32

LayerCast's experiment (NeurIPS 2025, section 3: batch sizes, GPU counts and types) on what a CPU has to vary. Batch and
threads are covered by this project's promise; instruction sets are measured, with every `kv_dtype`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from .. import metrics
from ..answers import judged, load_answers
from ..decoding import Run, decode
from ..machine import as_text
from ..models import load
from ..prompts import load_prompts
from ..reports import keep, slug
from ..run import common
from ..systems import SYSTEMS

DEFAULT = ("off", "fp32", "exact-auto", "exact", "exact-float32")
# What torch and oneDNN call an instruction set.
INSTRUCTIONS = {"sse": ("default", "SSE41"), "avx2": ("avx2", "AVX2"), "avx512": ("avx512", "DEFAULT")}


@dataclass(frozen=True)
class Configuration:
    """One way to run: a batch size, a number of threads, an instruction set by its key in `INSTRUCTIONS`."""

    batch_size: int
    threads: int
    instructions: str

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"b{self.batch_size}-t{self.threads}-{self.instructions}"

    def environment(self) -> dict[str, str]:
        """Variables of the process."""
        aten, onednn = INSTRUCTIONS[self.instructions]
        return {
            **os.environ,
            "ATEN_CPU_CAPABILITY": aten,
            "ONEDNN_MAX_CPU_ISA": onednn,
            "OMP_NUM_THREADS": str(self.threads),
        }


def configurations() -> list[Configuration]:
    """Batch 4, 8, 16 x threads 1, 2 x AVX2 and the machine's best; where AVX2 is the best, SSE and AVX2."""
    sets = ("avx2", "avx512") if "AVX512" in torch.backends.cpu.get_cpu_capability() else ("sse", "avx2")
    return [Configuration(*parts) for parts in itertools.product((4, 8, 16), (1, 2), sets)]


def run_one(options: argparse.Namespace, configuration: Configuration) -> None:
    """All systems in this process's configuration."""
    for system in options.systems:
        path = _path(options, system, configuration)
        if path.exists():
            continue
        model, tokenizer = load(options.model, SYSTEMS[system].dtype)
        run = Run(system, options.dataset, configuration.batch_size)
        prompts = _prompts(options, tokenizer)
        decode(model, tokenizer, prompts, run, options.new_tokens, SYSTEMS[system].gate())
        keep(path, run.to_dict())


def _prompts(options: argparse.Namespace, tokenizer: Any) -> list[str]:
    from margingate_hf.cli.loading import as_prompts

    return as_prompts(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))


def _path(options: argparse.Namespace, system: str, configuration: Configuration) -> Path:
    job = f"{slug(options.model)}_{options.dataset}_{options.limit}x{options.new_tokens}"
    return Path(options.out) / "raw" / f"{job}_{system}_{configuration.name}.json"


def spread(runs: dict[Configuration, Run], rights: list[list[bool]] | None) -> dict[str, Any]:
    """Spread over all configurations, and over those of one instruction set."""
    parts = list(runs.values())
    indices = metrics.division_indices(parts)
    within = 0
    for kind in {configuration.instructions for configuration in runs}:
        same = [run for configuration, run in runs.items() if configuration.instructions == kind]
        within = max(within, sum(index is not None for index in metrics.division_indices(same)))
    moved = [index for index in indices if index is not None]
    return {
        "prompts": len(indices),
        "diverged": len(moved),
        "diverged_within_instructions": within,
        "div_index_quartiles": list(metrics.quartiles(moved)) if moved else None,
        "avg_std_top1": metrics.spread_of_top1(parts),
        "std_length": metrics.spread_of_length(parts),
        "std_accuracy": None if rights is None else metrics.spread_of_accuracy(rights),
        "plans": sorted({run.plan for run in parts if run.plan}),
    }


def report(record: dict[str, Any]) -> str:
    """One row a system."""
    lines = [
        "# Twelve runtime configurations",
        "",
        f"`{record['command']}`",
        "",
        f"{as_text(record['machine'])}. {record['limit']} prompts of {record['dataset']}, {record['new_tokens']} new "
        f"tokens; configurations: {', '.join(record['configurations'])}.",
        "",
        "| system | outputs that differ among configurations | within one instruction set | Div_Index (quartiles) | "
        "Avg_Std@top1 | Std length | Std@Acc |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, row in record["systems"].items():
        quarters = row["div_index_quartiles"]
        cells = [
            system,
            f"{row['diverged']} of {row['prompts']}",
            f"{row['diverged_within_instructions']} of {row['prompts']}",
            "-" if quarters is None else " / ".join(f"{value:.0f}" for value in quarters),
            f"{row['avg_std_top1']:.1e}" if row["avg_std_top1"] else "0",
            f"{row['std_length']:.2f}",
            "-" if row["std_accuracy"] is None else f"{row['std_accuracy']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, limit=16, new_tokens=32, out="evals/results/configurations")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(DEFAULT))
    parser.add_argument("--worker", help=argparse.SUPPRESS)


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """Spread of every system over the configurations, from runs that are kept as they finish."""
    every = configurations()
    if options.worker:
        run_one(options, next(one for one in every if one.name == options.worker))
        return None
    for one in tqdm(every, desc="configurations"):
        if not all(_path(options, system, one).exists() for system in options.systems):
            command = [sys.executable, *options.command, "--worker", one.name]
            subprocess.run(command, check=True, env=one.environment())
    _, tokenizer = load(options.model)
    answers = load_answers(options.dataset, options.limit, options.data_dir)
    systems = {}
    for system in options.systems:
        runs = {one: Run(**json.loads(_path(options, system, one).read_text())) for one in every}
        systems[system] = spread(runs, judged(options.dataset, runs.values(), answers, tokenizer.decode))
    return {
        "dataset": options.dataset,
        "limit": options.limit,
        "new_tokens": options.new_tokens,
        "configurations": [one.name for one in every],
        "systems": systems,
    }
