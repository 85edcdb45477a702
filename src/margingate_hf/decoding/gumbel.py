"""Seeded Gumbel noise: a counter-based function of (seed, sample, position, token id), and of nothing else.

Adding Gumbel noise to log-probabilities and taking the argmax draws from the distribution they describe (the Gumbel-max
trick), so a sampled output is verified as a greedy one is. No generator is advanced: the noise of a position is the
same whichever row, batch or forward it is drawn in, and after any rollback.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): increment and the finaliser's multipliers
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    """SplitMix64's finaliser on one 64-bit integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class GumbelNoise:
    """
    Noise of one sampled output.

    Args:
        seed (`int`): 0 to 2^63 - 1.
        sample (`int`): which of a prompt's samples this output is.
    """

    seed: int
    sample: int = 0

    def key(self, position: int) -> int:
        """The 64-bit stream key of one position of the sequence."""
        return mix(mix(mix(self.seed + _GAMMA) ^ (self.sample + _GAMMA)) + (position + 1) * _GAMMA)

    def __call__(self, position: int, vocabulary: int, device: torch.device | None = None) -> torch.Tensor:
        """
        Args:
            position (`int`): index in the row's own sequence of the token to be drawn.
            vocabulary (`int`): token ids.

        Returns:
            `torch.Tensor` of shape `[vocabulary]`, float32: independent standard Gumbel variates, `-log(-log(u))`,
            `u` of 53 bits, computed in float64.
        """
        ids = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device)
        x = ids * _signed(_GAMMA) + _signed(self.key(position))
        x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
        x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
        x = x ^ _shift(x, 31)
        uniform = (_shift(x, 11).double() + 0.5) * 2.0**-53
        return (-(-uniform.log()).log()).float()
