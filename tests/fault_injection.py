"""Faults to plant, so that a test shows it can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from margingate_hf.forward.context import AttentionOptions, DecodeContext, VerifyContext, current_context
from margingate_hf.verifier import Verifier
from margingate_hf.verifier.registry import use_verifier
from margingate_hf.verifier.torch_cpu import TorchCPU


class PlainPlan:
    """FP32 `F.linear` as the library does it: right, and not batch-invariant."""

    name = "plain"
    copies_weights = True
    sums_planes = False
    sizes = (1,)

    def available(self) -> bool:
        return True

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    pack_once = pack

    def linear(self, rows: torch.Tensor, packed: torch.Tensor, precision: str = "float32") -> torch.Tensor:
        return F.linear(rows, packed)


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: VerifyContext,
    options: AttentionOptions,
) -> torch.Tensor:
    """FP32 SDPA over each row's tokens of the pass, all keys at once: right, and not batch-invariant."""
    assert options.softcap is None and options.sinks is None
    out = query.new_empty(query.shape[2], query.shape[1], values.shape[-1])
    for slot in context.slots.unique().tolist():
        mine = context.slots == slot
        positions = context.positions[mine]
        length = int(positions.max()) + 1
        k, v = (store[slot][:, :length] for store in (keys, values))
        visible = torch.arange(length)[None] <= positions[:, None]
        if options.sliding_window is not None:
            visible &= torch.arange(length)[None] > positions[:, None] - options.sliding_window
        group = query.shape[1] // k.shape[0]
        k, v = k.repeat_interleave(group, 0)[None], v.repeat_interleave(group, 0)[None]
        mixed = F.scaled_dot_product_attention(query[:, :, mine], k, v, visible, scale=options.scaling)
        out[mine] = mixed[0].transpose(0, 1)
    return out[None]


@contextlib.contextmanager
def plain_verifier(model: Any) -> Iterator[None]:
    """Replaces the model's verifier by FP32 `F.linear` and SDPA, and skips the self-test that would refuse it."""
    verifier = Verifier(model, PlainPlan())
    with (
        mock.patch.object(TorchCPU, "verify_attention", staticmethod(plain_attention)),
        use_verifier(model, verifier),
    ):
        yield


@contextlib.contextmanager
def disturbed_drafts(model: Any, wrong_at: Any) -> Iterator[None]:
    """
    Makes the fast path's best token wrong at every position for which `wrong_at(position)` holds, and checks that some
    draft was: a schedule that never drafts would make the test an empty one.
    """
    disturbed = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        context = current_context()
        if isinstance(context, DecodeContext):
            for row, position in enumerate(context.positions.tolist()):
                if wrong_at(position):
                    disturbed.append(position)
                    output.logits[row, -1] = -output.logits[row, -1]
        return output

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
    assert disturbed, "no draft was disturbed: a weak test"
