"""Models and prompts from what the command line names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..enabling import enable
from .checkpoints import fetch, quiet_transformers


def load(model_name: str | Path | None, progress: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """
    An enabled model and its tokenizer.

    Args:
        model_name (`str` or `Path`, *optional*): a local folder or a hub id; `None` brings SmolLM2-135M-Instruct.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): of the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: str | Path = model_name if model_name is not None else fetch(progress=progress)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return enable(model), tokenizer


def as_prompts(tokenizer: Any, questions: Sequence[str]) -> list[str]:
    """The questions as a chat would send them, or bare where the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        return list(questions)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]


def as_ids(tokenizer: Any, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of each of [`as_prompts`]."""
    return [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in as_prompts(tokenizer, questions)]
