"""Triton kernels for batch-invariant decoding. Imports nothing from `margingate_hf`."""

from . import layers
from .attention import group_tile, ragged_attention
from .column_repair import repair_columns
from .launch_table import LAUNCH, VERSION, describe, interpreted
from .margin import Top2, top2
from .matmul import linear, split_plan
from .rows import layer_norm, log_softmax, rms_norm, row_sum, softmax

__all__ = [
    "LAUNCH",
    "VERSION",
    "Top2",
    "describe",
    "group_tile",
    "interpreted",
    "layer_norm",
    "layers",
    "linear",
    "log_softmax",
    "ragged_attention",
    "repair_columns",
    "rms_norm",
    "row_sum",
    "softmax",
    "split_plan",
    "top2",
]
