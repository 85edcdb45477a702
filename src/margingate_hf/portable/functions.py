"""`exp`, `log`, `sin`, `cos`, `tanh` and `erf` with the same bits on every processor.

Each is a range reduction and a polynomial in FP64, and one rounding to FP32. Every addition and every multiplication is
an operation of its own, so there is nothing that a compiler could contract into a fused multiply-add; `+ - * /` of IEEE
754 are rounded correctly everywhere. Powers of two are made from their bits. No result is subnormal: it is 0 instead,
so flushing subnormals changes nothing. Against the real function the FP32 result is within 1 unit in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import coefficients as c

# Below, exp is 0: its FP32 value would be near the subnormal numbers.
EXP_LOWEST = -87.0
SMALLEST_NORMAL = 2.0**-126
_BIAS, _FRACTION = 1023, 52


def exp(x: torch.Tensor) -> torch.Tensor:
    """`e^x`, float32, any shape: 0 below -87, infinite above 88.72."""
    return exp64(x.double()).float()


def log(x: torch.Tensor) -> torch.Tensor:
    """`ln x`, float32, any shape: NaN below 0, minus infinity at 0 and at subnormal numbers."""
    return log64(x.double().where(~(x.abs() < SMALLEST_NORMAL), 0.0)).float()


def sin(x: torch.Tensor) -> torch.Tensor:
    """`sin x`, float32, any shape, in radians, `|x| <= 2^20`."""
    return _circular(x, 0)


def cos(x: torch.Tensor) -> torch.Tensor:
    """`cos x`, float32, any shape, in radians, `|x| <= 2^20`."""
    return _circular(x, 1)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """`(1 - e^-2|x|) / (1 + e^-2|x|)` with the sign of `x`, float32, any shape; `x - x^3 / 3` below 2^-12."""
    wide = x.double()
    decay = exp64(wide.abs() * -2.0)
    far = (1.0 - decay) / (1.0 + decay)
    far = torch.where(wide < 0, -far, far)
    near = wide - wide * wide * wide / 3.0
    return torch.where(wide.abs() < 2.0**-12, near, far).float()


def erf(x: torch.Tensor) -> torch.Tensor:
    """The error function, float32, any shape: one polynomial in `x^2` below 1, one a unit interval up to 4, then 1."""
    wide = x.double()
    size = wide.abs()
    near = wide * _polynomial(c.ERF_NEAR, wide * wide - 0.5)
    far = torch.ones_like(wide)
    for start, table in enumerate(c.ERF_FAR, 1):
        inside = (size >= start) & (size < start + 1)
        far = torch.where(inside, _polynomial(table, size - (start + 0.5)), far)
    far = torch.where(wide < 0, -far, far)
    out = torch.where(size < 1.0, near, far)
    return torch.where(wide.isnan(), wide, out).float()


def log64(x: torch.Tensor) -> torch.Tensor:
    """
    `ln x`, float64, any shape, within 2 units in the last place of float64 away from 1.

    `x = 2^e m` with `m` in [sqrt(1/2), sqrt(2)), `s = (m - 1) / (m + 1)`: `ln x = e ln 2 + ln((1 + s) / (1 - s))`.
    """
    bits = x.view(torch.int64)
    exponent = ((bits >> _FRACTION) & 0x7FF) - _BIAS
    fraction = (bits & ((1 << _FRACTION) - 1)) | (_BIAS << _FRACTION)
    mantissa = fraction.view(torch.float64)
    upper = mantissa > 1.4142135623730951
    mantissa = torch.where(upper, mantissa * 0.5, mantissa)
    exponent = (exponent + upper).double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    inner = s * _polynomial(c.LOG, s * s)
    out = exponent * c.LN2_HIGH + (exponent * c.LN2_LOW + inner)
    out = torch.where(x == 0, -torch.inf, out)
    out = torch.where(x < 0, torch.nan, out)
    return torch.where((x == torch.inf) | x.isnan(), x, out)


def exp64(x: torch.Tensor) -> torch.Tensor:
    """`e^x`, float64, any shape: `x = n ln 2 + r`, `2^n` from its bits; 0 below -87, infinite above 89."""
    held = x.clamp(EXP_LOWEST, 89.0)
    n = (held * c.LOG2_E).round()
    r = held - n * c.LN2_HIGH
    r = r - n * c.LN2_LOW
    out = _polynomial(c.EXP, r) * _power_of_two(n)
    out = torch.where(x < EXP_LOWEST, 0.0, out)
    return torch.where(x > 89.0, torch.inf, out)


def _circular(x: torch.Tensor, turns: int) -> torch.Tensor:
    """`sin(x + turns * pi / 2)`, float32: quarter turns taken off, then a polynomial on [-pi/4, pi/4]."""
    wide = x.double()
    n = (wide * c.TWO_OVER_PI).round()
    r = wide - n * c.HALF_PI_1
    r = r - n * c.HALF_PI_2
    r = r - n * c.HALF_PI_3
    square = r * r
    sine, cosine = r * _polynomial(c.SIN, square), _polynomial(c.COS, square)
    quarter = (n.nan_to_num(0.0, 0.0, 0.0).long() + turns) & 3
    out = torch.where((quarter & 1) == 1, cosine, sine)
    out = torch.where(quarter >= 2, -out, out)
    return torch.where(wide.isfinite(), out, torch.nan).float()


def _power_of_two(n: torch.Tensor) -> torch.Tensor:
    """`2^n` for whole `n`, float64, of the normal range; NaN gives 1, for a factor that is NaN already."""
    return ((n.nan_to_num(0.0).long() + _BIAS) << _FRACTION).view(torch.float64)


def _polynomial(table: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """Horner's rule, a multiplication and an addition a coefficient, each rounded by itself; float64."""
    out = torch.full_like(x, table[-1])
    for coefficient in reversed(table[:-1]):
        out = out * x
        out = out + coefficient
    return out
