"""What a user may ask of the margin gate: one validated, JSON-able record."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from typing import Any

COVERAGES = ("exact", "gated")
SCHEDULES = ("cost", "margin", "fixed", "step")
PRECISIONS = ("float32", "bfloat16")
REFERENCES = ("fp32", "alone")
KV_DTYPES = ("auto", "split", "float32")
MAX_DRAFT_TOKENS = 511
MAX_ROWS = 65_536


@dataclass(frozen=True)
class Preset:
    """A system of the field as settings of this one; `fields` is `None` for stock `generate`."""

    fields: dict[str, Any] | None
    about: str
    source: str


# Docs and evals are generated from these rows.
PRESETS: dict[str, Preset] = {
    "exact": Preset({}, "the defaults", "this project's"),
    "paper": Preset(
        {"coverage": "gated", "verify_batch_size": 1},
        "low-margin steps are computed again, each alone; statistical",
        "MarginGate, arXiv 2605.30218",
    ),
    "always": Preset(
        {"schedule": "step", "verify_batch_size": 1},
        "every step of every row is verified alone",
        "always-on verification, that paper's baseline",
    ),
    "grouped": Preset(
        {"schedule": "fixed", "num_draft_tokens": 15},
        "a verify forward every 16 tokens, whatever the margins",
        "LLM-42, arXiv 2601.17768",
    ),
    "layercast": Preset(
        {"num_draft_tokens": 0},
        "the verifier decodes alone: FP32 arithmetic on 16-bit weights",
        "LayerCast, NeurIPS 2025",
    ),
    "invariant": Preset(
        {"num_draft_tokens": 0, "precision": "bfloat16"},
        "the verifier decodes alone, operands rounded to BF16",
        "batch-invariant operators",
    ),
    "off": Preset(None, "stock `generate`", "transformers"),
}


@dataclass
class MarginGateConfig:
    """
    Settings of batch-invariant decoding.

    With `coverage="exact"` the output is the canonical one. Only `kv_dtype` and `precision` define what is canonical;
    every other setting decides *when* the verifier runs, and so how fast the same output appears. With
    `coverage="gated"` the guarantee is statistical.

    Args:
        threshold (`float`, *optional*, defaults to 0.5):
            A step is *low-margin* if its top-1/top-2 gap, in logits of the processed FP32 scores, is below this
            (MarginGate, arXiv 2605.30218, abstract). `0` flags none, `math.inf` flags all.
        coverage (`str`, *optional*, defaults to `"exact"`):
            `"exact"`: every position is verified before it is committed, so the output is exactly the canonical one.
            `"gated"`: only low-margin steps are verified, as in the paper (abstract). Such a step is computed again at
            once, on the cache as it stands; where the token was wrong, it and the step's K/V column are replaced.
            Prompts and wide steps are trusted to the model's own forward, and the cache keeps the model's own dtype.
        reference (`str`, *optional*, defaults to `"fp32"`):
            With `coverage="gated"`, what computes a low-margin step again. `"fp32"`: the verifier. `"alone"`: the same
            16-bit step as a batch of one.
        num_draft_tokens (`int`, *optional*, defaults to 31):
            Most tokens that a row may draft before a verify forward; one more is the most that a streamer gets at once.
            `0`: the verifier decodes alone.
        schedule (`str`, *optional*, defaults to `"cost"`):
            When a verify forward runs. `"fixed"`: when a row has `num_draft_tokens` drafts or would end. `"margin"`:
            also when a row has `low_margin_limit` low-margin drafts. `"cost"`: also as soon as one more draft is
            expected to cost more time than it saves, given the margins of the pending drafts and the times measured on
            this machine. `"step"`: after every step, for that step's own token (always-on verification).
        verify_batch_size (`int`, *optional*):
            Rows that one verify forward may cover. `None`: all that have something pending. `1`: each row alone.
        low_margin_limit (`int`, *optional*, defaults to 3):
            Low-margin drafts of one row that start a verify forward with `schedule="margin"`.
        precision (`str`, *optional*, defaults to `"float32"`):
            Arithmetic of the verifier. `"bfloat16"` rounds the operands of every linear layer except the head to BF16
            and accumulates in FP32. That is batch-invariant too, but its output may differ from `"float32"`'s. For
            models in BF16.
        kv_dtype (`str`, *optional*, defaults to `"split"`):
            Format of committed keys and values. `"auto"`: the model's own dtype. `"split"`: the sum of two values of
            the model's dtype, `hi + lo`. `"float32"`: unrounded.
        strict (`bool`, *optional*, defaults to `True`):
            Refuse a model whose forward uses an operation without a fixed reduction order. `False` lets it run
            unchanged, which gives up the guarantee and is recorded in the statistics.
        resident_weights (`bool`, *optional*):
            Keep an FP32 copy of the weights between verify forwards and, on a processor with BF16 products, a packed
            copy of a BF16 model's for draft steps. `None` decides by the memory that is free. Same bits either way.
        seed (`int` or `list[int]`, *optional*):
            Seed of `do_sample=True`: one for all prompts or one for each. The noise of a token depends on the seed, the
            sample's index within its prompt, the position and the token id, never on the batch.
        calibration (`dict` or `str`, *optional*):
            A calibration record, or the file or folder that holds its `margin_gate.json`, see
            [`MarginGateCalibration`]. The cost schedule takes its flip probabilities and a gated run reports its bound.
            A record of another model or machine is reported. It does not set `threshold`;
            [`MarginGateCalibration.config`] sets both.
        receipt (`bool`, *optional*, defaults to `False`):
            Give each output a [`Receipt`]: hashes and names of all it was made from, which [`replay`] checks.
    """

    threshold: float = 0.5
    coverage: str = "exact"
    reference: str = "fp32"
    num_draft_tokens: int = 31
    schedule: str = "cost"
    verify_batch_size: int | None = None
    low_margin_limit: int = 3
    precision: str = "float32"
    kv_dtype: str = "split"
    strict: bool = True
    resident_weights: bool | None = None
    seed: int | list[int] | None = None
    calibration: dict[str, Any] | str | None = None
    receipt: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """
        Checks every field.

        Raises:
            `TypeError`: a field has the wrong type.
            `ValueError`: a field is outside its range; the message names the field, the value and what is allowed.
        """
        if isinstance(self.threshold, str):
            self.threshold = _float_from_text(self.threshold)
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)):
            raise TypeError(f"`threshold` must be a number of logits, got {self.threshold!r}.")
        if math.isnan(self.threshold) or self.threshold < 0:
            raise ValueError(f"`threshold` must be 0 or more (`math.inf` flags every step), got {self.threshold!r}.")
        self.threshold = float(self.threshold)
        _one_of("coverage", self.coverage, COVERAGES)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("reference", self.reference, REFERENCES)
        _integer("num_draft_tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.verify_batch_size is not None:
            _integer("verify_batch_size", self.verify_batch_size, 1, MAX_ROWS)
        _integer("low_margin_limit", self.low_margin_limit, 1, MAX_DRAFT_TOKENS)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        for name, flag in (("strict", self.strict), ("receipt", self.receipt)):
            if not isinstance(flag, bool):
                raise TypeError(f"`{name}` must be True or False, got {flag!r}.")
        if self.resident_weights is not None and not isinstance(self.resident_weights, bool):
            raise TypeError(f"`resident_weights` must be True, False or None, got {self.resident_weights!r}.")
        if self.seed is not None:
            if isinstance(self.seed, tuple):
                self.seed = list(self.seed)
            for value in self.seed if isinstance(self.seed, list) else [self.seed]:
                _integer("seed", value, 0, 2**63 - 1)
        if self.calibration is not None and not isinstance(self.calibration, (dict, str)):
            raise TypeError(f"`calibration` must be a record (dict) or a path, got {self.calibration!r}.")

    @classmethod
    def preset(cls, name: str) -> MarginGateConfig | None:
        """
        A system of the field by name, see `PRESETS`; `None` for `"off"`.

        `"exact"`, `"always"`, `"grouped"` and `"layercast"` give the same tokens.

        Raises:
            `ValueError`: another name.
        """
        _one_of("preset", name, tuple(PRESETS))
        fields = PRESETS[name].fields
        return None if fields is None else cls(**fields)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MarginGateConfig:
        """
        Builds a config from a dict, for example one that came back from a `generation_config.json`.

        Raises:
            `ValueError`: a key is not a field; the message gives the nearest field name.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f" Did you mean `{near[0]}`?" if near else ""
                raise ValueError(f"`{key}` is not a field of MarginGateConfig.{hint} Fields: {', '.join(known)}.")
        return cls(**values)

    @classmethod
    def coerce(cls, value: Any) -> MarginGateConfig | None:
        """
        Reads what a user may pass as `margin_gate`: a config, a dict, `True` for the defaults, `None`/`False` for off.

        Raises:
            `TypeError`: anything else.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            value.validate()
            return value
        if isinstance(value, dict):
            return cls.from_dict(value)
        raise TypeError(
            f"`margin_gate` must be a MarginGateConfig, a dict of its fields, True, False or None, got {value!r}."
        )

    @classmethod
    def from_json_string(cls, text: str) -> MarginGateConfig:
        """Inverse of [`~MarginGateConfig.to_json_string`]."""
        return cls.from_dict(json.loads(text))

    def to_dict(self) -> dict[str, Any]:
        """All fields, in values that strict JSON can hold (an infinite threshold becomes the string `"inf"`)."""
        values = dataclasses.asdict(self)
        if math.isinf(self.threshold):
            values["threshold"] = "inf"
        return values

    def to_json_string(self) -> str:
        """The fields as JSON text, as transformers' own config records give it."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def update(self, **values: Any) -> MarginGateConfig:
        """A new, validated config with some fields replaced."""
        return type(self).from_dict({**self.to_dict(), **values})


def _float_from_text(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"`threshold` must be a number of logits, got {text!r}.") from None


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if not low <= value <= high:
        raise ValueError(f"`{name}` must be between {low} and {high}, got {value}.")
