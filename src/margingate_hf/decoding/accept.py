"""Which tokens of a verify forward are committed: pure functions of drafts and canonical logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..forward.backend import Backend
from .rows import Row


@dataclass(frozen=True)
class Decision:
    """
    Outcome of one verify forward for one row.

    Attributes:
        committed: canonical tokens, in order; at least one unless there was no draft and nothing beyond.
        flipped: whether the last of them replaces a different draft.
        wasted: drafts dropped behind it.
    """

    committed: tuple[int, ...]
    flipped: bool
    wasted: int


def compare(drafts: Sequence[int], canonical: Callable[[int], int], beyond: bool = True) -> Decision:
    """
    The longest agreeing prefix, and the canonical token that follows it.

    Args:
        drafts (`Sequence[int]`): draft tokens, position by position.
        canonical (`Callable[[int], int]`): the canonical token of draft `i`, valid while drafts `0 ... i-1` agree;
            `canonical(len(drafts))` is the token after the last.
        beyond (`bool`, *optional*, defaults to `True`): whether that last one is known.

    Returns:
        [`Decision`]: after LLM-42 (arXiv 2601.17768, decode-verify-rollback), with no cache and no model in sight.
    """
    committed: list[int] = []
    for index, draft in enumerate(drafts):
        token = canonical(index)
        committed.append(token)
        if token != draft:
            return Decision(tuple(committed), flipped=True, wasted=len(drafts) - index - 1)
    if beyond:
        committed.append(canonical(len(drafts)))
    return Decision(tuple(committed), flipped=False, wasted=0)


def leading_finite(logits: torch.Tensor) -> int:
    """
    How many leading rows of canonical logits `[tokens, vocabulary]` can be chosen from: no NaN, no +inf, and not all of
    them -inf. What lies behind the first that cannot is computed from it.
    """
    usable = logits.amax(-1).isfinite().tolist()
    return usable.index(False) if False in usable else len(usable)


def not_finite(row: Row) -> FloatingPointError:
    """The error of a row whose next canonical logits cannot be chosen from."""
    return FloatingPointError(
        f"the canonical logits of new token {len(row.committed)} are not finite: an activation or a K/V entry "
        "overflows or is NaN (FP16 holds 65,504 at most; check the checkpoint, or load it in BF16)"
    )


class Canonical:
    """
    Canonical tokens of one row; with processors, token `i` is computed once tokens `0 ... i-1` are known.

    Args:
        row ([`Row`]): the row, its drafts still in place.
        logits (`torch.Tensor` of shape `[pending tokens, vocabulary]`, float32): of the verify forward.
        backend ([`Backend`]): where the logits lie.

    Attributes:
        margins: canonical top-1/top-2 gap of each token found so far, in logits of the processed scores.
    """

    def __init__(self, row: Row, logits: torch.Tensor, backend: Backend):
        self.row = row
        self.logits = logits
        self.margins: list[float] = []
        self._backend = backend
        self._scores: list[torch.Tensor] = []
        self._before = [*row.prompt, *row.committed]
        self._drafts = list(row.drafts)
        self._tokens: list[int] = []
        if row.request.is_plain:
            tokens, margins = backend.top2_margin(logits)
            self._tokens, self.margins = tokens.tolist(), margins.tolist()

    def __call__(self, index: int) -> int:
        if index == len(self._tokens):
            ids = [*self._before, *self._drafts[:index]]
            scores = self.row.process(ids, self.logits[index])
            token, margin = self._backend.top2_margin(self.row.request.perturb(scores, len(ids)))
            self._tokens.append(int(token))
            self.margins.append(float(margin))
            self._scores.append(scores)
        return self._tokens[index]

    def scores(self, index: int) -> torch.Tensor:
        """Processed scores of token `index`, float32 `[vocabulary]`."""
        return self.logits[index] if self.row.request.is_plain else self._scores[index]
