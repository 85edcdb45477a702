"""The decode loop: admit, advance by one of the two coverages (draft, verify, accept), retire."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kv_cache.cache import MarginGateCache
from ..outputs import MarginGateStatistics
from ..verifier import Verifier
from .calibration_record import calibrated
from .commit import Committer
from .exact import ExactCoverage
from .gated import GatedCoverage
from .prompt_reader import PromptReader
from .receipts import receipt_of
from .request import DecodeRequest
from .rows import Row, RowRequest
from .run import Coverage, Run
from .slots import BatchSlots
from .totals import totals

COVERAGES: dict[str, Callable[[Run], Coverage]] = {"exact": ExactCoverage, "gated": GatedCoverage}


class DecodeLoop:
    """
    Takes the rows of a request through their slots to their ends.

    Args:
        model (`PreTrainedModel`): the model; its own forward drafts.
        verifier ([`Verifier`]): self-tested verifier of the same model.
        request ([`DecodeRequest`]): what is decoded.
        coverage (`Callable`, *optional*): makes the [`Coverage`]; by default that of the request's gate.

    Attributes:
        rows: in the order of admission.
    """

    def __init__(
        self,
        model: Any,
        verifier: Verifier,
        request: DecodeRequest,
        coverage: Callable[[Run], Coverage] | None = None,
    ):
        self.rows = [Row(row) for row in request.rows]
        self.weights = verifier.store.fingerprint
        cache = request.cache or _new_cache(verifier, request)
        self.run = Run(
            model=model,
            verifier=verifier,
            request=request,
            cache=cache,
            slots=BatchSlots(self.rows, cache, verifier.architecture, reused=request.max_batch_size is not None),
            reader=PromptReader(request, cache),
            committer=Committer(request, verifier.device),
            calibrated=calibrated(request.gate, verifier),
            statistics=MarginGateStatistics(
                fingerprint=_with_adapters(self.weights, request.rows), config=request.gate.to_dict()
            ),
        )
        self.coverage = (coverage or COVERAGES[request.gate.coverage])(self.run)
        self.run.statistics.plan = f"{verifier.name}/kv-{request.gate.kv_dtype}{self.coverage.plan_suffix}"
        for row in self.rows:  # a processor that cannot be described should fail before the work, not after it
            self.receipt(row)

    @property
    def unfinished(self) -> bool:
        """Whether any row is still waiting or decoding."""
        return bool(self.run.slots.waiting or self.run.slots.active)

    def step(self) -> list[Row]:
        """
        One round.

        Returns:
            The rows that have ended, in no particular order.
        """
        slots = self.run.slots
        self._end_early([*slots.waiting, *slots.active])
        finished = self._retire()
        slots.admit()
        if slots.active:
            self.coverage.advance()
        return finished + self._retire()

    def _end_early(self, rows: Sequence[Row]) -> None:
        """Marks rows that the caller has cancelled, and all of them where the model has changed under them."""
        for row in rows:
            if self.run.request.is_cancelled(row.index):
                row.finish_reason = "cancelled"
            elif self.run.verifier.store.fingerprint != self.weights:
                row.fail(RuntimeError("the model's weights or adapters were changed while this prompt was decoded"))

    def _retire(self) -> list[Row]:
        slots = self.run.slots
        ended = [row for row in (*slots.waiting, *slots.active) if row.done]
        for row in ended:
            slots.retire(row, self.run.reader.keep)
        return ended

    def restore_cache(self) -> None:
        """Puts the cache's rows back into the caller's order and drops what must not outlive the call."""
        self.run.slots.restore(self.coverage.outlives)

    def receipt(self, row: Row) -> dict[str, Any] | None:
        """Of a row that has ended, where the gate asks for one."""
        request = self.run.request
        if not request.gate.receipt:
            return None
        return receipt_of(row, request.gate, request.rules, self.weights, self.run.statistics.plan).to_dict()

    def totals(self) -> MarginGateStatistics:
        """The statistics so far, rows included."""
        return totals(self.run, self.rows, self.coverage.notes(), self.receipt)


@dataclass(frozen=True)
class Decoded:
    """
    Attributes:
        rows: all of them, ended, in the caller's order.
        cache: its rows in the same order.
        statistics: of the call.
    """

    rows: list[Row]
    cache: MarginGateCache
    statistics: MarginGateStatistics


def decode(model: Any, verifier: Verifier, request: DecodeRequest) -> Decoded:
    """Runs the rows of a request to their ends; arguments as for [`DecodeLoop`]."""
    loop = DecodeLoop(model, verifier, request)
    try:
        with torch.no_grad():
            while loop.unfinished:
                loop.step()
    finally:
        loop.restore_cache()
    return Decoded(sorted(loop.rows, key=lambda row: row.index), loop.run.cache, loop.totals())


def _new_cache(verifier: Verifier, request: DecodeRequest) -> MarginGateCache:
    rows = len(request.rows) if request.max_batch_size is None else min(request.max_batch_size, len(request.rows))
    if request.gate.coverage == "gated":
        return verifier.new_gated_cache(rows)
    return verifier.new_cache(rows, request.gate.kv_dtype)


def _with_adapters(weights: str, rows: Sequence[RowRequest]) -> str:
    """The fingerprint of a call: that of the weights, and where rows have adapters of their own, of their names too."""
    names = [row.adapter for row in sorted(rows, key=lambda row: row.index)]
    if not any(names):
        return weights
    return hashlib.sha256(f"{weights}{names}".encode()).hexdigest()[: len(weights)]
