"""What a calibration found: a threshold and its bound, a flip curve, and what both were measured with."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from transformers.utils.hub import PushToHubMixin

from ..config import MarginGateConfig
from ..verifier import Verifier
from .schedule import FlipCurve, flip_probability

logger = logging.getLogger(__name__)

FILE = "margin_gate.json"
# What must agree for the figures to carry over; the rest of the fingerprint only tells where they came from.
COMPARED = ("checkpoint", "dtype", "device", "plan")


@dataclass
class BatchSizeCounts:
    """
    Steps of one batch size.

    Attributes:
        batch_size: rows decoded together.
        steps: steps compared; `flips`: drafts that were not the canonical tokens.
        near_ties: flips whose margin was below the threshold; `confident`: the others, which a gated run misses.
        largest_flip: largest margin of a flip, in logits; `None` without one.
    """

    batch_size: int
    steps: int
    flips: int
    near_ties: int
    confident: int
    largest_flip: float | None


@dataclass
class MarginGateCalibration(PushToHubMixin):
    """
    A threshold with a bound on what it misses, and how likely a draft is to flip by its margin. See
    [`~margingate_hf.analysis.calibrate.calibrate`].

    Attributes:
        threshold: smallest one whose missed-flip rate is bounded, in logits of the draft path.
        threshold_steps: the same in BF16 steps: a margin over the spacing of BF16 numbers at the top logit. Carries
            over between models that scale or cap their logits.
        miss_rate, confidence: what was asked for: missed flips a step, and the probability that the bound holds.
        miss_bound: exact binomial (Clopper-Pearson) upper bound at `threshold`.
        sufficient: whether the sample could bound `miss_rate` at all; if not, `threshold` is beyond every flip seen and
            `miss_bound` is above `miss_rate`.
        trigger_rate: share of steps under the threshold.
        steps, flips, prompts, new_tokens: size of the sample.
        prompts_missed_bound: the same bound for prompts with any miss, out of `prompts`: steps of one output are not
            independent, prompts are.
        curve: flip probability by margin, for the cost schedule.
        batch_sizes: counts of each.
        fingerprint: what it was measured with.
    """

    threshold: float
    threshold_steps: float
    miss_rate: float
    confidence: float
    miss_bound: float
    sufficient: bool
    trigger_rate: float
    steps: int
    flips: int
    prompts: int
    new_tokens: int
    prompts_missed_bound: float
    curve: FlipCurve
    batch_sizes: list[BatchSizeCounts] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)

    def config(self, coverage: str = "gated", **fields: Any) -> MarginGateConfig:
        """A config with this threshold and this record; `fields` as for [`MarginGateConfig`]."""
        return MarginGateConfig(threshold=self.threshold, coverage=coverage, calibration=self.to_dict(), **fields)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MarginGateCalibration:
        """
        Inverse of [`~MarginGateCalibration.to_dict`].

        Raises:
            `ValueError`: not a calibration record; names what is missing or unknown.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            given = set(values) if isinstance(values, dict) else set()
            raise ValueError(
                f"`calibration` is not a record of this version (missing {sorted(names - given)}, unknown "
                f"{sorted(given - names)}); run `margingate calibrate` again."
            )
        curve = FlipCurve(*(tuple(values["curve"][name]) for name in ("edges", "probabilities")))
        counts = [BatchSizeCounts(**entry) for entry in values["batch_sizes"]]
        return cls(**{**values, "curve": curve, "batch_sizes": counts})

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """
        Writes `margin_gate.json` into a folder, beside a checkpoint for example.

        Args:
            save_directory (`str` or `Path`): made if it does not exist.
            push_to_hub (`bool`, *optional*, defaults to `False`): upload it as well; `kwargs` as for transformers'
                [`~transformers.utils.PushToHubMixin.push_to_hub`].
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> MarginGateCalibration:
        """
        Reads a record.

        Args:
            name_or_path (`str` or `Path`): the file, a folder with a `margin_gate.json`, or a hub id; `kwargs` as for
                transformers' `cached_file` (`revision`, `token`, ...).

        Raises:
            `OSError`: there is none. `ValueError`: it is not a record.
        """
        path = Path(name_or_path)
        found = path if path.is_file() else Path(cached_file(str(name_or_path), FILE, **kwargs))
        return cls.from_dict(json.loads(found.read_text()))

    def differs_from(self, verifier: Verifier) -> list[str]:
        """Where a verifier's model and machine differ from the record, in words."""
        now = fingerprint(verifier)
        return [
            f"{name} {self.fingerprint.get(name)!r}, now {now[name]!r}"
            for name in COMPARED
            if self.fingerprint.get(name) != now[name]
        ]


def fingerprint(verifier: Verifier) -> dict[str, Any]:
    """What a calibration depends on: checkpoint, dtype, device, the verifier's plan and with it torch's version."""
    return {
        "checkpoint": verifier.store.fingerprint,
        "dtype": str(verifier.model.dtype).removeprefix("torch."),
        "device": verifier.device.type,
        "plan": verifier.name,
    }


def record_of(config: MarginGateConfig) -> MarginGateCalibration | None:
    """
    The calibration a config names, or `None`.

    Raises:
        `ValueError`: it is not a record, or there is none where it points.
    """
    value = config.calibration
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return MarginGateCalibration.from_pretrained(value)
        except OSError:
            raise ValueError(
                f"`calibration`={value!r} holds no {FILE}; name the file or its folder, or run `margingate calibrate`."
            ) from None
    return MarginGateCalibration.from_dict(value)


@dataclass(frozen=True)
class Calibrated:
    """
    What a run takes from its calibration.

    Attributes:
        flips: P(flip | margin) for the schedule; the prior without a calibration.
        bound: its bound on misses a step, where it fits the model and the threshold in use is at least its own.
        notes: in words, where it was made with another model or machine.
    """

    flips: Callable[[float], float]
    bound: float | None = None
    notes: tuple[str, ...] = ()


def calibrated(config: MarginGateConfig, verifier: Verifier) -> Calibrated:
    """Reads the calibration a config names and compares it with a verifier's model and machine."""
    record = record_of(config)
    if record is None:
        return Calibrated(flip_probability)
    differences = record.differs_from(verifier)
    if not differences:
        return Calibrated(record.curve, None if config.threshold < record.threshold else record.miss_bound)
    note = f"the calibration was made with another setting ({'; '.join(differences)}): its bound does not carry over"
    logger.warning_once(note)  # type: ignore[attr-defined]  # transformers adds it to every logger
    return Calibrated(record.curve, notes=(note,))
