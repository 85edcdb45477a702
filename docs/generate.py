"""Writes the generated parts of the documentation: `python docs/generate.py`; a test compares them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

from margingate_hf import MarginGateConfig
from margingate_hf.config import PRESETS

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


def presets_table() -> str:
    """A table of the presets."""
    lines = ["| preset | settings | what it does | system |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        fields = ", ".join(f"{field}={value!r}".replace("'", '"') for field, value in (preset.fields or {}).items())
        settings = f"`{fields}`" if fields else "the defaults" if preset.fields is not None else "`None`"
        lines.append(f'| `"{name}"` | {settings} | {preset.about} | {preset.source} |')
    return "\n".join(lines)


def modules_table() -> str:
    """The package's modules by folder, each with the first sentence of its docstring."""
    lines: list[str] = []
    for folder in ("", "portable", "forward", "kv_cache", "verifier", "decoding", "analysis", "lm_eval", "cli"):
        home = PACKAGE / folder
        if folder:
            lines += ["", f"### `{folder}/`", first_sentence(home / "__init__.py") + ".", ""]
        lines += ["| module | what it is |", "|---|---|"]
        for path in sorted(home.glob("*.py")):
            if path.name != "__main__.py" and not (folder and path.name == "__init__.py"):
                lines.append(f"| `{path.name}` | {first_sentence(path)} |")
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """Of a module's docstring, without its full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.split(r"(?<=[.])\s", re.sub(r"\s+", " ", doc.strip()))[0].rstrip(".")


PARTS = {
    ("configuration.md", "fields"): fields_table,
    ("configuration.md", "presets"): presets_table,
    ("architecture.md", "modules"): modules_table,
}


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
