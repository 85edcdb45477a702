"""Determinism and cost of every system of the field, by one program on one machine.

OMP_NUM_THREADS=1 python -m evals determinism --dataset math500 --limit 12 --new-tokens 96

Each system runs in a process of its own, so that its peak memory is its own. Finished runs are kept under `OUT/raw` and
read again, so an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import AutoTokenizer

from margingate_hf.cli.checkpoints import quiet_transformers
from margingate_hf.cli.loading import as_prompts
from margingate_hf.verifier import verifier_for

from ..decoding import Run, decode
from ..machine import describe
from ..models import load, source
from ..plots import plot_survival
from ..prompts import load_prompts
from ..reports import keep, slug
from ..run import common, sizes
from ..systems import DEFAULT, SYSTEMS
from ..tables import as_markdown, summarise

ROUNDED = 5  # decimals of the margins and probabilities that are kept


def raw_path(options: argparse.Namespace, system: str, batch_size: int) -> Path:
    """Where one run is kept."""
    return Path(options.out) / "raw" / f"{slug(options.model)}_{options.dataset}_{system}_b{batch_size}.json"


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a kept run must agree in to be read again."""
    return {
        "model": options.model,
        "dataset": options.dataset,
        "limit": options.limit,
        "new_tokens": options.new_tokens,
        "min_new_tokens": options.min_new_tokens,
    }


def kept_run(options: argparse.Namespace, system: str, batch_size: int) -> Run | None:
    """A finished run of these settings, or `None`."""
    path = raw_path(options, system, batch_size)
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    return Run(**record["run"]) if record["settings"] == settings(options) else None


def run_system(options: argparse.Namespace, system: str) -> None:
    """All batch sizes of one system that are not kept yet; the work of one process."""
    model, tokenizer = load(options.model, SYSTEMS[system].dtype)
    texts = as_prompts(tokenizer, load_prompts(options.dataset, options.limit, options.data_dir))
    gate = SYSTEMS[system].gate()
    model.generation_config.min_new_tokens = options.min_new_tokens
    if gate is not None:
        verifier_for(model, gate)  # the self-test is no part of a run's time
    for batch_size in options.batch_sizes:
        if kept_run(options, system, batch_size) is not None:
            continue
        run = Run(system, options.dataset, batch_size)
        with tqdm(total=len(texts), desc=f"{system}, batch {batch_size}", unit="prompt") as bar:
            decode(model, tokenizer, texts, run, options.new_tokens, gate, bar.update)
        run.margins = [[round(value, ROUNDED) for value in row] for row in run.margins]
        run.top1 = [[round(value, ROUNDED) for value in row] for row in run.top1]
        path = raw_path(options, system, batch_size)
        keep(path, {"settings": settings(options), "machine": describe(), "run": run.to_dict()})


def run_all(options: argparse.Namespace) -> dict[str, list[Run]]:
    """Runs what is missing, a process a system, and reads everything back."""
    for system in options.systems:
        if all(kept_run(options, system, size) is not None for size in options.batch_sizes):
            continue
        subprocess.run([sys.executable, *options.command, "--worker", system], check=True)
    found: dict[str, list[Run]] = {}
    for system in options.systems:
        runs = [kept_run(options, system, size) for size in options.batch_sizes]
        found[system] = [run for run in runs if run is not None]
    return found


def _systems(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - SYSTEMS.keys())
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown systems {unknown}; known are {', '.join(SYSTEMS)}")
    return names


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    common(parser, limit=12, new_tokens=96, out="evals/results/determinism")
    parser.add_argument("--min-new-tokens", type=int, help="keeps an output from ending, for the long runs")
    parser.add_argument("--batch-sizes", type=sizes, default=[1, 2, 4, 8, 16], metavar="1,2,...")
    parser.add_argument("--systems", type=_systems, default=list(DEFAULT), metavar=",".join(DEFAULT))
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)


def result(options: argparse.Namespace) -> str:
    """Name of the result's files."""
    return f"{slug(options.model)}_{options.dataset}" + ("_long" if options.min_new_tokens else "")


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measures of every system, from runs that are kept as they finish."""
    if options.worker:
        run_system(options, options.worker)
        return None
    runs = run_all(options)
    with quiet_transformers():
        decoder = AutoTokenizer.from_pretrained(source(options.model)).decode
    summary = summarise(runs, options.dataset, options.limit, options.data_dir, decoder)
    name = result(options)
    plot_survival(summary, options.new_tokens, Path(options.out) / f"{name}_survival.png")
    return {"name": name, "settings": settings(options), "systems": summary}


report = as_markdown
