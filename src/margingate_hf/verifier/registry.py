"""The verifiers of this process: one for each model and setting, tested when made, kept as long as the model lives."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..config import MarginGateConfig
from ..forward.adapters import row_adapters
from ..forward.devices import execution_device
from .backends import backend_for
from .model_state import describe_structure
from .plans import LinearPlan
from .selftest import choose_verifier
from .verifier import Verifier

logger = logging.getLogger(__name__)

_verifiers: weakref.WeakKeyDictionary[Any, dict[tuple, Verifier]] = weakref.WeakKeyDictionary()
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_replaced: weakref.WeakKeyDictionary[Any, Verifier] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def use_verifier(model: Any, verifier: Verifier) -> Iterator[None]:
    """
    Gives a model this verifier, untested, for the duration of the block: for tests that plant a faulty one.

    Args:
        model (`PreTrainedModel`): the model.
        verifier ([`Verifier`]): of the same model.
    """
    _replaced[model] = verifier
    try:
        yield
    finally:
        del _replaced[model]


def verifier_for(model: Any, config: MarginGateConfig, plans: Sequence[LinearPlan] | None = None) -> Verifier:
    """
    The verifier of a model, self-tested once per (device, dtype, thread count, settings, structure of the model) and
    then kept with the model. Another layer, shape, dtype or acting adapter is another structure, and is tested anew.

    Every call compares hashes of the weights, so an edited weight is noticed.

    Raises:
        `VerifierError`: no plan passes the self-test; the message names the part that failed.
        `ValueError`: FP32 products would be rounded by a setting of the process.
    """
    if model in _replaced:
        return _replaced[model]
    device = execution_device(model)
    backend = backend_for(device)
    backend.check_settings()
    if plans is None:
        plans = backend.plans()
    key = (
        str(device),
        backend.name,
        model.dtype,
        torch.get_num_threads(),
        config.strict,
        config.resident_weights,
        config.precision,
        tuple(plans),
        describe_structure(model),
        row_adapters(model) is not None,
    )
    with _lock:
        lock = _locks.setdefault(model, threading.RLock())
        kept = _verifiers.setdefault(model, {})
    with lock:  # one self-test a model at a time; calls on other models go on
        verifier = kept.get(key)
        if verifier is None:
            verifier = kept[key] = choose_verifier(model, config, plans)
        elif verifier.refresh():
            logger.info("a weight or an adapter has changed since the last call; its FP32 copy was dropped.")
    return verifier


def forget_verifiers(model: Any) -> None:
    """Drops a model's verifiers and their FP32 weights."""
    with _lock:
        _verifiers.pop(model, None)
