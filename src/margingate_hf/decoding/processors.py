"""Logits processors of the user's own: whether they are functions of (ids, scores), and copies where they are not.

A step's scores may be processed more than once: for its draft, and again when it is verified. A processor that counts
its calls would be wrong without a word, so the first step of each row is processed twice and compared. One that offers
`copy()` or `reset()` may keep a state: each row then has its own, which sees every committed step once and in order, as
it would for the row alone; drafts are processed by copies of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList

from ..verifier.model_state import describe_callable


def is_own(processor: Any) -> bool:
    """Whether a processor is the user's, neither transformers' own nor declared to be pure."""
    declared = getattr(processor, "supports_continuous_batching", False) is True
    return not type(processor).__module__.startswith("transformers.") and not declared


def keeps_state(processor: Any) -> bool:
    """Whether a processor of the user's offers a copy of its state, or to reset it."""
    return is_own(processor) and any(callable(getattr(processor, name, None)) for name in ("copy", "reset"))


def row_copies(processors: Sequence[Any]) -> list[Any]:
    """The processors of one row: its own copies of those that keep a state."""
    return [_fresh(processor) if keeps_state(processor) else processor for processor in processors]


def _fresh(processor: Any) -> Any:
    if callable(getattr(processor, "copy", None)):
        return processor.copy()
    own = copy.deepcopy(processor)
    own.reset()
    return own


def draft_copies(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The same processors with copies of those that keep a state, to be used on drafts and thrown away."""
    return LogitsProcessorList(
        (item.copy() if callable(getattr(item, "copy", None)) else copy.deepcopy(item)) if keeps_state(item) else item
        for item in processors
    )


def check_pure(processors: LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor) -> None:
    """
    Processes one step twice and compares.

    Args:
        processors ([`~transformers.LogitsProcessorList`]): of one row.
        ids (`torch.LongTensor` of shape `[1, length]`): the row's tokens before the step.
        scores (`torch.FloatTensor` of shape `[1, vocabulary]`): its logits.

    Raises:
        `ValueError`: names a processor whose second result, or whose own state, is another one.
    """
    for processor in processors:
        if not is_own(processor) or keeps_state(processor):
            continue
        before = describe_callable(processor)
        first, second = (processor(ids, scores.clone()) for _ in range(2))
        same = torch.equal(first.nan_to_num(), second.nan_to_num())
        if not same or describe_callable(processor) != before:
            raise ValueError(
                f"`logits_processor`={type(processor).__name__!r} does not work with `margin_gate`: it keeps a state "
                "between calls, and a step may be processed more than once. Make it a function of (input_ids, scores), "
                "or give it `copy()` or `reset()` so that each row has its own; if its state moves no score, set "
                "`supports_continuous_batching = True` on it."
            )
