"""One program for every experiment: states the command, the machine and the result in one way.

python -m evals NAME --help
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Each is a module in `evals/experiments/`, and the question it answers.
EXPERIMENTS = {
    "determinism": "Which systems give the same output at every batch size, and at what cost?",
    "configurations": "What changes over batch sizes, threads and instruction sets?",
    "cost": "What does each system cost a token, and where does the time go?",
    "batching": "How long do many prompts take, and how much memory?",
    "schedules": "When should a verify forward run?",
    "growth": "How do a draft step and a verify forward grow with rows and length?",
    "transfer": "Does a calibrated threshold hold on other prompts?",
    "replay": "How long does checking a stored output take?",
    "lm_eval": "Do lm-eval's responses change with the batch size?",
    "architectures": "Which causal language models of transformers are supported?",
    "gpu": "Do the kernels hold on this GPU, and how fast are they?",
}


def module_of(name: str) -> Any:
    """The module of an experiment. Imports the package from the checkout where it is not installed."""
    for folder in ("src", "kernels/torch-ext"):
        if importlib.util.find_spec("margingate_hf") is None or importlib.util.find_spec("margingate_kernels") is None:
            sys.path.insert(0, str(ROOT / folder))
    return importlib.import_module(f"evals.experiments.{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one experiment and writes `OUT/NAME.json` and `OUT/NAME.md`; the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    listing = "\n".join(f"  {name:15}{question}" for name, question in EXPERIMENTS.items())
    top = argparse.ArgumentParser(
        prog="python -m evals", epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("name", choices=EXPERIMENTS, metavar="NAME", help="see below")
    name = top.parse_args(arguments[:1]).name
    module = module_of(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m evals {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.arguments(parser)
    options = parser.parse_args(arguments[1:])
    options.command = ["-m", "evals", *arguments]  # behind the interpreter: for processes of its own
    record = module.measure(options)
    if record is None:  # a process of its own has done its part
        return 0
    from .machine import describe
    from .reports import write

    record = {"command": shlex.join(["python", *options.command]), "machine": describe(), **record}
    result = module.result(options) if hasattr(module, "result") else name
    write(options.out, result, record, module.report(record))
    return int(bool(record.get("failed")))


def common(parser: argparse.ArgumentParser, repeats: int | None = None, **defaults: Any) -> None:
    """
    The arguments that most experiments share.

    Args:
        parser (`argparse.ArgumentParser`): gets them.
        repeats (`int`, *optional*): default of `--repeats`, where there is one.
        defaults: of `dataset`, `limit`, `new_tokens`, `out`.
    """
    from .prompts import DATASETS

    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, a local folder or a hub id")
    parser.add_argument("--dataset", choices=DATASETS, default=defaults.get("dataset", "math500"))
    parser.add_argument("--data-dir", help="folder of the benchmarks' JSONL files; default: $MARGINGATE_DATA")
    parser.add_argument("--limit", type=int, default=defaults.get("limit", 8), help="prompts")
    parser.add_argument("--new-tokens", type=int, default=defaults.get("new_tokens", 64))
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, default=Path(defaults.get("out", "evals/results")))


def sizes(text: str) -> list[int]:
    """Batch sizes, comma-separated, that begin with 1."""
    found = [int(part) for part in text.split(",")]
    if found[0] != 1 or min(found) < 1:
        raise argparse.ArgumentTypeError(f"positive sizes that begin with 1, got {text!r}")
    return found
