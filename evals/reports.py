"""Writes a result as JSON and as Markdown side by side."""

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
