"""The backends, and which of them runs on a device. A new one is a class of its own file and a line here."""

from __future__ import annotations

import os

import torch

from ..forward.backend import Backend
from .torch_cpu import TorchCPU
from .triton import Triton

BACKENDS: tuple[Backend, ...] = (TorchCPU(), Triton())
# Forces one, for tests.
VARIABLE = "MARGINGATE_BACKEND"


def device_types() -> list[str]:
    """Kinds of device that some backend serves."""
    return [kind for backend in BACKENDS for kind in backend.device_types]


def backend_for(device: torch.device) -> Backend:
    """
    The backend that runs on a device.

    Raises:
        `ValueError`: `MARGINGATE_BACKEND` names no backend.
        `NotImplementedError`: no backend for this kind of device.
    """
    forced = os.environ.get(VARIABLE)
    names = {backend.name: backend for backend in BACKENDS}
    if forced:
        if forced not in names:
            raise ValueError(f"{VARIABLE} must be one of {sorted(names)}, got {forced!r}. Unset or correct it.")
        return names[forced]
    for backend in BACKENDS:
        if device.type in backend.device_types:
            return backend
    raise NotImplementedError(f"no verifier runs on {device}; move the model to {' or '.join(device_types())}.")
