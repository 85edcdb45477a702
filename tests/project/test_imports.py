"""The order of the package's parts: a module imports from its own part and from those before it, also by a string."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "margingate_hf"
# Parts on one line do not import each other, except within a folder.
ORDER = (
    "version errors",
    "config",
    "outputs",
    "portable",
    "forward",
    "kv_cache",
    "verifier",
    "decoding",
    "engine",
    "generation",
    "enabling",
    "analysis",
    "lm_eval",
    "cli",
    "__init__",
)
FLOOR = {part: floor for floor, parts in enumerate(ORDER) for part in parts.split()}


def imported(path: Path) -> set[str]:
    """Parts that a module names: in import statements, wherever they stand, and in strings."""
    parents = ["margingate_hf", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            home = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            home = home if node.level else str(node.module)
            names = [f"{home}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"^margingate_hf\.[\w.]+", node.value)
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("margingate_hf.")}
    return found & FLOOR.keys()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    above = {name for name in imported(path) if FLOOR[name] >= FLOOR[part] and name != part}
    assert not above, f"{part} imports {sorted(above)}, which stand above it in ORDER"


def test_every_part_has_its_place() -> None:
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith(("py", "__py"))}
    assert parts == FLOOR.keys()


def test_an_import_that_runs_back_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    folder = tmp_path / "forward"
    folder.mkdir()
    module = folder / "module.py"
    module.write_text(
        'def f():\n    from ..decoding.rows import Row\nHOME = "margingate_hf.verifier.plans:cpu_plans"\n'
    )
    assert imported(module) == {"decoding", "verifier"}
