"""The systems of the field that `evals.determinism` compares, each as a dtype and a setting of the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from margingate_hf import MarginGateConfig


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
    "off": System(torch.bfloat16, _preset("off"), "stock `generate`, BF16"),
    "fp16": System(torch.float16, _preset("off"), "stock `generate`, FP16"),
    "fp32": System(torch.float32, _preset("off"), "stock `generate`, FP32"),
    "paper": System(torch.bfloat16, _preset("paper"), "MarginGate: low-margin steps recomputed alone in FP32"),
    "paper-alone": System(
        torch.bfloat16, _preset("paper", reference="alone"), "MarginGate, recomputed alone in the model's BF16"
    ),
    "always": System(torch.bfloat16, _preset("always"), "every step of every row verified alone"),
    "always-together": System(
        torch.bfloat16, _preset("always", verify_batch_size=None), "every step verified, all rows in one pass"
    ),
    "grouped": System(torch.bfloat16, _preset("grouped"), "verified every 16 tokens"),
    "layercast": System(torch.bfloat16, _preset("layercast"), "the verifier decodes alone, FP32"),
    "invariant": System(torch.bfloat16, _preset("invariant"), "the verifier decodes alone, BF16 operands"),
    "exact": System(torch.bfloat16, _preset("exact"), "this project's default"),
    "exact-bf16": System(torch.bfloat16, _preset("exact", precision="bfloat16"), "the default with BF16 operands"),
    "exact-1-plane": System(torch.bfloat16, _preset("exact", kv_dtype="auto"), "the default, one K/V plane"),
    "exact-3-planes": System(torch.bfloat16, _preset("exact", kv_dtype="float32"), "the default, three K/V planes"),
}
DEFAULT = ("off", "fp16", "fp32", "paper", "always", "grouped", "layercast", "invariant", "exact")
