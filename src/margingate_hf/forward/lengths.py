"""What a model's layers declare of how far they see, and the same model with every such length made short.

A sliding window of 4,096 tokens makes no difference to a sequence of 137, so a test on short sequences cannot tell a
layer that applies it from one that does not. The self-test therefore runs on a copy whose lengths are below its own,
both in our forward and in the model's own.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from .twin import configs_of

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Config fields that limit what a query sees or choose its rotary table, and what the self-test lowers them to.
SHORT_LENGTHS = {
    "sliding_window": 48,
    "sliding_window_size": 48,
    "attention_window_size": 48,
    "local_attention": 48,
    "attention_chunk_size": 40,
    "keep_window_size": 56,
    "index_topk": 32,
    "original_max_position_embeddings": 64,
}
# Fields that read like one of these and limit nothing that a query sees.
_HARMLESS = frozenset(
    "chunk_size_feed_forward max_position_embeddings max_window_layers sliding_window_pattern "
    "prefix_dense_sliding_window_pattern decoder_sparse_step mlp_only_layers".split()
)
_LIKE_A_LENGTH = re.compile(r"window|chunk|index_top_?k|sparse|landmark|stride|context_length|local_(?!experts)")
_SMALLEST = 8  # below this a number is a count of something else, an interval of layers for example


def declared_window(module: torch.nn.Module) -> int | None:
    """
    The sliding window that an attention module's config declares for its layer. Qwen2-MoE puts it into the mask alone
    and does not pass it on; our attention reads no mask.
    """
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if not types or layer is None or layer >= len(types) or types[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def unknown_lengths(config: Any) -> list[str]:
    """Fields of a text config that may limit what a query sees and that the self-test does not know how to shorten."""
    found = []
    for name, value in vars(config).items():
        name = name.lstrip("_")
        if name in SHORT_LENGTHS or name in _HARMLESS or not _LIKE_A_LENGTH.search(name):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= _SMALLEST:
            found.append(f"{name}={value}")
    return sorted(found)


def shorten(twin: torch.nn.Module) -> None:
    """Lowers every length in the configs and modules of a [`twin`] to that of `SHORT_LENGTHS`, in place."""
    lowered: dict[int, int] = {}
    for config in configs_of(twin):
        lowered.update(_shorten_fields(vars(config)))
        rope = getattr(config, "rope_parameters", None)
        if isinstance(rope, dict):
            config.rope_parameters = {
                name: dict(value) if isinstance(value, dict) else value for name, value in rope.items()
            }
            for part in (config.rope_parameters, *config.rope_parameters.values()):
                if isinstance(part, dict):
                    _shorten_fields(part)
    for module in twin.modules():
        _shorten_fields(vars(module))
        for name, value in list(vars(module).items()):  # a module that keeps a length under a name of its own
            if type(value) is int and value in lowered and _LIKE_A_LENGTH.search(name):
                setattr(module, name, lowered[value])


def _shorten_fields(state: dict[str, Any]) -> dict[int, int]:
    lowered = {}
    for name, short in SHORT_LENGTHS.items():
        value = state.get(name)
        if type(value) is int and value > short:
            state[name] = short
            lowered[value] = short
    return lowered
