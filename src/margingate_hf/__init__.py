"""Batch-invariant greedy decoding for Hugging Face Transformers."""

from .cache import MarginGateCache
from .calibration_record import MarginGateCalibration
from .config import MarginGateConfig
from .enabling import MarginGateModelForCausalLM, disable, enable
from .engine import MarginGateEngine, MarginGateGenerationOutput
from .gate import MarginGateLogitsProcessor
from .generation import MarginGateGenerationMixin
from .hint import install_hint
from .outputs import MarginGateOutput, MarginGateStatistics, RowStatistics

__version__ = "0.1.0"

__all__ = [
    "MarginGateCache",
    "MarginGateCalibration",
    "MarginGateConfig",
    "MarginGateEngine",
    "MarginGateGenerationMixin",
    "MarginGateGenerationOutput",
    "MarginGateLogitsProcessor",
    "MarginGateModelForCausalLM",
    "MarginGateOutput",
    "MarginGateStatistics",
    "RowStatistics",
    "disable",
    "enable",
]

install_hint()
