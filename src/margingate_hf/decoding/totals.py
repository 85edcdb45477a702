"""The statistics of a call, added up over its rows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria

from ..outputs import MarginGateStatistics, RowStatistics
from .rows import Row
from .run import Run

logger = logging.getLogger(__name__)


def totals(
    run: Run, rows: Sequence[Row], notes: Sequence[str], receipt: Callable[[Row], dict[str, Any] | None]
) -> MarginGateStatistics:
    """
    What the gate did so far; logs each note once.

    Args:
        run ([`Run`]): the call, whose own statistics hold times and forwards.
        rows (`Sequence[Row]`): all of them.
        notes (`Sequence[str]`): of the coverage.
        receipt (`Callable`): gives a row's receipt, or `None`.
    """
    ordered = sorted(rows, key=lambda row: row.index)
    failed = [f"row {row.index} ended early: {row.error}" for row in ordered if row.error is not None]
    found = dataclasses.replace(
        run.statistics,
        rows=[_of_row(row, receipt(row)) for row in ordered],
        reused_tokens=sum(row.counts.reused for row in rows),
        low_margin_steps=sum(row.counts.low_margin_steps for row in rows),
        flips=sum(row.counts.flips for row in rows),
        wasted_tokens=sum(row.counts.wasted for row in rows),
        repaired_columns=sum(row.counts.repaired for row in rows),
        new_tokens=sum(len(row.committed) for row in rows),
        notes=[
            *run.verifier.notes(),
            *run.calibrated.notes,
            *_clock_notes(run.request.criteria),
            *notes,
            *failed,
        ],
    )
    for note in found.notes:
        logger.warning_once(note)  # type: ignore[attr-defined]  # transformers adds it to every logger
    return found


def _of_row(row: Row, receipt: dict[str, Any] | None) -> RowStatistics:
    return RowStatistics(
        prompt_tokens=len(row.prompt),
        new_tokens=len(row.committed),
        low_margin_steps=row.counts.low_margin_steps,
        flips=row.counts.flips,
        wasted_tokens=row.counts.wasted,
        margins=row.margins,
        repaired_columns=row.counts.repaired,
        finish_reason=row.finish_reason,
        receipt=receipt,
    )


def _clock_notes(criteria: StoppingCriteriaList) -> list[str]:
    """What makes the length of an output depend on the clock, in words."""
    timed = [item.max_time for item in criteria if isinstance(item, MaxTimeCriteria)]
    return [f"max_time={seconds}: where an output ends depends on the machine's speed" for seconds in timed]
