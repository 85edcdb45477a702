"""linear in Triton's interpreter: bits across row counts, order, neighbours; closeness to float64; planted faults."""

import math

import pytest
import torch
from tensor_core import USES_DOT, modelled

from evals.faulty_kernels import with_fault
from margingate_kernels import linear, matmul, split_plan
from margingate_kernels.launch_table import LAUNCH, LinearLaunch

COUNTS = (1, 2, 15, 16, 17, 33, 64, 257)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations with outlier channels, as a transformer has them."""
    return randn(rows, inputs) * randn(inputs, seed=1).exp(), (randn(outputs, inputs, seed=2) * 0.02).to(dtype)


def error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Norm of the error over the norm of the exact product."""
    exact = x.double() @ weight.double().t()
    return float((out.double() - exact).norm() / exact.norm())


def tolerance(inputs: int) -> float:
    """Errors of 2^-24 a term that add at random over a row."""
    return 2.0**-24 * math.sqrt(inputs)


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [
        (96, 320, torch.bfloat16),  # one split, a ragged tile of outputs
        (40, 1096, torch.bfloat16),  # several splits, a ragged last block
        (33, 77, torch.bfloat16),  # nothing is a multiple of anything
        (64, 576, torch.float16),
        (48, 288, torch.float32),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_rows_bits_depend_on_that_row_alone(outputs: int, inputs: int, dtype: torch.dtype, precision: str) -> None:
    if precision == "bfloat16" and dtype == torch.float32:
        pytest.skip("16-bit operands need a 16-bit weight")
    largest = 257 if inputs == 320 else 33
    x, weight = operands(largest, outputs, inputs, dtype)
    whole = linear(x, weight, precision=precision)
    for count in (count for count in COUNTS if count <= largest):
        assert torch.equal(linear(x[:count].contiguous(), weight, precision=precision), whole[:count]), count
    order = torch.randperm(33, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(x[order].contiguous(), weight, precision=precision), whole[order])
    poisoned = x[:33].clone()
    poisoned[1::2] = math.nan
    found = linear(poisoned, weight, precision=precision)
    assert torch.equal(found[::2], whole[:33:2]) and found[1::2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inputs", [64, 77, 1600])
def test_close_to_float64(dtype: torch.dtype, inputs: int) -> None:
    x, weight = operands(5, 70, inputs, dtype)
    assert error(linear(x, weight), x, weight) < tolerance(inputs)
    if dtype != torch.float32:
        rounded = x.to(dtype)
        assert error(linear(x, weight, precision="bfloat16"), rounded, weight) < tolerance(inputs)


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 1096), (64, 192)])  # several splits, one split
def test_bias_and_residual_are_added_last(outputs: int, inputs: int) -> None:
    x, weight = operands(3, outputs, inputs, torch.bfloat16)
    bias, residual = randn(outputs, seed=4).bfloat16(), randn(3, outputs, seed=5)
    assert torch.equal(linear(x, weight, bias, residual), linear(x, weight) + bias.float() + residual)
    assert torch.equal(linear(x, weight, bias), linear(x, weight) + bias.float())


def test_splits_follow_the_weights_shape_and_cover_it() -> None:
    for launch in (entry.linear for entry in LAUNCH.values()):
        for outputs, inputs in ((4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1, 1), (49152, 576)):
            blocks, splits = split_plan(outputs, inputs, launch)
            assert 1 <= splits <= launch.max_splits
            assert (splits - 1) * blocks * launch.block_k < inputs <= splits * blocks * launch.block_k
    assert split_plan(4096, 4096, LinearLaunch()) == (8, 8)
    assert split_plan(128256, 4096, LinearLaunch())[1] == 1


def test_locks_are_left_at_zero_and_shared_by_calls() -> None:
    x, weight = operands(33, 40, 1096, torch.bfloat16)
    first = linear(x, weight)
    assert torch.equal(linear(x, weight), first)
    held = list(matmul._locks._held.values())
    assert held and all(not bool(locks.any()) for locks in held)


@pytest.mark.parametrize("chained", [False, True])
def test_fp32_quality_survives_a_tensor_cores_truncation(tmp_path, chained: bool) -> None:
    """A fresh accumulator for every block does; one chained accumulator does not, and is caught."""
    chain = ("matmul.py", "sums[tile] + _product(w, x, zero,", "_product(w, x, sums[tile],")
    module = with_fault(tmp_path, USES_DOT, *([chain] if chained else []))
    x, weight = operands(3, 64, 4096, torch.bfloat16)
    with modelled():
        found = error(module.linear(x, weight), x, weight)
    assert (found > 1e-6) if chained else (found < 5e-7), found


def test_a_split_taken_from_the_rows_is_caught(tmp_path) -> None:
    faulty = with_fault(
        tmp_path,
        (
            "matmul.py",
            "split_plan(outputs, x.shape[1], launch)",
            "split_plan(outputs, x.shape[1], launch._replace(max_splits=1 if rows > 16 else 8))",
        ),
    )
    x, weight = operands(33, 40, 1096, torch.bfloat16)
    assert not torch.equal(faulty.linear(x[:1].contiguous(), weight), faulty.linear(x, weight)[:1])


def test_no_rows() -> None:
    assert linear(torch.zeros(0, 64), torch.zeros(8, 64).bfloat16()).shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(x=torch.zeros(3, 64).bfloat16()), "`x` must be contiguous float32"),
        (dict(x=torch.zeros(64, 3).t()), "`x` must be contiguous float32"),
        (dict(weight=torch.zeros(8, 65).bfloat16()), "`weight` must have 64 columns"),
        (dict(weight=torch.zeros(8, 64, dtype=torch.float64)), "got torch.float64"),
        (dict(weight=torch.zeros(64, 8).bfloat16().t()), "`weight` must be contiguous"),
        (dict(bias=torch.zeros(9)), r"`bias` must be contiguous \[8\]"),
        (dict(residual=torch.zeros(2, 8)), r"`residual` must be contiguous float32 \[3, 8\]"),
        (dict(precision="half"), "`precision` must be"),
        (dict(precision="bfloat16", weight=torch.zeros(8, 64)), "needs a 16-bit weight"),
    ],
)
def test_bad_input(change: dict, text: str) -> None:
    arguments = dict(x=torch.zeros(3, 64), weight=torch.zeros(8, 64).bfloat16()) | change
    with pytest.raises(ValueError, match=text):
        linear(**arguments)
