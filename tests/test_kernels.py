"""Runs the kernels' own tests where they can run: in Triton's interpreter, and through the compiler with no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RESOURCES = HERE.parent / "kernels" / "resources.json"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")


def _environment(**changes: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, **changes}


def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", str(HERE / "kernels")]
    result = subprocess.run(
        [*command, str(HERE / "kernels")], env=_environment(TRITON_INTERPRET="1"), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout


@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_ahead_of_time(arch: int, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "kernels" / "compile_ahead.py"), str(arch)]
    result = subprocess.run(
        command, env=_environment(TRITON_CACHE_DIR=str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout)
    committed = json.loads(RESOURCES.read_text())
    expected = {name: entry for name, entry in committed["kernels"].items() if name.endswith(f"@sm_{arch}")}
    assert found["kernels"].keys() == expected.keys() and len(expected) > 30
    for name, entry in found["kernels"].items():
        _check(name, entry, arch)
    if found["triton"] == committed["triton"]:  # another compiler may well find other registers
        assert found["kernels"] == expected, f"refresh the table: {HERE / 'kernels' / 'compile_ahead.py'} --write"


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
