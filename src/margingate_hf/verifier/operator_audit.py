"""The second net of strictness: looks at the operators that really ran, below torch's Python functions.

`VerifierMode` sees Python-level calls. A scripted function or an extension reaches the operators without one. During
the self-test this mode watches the operators themselves and reports every one that reduces or approximates outside
our own fixed-plan code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..forward.fixed_plan import in_fixed_plan

UNPLANNED_OPERATORS = frozenset(
    "mm addmm bmm baddbmm addmv mv dot matmul linear einsum _grouped_mm convolution "
    "silu silu_ sigmoid sigmoid_ gelu gelu_ softplus hardswish mish logsigmoid_forward elu celu selu "
    "sum mean var std var_mean prod norm linalg_vector_norm logsumexp cumsum cumprod "
    "_softmax _log_softmax native_layer_norm native_group_norm _fused_rms_norm "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_fused_attention_overrideable "
    "scaled_dot_product_attention rsqrt".split()
)


class OperatorAudit(TorchDispatchMode):
    """
    Attributes:
        found (`set[str]`): operators that ran outside fixed-plan code although they need a plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Callable:
        name = func._schema.name.split("::")[-1]
        planned = in_fixed_plan()
        with torch._C.DisableTorchFunction():  # `VerifierMode` has judged the Python call, if there was one
            result = func(*args, **(kwargs or {}))
            if name in UNPLANNED_OPERATORS and not planned and isinstance(result, torch.Tensor):
                if result.is_floating_point():
                    self.found.add(name)
        return result
