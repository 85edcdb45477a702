"""Gated coverage: wide steps are trusted, low-margin steps computed again (MarginGate, arXiv 2605.30218, abstract).

Prompts and steps run on the draft path, batched. A step whose margin is under the threshold is computed again at once,
on the cache as it stands: by the verifier (`reference="fp32"`) or as the same 16-bit step of a batch of one
(`"alone"`). Where that gives another token, it and the step's K/V column are replaced. What was trusted wrongly stays:
the guarantee is that of the threshold.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import DynamicCache

from ..forward.context import Segment
from ..verifier.top2 import is_low
from .accept import leading_finite, not_finite
from .draft_steps import DraftSteps
from .rows import Row
from .run import Run

NOTE = (
    'coverage="gated": only steps with a margin under {threshold} logits are verified, so an output may depend on its '
    "batch; {bound}"
)


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


class GatedCoverage:
    """
    See [`Coverage`]: low-margin steps are verified, one step at a time; nothing is ever pending.

    Args:
        run ([`Run`]): the call.
        judge (`Callable`, *optional*): settles the tokens of the steps of one round, instead of computing the
            low-margin ones again.
    """

    def __init__(self, run: Run, judge: Callable[[list[Step]], None] | None = None):
        self.run = run
        self.judge = judge or self.recompute_low
        self.steps = DraftSteps(run.verifier, run.cache, None)  # the model's own products: what it drafts may stand
        self.plan_suffix = f"/gated-{run.request.gate.reference}"
        run.statistics.miss_bound = run.calibrated.bound

    def notes(self) -> list[str]:
        """See [`Coverage`]."""
        bound = self.run.calibrated.bound
        said = "no calibration says how often" if bound is None else f"calibrated to at most {bound:.1e} misses a step"
        return [NOTE.format(threshold=self.run.request.gate.threshold, bound=said)]

    def outlives(self, slot: int) -> int:
        """See [`Coverage`]; all of it."""
        return self.run.cache.lengths[slot]

    def advance(self) -> None:
        """One step of every row, or the prompts of those that have none yet; low-margin steps again; all committed."""
        run, started = self.run, time.perf_counter()
        rows = [row for row in run.slots.active if not row.committed]
        if rows:
            logits = self.prefill(rows)
            run.statistics.prefill_seconds += time.perf_counter() - started
        else:
            rows = list(run.slots.active)
            logits = self.steps.step(rows)
            run.statistics.draft_steps += 1
            run.statistics.decode_seconds += time.perf_counter() - started
        run.statistics.drafted_tokens += len(rows)
        found = run.best(rows, logits, _scores)
        steps = [Step(*parts) for parts in zip(rows, *found, logits, strict=True)]
        self.judge(steps)
        for step in steps:
            if not step.row.done:  # its own processor may have failed
                run.committer.guarded(step.row, self._commit, step)

    def prefill(self, rows: list[Row]) -> torch.Tensor:
        """
        Prompts by the model's own forward, left-padded into one batch as transformers does; their columns are copied.

        Returns:
            `torch.Tensor` of shape `[rows, vocabulary]`: logits of each prompt's last token.
        """
        run, device = self.run, self.run.verifier.device
        width = max(len(row.prompt) for row in rows)
        missing = [width - len(row.prompt) for row in rows]
        ids = [[0] * gap + row.prompt for row, gap in zip(rows, missing, strict=True)]
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in missing], device=device)
        stock = DynamicCache()
        logits: torch.Tensor = run.model(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_(min=0),
            cache=stock,
            use_cache=True,
            **({"logits_to_keep": 1} if run.verifier.architecture.keeps_logits else {}),
        ).logits[:, -1]
        run.cache.reserve(width)
        for layer, held in zip(run.cache.layers, stock.layers, strict=True):
            if layer.stores is None:
                layer.lazy_initialization(held.keys, held.values)
            for store, columns in zip(layer.stores or (), (held.keys, held.values), strict=True):
                for index, row in enumerate(rows):
                    store.write_trusted(row.slot, columns[index, :, missing[index] :])
        for row in rows:
            run.cache.extend(row.slot, 0, row.prompt, verified=False)
            row.num_read = len(row.prompt)
        run.statistics.prefill_tokens += sum(len(row.prompt) for row in rows)
        return logits

    def recompute_low(self, steps: list[Step]) -> None:
        """Computes low-margin steps again; where the token differs, it and its column are replaced."""
        run, gate = self.run, self.run.request.gate
        started = time.perf_counter()
        low = [step for step in steps if is_low(step.margin, gate.threshold) and not step.row.done]
        size = 1 if gate.reference == "alone" else gate.verify_batch_size or max(1, len(low))
        for start in range(0, len(low), size):
            part = low[start : start + size]
            before = [run.cache.export_entries(step.row.slot, step.position, step.position + 1) for step in part]
            if gate.reference == "alone":
                step = part[0]
                logits = self.steps.forward(step.row.slot, [step.last], [step.position], step.row.request.adapter)
            else:
                segments = [Segment(step.row.slot, step.position, [step.last]) for step in part]
                logits = run.verifier.recompute(run.cache, segments)
            found = run.best([step.row for step in part], logits, _scores)
            for one in zip(part, before, *found, logits, strict=True):
                self._settle(*one)
            run.statistics.verify_forwards += 1
            run.statistics.verified_tokens += len(part)
        run.statistics.verify_seconds += time.perf_counter() - started

    def _settle(self, step: Step, before: list[torch.Tensor], token: int, margin: float, logits: torch.Tensor) -> None:
        counts = step.row.counts
        counts.low_margin_steps += 1
        if token == step.token:
            self.run.cache.load_entries(step.row.slot, step.position, before)
        else:
            counts.flips += 1
            counts.repaired += 1
        step.token, step.margin, step.logits = token, margin, logits

    def _commit(self, row: Row, step: Step) -> None:
        logits = step.logits.float()
        if not leading_finite(logits[None]):
            row.fail(not_finite(row))
            return
        ids = [*row.prompt, *row.committed]
        self.run.committer.commit(row, step.token, step.margin, logits, lambda: row.process(ids, logits))


def _scores(row: Row, logits: torch.Tensor) -> torch.Tensor:
    """Processed scores of a step that may stand, from logits `[vocabulary]`; a row's first one is checked."""
    ids = [*row.prompt, *row.committed]
    return row.request.perturb(row.process(ids, logits.float()), len(ids))
