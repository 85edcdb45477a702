"""Other processors, as far as this one can stand in for them: limits of oneDNN's and torch's instruction sets.

Each limit runs in a process of its own, since both are read once. What must hold everywhere is asserted; what a
processor does not offer is skipped by the tests themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
LIMITS = {
    "SSE41": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX-512 without BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "AVX-512 with BF16, no AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
PROGRAM = """
import torch
from margingate_hf import MarginGateConfig, enable
from margingate_hf.verifier import CPU_PLANS, verifier_for
from margingate_hf.verifier.plans import probe_linear
from bitwise import assert_same, canonical, run_batch
from tiny import random_prompts, tiny_model

prompts = random_prompts([33, 1, 12, 70, 5])
for name in ("llama", "mixtral"):
    model = enable(tiny_model(name))
    for precision in ("float32", "bfloat16"):
        gate = MarginGateConfig(precision=precision, schedule="fixed", num_draft_tokens=4)
        assert not verifier_for(model, gate).passed_over, verifier_for(model, gate).passed_over
        for prompt, run in zip(prompts, run_batch(model, prompts, 8, gate)):
            assert_same(run, canonical(model, prompt, 8, gate), f"{name}, {precision}, {len(prompt)} tokens")
generator = torch.Generator().manual_seed(0)
for plan in CPU_PLANS:
    for outputs, terms in ((48, 80), (64, 1000), (257, 64), (8, 8), (100, 2304)):
        weight = torch.randn(outputs, terms, generator=generator).bfloat16().float()
        for precision in ("float32", "bfloat16"):
            found = probe_linear(plan, weight, precision)
            assert found is None, f"{plan.name}, {precision}: {found}"
print("held", torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.parametrize("limit", LIMITS)
def test_bits_hold_and_the_fast_plan_is_used(limit: str) -> None:
    environment = {**os.environ, **LIMITS[limit], "OMP_NUM_THREADS": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment.get("PYTHONPATH", "")])
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout.startswith("held")


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS)
def test_the_suite_passes(limit: str) -> None:
    """Everything but the long tier and what starts further suites."""
    environment = {**os.environ, **LIMITS[limit], "CI": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", "-p", "no:cacheprovider"]
    command += ["--ignore", str(Path(__file__)), "--ignore", str(HERE / "project" / "test_kernels.py")]
    out = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent)
    assert out.returncode == 0, out.stdout[-3000:]
