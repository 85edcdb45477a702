"""Right answers of the maths datasets, and whether a generated text gives one. For the spread of accuracy only."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .decoding import Run
from .prompts import SOURCES

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load_answers(dataset: str, limit: int, data_dir: str | None = None) -> list[str] | None:
    """The first `limit` answers of a maths dataset with local files, `None` for other datasets."""
    folder = data_dir or os.environ.get("MARGINGATE_DATA")
    if dataset not in ("gsm8k", "math500") or not folder:
        return None
    with (Path(folder) / SOURCES[dataset].file).open() as lines:
        return [json.loads(line)["answer"] for line, _ in zip(lines, range(limit), strict=False)]


def is_right(dataset: str, text: str, answer: str) -> bool:
    """
    GSM8K: the last number of the text is the one behind `####`. MATH500: the last `\\boxed{}` is the answer, blanks
    aside.
    """
    if dataset == "gsm8k":
        numbers = _NUMBER.findall(text)
        return bool(numbers) and _plain(numbers[-1]) == _plain(answer.rsplit("####", 1)[-1].strip())
    return _boxed(text) == re.sub(r"\s", "", answer)


def _plain(number: str) -> float:
    return float(number.replace(",", ""))


def _boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, braces balanced, without blanks."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for index in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return re.sub(r"\s", "", text[start + 7 : index])
    return None


def judged(
    dataset: str, runs: Iterable[Run], answers: Sequence[str] | None, decode: Callable[[list[int]], str]
) -> list[list[bool]] | None:
    """Whether each text of each run is right, `[run][prompt]`; `None` without answers."""
    if answers is None:
        return None
    return [
        [is_right(dataset, decode(row), answer) for row, answer in zip(run.tokens, answers, strict=True)]
        for run in runs
    ]
