"""A logits processor that records the margin between the two best tokens of every step."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from ..config import MarginGateConfig
from ..verifier.top2 import top2_margin


class MarginGateLogitsProcessor(LogitsProcessor):
    """
    Records the top-1/top-2 margin of every step and leaves the scores alone.

    For stock `generate` calls, where it should be the last of the user's processors (`generate` appends its own
    warpers after them). A call with `margin_gate` measures margins itself and reports them in its statistics.

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
