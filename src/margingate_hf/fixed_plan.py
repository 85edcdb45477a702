"""
Marks code whose operations already follow a fixed plan, so that the strict verifier neither routes nor refuses them.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

_state = threading.local()


class fixed_plan:
    """
    Context manager: inside it, torch calls of this thread go straight to torch.

    Used around our own attention and cache writes, which the model's forward calls in the middle of a verifier pass.
    Re-entrant.
    """

    def __enter__(self) -> None:
        _state.depth = getattr(_state, "depth", 0) + 1
        self._guard = torch._C.DisableTorchFunction()
        self._guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.__exit__(kind, error, trace)
        _state.depth -= 1


def in_fixed_plan() -> bool:
    """Whether this thread runs code that is already fixed-plan; the operator audit reads it."""
    return getattr(_state, "depth", 0) > 0
