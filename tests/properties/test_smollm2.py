"""The promise on a real checkpoint: SmolLM2-135M-Instruct, 16 prompts, 64 tokens, batches of 1, 2, 5 and 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitwise import Run, assert_same, canonical, run_batch
from fault_injection import plain_verifier
from margingate_hf import MarginGateConfig
from margingate_hf.analysis.compare import decode_all, divergence
from margingate_hf.cli.loading import as_prompts
from margingate_hf.cli.prompts import PROMPTS
from margingate_hf.forward.context import Segment
from margingate_hf.verifier import reference_logits, verifier_for

pytestmark = pytest.mark.smollm2
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def prompts(smollm2: tuple[Any, Any]) -> list[list[int]]:
    _, tokenizer = smollm2
    return [tokenizer(text, add_special_tokens=False).input_ids for text in as_prompts(tokenizer, PROMPTS)]


@pytest.fixture(scope="module")
def together(smollm2: tuple[Any, Any], prompts: list[list[int]]) -> list[Run]:
    return run_batch(smollm2[0], prompts, NEW_TOKENS)


@pytest.mark.parametrize("batch_size", [1, pytest.param(2, marks=pytest.mark.long), 5])
def test_every_batch_size_gives_the_same_bits(
    smollm2: tuple[Any, Any], prompts: list[list[int]], together: list[Run], batch_size: int
) -> None:
    model, _ = smollm2
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        side = "right" if batch_size == 5 else "left"
        for offset, run in enumerate(run_batch(model, batch, NEW_TOKENS, side=side)):
            assert_same(run, together[start + offset], f"prompt {start + offset}")


def test_it_is_the_canonical_text(smollm2: tuple[Any, Any], prompts: list[list[int]], together: list[Run]) -> None:
    for index in (0, 7):
        assert_same(together[index], canonical(smollm2[0], prompts[index], NEW_TOKENS), f"prompt {index}")


def test_other_settings_give_the_same_bits(
    smollm2: tuple[Any, Any], prompts: list[list[int]], together: list[Run]
) -> None:
    config = MarginGateConfig(num_draft_tokens=15, threshold=2.0, schedule="fixed", resident_weights=True)
    for run, expected in zip(run_batch(smollm2[0], prompts[3:8], NEW_TOKENS, config), together[3:8], strict=True):
        assert_same(run, expected)


def test_the_number_of_threads_changes_no_bit(
    smollm2: tuple[Any, Any], prompts: list[list[int]], together: list[Run]
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(2, before))  # one where the suite uses two, and the other way round
        for run, expected in zip(run_batch(smollm2[0], prompts[:3], NEW_TOKENS), together[:3], strict=True):
            assert_same(run, expected)
    finally:
        torch.set_num_threads(before)


def test_plain_bf16_does_move_with_the_batch(smollm2: tuple[Any, Any]) -> None:
    """The guard: on the same prompts the same comparison fails without the gate."""
    model, tokenizer = smollm2
    texts = as_prompts(tokenizer, PROMPTS)[:8]
    alone, batched = (decode_all(model, tokenizer, texts, size, NEW_TOKENS // 2, None) for size in (1, 8))
    assert divergence(alone, batched).prompts >= 1


def test_fp32_without_fixed_plans_fails_this_check(smollm2: tuple[Any, Any], prompts: list[list[int]]) -> None:
    model, _ = smollm2
    with plain_verifier(model), pytest.raises(AssertionError, match="differ"):
        for prompt, run in zip(prompts[:4], run_batch(model, prompts[:4], 8), strict=True):
            assert_same(run, run_batch(model, [prompt], 8)[0])


def test_logits_against_float64(smollm2: tuple[Any, Any], prompts: list[list[int]], record_property: Any) -> None:
    """
    "split" within 2e-5, "float32" within 2e-6 (relative, whole sequence); "auto" is reported.
    """
    model, _ = smollm2
    text = [*prompts[3], *prompts[10]]
    with torch.no_grad():
        exact = reference_logits(model, text, torch.float64)
    for kv_dtype, allowed in (("auto", 2e-2), ("split", 2e-5), ("float32", 2e-6)):
        verifier = verifier_for(model, MarginGateConfig(kv_dtype=kv_dtype))
        with torch.no_grad():
            logits = verifier.run(verifier.new_cache(1, kv_dtype), [Segment(0, 0, text)])
        error = float((logits - exact).norm() / exact.norm())
        record_property(f"relative_error_{kv_dtype}", error)
        assert error <= allowed, f"{kv_dtype}: {error:.1e}"
