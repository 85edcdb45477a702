"""Tiny random models, scaled so that greedy decoding shows many distinct tokens instead of one loop."""

from __future__ import annotations

import functools

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 257
BASE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def _without(*names: str) -> dict:
    return {key: value for key, value in BASE.items() if key not in names}


CONFIGS: dict[str, functools.partial] = {
    "llama": functools.partial(transformers.LlamaConfig, **BASE),
    "llama-tied": functools.partial(transformers.LlamaConfig, **BASE, tie_word_embeddings=True),
    "qwen2": functools.partial(transformers.Qwen2Config, **BASE),
    "qwen3": functools.partial(transformers.Qwen3Config, **BASE, head_dim=16),
    "mistral": functools.partial(transformers.MistralConfig, **BASE, sliding_window=12),
    "gpt-neox": functools.partial(transformers.GPTNeoXConfig, **_without("num_key_value_heads")),
    "gpt2": functools.partial(
        transformers.GPT2Config,
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gemma2": functools.partial(
        transformers.Gemma2Config, **BASE, head_dim=16, sliding_window=12, query_pre_attn_scalar=16
    ),
    "gemma3-text": functools.partial(
        transformers.Gemma3TextConfig,
        **BASE,
        head_dim=16,
        sliding_window=12,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi3": functools.partial(transformers.Phi3Config, **BASE),
    "olmo2": functools.partial(transformers.Olmo2Config, **BASE),
    "granite": functools.partial(transformers.GraniteConfig, **BASE, logits_scaling=4.0),
    "cohere": functools.partial(transformers.CohereConfig, **BASE),
    "starcoder2": functools.partial(transformers.Starcoder2Config, **BASE),
    "smollm3": functools.partial(transformers.SmolLM3Config, **BASE),
    "qwen3-moe": functools.partial(
        transformers.Qwen3MoeConfig, **BASE, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "mixtral": functools.partial(transformers.MixtralConfig, **BASE, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": functools.partial(
        transformers.GptOssConfig,
        **BASE,
        head_dim=16,
        sliding_window=12,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "deepseek-v3": functools.partial(
        transformers.DeepseekV3Config,
        **{**BASE, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}

# Where seed 0 gives a model that repeats itself.
SEEDS = {"gemma3-text": 1}


def tiny_config(name: str, **changes: object) -> PreTrainedConfig:
    """The config of a tiny architecture, some fields changed."""
    return CONFIGS[name](**changes)


def tiny_model(
    name: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
    scale: float = 22.0,
    **changes: object,
) -> PreTrainedModel:
    """A random model in eval mode; matrices but the embeddings are multiplied by `scale`, vectors made random."""
    torch.manual_seed(SEEDS.get(name, 0) if seed is None else seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=dtype)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter is not embeddings:
                parameter.mul_(scale)
            elif parameter.ndim == 1:  # biases start at 0 and norms at 1: give them something to do
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    return model.eval()


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
