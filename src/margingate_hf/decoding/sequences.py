"""Rows of different lengths as the rectangular tensors that transformers returns."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from .rows import Row


def sequences_of(input_ids: torch.Tensor, rows: list[Row], config: GenerationConfig) -> torch.Tensor:
    """Transformers' layout: the prompt as it came, new tokens, pad after each row's end; int64 `[rows, length]`."""
    width = max(len(row.committed) for row in rows)
    pad = config._pad_token_tensor
    new = input_ids.new_full((len(rows), width), 0 if pad is None else int(pad.flatten()[0]))
    for row in rows:
        new[row.index, : len(row.committed)] = new.new_tensor(row.committed)
    return torch.cat([input_ids, new], dim=1)


def stacked(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """One `[rows, vocabulary]` tensor a step; a row that has ended is 0. Empty where no row has a token."""
    steps = max(len(row) for row in rows)
    if not steps:
        return ()
    zeros = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(torch.stack([row[step] if step < len(row) else zeros for row in rows]) for step in range(steps))
