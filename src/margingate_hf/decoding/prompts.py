"""What people pass as a batch of prompts, as lists of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import refuse
from .checks import unpadded_prompts


def as_prompts(inputs: Any, model: Any) -> list[list[int]]:
    """
    Reads a batch of prompts.

    Args:
        inputs: lists, arrays or 1-D tensors of token ids, in any iterable; an integer tensor `[prompts, length]`; or a
            [`~transformers.BatchEncoding`] or dict with `input_ids` and, where prompts are padded, `attention_mask`.
        model (`PreTrainedModel`): the model the ids are for.

    Returns:
        `list[list[int]]`, none empty.

    Raises:
        `TypeError`: text, or one flat list of ids. `ValueError`: an empty prompt or an id outside the vocabulary.
    """
    if isinstance(inputs, Mapping):
        return as_prompts(_unpadded(inputs), model)
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
        raise _wrong_type(inputs)
    if isinstance(inputs, torch.Tensor) and inputs.dim() != 2:
        raise _wrong_type(f"tensor of shape {tuple(inputs.shape)}")
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    return [_prompt(index, prompt, vocabulary) for index, prompt in enumerate(inputs)]


def _unpadded(inputs: Mapping) -> list[list[int]]:
    if "input_ids" not in inputs:
        raise refuse("inputs", sorted(inputs), "a mapping must have `input_ids`")
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is None:
        return ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    if not isinstance(ids, torch.Tensor):  # ragged lists, each with a mask of its own
        return [
            unpadded_prompts(torch.tensor([one]), torch.tensor([kept]), set(), True)[0]
            for one, kept in zip(ids, mask, strict=True)
        ]
    return unpadded_prompts(ids, mask, set(), mask_given=True)


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
