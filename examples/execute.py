"""Runs notebooks and writes their outputs into them: `python examples/execute.py [quickstart audit ...]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 600


def execute(path: Path) -> nbformat.NotebookNode:
    """
    A notebook with the outputs of a fresh run, in a folder of its own, progress bars and times left out.

    Raises:
        `CellExecutionError`: a cell failed.
    """
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        NotebookClient(book, timeout=SECONDS, resources={"metadata": {"path": scratch}}).execute()
    for cell in book.cells:
        cell.get("metadata", {}).pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return book


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        began = time.perf_counter()
        nbformat.write(execute(path), path)
        sys.stdout.write(f"{name}: {time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
