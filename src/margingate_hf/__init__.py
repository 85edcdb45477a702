"""Batch-invariant decoding for Hugging Face Transformers."""

from .analysis.audit import AuditReport, audit
from .analysis.calibrate import calibrate
from .analysis.replay import Replay, Transcript, replay, replay_all
from .config import MarginGateConfig
from .decoding.calibration_record import MarginGateCalibration
from .decoding.margin import MarginGateLogitsProcessor
from .decoding.receipts import Receipt
from .enabling import MarginGateModelForCausalLM, disable, enable
from .engine import MarginGateEngine, MarginGateGenerationOutput
from .generation import MarginGateGenerationMixin
from .kv_cache.cache import MarginGateCache
from .outputs import MarginGateOutput, MarginGateStatistics, RowStatistics
from .version import __version__

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
    "__version__",
    "audit",
    "calibrate",
    "disable",
    "enable",
    "replay",
    "replay_all",
]
