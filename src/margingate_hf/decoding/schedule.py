"""When to run a verify forward. Decides speed alone: the tokens are the same whatever it answers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import MarginGateConfig
from .cost_meter import Costs

# P(a draft is not the canonical token) by its margin m in logits: FLIP_AT_TIE * exp(-m / FLIP_DECAY). Two candidates
# at a tie are right half the time; the decay fits SmolLM2 in BF16 (2.5 % of drafts flip, nearly all below 0.5 logits).
FLIP_AT_TIE = 0.5
FLIP_DECAY = 0.15
# The same for a draft whose margin is not known yet.
FLIP_BEFORE_DRAFT = 0.025
# What the cost schedule drafts while it has measured neither a draft step nor a verify forward.
UNMEASURED_DRAFTS = 7


def flip_probability(margin: float) -> float:
    """
    Prior probability that the verifier replaces a draft.

    Args:
        margin (`float`): the draft's top-1/top-2 gap in logits; NaN counts as a tie.
    """
    return FLIP_AT_TIE if math.isnan(margin) else FLIP_AT_TIE * math.exp(-margin / FLIP_DECAY)


@dataclass(frozen=True)
class FlipCurve:
    """
    Calibrated probability that the verifier replaces a draft, constant between edges.

    Attributes:
        edges: margins in logits, ascending; the first is 0.
        probabilities: one an edge, for margins from it to the next; the last holds to infinity.
    """

    edges: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __call__(self, margin: float) -> float:
        """Probability at a margin; NaN counts as a tie."""
        if math.isnan(margin):
            return self.probabilities[0]
        return self.probabilities[max(0, bisect.bisect_right(self.edges, margin) - 1)]


@dataclass(frozen=True)
class Pending:
    """
    One row between two verify forwards.

    Attributes:
        drafts: unverified tokens.
        low: those among them whose margin was under the threshold.
        would_end: whether the last of them ends the row (EOS or the length limit), so that drafting on is pointless.
        survival: probability that all drafts so far are canonical.
        expected: expected tokens a verify forward would commit now, the canonical one behind the agreeing prefix
            included.
    """

    drafts: int
    low: int
    would_end: bool
    survival: float = 1.0
    expected: float = 1.0


def should_verify(rows: Sequence[Pending], config: MarginGateConfig, costs: Costs | None = None) -> bool:
    """
    Whether to verify all rows now rather than draft one more token each.

    Args:
        rows (`Sequence[Pending]`): the rows still decoding.
        config ([`MarginGateConfig`]): `num_draft_tokens`, `schedule`, `low_margin_limit`.
        costs ([`Costs`], *optional*): measured times, for `schedule="cost"`; without them that schedule drafts a few.
    """
    if config.schedule == "step" and config.num_draft_tokens:
        return any(row.drafts for row in rows)
    unmeasured = config.schedule == "cost" and costs is None
    most = min(config.num_draft_tokens, UNMEASURED_DRAFTS) if unmeasured else config.num_draft_tokens
    for row in rows:
        if row.would_end or row.drafts >= most:
            return True
        if config.schedule == "margin" and row.low >= config.low_margin_limit:
            return True
    return config.schedule == "cost" and costs is not None and not drafting_pays(rows, costs)


def drafting_pays(rows: Sequence[Pending], costs: Costs) -> bool:
    """
    Whether one more draft a row lowers the expected time per committed token.

    A cycle of draft steps and one verify forward commits `E` tokens in expectation and takes `C` seconds. One more step
    adds to `E` the probability that its draft will be committed, and to `C` its own time and that of verifying its
    drafts. Stop as soon as that marginal rate falls below `E / C`: the rule of renewal-reward theory for a gain that
    falls from step to step.
    """
    count = len(rows)
    step = costs.draft_fixed + costs.draft_row * count + costs.verify_token * count
    spent = max(row.drafts for row in rows) * (costs.draft_fixed + costs.draft_row * count)
    spent += costs.verify_fixed + costs.verify_token * sum(row.drafts + 1 for row in rows)
    expected = sum(row.expected for row in rows)
    gain = (1.0 - FLIP_BEFORE_DRAFT) * sum(row.survival for row in rows)
    return gain * spent > expected * step
