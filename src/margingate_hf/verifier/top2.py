"""The two best tokens of a step: which is best, and by how much."""

from __future__ import annotations

import torch


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


def is_low(margin: float, threshold: float) -> bool:
    """Whether a margin is under the threshold, both in logits; NaN is."""
    return not margin >= threshold
