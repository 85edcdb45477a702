"""Between padded batches, as transformers has them, and lists of token ids, as everything here has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import refuse
from .rows import Row


def as_prompts(inputs: Any, vocabulary: int) -> list[list[int]]:
    """
    Reads a batch of prompts.

    Args:
        inputs: lists, arrays or 1-D tensors of token ids, in any iterable; an integer tensor `[prompts, length]`; or a
            [`~transformers.BatchEncoding`] or dict with `input_ids` and, where prompts are padded, `attention_mask`.
        vocabulary (`int`): token ids that the model has embeddings for.

    Returns:
        `list[list[int]]`, none empty.

    Raises:
        `TypeError`: text, or one flat list of ids. `ValueError`: an empty prompt or an id outside the vocabulary.
    """
    if isinstance(inputs, Mapping):
        return as_prompts(_from_mapping(inputs), vocabulary)
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
        raise _wrong_type(inputs)
    if isinstance(inputs, torch.Tensor) and inputs.dim() != 2:
        raise _wrong_type(f"tensor of shape {tuple(inputs.shape)}")
    return [_prompt(index, prompt, vocabulary) for index, prompt in enumerate(inputs)]


def _from_mapping(inputs: Mapping) -> list[list[int]]:
    if "input_ids" not in inputs:
        raise refuse("inputs", sorted(inputs), "a mapping must have `input_ids`")
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is None:
        return ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    if not isinstance(ids, torch.Tensor):  # ragged lists, each with a mask of its own
        return [unpadded(torch.tensor([one]), torch.tensor([kept]))[0] for one, kept in zip(ids, mask, strict=True)]
    return unpadded(ids, mask)


def _prompt(index: int, prompt: Any, vocabulary: int) -> list[int]:
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
        raise _wrong_type(prompt)
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not tokens:
        raise refuse("inputs", f"prompt {index} is empty", "a prompt needs at least one token")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise _wrong_type(token)
        if not 0 <= token < vocabulary:
            raise refuse("inputs", token, f"prompt {index} holds an id outside the vocabulary, 0 to {vocabulary - 1}")
    return tokens


def _wrong_type(value: Any) -> TypeError:
    error = refuse(
        "inputs",
        value,
        "it must be a list of prompts, each a list of token ids; encode text with the tokenizer first "
        '(`tokenizer(prompts)["input_ids"]`), and pass one prompt as `[ids]`',
        TypeError,
    )
    assert isinstance(error, TypeError)
    return error


def unpadded(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_or_eos: frozenset[int] = frozenset()
) -> list[list[int]]:
    """
    Each row's own token ids.

    Args:
        input_ids (`torch.LongTensor` of shape `[rows, length]`).
        attention_mask (`torch.Tensor` of shape `[rows, length]`, *optional*): 1 on the row's own tokens; padding on
            the left, the right or both.
        pad_or_eos (`frozenset[int]`): without a mask, ids that could be padding as well as an end of text.

    Raises:
        `ValueError`: a hole in the mask, an empty row, or padding that cannot be told from text.
    """
    ids = input_ids.tolist()
    if attention_mask is None:
        for row, tokens in enumerate(ids if len(ids) > 1 else ()):
            if tokens and (tokens[0] in pad_or_eos or tokens[-1] in pad_or_eos):
                raise ValueError(
                    f"`attention_mask` is missing and row {row} begins or ends with the pad/eos id: padding "
                    "cannot be told from text. Pass the tokenizer's `attention_mask`."
                )
        prompts = ids
    else:
        if attention_mask.shape != input_ids.shape:
            raise refuse("attention_mask", tuple(attention_mask.shape), f"it must be {tuple(input_ids.shape)}")
        prompts = [
            _masked(row, tokens, kept)
            for row, (tokens, kept) in enumerate(zip(ids, attention_mask.tolist(), strict=True))
        ]
    for row, tokens in enumerate(prompts):
        if not tokens:
            raise ValueError(f"`input_ids` row {row} holds no token; every prompt needs at least one.")
    return prompts


def _masked(row: int, tokens: list[int], kept: list[int]) -> list[int]:
    held = [position for position, keep in enumerate(kept) if keep]
    if held and held[-1] - held[0] + 1 != len(held):
        raise ValueError(
            f"`attention_mask` row {row} has a hole: 0 between 1s at position {_first_hole(held)}. "
            "Only padding on the left and right is allowed."
        )
    return [tokens[position] for position in held]


def _first_hole(held: list[int]) -> int:
    return next(a + 1 for a, b in zip(held, held[1:], strict=False) if b != a + 1)


def sequences_of(input_ids: torch.Tensor, rows: Sequence[Row], pad: int) -> torch.Tensor:
    """
    Transformers' layout: the prompts as they came, new tokens, `pad` after each row's end.

    Args:
        input_ids (`torch.LongTensor` of shape `[rows, length]`): the prompts.
        rows (`Sequence[Row]`): in the caller's order.
        pad (`int`): token id.

    Returns:
        `torch.LongTensor` of shape `[rows, length + longest output]`.
    """
    width = max(len(row.committed) for row in rows)
    new = input_ids.new_full((len(rows), width), pad)
    for row in rows:
        new[row.index, : len(row.committed)] = new.new_tensor(row.committed)
    return torch.cat([input_ids, new], dim=1)


def stacked(rows: Sequence[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """One `[rows, vocabulary]` tensor a step; a row that has ended is 0. Empty where no row has a token."""
    steps = max(len(row) for row in rows)
    if not steps:
        return ()
    zeros = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(torch.stack([row[step] if step < len(row) else zeros for row in rows]) for step in range(steps))
