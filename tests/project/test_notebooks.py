"""The notebooks run as they stand, and were committed with the outputs of such a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[Any]:
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_there_are_five() -> None:
    assert NAMES == ["audit", "calibrate", "lm_eval", "quickstart", "sampling"]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_installs_and_outputs_are_committed(name: str) -> None:
    code = cells(name)
    assert "%pip install" in code[0].source
    assert all(cell.execution_count for cell in code), "run `python examples/execute.py`"
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    text = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert len(text) > 100 and str(Path.home()) not in text


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for cell in module.execute(FOLDER / f"{name}.ipynb").cells:
        assert cell.cell_type != "code" or cell.execution_count


@pytest.mark.smollm2
def test_quickstart_runs(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run("quickstart", monkeypatch)


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.parametrize("name", [name for name in NAMES if name != "quickstart"])
def test_the_others_run(name: str, smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, monkeypatch)
