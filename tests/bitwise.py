"""What "the same" means in this suite: tokens, canonical logits and committed K/V columns, bit for bit, everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from margingate_hf import MarginGateConfig
from margingate_hf.forward.architecture import architecture_of
from margingate_hf.forward.context import Segment
from margingate_hf.verifier import verifier_for

# The default schedule may find that drafts do not pay on a machine, and then nothing is drafted that could go wrong.
DRAFTING = MarginGateConfig(schedule="fixed", num_draft_tokens=7)


@dataclass
class Run:
    """
    One row's result.

    Attributes:
        tokens: new tokens.
        logits: canonical FP32 logits, `[new tokens, vocabulary]`.
        columns: committed keys and values of each layer, float32 `[heads, positions, dim]`.
    """

    tokens: list[int]
    logits: torch.Tensor
    columns: list[tuple[torch.Tensor, torch.Tensor]]


def padded(prompts: list[list[int]], side: str = "left", pad: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` as a tokenizer would give them."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        fill = width - len(prompt)
        ids.append([pad] * fill + prompt if side == "left" else prompt + [pad] * fill)
        mask.append([0] * fill + [1] * len(prompt) if side == "left" else [1] * len(prompt) + [0] * fill)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def run_batch(
    model: Any,
    prompts: list[list[int]],
    new_tokens: int,
    config: MarginGateConfig | None = None,
    side: str = "left",
    **arguments: Any,
) -> list[Run]:
    """One gated `generate` call; also checks the cache it leaves."""
    out = model.generate(
        **padded(prompts, side),
        max_new_tokens=new_tokens,
        margin_gate=config or DRAFTING,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **arguments},
    )
    out.cache.check()
    runs = []
    for row, statistics in enumerate(out.margin_gate.rows):
        count = statistics.new_tokens
        start = out.sequences.shape[1] - len(out.logits)
        assert out.cache.verified[row] == statistics.prompt_tokens + count - 1
        runs.append(
            Run(
                out.sequences[row, start : start + count].tolist(),
                torch.stack([step[row] for step in out.logits[:count]]),
                [tuple(t.clone() for t in out.cache.committed(i, row)) for i in range(len(out.cache.layers))],
            )
        )
    return runs


def canonical(
    model: Any, prompt: list[int], new_tokens: int, config: MarginGateConfig | None = None, eos: int = 2
) -> Run:
    """The definition: verifier-only decoding of one prompt, one token at a time, the prompt's tokens too."""
    config = config or MarginGateConfig()
    verifier = verifier_for(model, config)
    cache = verifier.new_cache(1, config.kv_dtype)
    cache.long_rows = [architecture_of(model).needs_long_table(len(prompt) + new_tokens)]
    text, logits = list(prompt), []
    position = 0
    while len(text) < len(prompt) + new_tokens and not (len(text) > len(prompt) and text[-1] == eos):
        with torch.no_grad():
            step = verifier.run(cache, [Segment(0, position, [text[position]])])
        position += 1
        if position == len(text):
            logits.append(step[0])
            text.append(int(step[0].argmax()))
    return Run(text[len(prompt) :], torch.stack(logits), [cache.committed(i, 0) for i in range(len(cache.layers))])


def assert_same(a: Run, b: Run, what: str = "") -> None:
    """Every token, logit bit and K/V bit."""
    assert a.tokens == b.tokens, f"{what}: tokens differ: {a.tokens} / {b.tokens}"
    assert torch.equal(a.logits, b.logits), f"{what}: {_count(a.logits, b.logits)} steps differ in logit bits"
    for layer, (ours, theirs) in enumerate(zip(a.columns, b.columns, strict=True)):
        for name, x, y in zip(("keys", "values"), ours, theirs, strict=True):
            assert torch.equal(x, y), f"{what}: layer {layer} {name} differ in bits"


def _count(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a != b).any(-1).sum())
