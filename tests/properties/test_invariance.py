"""The promise: a row's bits do not depend on its batch, its padding, the window or the gate. Tiny random models."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitwise import Run, assert_same, canonical, run_batch
from fault_injection import disturbed_drafts, plain_verifier
from margingate_hf import MarginGateConfig, enable
from margingate_hf.config import KV_DTYPES
from tiny import random_prompts, tiny_model

NEW_TOKENS = 20
ARCHITECTURES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gpt-neox", "gpt2", "gemma2"]


@functools.cache
def model_of(name: str) -> Any:
    return enable(tiny_model(name))


@functools.cache
def canonical_of(name: str, prompt: tuple[int, ...], kv_dtype: str = "split") -> Run:
    return canonical(model_of(name), list(prompt), NEW_TOKENS, MarginGateConfig(kv_dtype=kv_dtype))


def assert_canonical(name: str, prompts: list[list[int]], config: MarginGateConfig, side: str = "left") -> None:
    for prompt, run in zip(prompts, run_batch(model_of(name), prompts, NEW_TOKENS, config, side), strict=True):
        assert_same(run, canonical_of(name, tuple(prompt), config.kv_dtype), f"{name}, {len(prompt)} tokens")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    side=st.sampled_from(["left", "right"]),
    num_draft_tokens=st.integers(0, 63),
    threshold=st.one_of(st.just(0.0), st.just(math.inf), st.floats(0, 20)),
    schedule=st.sampled_from(["cost", "margin", "fixed"]),
    limit=st.integers(1, 5),
)
def test_any_batch_gives_the_canonical_bits(
    lengths: list[int], order: Any, side: str, num_draft_tokens: int, threshold: float, schedule: str, limit: int
) -> None:
    prompts = random_prompts(lengths, seed=5)
    order.shuffle(prompts)
    config = MarginGateConfig(
        threshold=threshold, num_draft_tokens=num_draft_tokens, schedule=schedule, low_margin_limit=limit
    )
    assert_canonical("llama", prompts, config, side)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str) -> None:
    prompts = random_prompts([33, 1, 12, 70, 5])
    assert_canonical(name, prompts, MarginGateConfig())
    assert_canonical(name, prompts[::-1], MarginGateConfig(num_draft_tokens=2, schedule="fixed"), side="right")
    for prompt in prompts:
        assert len(set(canonical_of(name, tuple(prompt)).tokens)) >= 8, "the model repeats itself: a weak test"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_cache_format(kv_dtype: str) -> None:
    assert_canonical("qwen3", random_prompts([40, 7, 19]), MarginGateConfig(kv_dtype=kv_dtype))


def test_texts_that_cross_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([126, 10, 250])
    runs = run_batch(model_of("llama"), prompts, 12)
    for prompt, run in zip(prompts, runs, strict=True):
        assert_same(run, canonical(model_of("llama"), prompt, 12), f"{len(prompt)} tokens")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt-neox", "gpt2"])
def test_these_checks_fail_with_a_plain_fp32_verifier(name: str) -> None:
    """Without fixed plans FP32 is not batch-invariant, and the comparison above says so."""
    model = model_of(name)
    prompts = random_prompts([33, 1, 12, 70, 5])
    with plain_verifier(model), pytest.raises(AssertionError, match="differ"):
        for prompt, run in zip(prompts, run_batch(model, prompts, NEW_TOKENS), strict=True):
            assert_same(run, canonical(model, prompt, NEW_TOKENS))


@pytest.mark.parametrize("offset", range(8))
def test_a_flip_at_any_position_is_rolled_back(offset: int) -> None:
    prompts = random_prompts([9, 30, 17])
    with disturbed_drafts(model_of("llama"), lambda position: position % 8 == offset):
        assert_canonical("llama", prompts, MarginGateConfig(threshold=0, num_draft_tokens=7, schedule="fixed"))


def test_every_draft_wrong() -> None:
    """The worst fast path costs time, not a bit; every pass still commits a token."""
    prompts = random_prompts([9, 30, 17])
    with disturbed_drafts(model_of("mistral"), lambda position: True):
        assert_canonical("mistral", prompts, MarginGateConfig(threshold=0, num_draft_tokens=15, schedule="fixed"))
