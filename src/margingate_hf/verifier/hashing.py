"""Hashes of tensors: one that is the same on every machine, and one that is quick wherever the tensor lies."""

from __future__ import annotations

import torch
import xxhash

_WORDS = 1 << 20  # 64-bit words that one step of the device form mixes
_HALF = 0xFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15  # odd; its multiples are keys that differ in every bit position


def digest(tensor: torch.Tensor) -> str:
    """
    128-bit XXH3 of a tensor's bytes, in hexadecimal.

    Args:
        tensor (`torch.Tensor`, any shape, dtype and device).

    Returns:
        Equal for equal bytes, on every machine of one byte order.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def stamp(tensor: torch.Tensor) -> str:
    """
    A hash that tells whether a tensor has changed, computed where it lies: on CPU its [`digest`], on another device a
    mix of every 64-bit word with keys of its place, so that nothing has to be copied to the host.
    """
    return digest(tensor) if tensor.is_cpu else _mixed(tensor)


def _mixed(tensor: torch.Tensor) -> str:
    """
    NH (Black et al., UMAC, CRYPTO 1999) twice with other keys, on blocks of `_WORDS` words: the sum of
    `(low + key) * (high + key')` modulo 2^64, and XXH3 of the blocks' sums. A product of both halves is not linear in
    either: sign bits that are flipped in pairs do not cancel, whatever their place.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    words = flat.view(torch.int64)
    sums = []
    places = torch.arange(1, min(words.numel(), _WORDS) + 1, dtype=torch.int64, device=words.device)
    first = _key(places)
    second = _key(first)
    for part in words.split(_WORDS):
        low, high, count = part & _HALF, (part >> 32) & _HALF, part.numel()
        sums.append(((low + (first[:count] & _HALF)) * (high + (second[:count] & _HALF))).sum())
        sums.append(((low + (second[:count] >> 32)) * (high + (first[:count] >> 32))).sum())
    return digest(torch.stack(sums)) + f"-{flat.numel()}"


def _key(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 that leaves no bit in its place."""
    x = x * (_GAMMA - (1 << 64))
    x = (x ^ ((x >> 29) & ((1 << 35) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    return x ^ ((x >> 32) & _HALF)
