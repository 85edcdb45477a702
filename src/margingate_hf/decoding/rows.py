"""One prompt on its way through decoding: what was asked of it, where it stands, and what was counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList

from ..verifier.top2 import is_low
from .gumbel import GumbelNoise
from .processors import check_pure, draft_copies
from .schedule import flip_probability


@dataclass(frozen=True, eq=False)
class RowRequest:
    """
    What one row is decoded from.

    Attributes:
        index: the caller's row.
        prompt: token ids, no padding.
        limit: new tokens it may have.
        processors: its own logits processors, or `None`.
        noise: seeded noise of a sampled output, or `None`.
        adapter: its own PEFT adapter, see `adapters.py`.
        stateful: whether a processor keeps a state, which then sees every committed step once, see `processors.py`.
        reused: prompt entries that the cache of an earlier call holds already.
    """

    index: int
    prompt: list[int]
    limit: int
    processors: LogitsProcessorList | None = None
    noise: GumbelNoise | None = None
    adapter: str | None = None
    stateful: bool = False
    reused: int = 0

    @property
    def length(self) -> int:
        """Tokens the row may reach, prompt included."""
        return len(self.prompt) + self.limit

    @property
    def is_plain(self) -> bool:
        """Whether the raw logits decide, so that all tokens of a forward can be compared at once."""
        return not self.processors and self.noise is None

    def perturb(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """
        What the argmax is taken of: the processed scores, and when sampling the noise of this position.

        Args:
            scores (`torch.Tensor` of shape `[vocabulary]`, float32).
            position (`int`): index of the token in the row's own sequence.
        """
        if self.noise is None:
            return scores
        return scores + self.noise(position, scores.shape[-1], scores.device)


@dataclass
class RowCounts:
    """
    Attributes:
        reused: prompt entries that did not have to be computed: an earlier call's cache or the prefix cache held them.
        low_margin_steps: drafts whose margin was under the threshold.
        flips: drafts the verifier replaced; `wasted`: drafts dropped behind one.
        repaired: K/V entries of the draft path that were replaced.
    """

    reused: int = 0
    low_margin_steps: int = 0
    flips: int = 0
    wasted: int = 0
    repaired: int = 0


@dataclass(eq=False)
class Row:
    """
    Where one row stands.

    Attributes:
        request: what it is decoded from.
        counts: what was counted on the way.
        slot: its batch slot in the cache, which changes as other rows retire.
        num_read: prompt tokens that a verify forward has read; the row decodes once it has a committed token.
        committed: canonical new tokens.
        margins: canonical margin at each of them, in logits of the processed scores.
        logits, scores: canonical FP32 `[vocabulary]` a committed token, where the caller wants them.
        drafts: tokens decoded ahead; `num_low`: those among them with a low margin.
        survival, expected: see [`~margingate_hf.decoding.schedule.Pending`].
        finish_reason: what ended it: `"eos"`, `"length"`, `"stop"` (a criterion), `"error"` or `"cancelled"`.
        error: what ended the row alone: logits that are not finite, or its own processors or criteria.
    """

    request: RowRequest
    slot: int = -1
    counts: RowCounts = field(default_factory=RowCounts)
    num_read: int = 0
    committed: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    num_low: int = 0
    survival: float = 1.0
    expected: float = 1.0
    finish_reason: str = ""
    error: Exception | None = None
    _draft_processors: LogitsProcessorList | None = None

    @property
    def index(self) -> int:
        """The caller's row."""
        return self.request.index

    @property
    def prompt(self) -> list[int]:
        """Token ids, no padding."""
        return self.request.prompt

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.finish_reason)

    @property
    def verified(self) -> int:
        """Entries a verify forward has written: what was read of the prompt, then all tokens but the last."""
        return len(self.prompt) + len(self.committed) - 1 if self.committed else self.num_read

    @property
    def last(self) -> int:
        """The newest token, committed or draft."""
        return (self.drafts or self.committed)[-1]

    def pending(self, beyond: bool = True) -> list[int]:
        """
        Tokens the next verify forward has to read: the last committed one and the drafts, and if not `beyond` all but
        the last draft.
        """
        tokens = [self.committed[-1], *self.drafts]
        return tokens if beyond or not self.drafts else tokens[:-1]

    def add_draft(
        self, token: int, margin: float, threshold: float, flips: Callable[[float], float] = flip_probability
    ) -> None:
        """Appends a draft that leads by `margin` logits; `flips` is P(flip | margin)."""
        self.drafts.append(token)
        self.survival *= 1.0 - flips(margin)
        self.expected += self.survival
        if is_low(margin, threshold):
            self.num_low += 1
            self.counts.low_margin_steps += 1

    def drop_drafts(self) -> None:
        """Forgets what was decoded ahead, once a verify forward has judged it."""
        self.drafts, self.num_low, self.survival, self.expected = [], 0, 1.0, 1.0
        self._draft_processors = None

    def fail(self, error: Exception) -> None:
        """Ends the row by an error of its own; other rows go on."""
        self.error, self.finish_reason = error, "error"
        self.drop_drafts()

    def process(self, ids: list[int], logits: torch.Tensor, draft: bool = False) -> torch.Tensor:
        """
        The row's processors on one step, called as for a batch of one.

        Args:
            ids (`list[int]`): the row's tokens before the step, no padding.
            logits (`torch.Tensor` of shape `[vocabulary]`, float32).
            draft (`bool`, *optional*, defaults to `False`): the step may yet be dropped.

        Returns:
            `torch.Tensor` of shape `[vocabulary]`, float32.

        Raises:
            `ValueError`: at the row's first step, a processor that keeps a state and offers no copy of it.
        """
        processors = self.request.processors
        if not processors:
            return logits
        if draft and self.request.stateful:
            if self._draft_processors is None:
                self._draft_processors = draft_copies(processors)
            processors = self._draft_processors
        step = torch.tensor([ids], device=logits.device)
        if not self.committed and not draft:
            check_pure(processors, step, logits[None])
        scores = logits[None].clone()  # some processors write in place
        return processors(step, scores)[0]
