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
