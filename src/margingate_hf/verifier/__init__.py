"""FP32 verifier with a fixed order of summation, checked against itself and the model before use."""

from .mode import StrictVerifierError, VerifierMode
from .plans import CPU_PLANS, LinearPlan, PrepackedPlan, TilePlan
from .reference import reference_logits
from .registry import forget_verifiers, verifier_for
from .selftest import VerifierError, self_test
from .verifier import Verifier

__all__ = [
    "CPU_PLANS",
    "LinearPlan",
    "PrepackedPlan",
    "StrictVerifierError",
    "TilePlan",
    "Verifier",
    "VerifierError",
    "VerifierMode",
    "forget_verifiers",
    "reference_logits",
    "self_test",
    "verifier_for",
]
