"""Row reductions in Triton's interpreter: bits across row counts, closeness to float64, NaN and -inf rows."""

import math

import pytest
import torch

from margingate_kernels import layer_norm, log_softmax, rms_norm, row_sum, softmax

COUNTS = (1, 2, 15, 16, 17, 33, 64, 257)
OPERATIONS = {
    "sum": (row_sum, lambda x: x.sum(-1, keepdim=True)),
    "softmax": (softmax, lambda x: x.softmax(-1)),
    "log_softmax": (log_softmax, lambda x: x.log_softmax(-1)),
    "rms_norm": (lambda x: rms_norm(x)[0], lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
    "layer_norm": (layer_norm, lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])),
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("width", [7, 1024, 2500])
def test_a_rows_bits_depend_on_that_row_alone(name: str, width: int) -> None:
    function, _ = OPERATIONS[name]
    largest = 257 if width == 7 else 17
    x = randn(largest, width) * 3
    whole = function(x)
    for count in (count for count in COUNTS if count <= largest):
        assert torch.equal(function(x[:count]), whole[:count]), count
    assert torch.equal(function(x[:17].flip(0)), whole[:17].flip(0))
    poisoned = x[:5].clone()
    poisoned[1], poisoned[3] = math.nan, math.inf
    found = function(poisoned)
    for row in (0, 2, 4):
        assert torch.equal(found[row], whole[row])
    assert found[1].isnan().all()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("width", [1, 576, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_close_to_float64(name: str, width: int, dtype: torch.dtype) -> None:
    function, exact = OPERATIONS[name]
    x = (randn(3, width) * 4 + 1).to(dtype)
    expected = exact(x.double())
    found = function(x)
    assert found.dtype == torch.float32
    # Roundings of 2^-24, at random over the lanes' chains and the tree; `exp` of the hardware adds 2 to 4.
    scale = x.double().abs().sum(-1, keepdim=True) if name == "sum" else expected.abs() + expected.abs().max()
    assert float(((found.double() - expected).abs() / scale.clamp(min=1e-30)).max()) < 2.0**-24 * (8 + math.sqrt(width))


def test_residual_weight_and_bias() -> None:
    x, residual, weight, bias = randn(3, 300), randn(3, 300, seed=1), randn(300, seed=2), randn(300, seed=3)
    normed, summed = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5)[0])
    assert rms_norm(x)[1] is None
    assert torch.equal(layer_norm(x, weight.bfloat16(), bias), layer_norm(x) * weight.bfloat16().float() + bias)


def test_shapes_and_strides() -> None:
    x = randn(2, 3, 40)
    assert row_sum(x).shape == (2, 3, 1) and softmax(x).shape == x.shape
    assert torch.equal(softmax(x[:, ::2]), softmax(x)[:, ::2])
    assert torch.equal(row_sum(x.transpose(1, 2)), row_sum(x.transpose(1, 2).contiguous()))
    assert row_sum(x[:0]).shape == (0, 3, 1)


def test_softmax_of_masked_rows() -> None:
    x = randn(2, 30)
    x[0, 5:] = -math.inf
    x[1] = -math.inf
    found = softmax(x)
    assert torch.allclose(found[0, :5], x[0, :5].softmax(-1), atol=1e-6) and not found[0, 5:].any()
    assert found[1].isnan().all()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="got torch.float64"):
        row_sum(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="n > 0"):
        softmax(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"`weight` must be contiguous \[4\]"):
        layer_norm(torch.zeros(3, 4), torch.zeros(5))
    with pytest.raises(ValueError, match=r"`residual` must be contiguous \[3, 4\]"):
        rms_norm(torch.zeros(3, 4), residual=torch.zeros(4, 4))
