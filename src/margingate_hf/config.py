"""What a user may ask of the margin gate: one validated, JSON-able record."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from typing import Any

COVERAGES = ("full", "gated")
SCHEDULES = ("cost", "margin", "window", "step")
PRECISIONS = ("float32", "bfloat16")
REFERENCES = ("fp32", "alone")
MAX_WINDOW = 512
MAX_ROWS = 65_536
# Systems of the field as settings of this one; `None` is stock `generate`.
PRESETS: dict[str, dict[str, Any] | None] = {
    "certified": {},
    "paper": {"coverage": "gated", "rows_per_pass": 1},
    "always": {"schedule": "step", "rows_per_pass": 1},
    "grouped": {"schedule": "window", "window": 16},
    "layercast": {"window": 1},
    "invariant": {"window": 1, "precision": "bfloat16"},
    "off": None,
}


@dataclass
class MarginGateConfig:
    """
    Settings of margin-gated, batch-invariant greedy decoding.

    With `coverage="full"` no setting but `kv_planes` and `precision` can change a token: the others decide
    only *when* the verifier runs, that is, how fast the same text appears. With `coverage="gated"` the guarantee is
    statistical.

    Args:
        threshold (`float`, *optional*, defaults to 0.5):
            A step whose top-1/top-2 gap, in logits of the processed FP32 scores, is below this is a *low-margin*
            step (MarginGate, arXiv 2605.30218, abstract). `0` flags none, `math.inf` flags all.
        coverage (`str`, *optional*, defaults to `"full"`):
            `"full"`: every position is verified before it is committed, the text is exactly the canonical one.
            `"gated"`: only low-margin steps are, as in the paper (abstract): such a step is computed again at once, on
            the cache as it stands, and where the token was wrong, it and the step's K/V column are replaced. Wide steps
            and prompts are trusted to the fast path, and the cache keeps the model's own dtype.
        reference (`str`, *optional*, defaults to `"fp32"`):
            Under `coverage="gated"`, what a low-margin step is computed again by: `"fp32"`: the verifier; `"alone"`:
            the same 16-bit step as a batch of one.
        window (`int`, *optional*, defaults to 32):
            Most tokens of one row that one verifier pass may cover, and so the most a streamer gets at once. `1`
            decodes by the verifier alone.
        schedule (`str`, *optional*, defaults to `"cost"`):
            When to run a pass. `"window"`: a row's window is full or a row would end. `"margin"`: also when a row has
            `low_margin_limit` low-margin steps pending. `"cost"`: also as soon as one more draft would cost more time
            than it is expected to save, by the margins of the pending drafts and the times measured on this machine.
            `"step"`: after every step, that step's own token (always-on verification).
        rows_per_pass (`int`, *optional*):
            Rows that one verifier pass may cover. `None`: all that have something pending. `1` verifies each alone.
        low_margin_limit (`int`, *optional*, defaults to 3):
            Pending low-margin steps in one row that start a pass under `schedule="margin"`.
        precision (`str`, *optional*, defaults to `"float32"`):
            Arithmetic of the verifier. `"bfloat16"` rounds the operands of every linear layer but the head to BF16 and
            accumulates in FP32: as invariant, its text is its own, cheaper where the processor multiplies BF16. For
            models in BF16.
        kv_planes (`int`, *optional*, defaults to 2):
            Format of committed keys and values, in planes of the model's own dtype: `1` rounds them to it, `2` keeps
            hi + lo, `3` keeps exact FP32.
        strict (`bool`, *optional*, defaults to `True`):
            Refuse a model whose forward uses an operation the verifier has no fixed plan for. `False` lets it run
            unchanged, which gives up the guarantee and is recorded in the statistics.
        resident_weights (`bool`, *optional*):
            Keep an FP32 copy of the weights between passes, and on a processor with BF16 products a packed copy of a
            BF16 model's for the fast path. `None` decides by the memory that is free. Same bits either way.
        seed (`int` or `list[int]`, *optional*):
            Seed of `do_sample=True`: one for all prompts or one a prompt. The noise of a token depends on the seed, the
            sample's index within its prompt, the position and the token id, never on the batch.
        calibration (`dict` or `str`, *optional*):
            A calibration record, or the file or folder that holds its `margin_gate.json`, see
            [`MarginGateCalibration`]. The cost schedule takes its flip probabilities, a gated run reports its bound,
            and a model it was not made with is warned of. It does not set `threshold`;
            [`MarginGateCalibration.config`] sets both.
        receipt (`bool`, *optional*, defaults to `False`):
            Give each text a [`Receipt`]: hashes and names of all it was made from, which [`replay`] checks.
    """

    threshold: float = 0.5
    coverage: str = "full"
    reference: str = "fp32"
    window: int = 32
    schedule: str = "cost"
    rows_per_pass: int | None = None
    low_margin_limit: int = 3
    precision: str = "float32"
    kv_planes: int = 2
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
        _integer("window", self.window, 1, MAX_WINDOW)
        if self.rows_per_pass is not None:
            _integer("rows_per_pass", self.rows_per_pass, 1, MAX_ROWS)
        _integer("low_margin_limit", self.low_margin_limit, 1, MAX_WINDOW)
        _integer("kv_planes", self.kv_planes, 1, 3)
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
        A system of the field by name.

        - `"certified"`: the defaults.
        - `"paper"`: MarginGate (arXiv 2605.30218), each low-margin step recomputed alone. Statistical.
        - `"always"`: always-on verification, every step of every row alone, as that paper draws its baseline.
        - `"grouped"`: verify every 16 tokens whatever the margins (LLM-42, arXiv 2601.17768).
        - `"layercast"`: the verifier decodes alone, FP32 on 16-bit weights (LayerCast, NeurIPS 2025).
        - `"invariant"`: the verifier decodes alone, 16-bit operands (batch-invariant operators).
        - `"off"`: `None`, stock `generate`.

        `"certified"`, `"always"`, `"grouped"` and `"layercast"` give the same tokens.

        Raises:
            `ValueError`: another name.
        """
        _one_of("preset", name, tuple(PRESETS))
        fields = PRESETS[name]
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
