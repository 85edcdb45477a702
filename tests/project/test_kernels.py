"""Runs the kernels' own tests where they can run: in Triton's interpreter, and through the compiler with no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parents[1]
RESOURCES = HERE.parent / "kernels" / "resources.json"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")


def _environment(**changes: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, **changes}


def _at_once(commands: list[list[str]], **changes: str) -> list[str]:
    """Runs commands of one thread each side by side; returns what they printed."""
    environment = _environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MARGINGATE_BACKEND="triton", **changes)
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=HERE.parent,
        )
        for command in commands
    ]
    printed = []
    for process in running:
        out, errors = process.communicate()
        assert process.returncode == 0, out[-6000:] + errors[-2000:]
        printed.append(out)
    return printed


def _interpreted(marks: str, *beside: list[str]) -> None:
    files = sorted(str(file) for file in (HERE / "kernels").glob("test_*.py"))
    first = [file for file in files if file.endswith(("test_attention.py", "test_rows.py"))]
    groups = [first, [file for file in files if file not in first]] if marks == "not long" else [files]
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, "--confcutdir", str(HERE / "kernels")]
    printed = _at_once([*[[*options, *group] for group in groups], *beside], TRITON_INTERPRET="1")
    assert all(" passed" in text for text in printed[: len(groups)])


def test_in_the_interpreter(tmp_path: Path) -> None:
    """The kernels' tests, and a dry run of the GPU script beside them."""
    dry_run = ["-m", "evals", "gpu", "--tiny", "--out", str(tmp_path)]
    _interpreted("not long", dry_run)
    record = json.loads((tmp_path / "gpu.json").read_text())
    rows = [row for part in record["parts"].values() for row in part["rows"]]
    assert len(record["parts"]) == 9
    judged = [value for row in rows for value in row.values() if isinstance(value, bool)]
    assert len(judged) > 25 and all(judged), "the GPU script's own checks do not hold in the interpreter"
    text = (tmp_path / "gpu.md").read_text()
    assert "## attention bits" in text and "interpreter" in text.splitlines()[2]


def test_the_gpu_script_says_what_is_missing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    result = subprocess.run(
        [sys.executable, "-m", "evals", "gpu", "--out", str(tmp_path)],
        cwd=HERE.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode != 0 and "no CUDA device is there" in result.stderr


@pytest.mark.long
def test_in_the_interpreter_at_length() -> None:
    _interpreted("long")


def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    script = str(HERE / "kernels" / "compile_ahead.py")
    printed = _at_once([[script, str(arch)] for arch in (80, 90)], TRITON_CACHE_DIR=str(tmp_path))
    committed = json.loads(RESOURCES.read_text())
    for arch, text in zip((80, 90), printed, strict=True):
        found = json.loads(text)
        expected = {name: entry for name, entry in committed["kernels"].items() if name.endswith(f"@sm_{arch}")}
        assert found["kernels"].keys() == expected.keys() and len(expected) > 30
        for name, entry in found["kernels"].items():
            _check(name, entry, arch)
        if found["triton"] == committed["triton"]:  # another compiler may well find other registers
            assert found["kernels"] == expected, "the committed table is stale: compile_ahead.py --write refreshes it"


def _check(name: str, entry: dict, arch: int) -> None:
    """What every compiler must make of a kernel."""
    assert "error" not in entry, f"{name}: {entry['error']}"
    assert entry["spilled"] == 0 and entry["stack"] == 0, f"{name} spills"
    assert entry["shared_bytes"] <= (99 << 10), f"{name} fits no consumer GPU"
    if name.startswith("linear"):
        wanted = "HGMMA.64x16x16" if arch == 90 else "HMMA.16816"
        assert entry["products"] == [wanted], f"{name}: one instruction shape, {wanted}, got {entry['products']}"
        assert entry["copies_128"] > 0, f"{name}: the weight is not copied 16 bytes at a time"
    elif name.startswith("attention") and "combine" not in name:
        assert entry["products"] == ["HMMA.16816"], f"{name}: got {entry['products']}"
        assert entry["copies_128"] > 0, f"{name}: keys and values are not copied 16 bytes at a time"
    elif name.startswith(("rows", "top2")):
        assert entry["loads_128"] > 0, f"{name}: rows are not read 16 bytes at a time"


@pytest.mark.long
@pytest.mark.parametrize("arch", [75, 89, 120])
def test_other_architectures_compile_or_say_why_not(arch: int, tmp_path: Path) -> None:
    """Reported in docs/kernels.md; only 8.0 and later are supported."""
    command = [sys.executable, str(HERE / "kernels" / "compile_ahead.py"), str(arch), "--only", "linear/bf16"]
    result = subprocess.run(command, env=_environment(TRITON_CACHE_DIR=str(tmp_path)), capture_output=True, text=True)
    entries = json.loads(result.stdout)["kernels"]
    if arch > 75:
        assert all(entry.get("spilled") == 0 for entry in entries.values()), entries
