"""Canonical tokens of one row's pass, found as the comparison with drafts asks for them."""

from __future__ import annotations

import torch

from ..forward.backend import Backend
from .rows import Row


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
    Canonical tokens of one row's pass; with processors, token `i` is computed once tokens `0 ... i-1` are known.

    Args:
        row ([`Row`]): the row, its drafts still in place.
        logits (`torch.Tensor` of shape `[pending tokens, vocabulary]`, float32): of the pass.
        backend ([`Backend`]): where the logits lie.

    Attributes:
        margins: canonical top-1/top-2 gap of each token found so far, in logits of the processed scores.
    """

    def __init__(self, row: Row, logits: torch.Tensor, backend: Backend):
        self._backend = backend
        self.row = row
        self.logits = logits
        self.margins: list[float] = []
        self._scores: list[torch.Tensor] = []
        self._text = [*row.prompt, *row.committed]
        self._drafts = list(row.drafts)
        self._tokens: list[int] = []
        if row.is_plain:
            tokens, margins = backend.top2_margin(logits)
            self._tokens, self.margins = tokens.tolist(), margins.tolist()

    def __call__(self, index: int) -> int:
        if index == len(self._tokens):
            ids = [*self._text, *self._drafts[:index]]
            scores = self.row.process(ids, self.logits[index])
            token, margin = self._backend.top2_margin(self.row.perturb(scores, len(ids)))
            self._tokens.append(int(token))
            self.margins.append(float(margin))
            self._scores.append(scores)
        return self._tokens[index]

    def scores(self, index: int) -> torch.Tensor:
        """Processed scores of token `index`, float32 `[vocabulary]`."""
        return self.logits[index] if self.row.is_plain else self._scores[index]
