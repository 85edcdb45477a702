"""Every supported architecture: batch = alone, flips forced, every bit. Each row of docs/supported_models.md."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from bitwise import assert_same, canonical, padded, run_batch
from fault_injection import disturbed_drafts
from margingate_hf import MarginGateConfig, enable
from margingate_hf.verifier import VerifierError
from tiny import BASE, CONFIGS, random_prompts, tiny_model

PROMPTS = random_prompts([33, 1, 12, 70, 5])


@functools.cache
def model_of(name: str) -> Any:
    return enable(tiny_model(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_supported(name: str) -> None:
    model = model_of(name)
    before = (model.config._attn_implementation, model.config._experts_implementation)
    expected = [canonical(model, prompt, 12) for prompt in PROMPTS]
    assert max(len(set(run.tokens)) for run in expected) >= 8, "the model repeats itself: a weak test"
    for prompt, run, right in zip(PROMPTS, run_batch(model, PROMPTS, 12), expected, strict=True):
        assert_same(run, right, f"{name}, {len(prompt)} tokens")
    with disturbed_drafts(model, lambda position: position % 3 == 0):
        for run, right in zip(run_batch(model, PROMPTS[::-1], 12, side="right"), expected[::-1], strict=True):
            assert_same(run, right, f"{name}, flips forced")
    assert (model.config._attn_implementation, model.config._experts_implementation) == before


def test_a_conditional_generation_class_decodes_text() -> None:
    """`AutoModelForCausalLM` loads Gemma 3 checkpoints as image-text models."""
    text = tiny_model("gemma3-text").config.to_dict()
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "patch_size": 14}, image_token_index=250, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = enable(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    assert "ConditionalGeneration" in type(model).__name__
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    for prompt, run in zip(PROMPTS, run_batch(model, PROMPTS, 8), strict=True):
        assert_same(run, canonical(model, prompt, 8), f"{len(prompt)} tokens")


SHARED: dict[str, Any] = dict(vocab_size=257, pad_token_id=0, bos_token_id=1, eos_token_id=2)
REFUSED: dict[str, tuple[Any, str]] = {
    "falcon": (
        lambda: transformers.FalconConfig(**SHARED, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        "coverage",
    ),
    "bloom": (lambda: transformers.BloomConfig(**SHARED, hidden_size=32, n_layer=2, n_head=2), "coverage"),
    "mpt": (
        lambda: transformers.MptConfig(**SHARED, d_model=32, n_layers=2, n_heads=2, max_seq_len=64, use_cache=True),
        "coverage",
    ),
    "xglm": (
        lambda: transformers.XGLMConfig(
            **SHARED, d_model=32, num_layers=2, attention_heads=2, ffn_dim=32, max_position_embeddings=300
        ),
        "coverage",
    ),
    "llama4": (
        lambda: transformers.Llama4TextConfig(
            **BASE, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8, head_dim=16
        ),
        "chunked",
    ),
    "mamba": (lambda: transformers.MambaConfig(**SHARED, hidden_size=32, num_hidden_layers=2), "linear_attention"),
    "qwen3-next": (
        lambda: transformers.Qwen3NextConfig(**BASE, head_dim=16, num_experts=2, moe_intermediate_size=16),
        "linear_attention",
    ),
    "bamba": (
        lambda: transformers.BambaConfig(**{**BASE, "num_hidden_layers": 2}, attn_layer_indices=[1]),
        "linear_attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    build, text = REFUSED[name]
    torch.manual_seed(0)
    model = enable(AutoModelForCausalLM.from_config(build(), dtype=torch.bfloat16).eval())
    with pytest.raises((ValueError, NotImplementedError, VerifierError), match=text):
        model.generate(**padded(PROMPTS), max_new_tokens=2, do_sample=False, margin_gate=MarginGateConfig())


def test_the_table_in_the_docs_is_this_test() -> None:
    page = (Path(__file__).parents[2] / "docs" / "supported_models.md").read_text()
    tested = set(re.findall(r"`tests/properties/test_architectures.py::test_supported\[([\w-]+)\]`", page))
    assert tested == set(CONFIGS)
