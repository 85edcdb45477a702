"""Copies of the kernel package with a line or two changed, so that a test shows it can fail."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType

import margingate_kernels

SOURCE = Path(margingate_kernels.__file__).parent


def with_fault(folder: Path, *edits: tuple[str, str, str]) -> ModuleType:
    """Imports a copy of the package with edits `(file, right, wrong)`: `right`, found exactly once, reads `wrong`."""
    name = f"faulty_{abs(hash(edits))}"
    copy = folder / name
    shutil.copytree(SOURCE, copy)
    for file, right, wrong in edits:
        text = (copy / file).read_text()
        assert text.count(right) == 1, f"{file} holds {right!r} {text.count(right)} times"
        (copy / file).write_text(text.replace(right, wrong))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
