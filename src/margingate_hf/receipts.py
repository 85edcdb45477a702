"""A receipt: what a text was made from, in hashes and names, so that a replay can tell what has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import transformers

from .config import MarginGateConfig
from .rows import Row

# Settings that take part in a token; the others decide speed.
DECISIVE = ("coverage", "precision", "kv_planes", "strict")
VERSION = 1


@dataclass(frozen=True)
class Receipt:
    """
    Attributes:
        prompt, output: SHA-256 of the token ids.
        new_tokens, limit: length, and the most it could have been.
        finish_reason: `"eos"`, `"length"`, `"stop"`, `"error"` or `"cancelled"`.
        checkpoint: the verifier's hash of weights, buffers and adapters.
        processors: the row's logits processors with their settings.
        seed, sample: of the noise, `None` when greedy.
        config: the fields of [`MarginGateConfig`] that take part in a token.
        plan: the verifier's plan; versions: of the libraries. Neither makes a replay fail.
    """

    prompt: str
    output: str
    new_tokens: int
    limit: int
    finish_reason: str
    checkpoint: str
    processors: list[str]
    seed: int | None
    sample: int | None
    config: dict[str, Any]
    plan: str
    versions: dict[str, str]
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Receipt:
        """
        Inverse of [`~Receipt.to_dict`].

        Raises:
            `ValueError`: not a receipt of this version.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names or values["version"] != VERSION:
            raise ValueError(f"`receipt` is not a receipt of version {VERSION}: {str(values)[:80]}")
        return cls(**values)


def hash_tokens(tokens: Iterable[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(json.dumps([int(token) for token in tokens]).encode()).hexdigest()


def receipt_of(row: Row, config: MarginGateConfig, checkpoint: str, plan: str) -> Receipt:
    """The receipt of a row that has ended."""
    from . import __version__

    values = config.to_dict()
    return Receipt(
        prompt=hash_tokens(row.prompt),
        output=hash_tokens(row.committed),
        new_tokens=len(row.committed),
        limit=row.limit,
        finish_reason=row.finish_reason,
        checkpoint=checkpoint,
        processors=[describe_processor(processor) for processor in row.processors or ()],
        seed=None if row.noise is None else row.noise.seed,
        sample=None if row.noise is None else row.noise.sample,
        config={name: values[name] for name in DECISIVE},
        plan=plan,
        versions={
            "margingate-hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def describe_processor(processor: Any) -> str:
    """Class and plain settings of a logits processor, the same text for equal ones."""
    settings = {}
    for name, value in sorted(vars(processor).items()):
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, (bool, int, float, str, list, tuple, dict, type(None))):
            settings[name] = value
    return f"{type(processor).__name__}({json.dumps(settings, sort_keys=True, default=str)})"
