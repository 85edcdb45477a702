"""Batch-invariant evaluation by lm-eval: the model type `margingate-hf`, and canonical scoring."""

from .registration import main, register

__all__ = ["main", "register"]
