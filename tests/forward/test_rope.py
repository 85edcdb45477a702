"""RoPE types that follow the batch in transformers, pinned to each row here."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from bitwise import assert_same, canonical, padded, run_batch
from margingate_hf import MarginGateConfig, enable
from margingate_hf.forward.architecture import architecture_of
from margingate_hf.verifier import reference_logits
from tiny import random_prompts, tiny_model

ORIGINAL = 40
PROMPTS = random_prompts([9, 60, 20, 35])  # with 12 new tokens: short, long, short, long


@functools.cache
def phi3_longrope() -> Any:
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, **factors}
    return enable(tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=ORIGINAL))


def test_stock_longrope_does_move_with_its_company() -> None:
    """The reason for all this: in FP32, a long companion rotates a short row by the other table."""
    model = phi3_longrope()
    batch = padded([PROMPTS[0], PROMPTS[1]])
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(**batch, position_ids=positions).logits[0, -1].float()
        alone = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    assert (together - alone).norm() / alone.norm() > 0.05


def test_rows_on_both_sides_of_the_original_length() -> None:
    model = phi3_longrope()
    architecture = architecture_of(model)
    assert [architecture.needs_long_table(len(prompt) + 12) for prompt in PROMPTS] == [False, True, False, True]
    for prompt, run in zip(PROMPTS, run_batch(model, PROMPTS, 12), strict=True):
        assert_same(run, canonical(model, prompt, 12), f"{len(prompt)} tokens")
        assert_same(run, run_batch(model, [prompt], 12, MarginGateConfig(num_draft_tokens=2))[0])


@pytest.mark.parametrize("row", [1, 2])
def test_each_row_is_right_by_its_own_table(row: int) -> None:
    """Against the stock FP32 forward of the whole text, which picks the table by the text's own length."""
    model = phi3_longrope()
    text = PROMPTS[row]
    length = 12 if row == 1 else 5
    run = run_batch(model, PROMPTS, length)[row]
    architecture = architecture_of(model)
    assert architecture.needs_long_table(len(text) + length) == architecture.needs_long_table(len(text))
    with torch.no_grad():
        expected = reference_logits(model, [*text, *run.tokens[:-1]], torch.float64)[len(text) - 1 :]
    assert (run.logits - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_stock_call_before_changes_nothing(kind: str) -> None:
    if kind == "longrope":
        model = phi3_longrope()
    else:
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        model = enable(tiny_model("llama", rope_parameters=rope, max_position_embeddings=90))
    before = run_batch(model, PROMPTS, 6)
    mark = model.generate(**padded(PROMPTS), max_new_tokens=2, margin_gate=True, return_dict_in_generate=True)
    model.generate(**padded(random_prompts([120])), max_new_tokens=3, do_sample=False)
    for run, right in zip(run_batch(model, PROMPTS, 6), before, strict=True):
        assert_same(run, right)
    again = model.generate(**padded(PROMPTS), max_new_tokens=2, margin_gate=True, return_dict_in_generate=True)
    assert again.margin_gate.fingerprint == mark.margin_gate.fingerprint


def test_a_continued_chat_that_crosses_the_length_is_read_again() -> None:
    model = phi3_longrope()
    prompts = [PROMPTS[0]]
    first = model.generate(**padded(prompts), max_new_tokens=6, margin_gate=True, return_dict_in_generate=True)
    longer = [first.sequences[0].tolist() + PROMPTS[3]]
    arguments = dict(max_new_tokens=6, margin_gate=True, return_dict_in_generate=True)
    second = model.generate(**padded(longer), cache=first.cache, **arguments)
    assert second.margin_gate.reused_tokens == 0
    assert torch.equal(second.sequences, model.generate(**padded(longer), **arguments).sequences)
