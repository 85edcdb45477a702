"""A real checkpoint with sliding windows: Gemma 3 270M (window 512, every sixth layer global), texts longer than it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitwise import assert_same, canonical, run_batch
from margingate_hf import MarginGateConfig, enable
from margingate_hf.cli.checkpoints import GEMMA3_270M, fetch
from margingate_hf.cli.prompts import PROMPTS
from margingate_hf.verifier import reference_logits

pytestmark = pytest.mark.long
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = fetch(GEMMA3_270M)
    return enable(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ), AutoTokenizer.from_pretrained(path)


def test_texts_longer_than_the_window(gemma: tuple[Any, Any]) -> None:
    model, tokenizer = gemma
    assert model.config.get_text_config().sliding_window == 512
    long = " ".join(PROMPTS * 3)
    prompts = [tokenizer(text).input_ids for text in (long, PROMPTS[5], long[200:], PROMPTS[3])]
    assert len(prompts[0]) > 512 + 64
    together = run_batch(model, prompts, NEW_TOKENS)
    for index, (prompt, run) in enumerate(zip(prompts, together, strict=True)):
        assert_same(
            run, run_batch(model, [prompt], NEW_TOKENS, MarginGateConfig(num_draft_tokens=4))[0], f"prompt {index}"
        )
    assert_same(together[1], canonical(model, prompts[1], NEW_TOKENS))
    text = [*prompts[0], *together[0].tokens[:-1]]
    with torch.no_grad():
        exact = reference_logits(model, text)[len(prompts[0]) - 1 :]
    assert (
        together[0].logits - exact
    ).norm() / exact.norm() < 2e-4  # two K/V planes, twice the layers' depth of SmolLM2
