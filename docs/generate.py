"""Writes the generated parts of the documentation: `python docs/generate.py`; a test compares them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

from margingate_hf import MarginGateConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "margingate_hf"


def fields_table() -> str:
    """A table of the fields of [`MarginGateConfig`], from its docstring."""
    entries: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(MarginGateConfig) or "").split("Args:")[1].splitlines():
        found = re.match(r"    (\w+) \(", line)
        name = found[1] if found else name
        if name and not found:
            entries[name] = f"{entries.get(name, '')} {line.strip()}".strip()
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(MarginGateConfig):
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        meaning = re.sub(r"\s+", " ", entries[field.name]).replace("|", "\\|")
        meaning = re.sub(r"\[`([\w.~]+)`\]", lambda found: f"`{found[1].lstrip('~')}`", meaning)
        lines.append(f"| `{field.name}` | `{default}` | {meaning} |")
    return "\n".join(lines)


def modules_table() -> str:
    """A table of the package's modules, each with the first sentence of its docstring."""
    lines = ["| module | what it is |", "|---|---|"]
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = re.split(r"(?<=[.])\s", re.sub(r"\s+", " ", doc.strip()))[0].rstrip(".")
        if name.endswith("__init__.py") and name != "__init__.py":
            continue
        lines.append(f"| `{name}` | {first} |")
    return "\n".join(lines)


PARTS = {("configuration.md", "fields"): fields_table, ("architecture.md", "modules"): modules_table}


def filled(page: str, part: str, text: str) -> str:
    """A page with the text between the markers of a part replaced."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    head, rest = page.split(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main() -> None:
    for (name, part), make in PARTS.items():
        path = ROOT / "docs" / name
        path.write_text(filled(path.read_text(), part, make()))


if __name__ == "__main__":
    main()
