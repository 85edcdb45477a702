"""Reductions, norms and activations whose bits depend on one row alone.

The library forms these replace take their bits from a tensor's size: threads split a large sum, and a vectorised
`silu`/`sigmoid`/`gelu` uses another formula in the tail of the buffer than in its body. Here every reduction is over
the last dimension, one row after the other, and every activation is built from `+ - * / sqrt` (correctly rounded, hence
position-free) and `exp`, `tanh`, `erf`, `log` (checked to be position-free by `probe_elementwise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """
    Sum over the last dimension of a float32 tensor `[..., n]`, kept as size 1.

    A single row would be summed by all threads at once (torch splits a reduction with one output); a second row
    beside it keeps the serial order.
    """
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 1:
        flat = flat.expand(2, -1).contiguous()
        return flat.sum(-1)[:1].reshape(*x.shape[:-1], 1)
    return flat.sum(-1).reshape(*x.shape[:-1], 1)


def row_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension of a float32 tensor `[..., n]`, kept as size 1."""
    return row_sum(x) / x.shape[-1]


def softmax(x: torch.Tensor) -> torch.Tensor:
    """`exp(x - max) / sum` over the last dimension of a float32 tensor `[..., n]`."""
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / row_sum(weights)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """`x - max - log(sum(exp(x - max)))` over the last dimension of a float32 tensor `[..., n]`."""
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - row_sum(shifted.exp()).log()


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension; float32 `[..., n]`, weights `[n]`."""
    centred = x - row_mean(x)
    out = centred / (row_mean(centred * centred) + eps).sqrt()
    if weight is not None:
        out = out * weight.float()
    return out if bias is None else out + bias.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; float32 `[..., n]`, weight `[n]`."""
    out = x / (row_mean(x * x) + eps).sqrt()
    return out if weight is None else out * weight.float()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))`, float32, any shape."""
    return 1.0 / (1.0 + (-x).exp())


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x / (1 + exp(-x))`, float32, any shape."""
    return x / (-x).exp_().add_(1.0)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU, exact (`erf`) or by its `tanh` form; float32, any shape."""
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + inner.tanh())
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    """`log(1 + exp(beta x)) / beta`, the identity above `threshold`; float32, any shape."""
    scaled = x * beta
    return torch.where(scaled > threshold, x, (1.0 + scaled.clamp(max=threshold).exp()).log() / beta)


# Library functions that are used as they are, provided the probe finds them position-free.
ELEMENTWISE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.exp,
    torch.tanh,
    torch.erf,
    torch.cos,
    torch.sin,
    torch.log,
    torch.log1p,
    torch.expm1,
    torch.sqrt,
)


def probe_elementwise(device: torch.device | None = None) -> str | None:
    """
    Checks that the functions in `ELEMENTWISE` give an element the same bits wherever it stands in a buffer.

    Returns:
        `None` if so, otherwise one sentence that names the function.
    """
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(70_001, generator=generator, dtype=torch.float32) * 20 + 1e-3).to(
        device
    )  # longer than the grain at which torch uses threads
    for function in ELEMENTWISE:
        whole = function(x)
        for start, stop in ((0, 1), (1, 2), (3, 10), (5, 22), (7, 70), (1, 257), (13, 1_029), (0, 33_000)):
            if not torch.equal(function(x[start:stop].clone()), whole[start:stop]):
                return f"torch.{function.__name__}: bits depend on an element's place in the buffer"
    return None


def probe_reductions(
    row_sum: Callable[[torch.Tensor], torch.Tensor] = row_sum,
    device: torch.device | None = None,
    widths: tuple[int, ...] = (128, 576, 50_001),
) -> str | None:
    """
    Checks that a sum over the last dimension gives a row the same bits alone and among others.

    Args:
        row_sum (`Callable`, *optional*): the form to check, float32 `[rows, n]` to `[rows, 1]`.
        device (`torch.device`, *optional*): where.
        widths (`tuple[int, ...]`, *optional*): values of `n`.

    Returns:
        `None` if so, otherwise one sentence that names the width.
    """
    generator = torch.Generator().manual_seed(0)
    for width in widths:
        x = torch.randn(9, width, generator=generator, dtype=torch.float32).to(device)
        whole = row_sum(x)
        for count in (1, 2, 3, 8):
            if not torch.equal(row_sum(x[:count]), whole[:count]):
                return f"row_sum over {width}: bits depend on the number of rows ({count})"
    return None
