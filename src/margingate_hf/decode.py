"""Deferred verification: rows decode ahead in the fast path, verifier passes commit (DESIGN section 3 of the project).

The loop alternates fast steps, which append one draft to every row, with passes, which read every row's pending tokens,
overwrite their K/V columns and commit each row's agreeing prefix and one canonical token more. Nothing uncommitted
reaches a streamer, a stopping criterion or the output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteriaList

from .cache import MarginGateCache
from .config import MarginGateConfig
from .dispatch import implementation
from .geometry import DecodeGeometry, Segment, geometry_scope
from .interfaces import installed
from .outputs import MarginGateStatistics, RowStatistics
from .rope import needs_long_table
from .rows import Row, compare
from .schedule import Pending, should_verify
from .verifier import Verifier

logger = logging.getLogger(__name__)


@dataclass
class DecodeRequest:
    """
    One `generate` call, freed of padding.

    Attributes:
        rows: the prompts, `slot == index` at first.
        cache: columns of an earlier call to build on, `None` for an empty cache.
        eos: token ids that end a row.
        criteria: custom stopping criteria, asked after every committed token with `[1, length]`.
        keep_logits, keep_scores: record canonical values of every step.
        on_commit: called with each committed token, in order (streaming).
    """

    config: MarginGateConfig
    rows: list[Row]
    cache: MarginGateCache | None = None
    eos: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    keep_logits: bool = False
    keep_scores: bool = False
    on_commit: Callable[[Row, int], None] | None = None


def decode(model: Any, verifier: Verifier, request: DecodeRequest) -> tuple[MarginGateCache, MarginGateStatistics]:
    """
    Runs the rows of `request` to their ends; their `committed` lists hold the result.

    Args:
        model (`PreTrainedModel`): the model; its own forward is the fast path.
        verifier ([`Verifier`]): self-tested verifier of the same model.

    Returns:
        `(cache, statistics)`, the cache's rows in the order of `request.rows`.
    """
    loop = _Loop(model, verifier, request)
    try:
        with torch.no_grad(), installed(model):
            loop.prefill()
            while loop.active:
                loop.draft()
                loop.verify()
    finally:
        loop.restore_cache()
    return loop.cache, loop.totals()


class _Loop:
    def __init__(self, model: Any, verifier: Verifier, request: DecodeRequest):
        self.model = model
        self.device = verifier.device
        self.verifier = verifier
        self.request = request
        self.config = request.config
        self.rows = request.rows
        self.active = list(request.rows)  # active[i].slot == i
        cache = request.cache
        self.cache = verifier.new_cache(len(self.rows), self.config.kv_planes) if cache is None else cache
        self.cache.long_rows = [needs_long_table(model, len(row.prompt) + row.limit) for row in self.rows]
        self.statistics = MarginGateStatistics(
            plan=f"{verifier.name}/planes{self.config.kv_planes}",
            fingerprint=verifier.store.fingerprint,
            config=self.config.to_dict(),
        )

    def prefill(self) -> None:
        """The verifier reads the prompts, unpadded, and commits each row's first token."""
        started = time.perf_counter()
        segments = [Segment(row.slot, row.reused, row.prompt[row.reused :]) for row in self.active]
        logits = self.verifier.run(self.cache, segments, keep="last")
        self._commit([logits[i : i + 1] for i in range(len(segments))])
        self.statistics.prefill_tokens = sum(len(segment.tokens) for segment in segments)
        self.statistics.reused_tokens = sum(row.reused for row in self.rows)
        self.statistics.prefill_seconds = time.perf_counter() - started

    def draft(self) -> None:
        """Fast steps until the schedule asks for a pass."""
        started = time.perf_counter()
        meter = self.verifier.meter
        while not should_verify([self._pending(row) for row in self.active], self.config, meter.costs()):
            began = time.perf_counter()
            self._fast_step()
            meter.steps.add(len(self.active), time.perf_counter() - began)
        self.statistics.decode_seconds += time.perf_counter() - started

    def verify(self) -> None:
        """One pass over every active row."""
        started = time.perf_counter()
        segments = [Segment(row.slot, row.verified, row.pending()) for row in self.active]
        counts = [len(segment.tokens) for segment in segments]
        logits = self.verifier.run(self.cache, segments)
        self._commit(list(logits.split(counts)))
        self.statistics.passes += 1
        self.statistics.verified_tokens += sum(counts)
        seconds = time.perf_counter() - started
        self.verifier.meter.passes.add(sum(counts), seconds)
        self.statistics.verify_seconds += seconds

    def _pending(self, row: Row) -> Pending:
        would_end = len(row.committed) + len(row.drafts) + 1 >= row.limit or (
            bool(row.drafts) and row.drafts[-1] in self.request.eos
        )
        return Pending(len(row.drafts), row.low, would_end, row.survival, row.expected)

    def _fast_step(self) -> None:
        device = self.device
        tokens = [row.last for row in self.active]
        positions = [row.verified + len(row.drafts) for row in self.active]
        self.cache.reserve(max(positions) + 1)
        long = self.cache.long_flags([row.slot for row in self.active], device)
        geometry = DecodeGeometry(torch.tensor(positions, device=device), max(positions) + 1, long)
        with geometry_scope(geometry):
            logits = self.model(
                input_ids=torch.tensor(tokens, device=device)[:, None],
                position_ids=geometry.positions[:, None],
                cache=self.cache,
                use_cache=True,
            ).logits[:, -1]
        for row, position, token in zip(self.active, positions, tokens, strict=True):
            self.cache.extend(row.slot, position, [token], verified=False)
        for row, token, margin in zip(self.active, *self._best(logits), strict=True):
            row.add_draft(token, margin, self.config.threshold)
        self.statistics.fast_steps += 1
        self.statistics.row_steps += len(self.active)

    def _best(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        if not all(row.is_plain for row in self.active):
            texts = [[*row.prompt, *row.committed, *row.drafts] for row in self.active]
            logits = torch.stack(
                [
                    row.perturb(row.process(ids, piece.float()), len(ids))
                    for row, ids, piece in zip(self.active, texts, logits, strict=True)
                ]
            )
        tokens, margins = implementation("top2_margin", logits.device)(logits)
        return tokens.tolist(), margins.tolist()

    def _commit(self, logits: list[torch.Tensor]) -> None:
        """Compares, commits and rolls back every active row; `logits[i]` is `[pending tokens, vocabulary]`."""
        for row, piece in zip(list(self.active), logits, strict=True):
            canonical = _Canonical(row, piece)
            decision = compare(row.drafts, canonical)
            row.flips += decision.flipped
            row.wasted += decision.wasted
            row.drop_drafts()
            for index, token in enumerate(decision.committed):
                self._commit_token(row, token, index, canonical)
                if row.done:
                    break
            self.cache.rollback(row.slot, row.verified)
        for row in [row for row in self.active if row.done]:
            self._retire(row)

    def _commit_token(self, row: Row, token: int, index: int, canonical: _Canonical) -> None:
        row.committed.append(token)
        row.margins.append(canonical.margins[index])
        if self.request.keep_logits:
            row.logits.append(canonical.logits[index].clone())
        if self.request.keep_scores:
            row.scores.append(canonical.scores(index).clone())
        row.done = token in self.request.eos or len(row.committed) >= row.limit
        if self.request.criteria and not row.done:
            ids = torch.tensor([[*row.prompt, *row.committed]], device=self.device)
            scores = tuple(score[None] for score in row.scores) or None
            row.done = bool(self.request.criteria(ids, scores).all())
        if self.request.on_commit is not None:
            self.request.on_commit(row, token)

    def _retire(self, row: Row) -> None:
        """Moves a finished row behind the active ones, where no pass and no step reads it."""
        last = self.active[-1]
        self.cache.swap_rows(row.slot, last.slot)
        self.active[row.slot] = last
        self.active.pop()
        row.slot, last.slot = last.slot, row.slot

    def restore_cache(self) -> None:
        """Puts the cache's rows back into the caller's order and drops unverified columns, also after an error."""
        for row in self.rows:
            while row.slot != row.index:
                other = next(other for other in self.rows if other.slot == row.index)
                self.cache.swap_rows(row.slot, other.slot)
                row.slot, other.slot = other.slot, row.slot
            self.cache.rollback(row.slot, self.cache.verified[row.slot])

    def totals(self) -> MarginGateStatistics:
        """Adds up the rows' statistics."""
        total = self.statistics
        for row in self.rows:
            total.rows.append(
                RowStatistics(
                    len(row.prompt), len(row.committed), row.low_margin_steps, row.flips, row.wasted, row.margins
                )
            )
        total.low_margin_steps = sum(row.low_margin_steps for row in total.rows)
        total.flips = sum(row.flips for row in total.rows)
        total.wasted_tokens = sum(row.wasted_tokens for row in total.rows)
        total.new_tokens = sum(row.new_tokens for row in total.rows)
        total.notes = self.verifier.notes()
        for note in total.notes:
            logger.warning_once(note)  # type: ignore[attr-defined]  # transformers adds it to every logger
        return total


class _Canonical:
    """Canonical tokens of one row's pass; with processors, token `i` is computed once tokens `0 ... i-1` are known."""

    def __init__(self, row: Row, logits: torch.Tensor):
        self.row = row
        self.logits = logits
        self.margins: list[float] = []
        self._scores: list[torch.Tensor] = []
        self._text = [*row.prompt, *row.committed]
        self._drafts = list(row.drafts)
        self._tokens: list[int] = []
        if row.is_plain:
            tokens, margins = implementation("top2_margin", logits.device)(logits)
            self._tokens, self.margins = tokens.tolist(), margins.tolist()

    def __call__(self, index: int) -> int:
        if index == len(self._tokens):
            ids = [*self._text, *self._drafts[:index]]
            scores = self.row.process(ids, self.logits[index])
            token, margin = implementation("top2_margin", scores.device)(self.row.perturb(scores, len(ids)))
            self._tokens.append(int(token))
            self.margins.append(float(margin))
            self._scores.append(scores)
        return self._tokens[index]

    def scores(self, index: int) -> torch.Tensor:
        """Processed scores of token `index`, float32 `[vocabulary]`."""
        return self.logits[index] if self.row.is_plain else self._scores[index]
