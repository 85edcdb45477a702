"""All prompts under one system at one batch size: tokens, margins and probabilities of every step, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from margingate_hf import MarginGateConfig
from margingate_hf.analysis.compare import generate_batches
from margingate_hf.verifier.top2 import top2_margin

from .machine import peak_bytes

COUNTS = (
    "draft_steps",
    "drafted_tokens",
    "verify_forwards",
    "verified_tokens",
    "low_margin_steps",
    "flips",
    "wasted_tokens",
    "repaired_columns",
    "setup_seconds",
    "prefill_seconds",
    "decode_seconds",
    "verify_seconds",
    "wasted_seconds",
)


@dataclass
class Run:
    """
    Attributes:
        tokens: new tokens of each prompt, its end included.
        margins: top-1/top-2 gap of the logits each token was taken from, in logits.
        top1: probability of the likeliest token there.
        seconds: wall clock of the `generate` calls.
        peak_bytes: largest resident set of the process so far.
        counts: sums of the gate's statistics; empty without a gate.
    """

    system: str
    dataset: str
    batch_size: int
    tokens: list[list[int]] = field(default_factory=list)
    margins: list[list[float]] = field(default_factory=list)
    top1: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    plan: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def decode(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    run: Run,
    new_tokens: int,
    gate: MarginGateConfig | None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Run:
    """
    Decodes `prompts` greedily in batches of `run.batch_size`, left-padded, and fills in `run`.

    Args:
        model (`PreTrainedModel`): an enabled model.
        tokenizer (`PreTrainedTokenizerBase`): with `padding_side="left"`.
        prompts (`Sequence[str]`): chat template applied.
        gate ([`MarginGateConfig`], *optional*): `None` decodes as transformers does.
        on_progress (`Callable`): told how many prompts each batch has finished.
    """
    arguments = {"max_new_tokens": new_tokens, "margin_gate": gate, "output_logits": True}
    for out, rows, seconds in generate_batches(model, tokenizer, prompts, run.batch_size, **arguments):
        run.seconds += seconds
        _keep_steps(run, rows, out.logits)
        if gate is not None:
            run.plan = out.margin_gate.plan
            for name in COUNTS:
                run.counts[name] = run.counts.get(name, 0) + getattr(out.margin_gate, name)
        on_progress(len(rows))
    run.peak_bytes = peak_bytes()
    return run


def _keep_steps(run: Run, rows: list[list[int]], logits: Sequence[torch.Tensor]) -> None:
    steps = [(top2_margin(step)[1], step.float().softmax(-1).amax(-1)) for step in logits]
    for index, row in enumerate(rows):
        run.tokens.append(row)
        run.margins.append([float(margins[index]) for margins, _ in steps[: len(row)]])
        run.top1.append([float(top1[index]) for _, top1 in steps[: len(row)]])
