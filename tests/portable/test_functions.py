"""Portable functions: within 1 ulp of the real function, their special values, and the same bits everywhere."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mpmath
import pytest
import torch

from margingate_hf.portable import functions

ROOT = Path(__file__).parents[2]
# SHA-256 of each function on `inputs(...)`: they must come out on every processor, and for ever.
GOLDEN = {
    "exp": "5176f98c60d92982",
    "log": "ce1699f8fb302602",
    "sin": "15572abba09de043",
    "cos": "db44d5e4dbd08648",
    "tanh": "4fe4c6b013ded5fc",
    "erf": "b7d8f4cb36420d4c",
    "exp64": "a44d2571a97aed46",
    "log64": "a560ccb6abf3a8ba",
}


def inputs(name: str, count: int = 4001) -> torch.Tensor:
    """FP32 arguments over the function's whole range, dense where it bends, and hard cases; made from integers."""
    steps = torch.arange(count, dtype=torch.float64)
    low, high = {"exp": (-87.0, 88.7), "tanh": (-10.0, 10.0), "erf": (-4.5, 4.5)}.get(name, (-30.0, 30.0))
    spread = (low + (high - low) / (count - 1) * steps).float()
    small = (steps / count - 0.5).float() * 2.0**-8
    if name == "log":
        bits = torch.arange(0x00800000, 0x7F800000, 0x7F000000 // count, dtype=torch.int64)
        near_one = (1.0 + small.double()).float()
        return torch.cat([bits.int().view(torch.float32), near_one])
    if name in ("sin", "cos"):
        # Positions times frequencies, and the FP32 numbers nearest to multiples of pi / 2.
        positions = (steps * 262.0).float()
        nearest = (torch.arange(1, count, dtype=torch.float64) * (math.pi / 2) * 160).float()
        return torch.cat([spread, small, positions, nearest])
    return torch.cat([spread, small])


def units_away(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance from the real function in units in the last place of FP32."""
    real = getattr(mpmath, name)
    with mpmath.workdps(40):
        exact = [real(mpmath.mpf(value)) for value in x.double().tolist()]
        found = []
        for value, want in zip(y.double().tolist(), exact, strict=True):
            ulp = mpmath.mpf(2) ** max(-149, int(mpmath.floor(mpmath.log(abs(want), 2))) - 23 if want else -149)
            found.append(float(abs(mpmath.mpf(value) - want) / ulp))
    return torch.tensor(found)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tanh", "erf"])
def test_within_one_unit_in_the_last_place(name: str) -> None:
    x = inputs(name)[::3]
    away = units_away(name, x, getattr(functions, name)(x))
    assert away.max() <= 0.51, f"{name}: {away.max():.3f} ulp at {float(x[away.argmax()])!r}"


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tanh", "erf"])
def test_a_bit_does_not_depend_on_the_shape_or_the_neighbours(name: str) -> None:
    function = getattr(functions, name)
    x = inputs(name)
    whole = function(x)
    assert torch.equal(function(x.flip(0)).flip(0), whole)
    for start, stop in ((0, 1), (1, 2), (3, 10), (5, 22), (13, 1029)):
        assert torch.equal(function(x[start:stop].clone()), whole[start:stop])
    assert torch.equal(function(torch.cat([x, torch.tensor([math.nan])]))[:-1], whole)


def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-40, -1e-40])

    def same(found: torch.Tensor, expected: list[float]) -> bool:
        return torch.equal(found.nan_to_num(123.0), torch.tensor(expected).nan_to_num(123.0))

    assert same(functions.exp(x), [1, 1, inf, 0, nan, 1, 1])
    assert same(functions.exp(torch.tensor([-87.5, -1e30, 89.0, 1e30])), [0, 0, inf, inf])
    assert same(functions.log(x), [-inf, -inf, inf, nan, nan, -inf, -inf])
    assert same(functions.tanh(x)[:5], [0, 0, 1, -1, nan])
    assert same(functions.erf(x)[:5], [0, 0, 1, -1, nan])
    assert same(functions.sin(x)[:5], [0, 0, nan, nan, nan])
    assert same(functions.cos(x)[:5], [1, 1, nan, nan, nan])


def digests() -> str:
    """One line a function."""
    lines = []
    for name in ("exp", "log", "sin", "cos", "tanh", "erf"):
        out = getattr(functions, name)(inputs(name))
        lines.append(f"{name} {hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16]}")
    # Before the rounding to FP32, which hides almost every difference.
    for name, wide in (("exp", functions.exp64), ("log", functions.log64)):
        out = wide(inputs(name).double())
        lines.append(f"{name}64 {hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16]}")
    return "\n".join(lines)


LIMITS = {
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"},
    "flush denormal": {"MARGINGATE_TEST_FLUSH": "1"},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_same_bits_on_every_instruction_set(limit: str) -> None:
    program = (
        "import os, torch\n"
        "torch.set_flush_denormal(bool(os.environ.get('MARGINGATE_TEST_FLUSH')))\n"
        "from test_functions import digests\nprint(digests())\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **LIMITS[limit], "PYTHONPATH": path}
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.strip() == digests()


def test_golden_digests() -> None:
    assert dict(line.split() for line in digests().splitlines()) == GOLDEN


def test_a_fused_multiply_add_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """`addcmul` may round once where two operations round twice: the digests must notice."""

    def fused(table: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
        """Horner's rule in twice the precision, rounded once a step, as a fused operation does."""
        out = torch.full_like(x, table[-1])
        for coefficient in reversed(table[:-1]):
            high = out * x
            error = _product_error(out, x, high)
            total = high + coefficient
            rest = (high - (total - (total - high))) + (coefficient - (total - high)) + error
            out = total + rest
        return out

    monkeypatch.setattr(functions, "_polynomial", fused)
    found = dict(line.split() for line in digests().splitlines())
    assert found["exp64"] != GOLDEN["exp64"]


def _product_error(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """`a * b - product`, exactly (Dekker, 1971)."""
    split = 2.0**27 + 1.0
    a_high = a * split - (a * split - a)
    b_high = b * split - (b * split - b)
    a_low, b_low = a - a_high, b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def test_a_library_function_is_not_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a library function was called")

    saved: dict[str, Callable] = {}
    for name in ("exp", "log", "sin", "cos", "tanh", "erf", "pow", "addcmul", "addcdiv"):
        saved[name] = getattr(torch, name)
        monkeypatch.setattr(torch, name, refuse)
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for name in ("exp", "log", "sin", "cos", "tanh", "erf"):
        getattr(functions, name)(torch.tensor([0.5, 1.5]))
