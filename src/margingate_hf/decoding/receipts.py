"""A receipt: what an output was made from, in hashes and names, so that a replay can tell what has changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import transformers

from ..config import MarginGateConfig
from ..verifier.model_state import describe_callable
from ..version import __version__
from .rows import Row

# Settings that take part in a token; the others decide speed.
DECISIVE = ("coverage", "precision", "kv_dtype", "strict")
VERSION = 3
REASONS = ("eos", "length", "stop", "error", "cancelled")


@dataclass(frozen=True)
class Receipt:
    """
    Attributes:
        prompt, output: SHA-256 of the token ids.
        new_tokens, limit: length, and the most it could have been.
        eos: token ids that end an output, ascending.
        criteria: other rules that could end it, with their settings.
        finish_reason: `"eos"`, `"length"`, `"stop"` (one of `criteria`), `"error"` or `"cancelled"`.
        checkpoint: the verifier's hash of weights, buffers, adapters and configs.
        adapter: the row's own PEFT adapter, where the call named one for each row.
        processors: the row's logits processors with their settings.
        seed, sample: of the noise, `None` when greedy.
        config: the fields of [`MarginGateConfig`] that take part in a token.
        plan: the verifier's plan; versions: of the libraries. Another plan or version is noted, and makes no replay
            fail.
        seal: SHA-256 of all other fields. It shows a slip, not a forger: who can write a receipt can seal it.
    """

    prompt: str
    output: str
    new_tokens: int
    limit: int
    eos: list[int]
    criteria: list[str]
    finish_reason: str
    checkpoint: str
    adapter: str | None
    processors: list[str]
    seed: int | None
    sample: int | None
    config: dict[str, Any]
    plan: str
    versions: dict[str, str]
    version: int = VERSION
    seal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def sealed(self) -> str:
        """What `seal` must be."""
        values = {name: value for name, value in asdict(self).items() if name != "seal"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Receipt:
        """
        Inverse of [`~Receipt.to_dict`].

        Raises:
            `ValueError`: not a receipt of this version.
        """
        names = {field.name for field in fields(cls)}
        wrong = not isinstance(values, dict) or set(values) != names or values["version"] != VERSION
        if wrong or values["finish_reason"] not in REASONS or set(values["config"]) != set(DECISIVE):
            raise ValueError(f"`receipt` is not a receipt of version {VERSION}: {str(values)[:80]}")
        return cls(**values)


def hash_tokens(tokens: Iterable[int]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(json.dumps([int(token) for token in tokens]).encode()).hexdigest()


def receipt_of(row: Row, config: MarginGateConfig, rules: Rules, checkpoint: str, plan: str) -> Receipt:
    """The receipt of a row that has ended."""
    values = config.to_dict()
    receipt = Receipt(
        prompt=hash_tokens(row.prompt),
        output=hash_tokens(row.committed),
        new_tokens=len(row.committed),
        limit=row.request.limit,
        eos=list(rules.eos),
        criteria=list(rules.criteria),
        finish_reason=row.finish_reason,
        checkpoint=checkpoint,
        adapter=row.request.adapter,
        processors=[describe_processor(processor) for processor in row.request.processors or ()],
        seed=None if row.request.noise is None else row.request.noise.seed,
        sample=None if row.request.noise is None else row.request.noise.sample,
        config={name: values[name] for name in DECISIVE},
        plan=plan,
        versions=versions(),
    )
    return dataclasses.replace(receipt, seal=receipt.sealed())


@dataclass(frozen=True)
class Rules:
    """What may end an output: token ids, ascending, and other rules with their settings."""

    eos: tuple[int, ...]
    criteria: tuple[str, ...]


def versions() -> dict[str, str]:
    """Of the libraries a receipt names."""
    return {"margingate-hf": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def describe_processor(processor: Any) -> str:
    """Class and plain settings of a logits processor or a stopping rule, equal for equal ones."""
    if not hasattr(processor, "__dict__") or isinstance(processor, type(describe_processor)):
        return describe_callable(processor)
    settings = {}
    for name, value in sorted(vars(processor).items()):
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, (bool, int, float, str, list, tuple, dict, type(None))):
            settings[name] = _jsonable(value)
    return f"{type(processor).__name__}({json.dumps(settings, sort_keys=True, default=str)})"


def _jsonable(value: Any) -> Any:
    """Settings with keys that JSON can hold: transformers has tuples of token ids as keys."""
    if isinstance(value, dict):
        pairs = [(key if isinstance(key, str) else repr(key), _jsonable(item)) for key, item in value.items()]
        return dict(sorted(pairs))
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value
