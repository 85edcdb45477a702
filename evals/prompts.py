"""Prompts of the evaluations: the package's own sets, and GSM8K behind worked examples."""

from __future__ import annotations

import json
import os
from pathlib import Path

from margingate_hf.cli.prompt_sets import DATASETS, SOURCES, load_prompts

__all__ = ["DATASETS", "SOURCES", "load_few_shot", "load_prompts"]


def load_few_shot(limit: int, shots: int, data_dir: str | None = None) -> list[str]:
    """
    GSM8K questions behind the same worked examples, as lm-eval's task words them.

    Args:
        limit (`int`): questions.
        shots (`int`): examples, the first of the training split.
        data_dir (`str`, *optional*): folder with `gsm8k_train.jsonl` and `gsm8k_test.jsonl`; defaults to
            `$MARGINGATE_DATA`.

    Raises:
        `ValueError`: the files are not there.
    """
    folder = Path(data_dir or os.environ.get("MARGINGATE_DATA") or "")
    path = folder / "gsm8k_train.jsonl"
    if not path.exists():
        raise ValueError(f"`data_dir`={str(folder)!r} has no {path.name}; set it or $MARGINGATE_DATA.")
    with path.open() as lines:
        examples = [json.loads(line) for line, _ in zip(lines, range(shots), strict=False)]
    head = "".join(f"Question: {example['question']}\nAnswer: {example['answer']}\n\n" for example in examples)
    return [f"{head}Question: {question}\nAnswer:" for question in load_prompts("gsm8k", limit, data_dir)]
