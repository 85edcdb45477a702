"""What the draft steps on one verifier's model keep from call to call: packed products and measured times."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..verifier import Verifier
from .cost_meter import CostMeter


@dataclass
class Drafting:
    """
    Attributes:
        product: the linear product of a draft step, see [`DraftLinear`]; `None`: the model's own.
        meter: times of draft steps and verify forwards.
    """

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None
    meter: CostMeter = field(default_factory=CostMeter)


_lock = threading.Lock()
_drafting: weakref.WeakKeyDictionary[Verifier, Drafting] = weakref.WeakKeyDictionary()


def drafting_of(verifier: Verifier) -> Drafting:
    """The state of a verifier's draft steps; kept as long as the verifier."""
    with _lock:
        found = _drafting.get(verifier)
        if found is None:
            found = _drafting[verifier] = Drafting(verifier.backend.draft_product(verifier.store))
    return found
