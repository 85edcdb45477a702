"""Exact coverage: rows draft ahead, verify forwards commit (after LLM-42, arXiv 2601.17768).

Draft steps append one token to every row. A verify forward reads every row's pending tokens, overwrites their K/V
columns, and commits each row's agreeing drafts and one canonical token more.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from ..forward.context import Segment
from .accept import Canonical, compare, leading_finite, not_finite
from .draft_steps import DraftSteps
from .drafting import drafting_of
from .prompt_reader import Part
from .rows import Row
from .run import Run
from .schedule import Pending, should_verify


class ExactCoverage:
    """
    See [`Coverage`]: every position is verified before it is committed.

    Args:
        run ([`Run`]): the call.
    """

    plan_suffix = ""

    def __init__(self, run: Run):
        self.run = run
        drafting = drafting_of(run.verifier)
        self.meter = drafting.meter
        self.steps = DraftSteps(run.verifier, run.cache, drafting.product)

    def notes(self) -> list[str]:
        """See [`Coverage`]; none."""
        return []

    def outlives(self, slot: int) -> int:
        """See [`Coverage`]; what was verified."""
        return self.run.cache.verified[slot]

    def advance(self) -> None:
        """Drafts unless a prompt is to be read; verifies all that is pending; accepts what agrees."""
        run, gate = self.run, self.run.request.gate
        active = run.slots.active
        if all(row.committed for row in active):
            self.draft()
        parts = run.reader.parts([row for row in active if not row.done], beyond=gate.schedule != "step")
        size = gate.verify_batch_size or max(1, len(parts))
        for start in range(0, len(parts), size):
            group = parts[start : start + size]
            started = time.perf_counter()
            for part, logits in zip(group, self.verify(group), strict=True):
                run.reader.done(part)
                if len(logits):
                    run.committer.guarded(part.row, self.accept, logits)
            self._count(group, time.perf_counter() - started)

    def draft(self) -> None:
        """Draft steps until the schedule asks for a verify forward."""
        run, gate = self.run, self.run.request.gate
        started = time.perf_counter()
        rows = list(run.slots.active)
        while rows and not should_verify([self._pending(row) for row in rows], gate, self.meter.costs()):
            began = time.perf_counter()
            found = run.best(rows, self.steps.step(rows), _draft_scores)
            for row, token, margin in zip(rows, *found, strict=True):
                row.add_draft(token, margin, gate.threshold, run.calibrated.flips)
            run.statistics.draft_steps += 1
            run.statistics.drafted_tokens += len(rows)
            self.meter.add_draft_step(len(rows), time.perf_counter() - began)
            if any(row.done for row in rows):  # its own processor has failed
                break
        run.statistics.decode_seconds += time.perf_counter() - started

    def verify(self, parts: list[Part]) -> list[torch.Tensor]:
        """Canonical logits of each part, `[num_logits, vocabulary]`, float32."""
        counts = [part.num_logits for part in parts]
        segments = [Segment(part.row.slot, part.row.verified, part.tokens) for part in parts]
        return list(self.run.verifier.run(self.run.cache, segments, keep=counts).split(counts))

    def accept(self, row: Row, logits: torch.Tensor) -> None:
        """Commits a row's agreeing drafts and what follows, `logits` `[pending tokens, vocabulary]`; rolls back."""
        known = leading_finite(logits)
        canonical = Canonical(row, logits, self.run.verifier.backend)
        decision = compare(row.drafts[:known], canonical, beyond=known > len(row.drafts))
        row.counts.repaired += len(row.drafts)
        row.counts.flips += decision.flipped
        row.counts.wasted += decision.wasted
        row.drop_drafts()
        for index, token in enumerate(decision.committed):
            self.run.committer.commit(
                row, token, canonical.margins[index], logits[index], partial(canonical.scores, index)
            )
            if row.done:
                break
        if known < len(logits) and not decision.flipped and not row.done:
            row.fail(not_finite(row))
        self.run.cache.rollback(row.slot, row.verified)

    def _pending(self, row: Row) -> Pending:
        would_end = len(row.committed) + len(row.drafts) + 1 >= row.request.limit or (
            bool(row.drafts) and row.drafts[-1] in self.run.request.eos
        )
        return Pending(len(row.drafts), row.num_low, would_end, row.survival, row.expected)

    def _count(self, parts: list[Part], seconds: float) -> None:
        statistics = self.run.statistics
        of_prompt = sum(len(part.tokens) for part in parts if part.of_prompt)
        decoded = sum(len(part.tokens) for part in parts if not part.of_prompt)
        statistics.prefill_tokens += of_prompt
        statistics.verified_tokens += decoded
        if of_prompt:
            statistics.prefill_seconds += seconds
        else:
            statistics.verify_forwards += 1
            statistics.verify_seconds += seconds
            self.meter.add_verify(decoded, seconds)


def _draft_scores(row: Row, logits: torch.Tensor) -> torch.Tensor:
    """Processed scores of a draft step, from logits `[vocabulary]`."""
    ids = [*row.prompt, *row.committed, *row.drafts]
    return row.request.perturb(row.process(ids, logits.float(), draft=True), len(ids))
