"""Committing a token: the row gets it, rules are asked whether the row ends, and a streamer hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .request import DecodeRequest
from .rows import Row


class Committer:
    """
    Nothing that is not committed reaches a streamer, a stopping criterion or the output.

    Args:
        request ([`DecodeRequest`]): its rules, and what to record.
        device (`torch.device`): where criteria get their ids.
    """

    def __init__(self, request: DecodeRequest, device: torch.device):
        self.request = request
        self.device = device

    def commit(
        self, row: Row, token: int, margin: float, logits: torch.Tensor, scores: Callable[[], torch.Tensor]
    ) -> None:
        """
        Args:
            row ([`Row`]): gets the token.
            token (`int`): the token; `margin`: its lead, in logits of the processed scores.
            logits (`torch.Tensor` of shape `[vocabulary]`, float32): raw.
            scores (`Callable`): gives the processed scores `[vocabulary]`, float32; called where they are recorded.
        """
        row.committed.append(token)
        row.margins.append(margin)
        if self.request.keep_logits:
            row.logits.append(logits.clone())
        if self.request.keep_scores:
            row.scores.append(scores().clone())
        row.finish_reason = self._finish_reason(row, token)
        if self.request.on_commit is not None:
            self.request.on_commit(row.index, token)

    def _finish_reason(self, row: Row, token: int) -> str:
        request = self.request
        if token in request.eos:
            return "eos"
        if len(row.committed) >= row.request.limit:
            return "length"
        if request.criteria:
            ids = torch.tensor([[*row.prompt, *row.committed]], device=self.device)
            held = tuple(score[None] for score in row.scores) or None
            if request.criteria(ids, held).all():
                return "stop"
        return "stop" if request.stop is not None and request.stop(row.prompt, row.committed) else ""

    def guarded(self, row: Row, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs what calls a row's own processors or criteria; under `isolate` an exception there ends the row."""
        if not self.request.isolate:
            return work(row, *arguments)
        try:
            return work(row, *arguments)
        except Exception as error:
            row.fail(error)
            return None
