"""When to run a verifier pass. Decides speed alone: the tokens are the same whatever it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config import MarginGateConfig


@dataclass(frozen=True)
class Pending:
    """
    One row between two passes.

    Attributes:
        drafts: unverified tokens.
        low: those among them whose margin was under the threshold.
        would_end: whether the last of them ends the row (EOS or the length limit), so that drafting on is pointless.
    """

    drafts: int
    low: int
    would_end: bool


def should_verify(rows: Sequence[Pending], config: MarginGateConfig) -> bool:
    """
    Whether to verify all rows now rather than draft one more token each.

    A pass reads a row's drafts and the token before them, so `window` tokens mean `window - 1` drafts.

    Args:
        rows (`Sequence[Pending]`): the rows still decoding.
        config ([`MarginGateConfig`]): `window`, `schedule`, `low_margin_limit`.
    """
    for row in rows:
        if row.would_end or row.drafts + 1 >= config.window:
            return True
        if config.schedule == "margin" and row.low >= config.low_margin_limit:
            return True
    return False
