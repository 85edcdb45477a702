"""One decode call: what both coverages work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..kv_cache.cache import MarginGateCache
from ..outputs import MarginGateStatistics
from ..verifier import Verifier
from .calibration_record import Calibrated
from .commit import Committer
from .prompt_reader import PromptReader
from .request import DecodeRequest
from .rows import Row
from .slots import BatchSlots


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        model: the user's model.
        verifier: self-tested verifier of it.
        request: what is decoded.
        cache, slots: where the rows are; reader: what a verify forward reads of them.
        committer: hands out tokens.
        calibrated: flip probabilities and bound.
        statistics: of the call; times and forwards are added as they happen.
    """

    model: Any
    verifier: Verifier
    request: DecodeRequest
    cache: MarginGateCache
    slots: BatchSlots
    reader: PromptReader
    committer: Committer
    calibrated: Calibrated
    statistics: MarginGateStatistics

    def best(
        self, rows: list[Row], logits: torch.Tensor, scores: Callable[[Row, torch.Tensor], torch.Tensor]
    ) -> tuple[list[int], list[float]]:
        """
        Best token and margin of each row's step.

        Args:
            rows (`list[Row]`): one a line of `logits`.
            logits (`torch.Tensor` of shape `[rows, vocabulary]`, any floating dtype).
            scores (`Callable`): what the argmax of a row with processors or noise is taken of, from its logits
                `[vocabulary]`.
        """
        if not all(row.request.is_plain for row in rows):
            found = [self.committer.guarded(row, scores, piece) for row, piece in zip(rows, logits, strict=True)]
            logits = torch.stack(
                [piece.float() if one is None else one for one, piece in zip(found, logits, strict=True)]
            )
        tokens, margins = self.verifier.backend.top2_margin(logits)
        return tokens.tolist(), margins.tolist()


class Coverage(Protocol):
    """Which positions are verified before they are committed; a [`DecodeLoop`] has one of them."""

    @property
    def plan_suffix(self) -> str:
        """Added to the plan's name in the statistics."""

    def notes(self) -> list[str]:
        """What the caller should know of the guarantee, in words."""

    def advance(self) -> None:
        """Takes the active rows forward; those that end are `done`."""

    def outlives(self, slot: int) -> int:
        """Entries of a row that are kept after the call."""
