"""Writes a result as JSON and as Markdown side by side, and finished parts of a long run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(out: Path, name: str, record: dict[str, Any], markdown: str) -> None:
    """`OUT/NAME.json` and `OUT/NAME.md`; the Markdown is printed as well."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / f"{name}.md").write_text(markdown)
    print(markdown)


def keep(path: Path, record: dict[str, Any]) -> None:
    """A finished part of a run, for a later call to read; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, default=str) + "\n")


def slug(model: str | None) -> str:
    """A model's name in a file name, so that a part kept for one model is never read for another."""
    return (model or "smollm2").split("/")[-1]
