"""Refuses what the margin gate cannot honour, in one clear sentence and before any work starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig

from ..config import MarginGateConfig
from ..errors import refuse
from ..forward.architecture import Architecture, architecture_of
from ..forward.devices import execution_device, named_weights
from ..kv_cache.cache import MarginGateCache
from ..verifier.backends import backend_for, device_types
from .calibration_record import record_of

GENERATION_FIELDS = GenerationConfig()
# Every field of transformers' `GenerationConfig`: what the gate honours, what it refuses where it is set to anything
# that matters, and what moves no token.
HONOURED_FIELDS = frozenset(
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample temperature top_k top_p min_p "
    "top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias "
    "num_return_sequences output_scores output_logits return_dict_in_generate pad_token_id eos_token_id".split()
)
REFUSED_FIELDS = frozenset(
    "num_beams penalty_alpha dola_layers guidance_scale watermarking_config output_attentions output_hidden_states "
    "constraints force_words_ids token_healing prompt_lookup_num_tokens assistant_early_exit use_mtp use_cache "
    "assistant_ensemble_weight speculation_type cache_implementation".split()
)
HARMLESS_FIELDS = frozenset(
    "transformers_version bos_token_id decoder_start_token_id cache_config max_cache_len low_memory early_stopping "
    "num_beam_groups diversity_penalty continuous_batching_config length_penalty is_assistant num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_lookbehind target_lookbehind max_matching_ngram_size prefill_chunk_size compile_config disable_compile "
    "return_legacy_cache".split()
)
STRATEGIES = (
    "prompt_lookup_num_tokens assistant_early_exit use_mtp penalty_alpha dola_layers assistant_ensemble_weight "
    "speculation_type"
).split()
KNOWN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATEFUL_PROCESSORS = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WatermarkLogitsProcessor",
)
# Of transformers' own methods that shape a forward's inputs, none may be replaced: the verifier does not call them.
INPUT_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# What the model's forward may be given through `generate`; anything else it takes would be dropped without a word.
FORWARD_ARGUMENTS = frozenset({"input_ids", "attention_mask", "cache", "use_cache", "logits_to_keep"})
IMAGE_ARGUMENTS = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "image_sizes")


def check_model(model: Any) -> None:
    """
    Refuses models the gate cannot promise anything for.

    Raises:
        `ValueError`, `NotImplementedError`: names what is wrong with the model and what to do.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise refuse("model", type(model).__name__, "it is an encoder-decoder; use a decoder-only model")
    if model.training:
        raise refuse("model.training", True, "dropout makes every run differ; call `model.eval()` first")
    _check_inputs_are_stock(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None or getattr(model, "is_quantized", False):
        method = getattr(getattr(model.config, "quantization_config", None), "quant_method", "unknown")
        raise refuse("quantization_config", str(method), "load the model un-quantised, in BF16, FP16 or FP32")
    if model.dtype not in KNOWN_DTYPES:
        raise refuse("model.dtype", model.dtype, "load the model in BF16, FP16 or FP32")
    device = execution_device(model)
    if device.type not in device_types():
        raise refuse(
            "model.device",
            str(device),
            f"no verifier is built for it; move the model to {' or '.join(device_types())}",
            NotImplementedError,
        )
    lacking = backend_for(device).fits(device)
    if lacking:
        raise refuse("model.device", str(device), lacking, NotImplementedError)
    spread = {str(tensor.device) for _, tensor, _ in named_weights(model) if not tensor.is_cpu}
    if len(spread) > 1:
        raise refuse(
            "model.hf_device_map",
            sorted(spread),
            "the verifier works on one GPU; load the model on one",
            NotImplementedError,
        )
    refusal = architecture_of(model).refusal
    if refusal is not None:
        raise refusal


def _check_inputs_are_stock(model: Any) -> None:
    for name in INPUT_METHODS:
        own = vars(model).get(name)
        stock = getattr(type(model), name, None)
        if own is not None and getattr(own, "__func__", None) is not stock:
            raise refuse(
                name,
                getattr(own, "__qualname__", own),
                "it was replaced on the model, as soft prompts do (prompt tuning, prefix tuning, p-tuning), and the "
                "verifier reads token ids alone; use an adapter in the layers, such as LoRA",
                NotImplementedError,
            )
        owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if owner is not None and not owner.__module__.startswith("transformers."):
            raise refuse(
                name,
                f"{owner.__module__}.{owner.__qualname__}",
                "the verifier does not call a model's own form of it; remove it if it changes no input",
                NotImplementedError,
            )


def check_gate(model: Any, gate: MarginGateConfig) -> None:
    """
    Refuses settings of the gate that this model cannot have, and a calibration that cannot be read.

    Raises:
        `ValueError`: names the field and what to do.
    """
    if gate.precision == "bfloat16" and model.dtype != torch.bfloat16:
        raise refuse("precision", "bfloat16", f'the model is in {model.dtype}; use "float32", or load it in BF16')
    record_of(gate)  # a file that is not there should be missed now


def check_length(architecture: Architecture, length: int, row: int, coverage: str) -> None:
    """
    Refuses a row that would outgrow the model's learned positions, or the original length of a `dynamic` RoPE, whose
    frequencies then follow the batch, and under gated coverage that of a `longrope`.

    Raises:
        `ValueError`: names the row and the lengths.
    """
    learned = architecture.learned_positions
    if learned is not None and length > learned:
        raise refuse(
            "max_new_tokens",
            f"row {row} may reach {length} tokens",
            f"the model has {learned} learned positions and none beyond; shorten the prompt or lower it",
        )
    if not architecture.needs_long_table(length):
        return
    reaches = f"row {row} may reach {length} tokens, beyond the original {architecture.original_length}"
    if architecture.dynamic_rope:
        raise refuse(
            "rope_type",
            "dynamic",
            f"{reaches}, where its frequencies follow the longest row of the batch; "
            "shorten it or lower `max_new_tokens`",
        )
    if coverage == "gated":
        raise refuse(
            "coverage",
            "gated",
            f"{reaches}, and the fast prefill takes its rotary table from the longest prompt; "
            'use coverage="exact", or shorten it',
        )


def check_call(model: Any, arguments: dict[str, Any], rows: int | None) -> None:
    """
    Refuses keyword arguments of `generate` that the gate cannot honour.

    Args:
        model (`PreTrainedModel`): the model.
        arguments (`dict`): what the caller passed, `generate`'s own named parameters included.
        rows (`int`, *optional*): rows of the input ids, where they are known.

    Raises:
        `ValueError`, `NotImplementedError`: names the argument and what to do.
    """
    given = {name for name, value in arguments.items() if value is not None}
    if "inputs_embeds" in given:
        raise refuse("inputs_embeds", "tensor", "the verifier re-reads token ids; pass `input_ids`")
    if "position_ids" in given:
        raise refuse("position_ids", "tensor", "positions are counted from each row's own first token; leave it out")
    for name in IMAGE_ARGUMENTS:
        if name in given:
            raise refuse(name, "tensor", "only text prompts can be verified; leave it out")
    if "assistant_model" in given:
        raise refuse("assistant_model", "model", "the gate is its own draft and verify; leave it out")
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if arguments.get(name):
            raise refuse(name, arguments[name], "assisted decoding drafts in its own way; leave it out")
    if arguments.get("synced_gpus"):
        raise refuse("synced_gpus", True, "ranks would run different numbers of forwards and dead-lock")
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if name in given:
            raise refuse(name, "tensor", "classifier-free guidance keeps a state between steps; leave it out")
    for name in ("cache", "past_key_values", "cache_params"):
        if name in given and not (name == "cache" and isinstance(arguments[name], MarginGateCache)):
            raise refuse(
                name,
                type(arguments[name]).__name__,
                "keys and values of unknown origin are not canonical; pass the whole sequence as `input_ids`, or as "
                "`cache` the MarginGateCache of an earlier gated call",
            )
    if "custom_generate" in given:
        raise refuse(
            "custom_generate", arguments["custom_generate"], "it replaces the decode loop; leave one of them out"
        )
    known = inspect.signature(type(model).forward).parameters
    for name in sorted(given & set(known) - FORWARD_ARGUMENTS):
        if not hasattr(GENERATION_FIELDS, name):
            raise refuse(
                name,
                "given",
                "the model's forward takes it, and a verify forward passes on token ids alone; leave it out",
            )
    if "streamer" in given and rows is not None and rows > 1:
        raise refuse("streamer", type(arguments["streamer"]).__name__, f"streamers take one row, got {rows}")


def check_generation_config(config: GenerationConfig, gate: MarginGateConfig, cache_implementation: Any = None) -> None:
    """
    Refuses decoding strategies other than greedy and seeded sampling, and caches of other formats.

    Args:
        config ([`~transformers.GenerationConfig`]): of the call, the model's own defaults filled in.
        gate ([`MarginGateConfig`]): settings of the gate.
        cache_implementation (`str`, *optional*): what the call itself asks for; the checkpoint's own choice has no
            meaning here, since the gate brings its cache.

    Raises:
        `ValueError`, `NotImplementedError`: names the field and what to do.
    """
    if config.do_sample and gate.seed is None:
        raise refuse(
            "do_sample",
            True,
            "unseeded sampling cannot be reproduced; pass `do_sample=False`, or a seed: `MarginGateConfig(seed=0)`",
        )
    if (config.num_beams or 1) > 1:
        raise refuse(
            "num_beams", config.num_beams, "beam search has no single next token to verify; pass `num_beams=1`"
        )
    if (config.num_return_sequences or 1) > 1 and not config.do_sample:
        raise refuse("num_return_sequences", config.num_return_sequences, "greedy decoding has one answer; pass 1")
    if config.use_cache is False:
        raise refuse("use_cache", False, "verification works on the cache; leave it out")
    if cache_implementation not in (None, "dynamic"):
        raise refuse("cache_implementation", cache_implementation, "leave it out; the gate brings its own cache")
    for name in STRATEGIES:
        if getattr(config, name, None):
            raise refuse(name, getattr(config, name), "it selects another decoding strategy; leave it out")
    for name in ("constraints", "force_words_ids", "token_healing"):
        if getattr(config, name, None):
            raise refuse(name, getattr(config, name), "it is not plain next-token decoding; leave it out")
    if config.guidance_scale not in (None, 1, 1.0):
        raise refuse("guidance_scale", config.guidance_scale, "classifier-free guidance keeps a state; leave it out")
    if config.watermarking_config is not None:
        raise refuse("watermarking_config", "config", "watermarking keeps a state between steps; leave it out")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise refuse(name, True, "the draft path's would not be canonical; run the model's forward on the result")


def check_processors(processors: Iterable[Any]) -> None:
    """
    Refuses logits processors that keep a state between calls: they are called again for every verified position.

    Raises:
        `ValueError`: names the class.
    """
    for processor in processors:
        for kind in type(processor).__mro__:
            if kind.__name__ in STATEFUL_PROCESSORS:
                raise refuse("logits_processor", kind.__name__, "it keeps a state between steps; leave it out")
