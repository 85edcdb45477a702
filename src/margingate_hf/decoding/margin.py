"""The margin between the two best tokens of a step, and a logits processor that records it."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from ..config import MarginGateConfig


def top2_margin(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Best token and its lead over the second best.

    Args:
        scores (`torch.Tensor` of shape `[..., vocabulary]`, any floating dtype): processed scores of one step a row.

    Returns:
        `(tokens, margins)`: `tokens` int64 `[...]`, the lowest id among equals; `margins` float32 `[...]`, top-1 minus
        top-2 in logits, 0 on a tie, `inf` where only one token is finite. A row that holds NaN has margin NaN, which
        is below no threshold and must be treated as low; a row with no finite score has margin NaN as well.
    """
    best, ids = scores.topk(2, dim=-1)
    best = best.float()
    margins = best[..., 0] - best[..., 1]
    tokens = ids[..., 0]
    if bool((margins > 0).all()):
        return tokens, margins
    # topk does not promise the lowest id among equals; argmax does.
    return torch.where(margins > 0, tokens, scores.argmax(dim=-1)), margins


class MarginGateLogitsProcessor(LogitsProcessor):
    """
    Records the top-1/top-2 margin of every step and leaves the scores alone.

    [`MarginGateGenerationMixin`] uses it inside the gate; it also works in any stock `generate` call, where it should
    be the last of the user's processors (stock `generate` appends its own warpers after them).

    Args:
        threshold (`float`, *optional*, defaults to `MarginGateConfig.threshold`):
            Steps whose margin is below this many logits count as low.

    Example:

    ```python
    >>> gate = MarginGateLogitsProcessor(threshold=0.5)
    >>> model.generate(**batch, logits_processor=[gate])
    >>> gate.margins  # float32 [rows, steps]
    ```
    """

    # Pure in (input_ids, scores), so transformers' continuous batching may run it as well.
    supports_continuous_batching = True

    def __init__(self, threshold: float = MarginGateConfig.threshold):
        self.threshold = MarginGateConfig(threshold=threshold).threshold
        self.reset()

    def reset(self) -> None:
        """Forgets what was recorded."""
        self._margins: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `[rows, length]`): tokens so far; not read.
            scores (`torch.FloatTensor` of shape `[rows, vocabulary]`): processed scores, returned unchanged.
        """
        tokens, margins = top2_margin(scores)
        self._tokens.append(tokens)
        self._margins.append(margins)
        return scores

    @property
    def margins(self) -> torch.Tensor:
        """Margins in logits, float32 `[rows, steps]`."""
        return torch.stack(self._margins, dim=-1) if self._margins else torch.empty(0, 0, dtype=torch.float32)

    @property
    def tokens(self) -> torch.Tensor:
        """Best tokens, int64 `[rows, steps]`."""
        return torch.stack(self._tokens, dim=-1) if self._tokens else torch.empty(0, 0, dtype=torch.long)

    @property
    def is_low(self) -> torch.Tensor:
        """Which steps are low-margin, bool `[rows, steps]`; NaN counts as low."""
        return ~(self.margins >= self.threshold)
