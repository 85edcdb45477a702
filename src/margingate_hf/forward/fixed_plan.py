"""
Marks code whose operations already follow a fixed plan, so that the strict verifier neither routes nor refuses them.
"""

from __future__ import annotations

import torch

# Context manager: inside it, torch calls of this thread go straight to torch. Used around our own attention and cache
# writes, which the model's forward calls in the middle of a verify forward. Re-entrant. Entered and left in C: an
# interrupt cannot fall between taking the state and the block that gives it back.
fixed_plan = torch._C.DisableTorchFunction


def in_fixed_plan() -> bool:
    """Whether this thread runs code that is already fixed-plan; the operator audit reads it."""
    return not torch._C._is_torch_function_enabled()
