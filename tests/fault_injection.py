"""Faults to plant, so that a test shows it can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from margingate_hf.forward import attention
from margingate_hf.forward.context import DecodeGeometry, VerifyGeometry, current_geometry
from margingate_hf.verifier import Verifier


class PlainPlan:
    """FP32 `F.linear` as the library does it: right, and not batch-invariant."""

    name = "plain"
    copies_weights = True
    column_store = "column_store"
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
    geometry: VerifyGeometry,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """FP32 SDPA over each row's tokens of the pass, all keys at once: right, and not batch-invariant."""
    assert softcap is None and sinks is None
    out = query.new_empty(query.shape[2], query.shape[1], values.shape[-1])
    for slot in geometry.slots.unique().tolist():
        mine = geometry.slots == slot
        positions = geometry.positions[mine]
        length = int(positions.max()) + 1
        k, v = (store[slot][:, :length] for store in (keys, values))
        visible = torch.arange(length)[None] <= positions[:, None]
        if sliding_window is not None:
            visible &= torch.arange(length)[None] > positions[:, None] - sliding_window
        group = query.shape[1] // k.shape[0]
        k, v = k.repeat_interleave(group, 0)[None], v.repeat_interleave(group, 0)[None]
        out[mine] = F.scaled_dot_product_attention(query[:, :, mine], k, v, visible, scale=scaling)[0].transpose(0, 1)
    return out[None]


@contextlib.contextmanager
def plain_verifier(model: Any) -> Iterator[None]:
    """Replaces the model's verifier by FP32 `F.linear` and SDPA, and skips the self-test that would refuse it."""
    verifier = Verifier(model, PlainPlan())
    with (
        mock.patch.object(attention, "verify_attention", plain_attention),
        mock.patch("margingate_hf.generation.verifier_for", lambda *_: verifier),
        mock.patch("margingate_hf.engine.verifier_for", lambda *_: verifier),
        mock.patch("bitwise.verifier_for", lambda *_: verifier),
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
        geometry = current_geometry()
        if isinstance(geometry, DecodeGeometry):
            for row, position in enumerate(geometry.positions.tolist()):
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
