"""Prompts of the public benchmarks, from local JSONL files or the hub. The repository holds none of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from margingate_hf.demo.prompts import PROMPTS


@dataclass(frozen=True)
class Source:
    """
    Attributes:
        file: name in the data directory.
        field: key of the question.
        hub: `(dataset, config, split)` on the Hugging Face Hub.
    """

    file: str
    field: str
    hub: tuple[str, str | None, str]


SOURCES = {
    "math500": Source("math500_test.jsonl", "problem", ("HuggingFaceH4/MATH-500", None, "test")),
    "gsm8k": Source("gsm8k_test.jsonl", "question", ("openai/gsm8k", "main", "test")),
    "humaneval": Source("humaneval.jsonl", "prompt", ("openai/openai_humaneval", None, "test")),
}
DATASETS = ("chat", *SOURCES)


def load_prompts(dataset: str, limit: int, data_dir: str | None = None) -> list[str]:
    """
    The first `limit` questions.

    Args:
        dataset (`str`): `"chat"` (the project's own), `"math500"`, `"gsm8k"` or `"humaneval"`.
        data_dir (`str`, *optional*): folder of JSONL files; defaults to `$MARGINGATE_DATA`, else the hub is asked.

    Raises:
        `ValueError`: an unknown dataset, or none of the sources is there.
    """
    if dataset == "chat":
        return list(PROMPTS[:limit])
    if dataset not in SOURCES:
        raise ValueError(f"`dataset` must be one of {', '.join(DATASETS)}, got {dataset!r}.")
    source = SOURCES[dataset]
    folder = data_dir or os.environ.get("MARGINGATE_DATA")
    if folder:
        path = Path(folder) / source.file
        if not path.exists():
            raise ValueError(f"`data_dir`={folder!r} has no {source.file}.")
        with path.open() as lines:
            return [json.loads(line)[source.field] for line, _ in zip(lines, range(limit), strict=False)]
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"{dataset} needs `--data-dir` (or $MARGINGATE_DATA) with {source.file}, or `pip install datasets`."
        ) from None
    name, config, split = source.hub
    return list(load_dataset(name, config, split=f"{split}[:{limit}]")[source.field])


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
