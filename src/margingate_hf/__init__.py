"""Batch-invariant greedy decoding for Hugging Face Transformers."""

from .auditing import AuditReport, audit
from .cache import MarginGateCache
from .calibration import calibrate
from .calibration_record import MarginGateCalibration
from .config import MarginGateConfig
from .enabling import MarginGateModelForCausalLM, disable, enable
from .engine import MarginGateEngine, MarginGateGenerationOutput
from .gate import MarginGateLogitsProcessor
from .generation import MarginGateGenerationMixin
from .outputs import MarginGateOutput, MarginGateStatistics, RowStatistics
from .receipts import Receipt
from .replaying import Replay, Transcript, replay, replay_all

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
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
    "Receipt",
    "Replay",
    "RowStatistics",
    "Transcript",
    "audit",
    "calibrate",
    "disable",
    "enable",
    "replay",
    "replay_all",
]
