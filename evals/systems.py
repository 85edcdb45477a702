"""The systems of the field that the experiments compare, each as a dtype and a setting of the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from margingate_hf import MarginGateConfig
from margingate_hf.config import PRESETS


@dataclass(frozen=True)
class System:
    """
    Attributes:
        dtype: of the model.
        gate: makes the config, `None` for stock `generate`.
        about: one line for the table's legend.
    """

    dtype: torch.dtype
    gate: Callable[[], MarginGateConfig | None]
    about: str


def _preset(name: str, **changes: object) -> Callable[[], MarginGateConfig | None]:
    def make() -> MarginGateConfig | None:
        config = MarginGateConfig.preset(name)
        return config.update(**changes) if config is not None and changes else config

    return make


SYSTEMS: dict[str, System] = {
    **{name: System(torch.bfloat16, _preset(name), preset.about) for name, preset in PRESETS.items()},
    "fp16": System(torch.float16, _preset("off"), "stock `generate`, FP16"),
    "fp32": System(torch.float32, _preset("off"), "stock `generate`, FP32"),
    "paper-alone": System(
        torch.bfloat16, _preset("paper", reference="alone"), "MarginGate, recomputed alone in the model's BF16"
    ),
    "always-together": System(
        torch.bfloat16, _preset("always", verify_batch_size=None), "every step verified, all rows in one forward"
    ),
    "exact-bf16": System(torch.bfloat16, _preset("exact", precision="bfloat16"), "the default with BF16 operands"),
    "exact-auto": System(torch.bfloat16, _preset("exact", kv_dtype="auto"), "the default, K/V in the model's dtype"),
    "exact-float32": System(torch.bfloat16, _preset("exact", kv_dtype="float32"), "the default, K/V in FP32"),
}
DEFAULT = ("off", "fp16", "fp32", "paper", "always", "grouped", "layercast", "invariant", "exact")
