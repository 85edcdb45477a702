"""Deferred verification: rows decode ahead in the fast path, verifier passes commit (DESIGN section 3 of the project).

The loop alternates fast steps, which append one draft to every row, with passes, which read every row's pending tokens,
overwrite their K/V columns and commit each row's agreeing prefix and one canonical token more. Nothing uncommitted
reaches a streamer, a stopping criterion or the output.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria

from ..config import MarginGateConfig
from ..forward.context import DecodeContext, Segment, context_scope
from ..kv_cache.cache import MarginGateCache
from ..kv_cache.prefix_cache import PREFIX_BLOCK, PrefixStore, block_keys
from ..outputs import MarginGateStatistics, RowStatistics
from ..verifier import Verifier
from .calibration_record import calibrated
from .canonical import Canonical, leading_finite, not_finite
from .drafting import drafting_of
from .receipts import Rules, describe_processor, receipt_of
from .rows import Row, compare
from .schedule import Pending, should_verify

logger = logging.getLogger(__name__)


@dataclass
class DecodeRequest:
    """
    Texts to decode, freed of padding.

    Attributes:
        rows: the prompts, in the caller's order; `slot == index` at first where all are decoded at once.
        cache: columns of an earlier call to build on, `None` for an empty cache.
        eos: token ids that end a row.
        criteria: custom stopping criteria, asked after every committed token with `[1, length]`.
        keep_logits, keep_scores: record canonical values of every step.
        stop: asked after every committed token with the row's prompt and its new tokens, whether the row ends there.
        on_commit: called with each committed token, in order (streaming).
        max_rows: rows decoded at once, others wait for a place. `None`: all, and the cache keeps them.
        chunk: prompt tokens that one pass reads. `None`: whole prompts.
        prefixes: verified columns to start from and to add to; needs `max_rows`.
        shared: the only blocks of columns to add to them, see [`shared_blocks`]; `None`: all.
        isolate: an exception of a row's own processors or criteria ends that row alone.
    """

    config: MarginGateConfig
    rows: list[Row]
    cache: MarginGateCache | None = None
    eos: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    stop: Callable[[list[int], list[int]], bool] | None = None
    keep_logits: bool = False
    keep_scores: bool = False
    on_commit: Callable[[Row, int], None] | None = None
    max_rows: int | None = None
    chunk: int | None = None
    prefixes: PrefixStore | None = None
    shared: frozenset[int] | None = None
    isolate: bool = False

    @property
    def rules(self) -> Rules:
        """What may end a row beside its limit."""
        rules = [*self.criteria, *([] if self.stop is None else [self.stop])]
        return Rules(tuple(sorted(self.eos)), tuple(map(describe_processor, rules)))


class DecodeLoop:
    """
    Rows on their way through fast steps and verifier passes. Rows are admitted and retired between passes; since a
    row's bits depend on its own text alone, neither can change another's.

    Args:
        model (`PreTrainedModel`): the model; its own forward is the fast path.
        verifier ([`Verifier`]): self-tested verifier of the same model.
        request ([`DecodeRequest`]): the rows; their `committed` lists hold the result.
    """

    def __init__(self, model: Any, verifier: Verifier, request: DecodeRequest):
        self.model = model
        self.device = verifier.device
        self.verifier = verifier
        self.drafting = drafting_of(verifier)
        self.request = request
        self.config = request.config
        self.rows = request.rows
        self.waiting = deque(request.rows)
        self.active: list[Row] = []  # active[i].slot == i
        self.finished: list[Row] = []
        places = len(self.rows) if request.max_rows is None else min(request.max_rows, len(self.rows))
        cache = request.cache
        self.cache = self._new_cache(places) if cache is None else cache
        if request.prefixes is not None:
            request.prefixes.bind(self.cache)
        self.calibrated = calibrated(self.config, verifier)
        self.notes = [*self.calibrated.notes, *_clock_notes(request.criteria)]
        self.statistics = MarginGateStatistics(
            plan=f"{verifier.name}/planes{self.config.kv_planes}",
            fingerprint=_with_adapters(verifier.store.fingerprint, self.rows),
            config=self.config.to_dict(),
        )
        self.weights = verifier.store.fingerprint
        for row in self.rows:  # a processor that cannot be described should fail before the work, not after it
            self.receipt(row)

    def _new_cache(self, places: int) -> MarginGateCache:
        return self.verifier.new_cache(places, self.config.kv_planes)

    def _product(self) -> Any:
        """What stands in for torch's linear product in a fast step."""
        return self.drafting.product

    @property
    def unfinished(self) -> bool:
        """Whether any row is still waiting or decoding."""
        return bool(self.waiting or self.active)

    def step(self) -> list[Row]:
        """
        Admits rows to free places and takes them forward.

        Returns:
            The rows that have ended, in no particular order.
        """
        for row in [row for row in (*self.waiting, *self.active) if row.cancelled]:
            row.finish_reason = "cancelled"
            self._end(row)
        if self.verifier.store.fingerprint != self.weights:
            for row in [*self.waiting, *self.active]:
                row.fail(RuntimeError("the model's weights or adapters were changed while this prompt was decoded"))
                self._end(row)
        self._admit()
        self._advance()
        finished, self.finished = self.finished, []
        return finished

    def _advance(self) -> None:
        """Drafts unless a prompt is to be read, and runs one pass."""
        if all(row.committed for row in self.active):
            self._draft()
        if self.active:
            self._verify()

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self.cache.rows:
            row = self.waiting.popleft()
            row.slot = len(self.active)
            if self.request.max_rows is not None:
                self.cache.clear(row.slot)
            self.cache.long_rows[row.slot] = self.verifier.architecture.needs_long_table(len(row.prompt) + row.limit)
            self.cache.adapters[row.slot] = row.adapter
            row.read = row.reused
            self.active.append(row)

    def _draft(self) -> None:
        """Fast steps until the schedule asks for a pass."""
        started = time.perf_counter()
        meter = self.drafting.meter
        while self.active and not should_verify(
            [self._pending(row) for row in self.active], self.config, meter.costs()
        ):
            began = time.perf_counter()
            self._draft_tokens()
            meter.add_step(len(self.active), time.perf_counter() - began)
            for row in [row for row in self.active if row.done]:  # its own processor has failed
                self._end(row)
        self.statistics.decode_seconds += time.perf_counter() - started

    def _verify(self) -> None:
        """
        Every decoding row's pending tokens and what the others have left of their prompts, in one pass unless the
        caller wants fewer rows in each.
        """
        parts = self._parts()
        size = self.config.rows_per_pass or len(parts)
        for start in range(0, len(parts), size):
            self._pass(parts[start : start + size])
        for row in [row for row in self.active if row.done]:
            self._end(row)

    def _pass(self, parts: list[tuple[Row, list[int], int]]) -> None:
        started = time.perf_counter()
        segments = [Segment(row.slot, row.verified, tokens) for row, tokens, _ in parts]
        counts = [kept for *_, kept in parts]
        logits = self.verifier.run(self.cache, segments, keep=counts)
        prompt_tokens = sum(len(tokens) for row, tokens, _ in parts if not row.committed)
        decoded = sum(len(tokens) for row, tokens, _ in parts if row.committed)
        for (row, tokens, _), piece in zip(parts, logits.split(counts), strict=True):
            if not row.committed:
                row.read += len(tokens)
                if self.request.prefixes is not None:
                    self.request.prefixes.keep(self.cache, row.slot, self.request.shared)
            if len(piece):
                self._guarded(row, self._commit, piece)
        seconds = time.perf_counter() - started
        self.statistics.prefill_tokens += prompt_tokens
        self.statistics.verified_tokens += decoded
        if prompt_tokens:
            self.statistics.prefill_seconds += seconds
        else:
            self.statistics.passes += 1
            self.statistics.verify_seconds += seconds
            self.drafting.meter.add_pass(decoded, seconds)

    def _parts(self) -> list[tuple[Row, list[int], int]]:
        """
        What the pass reads: `(row, tokens, of how many of the last ones logits are wanted)`.

        Prompts are read in the order of admission, `chunk` tokens in all. A row whose next block of prompt another row
        reads in this very pass sits the pass out and takes the block from the prefix store afterwards.
        """
        parts: list[tuple[Row, list[int], int]] = []
        room = self.request.chunk or sum(len(row.prompt) for row in self.active)
        beyond = self.config.schedule != "step"
        claimed: set[int] = set()
        for row in self.active:
            if row.committed:
                tokens = row.pending(beyond)
                parts.append((row, tokens, len(tokens)))
                continue
            left = self._claim(row, claimed)
            take = left if left <= room else max(0, (row.read + room) // PREFIX_BLOCK * PREFIX_BLOCK - row.read)
            if take:
                room -= take
                if self.request.prefixes is not None:
                    self.request.prefixes.missed(take)
                tokens = row.prompt[row.read : row.read + take]
                parts.append((row, tokens, int(row.read + take == len(row.prompt))))
        return parts

    def _claim(self, row: Row, claimed: set[int]) -> int:
        """Prompt tokens a row has left to read itself in this pass."""
        prefixes = self.request.prefixes
        left = len(row.prompt) - row.read
        if prefixes is None:
            return left
        if row.read % PREFIX_BLOCK == 0:
            # The last prompt token is always read: its logits are needed.
            blocks = prefixes.find(self.cache, row.slot, row.prompt, len(row.prompt) - 1)
            copied = prefixes.load(self.cache, row.slot, blocks, row.read)
            row.read, row.reused, left = row.read + copied, row.reused + copied, left - copied
        mine = block_keys(row.prompt, row.read)
        if mine and mine[0] in claimed:
            return 0
        claimed.update(mine)
        return left

    def _guarded(self, row: Row, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs what calls a row's own processors or criteria; under `isolate` an exception there ends the row."""
        if not self.request.isolate:
            return work(row, *arguments)
        try:
            return work(row, *arguments)
        except Exception as error:
            row.fail(error)
            return None

    def _pending(self, row: Row) -> Pending:
        would_end = len(row.committed) + len(row.drafts) + 1 >= row.limit or (
            bool(row.drafts) and row.drafts[-1] in self.request.eos
        )
        return Pending(len(row.drafts), row.low, would_end, row.survival, row.expected)

    def _draft_tokens(self) -> None:
        logits = self._fast_step()
        for row, token, margin in zip(self.active, *self._best(self.active, logits), strict=True):
            row.add_draft(token, margin, self.config.threshold, self.calibrated.flips)

    def _fast_step(self) -> torch.Tensor:
        """One token more in every active row's cache; logits `[rows, vocabulary]`, the model's dtype."""
        tokens = [row.last for row in self.active]
        positions = [row.verified + len(row.drafts) for row in self.active]
        self.cache.reserve(max(positions) + 1)
        for row, position in zip(self.active, positions, strict=True):
            self.cache.touch(row.slot, position + 1)
        parts = [self._fast_forward(rows) for rows in _alike(self.active)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        for row, position, token in zip(self.active, positions, tokens, strict=True):
            self.cache.extend(row.slot, position, [token], verified=False)
        self.statistics.fast_steps += 1
        self.statistics.row_steps += len(self.active)
        return logits

    def _fast_forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """The model's own forward on one token of each of consecutive rows; logits `[rows, vocabulary]`."""
        device = self.device
        positions = [row.verified + len(row.drafts) for row in rows]
        context = DecodeContext(
            torch.tensor(positions, device=device),
            max(positions) + 1,
            self.cache.long_flags([row.slot for row in rows], device),
            first=rows[0].slot,
            product=self._product(),
            backend=self.verifier.backend,
        )
        with context_scope(context):
            logits: torch.Tensor = self.verifier.twin_for(rows[0].adapter)(
                input_ids=torch.tensor([row.last for row in rows], device=device)[:, None],
                position_ids=context.positions[:, None],
                cache=self.cache,
                use_cache=True,
            ).logits[:, -1]
        return logits

    def _best(self, rows: list[Row], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Best token and margin of each row's step, `logits` `[rows, vocabulary]`, any floating dtype."""
        if not all(row.is_plain for row in rows):
            scores = [self._guarded(row, self._scores, piece) for row, piece in zip(rows, logits, strict=True)]
            logits = torch.stack(
                [piece.float() if found is None else found for found, piece in zip(scores, logits, strict=True)]
            )
        tokens, margins = self.verifier.backend.top2_margin(logits)
        return tokens.tolist(), margins.tolist()

    @staticmethod
    def _scores(row: Row, logits: torch.Tensor) -> torch.Tensor:
        ids = [*row.prompt, *row.committed, *row.drafts]
        return row.perturb(row.process(ids, logits.float(), draft=True), len(ids))

    def _commit(self, row: Row, logits: torch.Tensor) -> None:
        """Compares, commits and rolls back a row; `logits` is `[pending tokens, vocabulary]`."""
        known = leading_finite(logits)
        canonical = Canonical(row, logits, self.verifier.backend)
        decision = compare(row.drafts[:known], canonical, beyond=known > len(row.drafts))
        row.repaired += len(row.drafts)
        row.flips += decision.flipped
        row.wasted += decision.wasted
        row.drop_drafts()
        for index, token in enumerate(decision.committed):
            scores = canonical.scores(index) if self.request.keep_scores else None
            self._commit_token(row, token, canonical.margins[index], canonical.logits[index], scores)
            if row.done:
                break
        if known < len(logits) and not decision.flipped and not row.done:
            row.fail(not_finite(row))
        self.cache.rollback(row.slot, row.verified)

    def _commit_token(
        self, row: Row, token: int, margin: float, logits: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Hands out one token; `logits` and, where they are kept, processed `scores` are `[vocabulary]`."""
        row.committed.append(token)
        row.margins.append(margin)
        if self.request.keep_logits:
            row.logits.append(logits.clone())
        if scores is not None:
            row.scores.append(scores.clone())
        row.finish_reason = self._finish_reason(row, token)
        row.done = bool(row.finish_reason)
        if self.request.on_commit is not None:
            self.request.on_commit(row, token)

    def _finish_reason(self, row: Row, token: int) -> str:
        if token in self.request.eos:
            return "eos"
        if len(row.committed) >= row.limit:
            return "length"
        if self.request.criteria:
            ids = torch.tensor([[*row.prompt, *row.committed]], device=self.device)
            held = tuple(score[None] for score in row.scores) or None
            if self.request.criteria(ids, held).all():
                return "stop"
        return "stop" if self.request.stop is not None and self.request.stop(row.prompt, row.committed) else ""

    def _end(self, row: Row) -> None:
        """Takes a row out: its place goes behind the active ones, where no pass and no step reads it."""
        row.done = True
        row.drop_drafts()
        self.finished.append(row)
        if row in self.waiting:
            self.waiting.remove(row)
            return
        self.cache.rollback(row.slot, row.verified)
        if self.request.prefixes is not None:
            self.request.prefixes.keep(self.cache, row.slot, self.request.shared)
        last = self.active[-1]
        self.cache.swap_rows(row.slot, last.slot)
        self.active[row.slot] = last
        self.active.pop()
        row.slot, last.slot = last.slot, row.slot

    def restore_cache(self) -> None:
        """Puts the cache's rows back into the caller's order and drops unverified columns, also after an error."""
        if self.request.max_rows is not None:
            return
        for row in self.rows:
            while row.slot != row.index:
                other = next(other for other in self.rows if other.slot == row.index)
                self.cache.swap_rows(row.slot, other.slot)
                row.slot, other.slot = other.slot, row.slot
            self.cache.rollback(row.slot, self._kept(row.slot))

    def _kept(self, slot: int) -> int:
        """Columns of a row that outlive the call."""
        return self.cache.verified[slot]

    def receipt(self, row: Row) -> dict[str, Any] | None:
        """Of a row that has ended, where the config asks for one."""
        if not self.config.receipt:
            return None
        statistics = self.statistics
        return receipt_of(row, self.config, self.request.rules, self.weights, statistics.plan).to_dict()

    def totals(self) -> MarginGateStatistics:
        """Adds up the rows' statistics."""
        total = self.statistics
        total.reused_tokens = sum(row.reused for row in self.rows)
        total.rows = [
            RowStatistics(
                prompt_tokens=len(row.prompt),
                new_tokens=len(row.committed),
                low_margin_steps=row.low_margin_steps,
                flips=row.flips,
                wasted_tokens=row.wasted,
                margins=row.margins,
                repaired_columns=row.repaired,
                finish_reason=row.finish_reason,
                receipt=self.receipt(row),
            )
            for row in self.rows
        ]
        total.low_margin_steps = sum(row.low_margin_steps for row in total.rows)
        total.flips = sum(row.flips for row in total.rows)
        total.wasted_tokens = sum(row.wasted_tokens for row in total.rows)
        total.repaired_columns = sum(row.repaired_columns for row in total.rows)
        total.new_tokens = sum(row.new_tokens for row in total.rows)
        failed = [f"row {row.index} ended early: {row.error}" for row in self.rows if row.error is not None]
        total.notes = [*self.verifier.notes(), *self.notes, *failed]
        for note in total.notes:
            logger.warning_once(note)  # type: ignore[attr-defined]  # transformers adds it to every logger
        return total


def _alike(rows: list[Row]) -> list[list[Row]]:
    """Runs of consecutive rows that share an adapter."""
    return [list(run) for _, run in itertools.groupby(rows, key=lambda row: row.adapter)]


def _clock_notes(criteria: StoppingCriteriaList) -> list[str]:
    """What makes the length of an output depend on the clock, in words."""
    timed = [item.max_time for item in criteria if isinstance(item, MaxTimeCriteria)]
    return [f"max_time={seconds}: where an output ends depends on the machine's speed" for seconds in timed]


def _with_adapters(weights: str, rows: list[Row]) -> str:
    """The fingerprint of a call: that of the weights, and where rows have adapters of their own, of their names too."""
    names = [row.adapter for row in sorted(rows, key=lambda row: row.index)]
    if not any(names):
        return weights
    return hashlib.sha256(f"{weights}{names}".encode()).hexdigest()[: len(weights)]
