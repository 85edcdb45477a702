"""Triton kernels for batch-invariant decoding. Imports nothing from `margingate_hf`."""

from .column_repair import repair_columns
from .margin import Top2, top2

__all__ = ["Top2", "repair_columns", "top2"]
