"""Gated coverage: wide steps are trusted, low-margin steps computed again (MarginGate, arXiv 2605.30218, abstract).

Prompts and steps run in the fast path, batched. A step whose margin is under the threshold is computed again at once,
on the cache as it stands: by the verifier (`reference="fp32"`) or as the same 16-bit step of a batch of one
(`"alone"`). Where that gives another token, it and the step's K/V column are replaced. What was trusted wrongly stays:
the guarantee is that of the threshold.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import DynamicCache

from ..forward.context import DecodeContext, Segment, context_scope
from ..kv_cache.cache import MarginGateCache
from ..verifier.top2 import is_low
from .canonical import leading_finite, not_finite
from .loop import DecodeLoop
from .rows import Row

NOTE = (
    'coverage="gated": only steps with a margin under {threshold} logits are verified, so a text may depend on its '
    "batch; {bound}"
)


class GatedLoop(DecodeLoop):
    """As [`DecodeLoop`], one step at a time; nothing is ever pending."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.statistics.plan += f"/gated-{self.config.reference}"
        bound = self.statistics.miss_bound = self.calibrated.bound
        said = "no calibration says how often" if bound is None else f"calibrated to at most {bound:.1e} misses a step"
        self.notes.append(NOTE.format(threshold=self.config.threshold, bound=said))

    def _new_cache(self, places: int) -> MarginGateCache:
        return self.verifier.new_gated_cache(places)

    def _advance(self) -> None:
        started = time.perf_counter()
        rows = [row for row in self.active if not row.committed]
        if rows:
            logits = self._prefill(rows)
            self.statistics.prefill_seconds += time.perf_counter() - started
        elif self.active:
            rows = list(self.active)
            logits = self._fast_step()
            self.statistics.decode_seconds += time.perf_counter() - started
        else:
            return
        steps = [Step(row, *found) for row, *found in zip(rows, *self._best(rows, logits), logits, strict=True)]
        self._judge(steps)
        for step in steps:
            if not step.row.done:  # its own processor may have failed
                self._guarded(step.row, self._commit_step, step)
        for row in [row for row in rows if row.done]:
            self._end(row)

    @staticmethod
    def _scores(row: Row, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores of a step that may stand: no draft, so a row's first one is checked like a verified one."""
        ids = [*row.prompt, *row.committed]
        return row.perturb(row.process(ids, logits.float()), len(ids))

    def _product(self) -> None:
        """The model's own: what it drafts may stand."""

    def _judge(self, steps: list[Step]) -> None:
        """Settles the tokens of this turn's steps."""
        self._recompute([step for step in steps if step.is_low(self.config.threshold) and not step.row.done])

    def _prefill(self, rows: list[Row]) -> torch.Tensor:
        """
        Prompts by the model's own forward, left-padded into one batch as transformers does; their columns are copied.

        Returns:
            `torch.Tensor` of shape `[rows, vocabulary]`: logits of each prompt's last token.
        """
        width = max(len(row.prompt) for row in rows)
        missing = [width - len(row.prompt) for row in rows]
        ids = [[0] * gap + row.prompt for row, gap in zip(rows, missing, strict=True)]
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in missing], device=self.device)
        stock = DynamicCache()
        logits = self.model(
            input_ids=torch.tensor(ids, device=self.device),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_(min=0),
            cache=stock,
            use_cache=True,
            **({"logits_to_keep": 1} if self.verifier.architecture.keeps_logits else {}),
        ).logits[:, -1]
        self.cache.reserve(width)
        for layer, held in zip(self.cache.layers, stock.layers, strict=True):
            if layer.stores is None:
                layer.lazy_initialization(held.keys, held.values)
            for store, columns in zip(layer.stores or (), (held.keys, held.values), strict=True):
                for index, row in enumerate(rows):
                    store.trust(row.slot, columns[index, :, missing[index] :])
        for row in rows:
            self.cache.extend(row.slot, 0, row.prompt, verified=False)
            row.read = len(row.prompt)
        self.statistics.prefill_tokens += sum(len(row.prompt) for row in rows)
        self.statistics.row_steps += len(rows)
        return logits

    def _recompute(self, steps: list[Step]) -> None:
        """Computes steps again and settles each: the new token and column where the token differs, else the old."""
        started = time.perf_counter()
        size = 1 if self.config.reference == "alone" else self.config.rows_per_pass or max(1, len(steps))
        for start in range(0, len(steps), size):
            part = steps[start : start + size]
            before = [self._column(step) for step in part]
            if self.config.reference == "alone":
                logits = self._step_alone(part[0])
            else:
                segments = [Segment(step.row.slot, step.position, [step.last]) for step in part]
                logits = self.verifier.recompute(self.cache, segments)
            found = self._best([step.row for step in part], logits)
            for step, column, token, margin, values in zip(part, before, *found, logits, strict=True):
                self._settle(step, column, token, margin, values)
            self.statistics.passes += 1
            self.statistics.verified_tokens += len(part)
        self.statistics.verify_seconds += time.perf_counter() - started

    def _column(self, step: Step) -> list[torch.Tensor]:
        return self.cache.export_columns(step.row.slot, step.position, step.position + 1)

    def _settle(self, step: Step, before: list[torch.Tensor], token: int, margin: float, logits: torch.Tensor) -> None:
        step.row.low_margin_steps += 1
        if token == step.token:
            self.cache.load_columns(step.row.slot, step.position, before)
        else:
            step.row.flips += 1
            step.row.repaired += 1
        step.token, step.margin, step.logits = token, margin, logits

    def _step_alone(self, step: Step) -> torch.Tensor:
        """The fast step of one row as a batch of one; logits `[1, vocabulary]`."""
        position = torch.tensor([step.position], device=self.device)
        long = self.cache.long_flags([step.row.slot], self.device)
        context = DecodeContext(position, step.position + 1, long, first=step.row.slot, backend=self.verifier.backend)
        with context_scope(context):
            return self.verifier.twin_for(step.row.adapter)(
                input_ids=torch.tensor([[step.last]], device=self.device),
                position_ids=position[:, None],
                cache=self.cache,
                use_cache=True,
            ).logits[:, -1]

    def _commit_step(self, row: Row, step: Step) -> None:
        logits = step.logits.float()
        if not leading_finite(logits[None]):
            row.fail(not_finite(row))
            return
        scores = row.process([*row.prompt, *row.committed], logits) if self.request.keep_scores else None
        self._commit_token(row, step.token, step.margin, logits, scores)

    def _kept(self, slot: int) -> int:
        return self.cache.lengths[slot]


class Step:
    """
    One row's step on its way to a token.

    Attributes:
        position, last: of the token that went in; its column is the step's.
        token, margin, logits: what came out, `logits` `[vocabulary]`.
    """

    def __init__(self, row: Row, token: int, margin: float, logits: torch.Tensor):
        self.row, self.token, self.margin, self.logits = row, token, margin, logits
        self.position = len(row.prompt) + len(row.committed) - 1
        self.last = (row.committed or row.prompt)[-1]

    def is_low(self, threshold: float) -> bool:
        """NaN is low."""
        return is_low(self.margin, threshold)
