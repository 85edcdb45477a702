"""Layers that see less than everything, with windows longer than the self-test's texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from bitwise import assert_same, canonical, run_batch
from margingate_hf import MarginGateConfig, enable
from margingate_hf.forward import registered
from margingate_hf.forward.context import Segment
from margingate_hf.forward.lengths import SHORT_LENGTHS, declared_window, shorten, unknown_lengths
from margingate_hf.kv_cache.prefix_cache import PrefixCache
from margingate_hf.lm_eval.scoring import score_continuations
from margingate_hf.verifier import VerifierError, reference_logits, verifier_for
from margingate_hf.verifier.reference import eager_twin
from margingate_hf.verifier.selftest import TOLERANCE
from tiny import BASE, random_prompts, tiny_model

WINDOW = 200
LONG = random_prompts([330])[0]


def window_in_the_mask(**changes: Any) -> Any:
    """Qwen2-MoE: its layers declare a sliding window and do not pass it to attention."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        **{**BASE, "max_position_embeddings": 1024},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                parameter.mul_(8)
    return enable(model.eval())


def test_a_window_that_lives_in_the_mask_is_applied() -> None:
    model = window_in_the_mask()
    verifier = verifier_for(model, MarginGateConfig())
    with torch.no_grad():
        found = verifier.run(verifier.new_cache(1, "float32"), [Segment(0, 0, LONG)])
        right = reference_logits(model, LONG)
    assert ((found - right).norm(dim=-1) <= TOLERANCE * right.norm(dim=-1)).all()
    model.config.sliding_window = 2 * WINDOW
    with torch.no_grad():
        assert not torch.allclose(reference_logits(model, LONG)[-1], right[-1]), "no text leaves the window: weak"


def test_and_it_is_the_same_bits_in_any_batch() -> None:
    model = window_in_the_mask()
    prompts = [LONG[:230], *random_prompts([9])]
    for prompt, run in zip(prompts, run_batch(model, prompts, 6), strict=True):
        assert_same(run, canonical(model, prompt, 6))


def test_a_window_that_is_not_applied_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: attention looks at nothing but what it is passed. The window is longer than the self-test's texts."""
    monkeypatch.setattr(registered, "declared_window", lambda module: None)
    with pytest.raises(VerifierError, match="correctness"):
        verifier_for(window_in_the_mask(), MarginGateConfig())


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3-text", "gpt-oss"])
def test_windows_that_are_passed_and_longer_than_the_test_are_still_tested(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable(tiny_model(name, sliding_window=WINDOW))
    assert verifier_for(model, MarginGateConfig())
    stock = registered.margingate_attention

    def blind(module: Any, *args: Any, sliding_window: Any = None, **kwargs: Any) -> Any:
        return stock(module, *args, sliding_window=10**6, **kwargs)

    monkeypatch.setitem(registered.AttentionInterface._global_mapping, registered.NAME, blind)
    with pytest.raises(VerifierError, match="correctness"):
        verifier_for(enable(tiny_model(name, sliding_window=WINDOW, seed=1)), MarginGateConfig())


def test_lengths_are_lowered_in_a_copy_alone() -> None:
    model = window_in_the_mask()
    twin = eager_twin(model)
    shorten(twin)
    assert twin.config.sliding_window == SHORT_LENGTHS["sliding_window"]
    assert twin.model.layers[0].self_attn.sliding_window == SHORT_LENGTHS["sliding_window"]
    assert model.config.sliding_window == WINDOW and model.model.layers[0].self_attn.sliding_window == WINDOW
    assert declared_window(model.model.layers[0].self_attn) == WINDOW
    assert declared_window(model.model.layers[1].self_attn) is None
    assert twin.model.layers[0].mlp.gate.weight is model.model.layers[0].mlp.gate.weight


def test_a_length_nobody_knows_is_refused_by_name() -> None:
    model = enable(tiny_model("llama"))
    model.config.landmark_window = 512
    assert unknown_lengths(model.config) == ["landmark_window=512"]
    with pytest.raises(VerifierError, match="landmark_window=512 may limit what a layer sees"):
        verifier_for(model, MarginGateConfig())


@pytest.mark.parametrize("rows", [1, 8])
def test_a_score_under_longrope_does_not_depend_on_the_others(rows: int) -> None:
    half = 16 // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": 64,
    }
    model = enable(
        tiny_model("phi3", max_position_embeddings=512, original_max_position_embeddings=64, rope_parameters=rope)
    )
    context, short, long = *random_prompts([50]), *random_prompts([6, 30], seed=3)
    verifier = verifier_for(model, MarginGateConfig())
    (alone,) = score_continuations(model, verifier, [(context, short)], "split", rows)
    (other,) = score_continuations(model, verifier, [(context, long)], "split", rows)
    for store in (None, PrefixCache(1 << 24)):
        found = score_continuations(model, verifier, [(context, short), (context, long)], "split", rows, store)
        assert found == [alone, other]
