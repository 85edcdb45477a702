"""Every launch parameter of this package, by architecture. Nothing here is ever chosen from rows, batch or text length.

Parameters marked *bits* take part in the order of a reduction: changing one changes results, so `describe` puts them
into the fingerprint of whatever uses these kernels. The others only move time.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton

# Raised whenever a kernel's arithmetic changes.
VERSION = 2


class LinearLaunch(NamedTuple):
    """
    Attributes:
        tokens: rows of activations a program works on, in tiles of 16; not *bits*, every tile is alike.
        block_n: outputs a program computes; not *bits*.
        block_k: terms summed in one tensor-core accumulator before an ordinary addition; *bits*.
        target_programs, max_splits: how many ways `split_plan` cuts a weight's inner dimension; *bits*.
    """

    tokens: int = 32
    block_n: int = 64
    block_k: int = 64
    target_programs: int = 528
    max_splits: int = 8
    num_warps: int = 4
    num_stages: int = 4


class AttentionLaunch(NamedTuple):
    """
    Attributes:
        block: keys of one block, anchored at position 0; *bits*.
        split: keys of one program, anchored at position 0, a multiple of `block`; *bits*.
        num_warps: how the sum over a block is shared among threads; *bits*.
    """

    block: int = 64
    split: int = 256
    num_warps: int = 4
    num_stages: int = 2


class RowLaunch(NamedTuple):
    """
    Attributes:
        block: elements a program holds at a time; with `num_warps` it fixes the tree of a sum; *bits*.
    """

    block: int = 1024
    num_warps: int = 4


class Launch(NamedTuple):
    """
    One architecture's row. `attention` is keyed by the head dimension, rounded up to a power of two, and by whether
    keys and values are cut into pieces in registers (FP16 and FP32) or are pieces as stored (BF16).
    """

    linear: LinearLaunch
    attention: dict[tuple[int, bool], AttentionLaunch]
    rows: RowLaunch


_ATTENTION = {
    **{(dim, False): AttentionLaunch() for dim in (16, 32, 64, 128)},
    **{(dim, True): AttentionLaunch(num_warps=8) for dim in (16, 32, 64, 128)},
    (256, False): AttentionLaunch(block=32),
    (256, True): AttentionLaunch(block=32, num_warps=8),
}
LAUNCH: dict[int, Launch] = {
    80: Launch(LinearLaunch(), _ATTENTION, RowLaunch()),
    90: Launch(LinearLaunch(), _ATTENTION, RowLaunch()),
}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; it must have been chosen before this package was imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch_for(device: torch.device) -> Launch:
    """
    The table row of a device: sm_90's for a Hopper GPU, sm_80's for every other one and for the interpreter.

    Args:
        device (`torch.device`): where the tensors lie.

    Raises:
        `RuntimeError`: neither a GPU of compute capability 8.0 or later nor the interpreter.
    """
    if device.type != "cuda":
        if interpreted():
            return LAUNCH[80]
        raise RuntimeError(
            f"Triton kernels need tensors on a CUDA device, got {device}. Set TRITON_INTERPRET=1 before Python starts "
            "to run them in Triton's interpreter (tests only: it is about 1,000 times slower)."
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"these kernels need compute capability 8.0 or later (BF16 tensor cores), {device} has {major}.{minor}. "
            "Choose an A100, L4, RTX 30 or later (on Colab an L4 or A100 runtime), or move the model to the CPU."
        )
    return LAUNCH[90 if major == 9 else 80]


def attention_launch(launch: Launch, dim: int, dtype: torch.dtype) -> AttentionLaunch:
    """
    The parameters for a head dimension and the dtype of the planes.

    Raises:
        `ValueError`: the dimension is larger than any in the table.
    """
    key = (padded_dim(dim), dtype != torch.bfloat16)
    if key not in launch.attention:
        raise ValueError(f"`dim` must be at most {max(launch.attention)[0]}, got {dim}.")
    return launch.attention[key]


def padded_dim(dim: int) -> int:
    """A head dimension as a kernel holds it: a power of two, at least the 16 a tensor-core product needs."""
    return max(16, triton.next_power_of_2(dim))


def describe(device: torch.device) -> str:
    """Everything in one line that the bits of these kernels depend on beside their inputs."""
    launch = launch_for(device)
    linear, rows = launch.linear, launch.rows
    attention = ",".join(
        f"{dim}{'s' if split else ''}:{entry.block}/{entry.split}x{entry.num_warps}"
        for (dim, split), entry in sorted(launch.attention.items())
    )
    where = "interpreter"
    if device.type == "cuda":
        where = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return (
        f"margingate_kernels-{VERSION}/{where}/triton-{triton.__version__}"
        f"/linear-k{linear.block_k}-p{linear.target_programs}-s{linear.max_splits}"
        f"/attention-{attention}/rows-{rows.block}x{rows.num_warps}"
    )
