"""What a call with the gate returns beside the tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput


@dataclass
class RowStatistics:
    """
    One prompt.

    Attributes:
        prompt_tokens, new_tokens: lengths, padding not counted.
        low_margin_steps: drafts whose margin was under the threshold.
        flips: drafts the verifier replaced.
        wasted_tokens: drafts dropped behind a flip.
        margins: canonical top-1/top-2 margin of each new token, in logits of the processed scores; under
            `coverage="gated"` the draft path's where it was trusted.
        repaired_columns: K/V columns of the draft path that were replaced: every one a verify forward covered, or under
            `coverage="gated"` those of wrong tokens.
        finish_reason: `"eos"`, `"length"`, `"stop"` (a criterion) or `"error"` (canonical logits that are not finite;
            the `notes` of the call say where).
        receipt: see [`Receipt`], with `MarginGateConfig(receipt=True)`.
    """

    prompt_tokens: int
    new_tokens: int
    low_margin_steps: int
    flips: int
    wasted_tokens: int
    margins: list[float]
    repaired_columns: int = 0
    finish_reason: str = ""
    receipt: dict[str, Any] | None = None


@dataclass
class MarginGateStatistics:
    """
    One `generate` call. Times in seconds of wall clock.

    Attributes:
        plan: the verifier's plan in one line; `fingerprint`: hash of weights, buffers and adapters it ran on.
        draft_steps: forwards of the draft path; `drafted_tokens`: drafts they gave, summed over rows.
        verify_forwards: those that read no prompt; `verified_tokens`: tokens of decoding rows that they read.
        prefill_tokens: prompt tokens read by the verifier; `reused_tokens`: those whose entries were there already,
            in a cache from an earlier call or left by another prompt.
        low_margin_steps, flips, wasted_tokens, repaired_columns: sums over rows.
        miss_bound: under `coverage="gated"` with a calibration, its upper bound on wrong tokens a step; the bound of an
            exact run is 0 by construction.
        notes: every slower or weaker path that was taken, in words. Empty in a normal run.
        rows: per prompt.
    """

    plan: str = ""
    fingerprint: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    draft_steps: int = 0
    drafted_tokens: int = 0
    verify_forwards: int = 0
    verified_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    low_margin_steps: int = 0
    flips: int = 0
    wasted_tokens: int = 0
    repaired_columns: int = 0
    miss_bound: float | None = None
    new_tokens: int = 0
    setup_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    verify_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    rows: list[RowStatistics] = field(default_factory=list)

    @property
    def trigger_rate(self) -> float:
        """Low-margin drafts over all drafts."""
        return self.low_margin_steps / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def flip_rate(self) -> float:
        """Drafts the verifier replaced, over drafts it compared (dropped ones are not compared)."""
        compared = self.drafted_tokens - self.wasted_tokens
        return self.flips / compared if compared else 0.0

    @property
    def wasted_seconds(self) -> float:
        """Share of `decode_seconds` spent on drafts that were dropped."""
        return self.decode_seconds * self.wasted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Fields and rates, JSON-able."""
        rates = {"trigger_rate": self.trigger_rate, "flip_rate": self.flip_rate, "wasted_seconds": self.wasted_seconds}
        return {**asdict(self), **rates}


@dataclass
class MarginGateOutput(GenerateDecoderOnlyOutput):
    """
    A stock [`~transformers.generation.GenerateDecoderOnlyOutput`] with statistics.

    `logits` and `scores` hold the canonical FP32 values, raw and processed; rows that have ended are 0 there. `cache`
    is the [`MarginGateCache`], rows in the caller's order.

    Args:
        margin_gate ([`MarginGateStatistics`], *optional*): what the gate did.
    """

    margin_gate: MarginGateStatistics | None = None
