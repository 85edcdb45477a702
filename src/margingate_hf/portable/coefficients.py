"""Coefficients and constants of the portable functions: one table for torch and for Triton.

Written as hexadecimal floats, so that no reader rounds them. Polynomials in the monomial basis, lowest degree first.
"""

from __future__ import annotations

# 1 / ln 2.
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# ln 2 in two parts; the first has 42 significant bits, so that its product with an exponent is exact.
LN2_HIGH = float.fromhex("0x1.62e42fefa3800p-1")
LN2_LOW = float.fromhex("0x1.ef35793c76730p-45")
# 2 / pi.
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
# pi / 2 in three parts; the first two have 33 significant bits: exact products with quarter turns below 2^20.
HALF_PI_1 = float.fromhex("0x1.921fb54400000p+0")
HALF_PI_2 = float.fromhex("0x1.0b4611a600000p-34")
HALF_PI_3 = float.fromhex("0x1.3198a2e037073p-69")
# exp(r), |r| <= ln(2) / 2: Taylor; the rest is below 2e-16.
EXP = (
    float.fromhex("0x1.0000000000000p+0"),
    float.fromhex("0x1.0000000000000p+0"),
    float.fromhex("0x1.0000000000000p-1"),
    float.fromhex("0x1.5555555555555p-3"),
    float.fromhex("0x1.5555555555555p-5"),
    float.fromhex("0x1.1111111111111p-7"),
    float.fromhex("0x1.6c16c16c16c17p-10"),
    float.fromhex("0x1.a01a01a01a01ap-13"),
    float.fromhex("0x1.a01a01a01a01ap-16"),
    float.fromhex("0x1.71de3a556c734p-19"),
    float.fromhex("0x1.27e4fb7789f5cp-22"),
    float.fromhex("0x1.ae64567f544e4p-26"),
    float.fromhex("0x1.1eed8eff8d898p-29"),
)
# log((1 + s) / (1 - s)) / s in s^2, |s| <= 0.1716: Taylor; the rest is below 1e-17.
LOG = (
    float.fromhex("0x1.0000000000000p+1"),
    float.fromhex("0x1.5555555555555p-1"),
    float.fromhex("0x1.999999999999ap-2"),
    float.fromhex("0x1.2492492492492p-2"),
    float.fromhex("0x1.c71c71c71c71cp-3"),
    float.fromhex("0x1.745d1745d1746p-3"),
    float.fromhex("0x1.3b13b13b13b14p-3"),
    float.fromhex("0x1.1111111111111p-3"),
    float.fromhex("0x1.e1e1e1e1e1e1ep-4"),
    float.fromhex("0x1.af286bca1af28p-4"),
    float.fromhex("0x1.8618618618618p-4"),
)
# sin(r) / r in r^2, |r| <= pi / 4: Taylor; the rest is below 1e-18.
SIN = (
    float.fromhex("0x1.0000000000000p+0"),
    float.fromhex("-0x1.5555555555555p-3"),
    float.fromhex("0x1.1111111111111p-7"),
    float.fromhex("-0x1.a01a01a01a01ap-13"),
    float.fromhex("0x1.71de3a556c734p-19"),
    float.fromhex("-0x1.ae64567f544e4p-26"),
    float.fromhex("0x1.6124613a86d09p-33"),
    float.fromhex("-0x1.ae7f3e733b81fp-41"),
    float.fromhex("0x1.952c77030ad4ap-49"),
)
# cos(r) in r^2: Taylor; the rest is below 3e-18.
COS = (
    float.fromhex("0x1.0000000000000p+0"),
    float.fromhex("-0x1.0000000000000p-1"),
    float.fromhex("0x1.5555555555555p-5"),
    float.fromhex("-0x1.6c16c16c16c17p-10"),
    float.fromhex("0x1.a01a01a01a01ap-16"),
    float.fromhex("-0x1.27e4fb7789f5cp-22"),
    float.fromhex("0x1.1eed8eff8d898p-29"),
    float.fromhex("-0x1.93974a8c07c9dp-37"),
    float.fromhex("0x1.ae7f3e733b81fp-45"),
)
# erf(x) / x in x^2 - 0.5, |x| < 1: Chebyshev interpolation, within 2e-14.
ERF_NEAR = (
    float.fromhex("0x1.ee51eb23cb88cp-1"),
    float.fromhex("-0x1.1fd1629215218p-2"),
    float.fromhex("0x1.454368013bc4dp-4"),
    float.fromhex("-0x1.2b902b7b1a38cp-6"),
    float.fromhex("0x1.c82aa346d1b99p-9"),
    float.fromhex("-0x1.2639920bc06b9p-11"),
    float.fromhex("0x1.4864d6bda3458p-14"),
    float.fromhex("-0x1.429da96fb5181p-17"),
    float.fromhex("0x1.1c6a2a4908255p-20"),
    float.fromhex("-0x1.c1a515de8637ap-24"),
)
# erf(x) in x - 1.5, x - 2.5 and x - 3.5 for |x| in [1, 2), [2, 3) and [3, 4): Chebyshev interpolation, within 2e-12.
ERF_FAR = (
    (
        float.fromhex("0x1.eea5557137ae0p-1"),
        float.fromhex("0x1.e723726a88b1bp-4"),
        float.fromhex("-0x1.6d5a95d049de7p-3"),
        float.fromhex("0x1.1c2a02f54dc84p-3"),
        float.fromhex("-0x1.6d5a966a85ccfp-5"),
        float.fromhex("-0x1.e723df8df506cp-7"),
        float.fromhex("0x1.3ca3fdbe028c2p-6"),
        float.fromhex("-0x1.36cb8b678ef3ep-8"),
        float.fromhex("-0x1.35bee9a37dacep-9"),
        float.fromhex("0x1.bf00fb10939dcp-10"),
        float.fromhex("-0x1.77c06c75e9978p-14"),
        float.fromhex("-0x1.f69f951b1de5dp-13"),
        float.fromhex("0x1.185f1cc783878p-14"),
    ),
    (
        float.fromhex("0x1.ffcaa8f4c9beap-1"),
        float.fromhex("0x1.1d831708a0fd5p-9"),
        float.fromhex("-0x1.64e3dcd3f48cep-8"),
        float.fromhex("0x1.119da18c05748p-7"),
        float.fromhex("-0x1.1a89b96dd5ff6p-7"),
        float.fromhex("0x1.90e7e07334323p-8"),
        float.fromhex("-0x1.6ecdc6dc4599ap-9"),
        float.fromhex("0x1.1c76a2d406e93p-11"),
        float.fromhex("0x1.11583e42d79e6p-12"),
        float.fromhex("-0x1.0794a23c01b90p-12"),
        float.fromhex("0x1.4a3457816bfd1p-14"),
        float.fromhex("0x1.239f839e68060p-17"),
        float.fromhex("-0x1.d12f93f675a2ap-17"),
    ),
    (
        float.fromhex("0x1.ffffe710d565ep-1"),
        float.fromhex("0x1.6a5973237efd0p-18"),
        float.fromhex("-0x1.3d0e43e910ad3p-16"),
        float.fromhex("0x1.62ccdbda60c69p-15"),
        float.fromhex("-0x1.1c0770112cc43p-14"),
        float.fromhex("0x1.586c98552f89ep-14"),
        float.fromhex("-0x1.461581133e779p-14"),
        float.fromhex("0x1.e80f12f72e80dp-15"),
        float.fromhex("-0x1.1f5bfcc1d6471p-15"),
        float.fromhex("0x1.0280fbe89e535p-16"),
        float.fromhex("-0x1.38ee08307327ep-18"),
        float.fromhex("0x1.a9040af3454dap-23"),
        float.fromhex("0x1.14a8773b0d6b5p-21"),
    ),
)
