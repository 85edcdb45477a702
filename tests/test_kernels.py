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
    table = json.loads(result.stdout)
    assert len(table) == 5
    for name, entry in table.items():
        assert entry["spilled"] == 0, f"{name} spills"
        assert entry["registers"] <= 128, f"{name} uses {entry['registers']} registers"
    assert table[f"top2/fp32@sm_{arch}"]["loads_128"] > 0, "the logits are not read 16 bytes at a time"
