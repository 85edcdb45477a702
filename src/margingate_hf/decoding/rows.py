"""What the decode loop knows of one prompt, and the comparison of drafts with canonical tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList

from .gumbel import GumbelNoise
from .processors import check_pure, draft_copies
from .schedule import flip_probability


@dataclass(frozen=True)
class Decision:
    """
    Outcome of one pass for one row.

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
        drafts (`Sequence[int]`): tokens of the fast path, position by position.
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


@dataclass(eq=False)
class Row:
    """
    One prompt on its way through the loop.

    Attributes:
        index: the caller's row.
        slot: its row in the cache, which changes as other rows retire.
        prompt: unpadded token ids.
        limit: new tokens it may have.
        processors: its own logits processors, or `None`.
        noise: seeded noise of a sampled text, or `None`.
        adapter: its own PEFT adapter, see `adapters.py`.
        stateful: whether a processor keeps a state, which then sees every committed step once, see `processors.py`.
        reused: prompt columns that did not have to be computed: a cache from an earlier call, or the prefix store, held
            them.
        read: prompt columns that are verified; the row decodes once it has a committed token.
        committed: canonical new tokens.
        margins: canonical margin at each of them, in logits of the processed scores.
        drafts, low: tokens decoded ahead, and how many of them had a low margin.
        survival, expected: see [`~margingate_hf.decoding.schedule.Pending`].
        logits, scores: canonical FP32 `[vocabulary]` a committed token, where the caller wants them.
        repaired: columns of the fast path that were replaced.
        done: ended by EOS, limit, a criterion, an error or a cancellation.
        finish_reason: which of them, `"eos"`, `"length"`, `"stop"` (a criterion), `"error"` or `"cancelled"`.
        cancelled: the caller wants no more of it.
        error: what ended the row alone: logits that are not finite, or its own processors or criteria.
    """

    index: int
    slot: int
    prompt: list[int]
    limit: int
    processors: LogitsProcessorList | None = None
    noise: GumbelNoise | None = None
    adapter: str | None = None
    stateful: bool = False
    reused: int = 0
    read: int = 0
    committed: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    low: int = 0
    survival: float = 1.0
    expected: float = 1.0
    logits: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    low_margin_steps: int = 0
    flips: int = 0
    wasted: int = 0
    repaired: int = 0
    done: bool = False
    finish_reason: str = ""
    cancelled: bool = False
    error: Exception | None = None
    _draft_processors: LogitsProcessorList | None = None

    @property
    def verified(self) -> int:
        """Columns a pass has written: what was read of the prompt, then all of the text but its last token."""
        return len(self.prompt) + len(self.committed) - 1 if self.committed else self.read

    @property
    def last(self) -> int:
        """The newest token, committed or draft."""
        return (self.drafts or self.committed)[-1]

    def pending(self, beyond: bool = True) -> list[int]:
        """Tokens the next pass has to read: the last committed one and the drafts; not `beyond`: but the last draft."""
        tokens = [self.committed[-1], *self.drafts]
        return tokens if beyond or not self.drafts else tokens[:-1]

    def add_draft(
        self, token: int, margin: float, threshold: float, flips: Callable[[float], float] = flip_probability
    ) -> None:
        """Appends a token of the fast path, `margin` logits ahead of the second best; `flips` is P(flip | margin)."""
        self.drafts.append(token)
        self.survival *= 1.0 - flips(margin)
        self.expected += self.survival
        if not margin >= threshold:  # NaN is low
            self.low += 1
            self.low_margin_steps += 1

    def fail(self, error: Exception) -> None:
        """Ends the row by an error of its own; other rows go on."""
        self.error, self.done, self.finish_reason = error, True, "error"
        self.drop_drafts()

    def drop_drafts(self) -> None:
        """Forgets what was decoded ahead, once a pass has judged it."""
        self.drafts, self.low, self.survival, self.expected = [], 0, 1.0, 1.0
        self._draft_processors = None

    def process(self, ids: list[int], logits: torch.Tensor, draft: bool = False) -> torch.Tensor:
        """
        The row's processors on one step, called as for a batch of one.

        Args:
            ids (`list[int]`): the row's unpadded tokens before the step.
            logits (`torch.Tensor` of shape `[vocabulary]`, float32).
            draft (`bool`, *optional*, defaults to `False`): the step may yet be dropped.

        Returns:
            `torch.Tensor` of shape `[vocabulary]`, float32.

        Raises:
            `ValueError`: at the row's first step, a processor that keeps a state and offers no copy of it.
        """
        processors = self.processors
        if not processors:
            return logits
        if draft and self.stateful:
            if self._draft_processors is None:
                self._draft_processors = draft_copies(processors)
            processors = self._draft_processors
        step = torch.tensor([ids], device=logits.device)
        if not self.committed and not draft:
            check_pure(processors, step, logits[None])
        scores = logits[None].clone()  # some processors write in place
        return processors(step, scores)[0]

    def perturb(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """
        What the argmax is taken of: the processed scores, and when sampling the noise of this position.

        Args:
            scores (`torch.Tensor` of shape `[vocabulary]`, float32).
            position (`int`): index of the token in the row's own text.
        """
        if self.noise is None:
            return scores
        return scores + self.noise(position, scores.shape[-1], scores.device)

    @property
    def is_plain(self) -> bool:
        """Whether the raw logits decide, so that a whole pass can be compared at once."""
        return not self.processors and self.noise is None
