"""Prompts from a file, from the project, or from public benchmarks in local JSONL files or on the hub."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

from .prompts import PROMPTS


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
FIELDS = ("prompt", "question", "problem", "text")


def load_prompts(dataset: str, limit: int | None, data_dir: str | None = None) -> list[str]:
    """
    The first `limit` questions.

    Args:
        dataset (`str`): `"chat"` (the project's own), `"math500"`, `"gsm8k"` or `"humaneval"`; or a file: one prompt a
            line, or JSONL with a `"prompt"`, `"question"`, `"problem"` or `"text"` each.
        limit (`int`, *optional*): `None` takes all.
        data_dir (`str`, *optional*): folder of JSONL files; defaults to `$MARGINGATE_DATA`, else the hub is asked.

    Raises:
        `ValueError`: an unknown dataset, or none of the sources is there.
    """
    if dataset == "chat":
        return list(PROMPTS[:limit])
    if dataset not in SOURCES:
        return _from_file(dataset)[:limit]
    source = SOURCES[dataset]
    folder = data_dir or os.environ.get("MARGINGATE_DATA")
    if folder:
        path = Path(folder) / source.file
        if not path.exists():
            raise ValueError(f"`data_dir`={folder!r} has no {source.file}.")
        with path.open() as lines:
            return [json.loads(line)[source.field] for line in itertools.islice(lines, limit)]
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"{dataset} needs `--data-dir` (or $MARGINGATE_DATA) with {source.file}, or `pip install datasets`."
        ) from None
    name, config, split = source.hub
    part = split if limit is None else f"{split}[:{limit}]"
    return list(load_dataset(name, config, split=part)[source.field])


def _from_file(name: str) -> list[str]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"`prompts` must be a file or one of {', '.join(DATASETS)}, got {name!r}.")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"`prompts`={name!r} holds no prompt.")
    return [_of_record(name, line) for line in lines] if path.suffix == ".jsonl" else lines


def _of_record(name: str, line: str) -> str:
    record = json.loads(line)
    for field in FIELDS:
        if isinstance(record, dict) and isinstance(record.get(field), str):
            return str(record[field])
    raise ValueError(f"`prompts`={name!r} has a line without any of {', '.join(FIELDS)}: {line[:80]}")
