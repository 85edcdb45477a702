"""What is special about a model, read once: its layers, its positions, and why it may have to be refused.

An architecture that needs an exception gets it here: a field, and one place that asks for it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import refuse
from .lengths import KNOWN_LAYER_TYPES, unknown_lengths
from .rope import PINNED_TYPES, original_length, rotary_modules

_POSITION_EMBEDDINGS = frozenset("wpe embed_positions position_embedding position_embeddings positions_embed".split())


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        n_layers (`int`): attention layers.
        learned_positions (`int`, *optional*): tokens that a learned embedding of absolute positions can hold.
        original_length (`int`, *optional*): tokens that the short rotary table serves, where a longer row has another.
        dynamic_rope (`bool`): whether the frequencies beyond that length follow the longest row of the batch.
        keeps_logits (`bool`): whether its forward takes `logits_to_keep`.
        refusal (`Exception`, *optional*): why nothing can be promised for it.
        uncovered (`str`, *optional*): why the self-test could not cover it.
    """

    n_layers: int
    learned_positions: int | None
    original_length: int | None
    dynamic_rope: bool
    keeps_logits: bool
    refusal: Exception | None
    uncovered: str | None

    def needs_long_table(self, length: int) -> bool:
        """Whether a row that may reach `length` tokens is decoded with the long rotary table."""
        return self.original_length is not None and length > self.original_length


def architecture_of(model: Any) -> Architecture:
    """Reads a model (`PreTrainedModel`), or a [`twin`] of one."""
    config = model.config.get_text_config(decoder=True)
    return Architecture(
        n_layers=int(config.num_hidden_layers),
        learned_positions=_learned_positions(model, config),
        original_length=original_length(model),
        dynamic_rope=any(module.rope_type == "dynamic" for module in rotary_modules(model)),
        keeps_logits="logits_to_keep" in inspect.signature(type(model).forward).parameters,
        refusal=_refusal(model, config),
        uncovered=_uncovered(model, config),
    )


def vocabulary_of(model: Any) -> int:
    """Token ids that a model (`PreTrainedModel`) has embeddings for."""
    return int(model.get_input_embeddings().num_embeddings)


def _learned_positions(model: Any, config: Any) -> int | None:
    limit = getattr(config, "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    for name, module in model.named_modules():
        positional = isinstance(module, torch.nn.Embedding) and module is not tokens
        if positional and limit is not None and name.rsplit(".", 1)[-1] in _POSITION_EMBEDDINGS:
            return int(limit)
    return None


def _refusal(model: Any, config: Any) -> Exception | None:
    kind = type(model).__name__
    linear = [kind for kind in getattr(config, "layer_types", None) or () if "linear" in kind or "mamba" in kind]
    if linear or getattr(model, "_is_stateful", False):
        return refuse(
            "model",
            kind,
            f"its {sorted(set(linear)) or 'recurrent'} layers keep a state that cannot roll back; "
            "use an attention-only model",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (value for value in rope.values() if isinstance(value, dict)):
        if parameters.get("rope_type") in PINNED_TYPES:
            return refuse(
                "rope_type",
                parameters["rope_type"],
                "its frequencies follow the longest row of the batch, and differ by layer; use another checkpoint",
                NotImplementedError,
            )
    return None


def _uncovered(model: Any, config: Any) -> str | None:
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not call transformers' attention interface"
    declared = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and "chunked_attention" in declared:
        return "chunked attention lives in the mask alone, which the verifier does not read"
    unknown = declared - KNOWN_LAYER_TYPES
    if unknown:
        return f"layer types {sorted(unknown)} are none of {sorted(KNOWN_LAYER_TYPES)}"
    lengths = unknown_lengths(config)
    if lengths:
        return f"{', '.join(lengths)} may limit what a layer sees, and the self-test cannot lower it"
    return None
