"""The model's weights, up-cast to FP32 and packed for the linear plan; never stale.

`p.data` edits do not bump a tensor's version counter, so every `generate` call compares a hash of every parameter and
buffer with the one its packed copy was made from (one read of the weights), and drops what changed.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ..forward.devices import named_weights
from .hashing import digest, stamp
from .model_state import describe_state
from .plans import LinearPlan, reorder
from .precision import multiplies_bfloat16

# Share of the memory free at the time that an FP32 copy may take when the user left the choice to us.
RESIDENT_SHARE = 0.5


class WeightStore:
    """
    FP32 weights for the verifier.

    Args:
        model (`torch.nn.Module`): the model; only its parameters and buffers are read.
        plan ([`LinearPlan`]): how a weight is packed.
        resident (`bool`, *optional*): keep packed weights between verify forwards; `None` decides by free memory.
    """

    def __init__(self, model: torch.nn.Module, plan: LinearPlan, resident: bool | None = None):
        # Weak: the registry keeps a verifier as long as its model, and must not be what keeps the model.
        self._model = weakref.ref(model)
        self.plan = plan
        self._wanted = resident
        self._lock = threading.Lock()
        self._packed: dict[tuple, Any] = {}
        self._weights: dict[str, _Entry] = {}
        self._digests: dict[str, str] = {}
        self._owners: dict[int, str] = {}
        self.resident = False
        self.fingerprint = ""
        self.refresh()

    @property
    def model(self) -> torch.nn.Module:
        """
        The model.

        Raises:
            `ReferenceError`: it is gone.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the model these weights belong to no longer exists.")
        return model

    def refresh(self) -> set[str]:
        """
        Compares hashes and drops packed copies of what changed.

        Returns:
            Names of what had changed.
        """
        weights: dict[str, _Entry] = {}
        owners: dict[int, str] = {}
        for name, tensor, stable in named_weights(self.model):
            if stable:
                owners[tensor.untyped_storage().data_ptr()] = name
            address = tensor.data_ptr() if stable else 0
            weights[name] = _Entry(address, tuple(tensor.shape), str(tensor.dtype), stamp(tensor))
        with self._lock:
            before = self._weights
            changed = {name for name in weights.keys() | before.keys() if weights.get(name) != before.get(name)}
            if changed:
                stale = {entry[name].address for entry in (weights, before) for name in changed if name in entry}
                storages = {ptr for ptr, name in (*owners.items(), *self._owners.items()) if name in changed}
                self._packed = {
                    key: value for key, value in self._packed.items() if key[0] not in storages and key[1] not in stale
                }
                self._weights, self._owners = weights, owners
                self._digests = self._digests_of(weights)
            # Also where no tensor changed: what else a forward reads is in none of them.
            self.fingerprint = _fingerprint(weights, self._digests, describe_state(self.model))
            self.resident = self._decide()
            if not self.resident:
                self._packed.clear()
        return {name for name in changed if _content(weights.get(name)) != _content(before.get(name))}

    def _digests_of(self, weights: dict[str, _Entry]) -> dict[str, str]:
        """The portable hash of every tensor; on CPU the stamps are just that."""
        known = {self._weights[name].stamp: value for name, value in self._digests.items() if name in self._weights}
        found = {}
        for name, tensor, _ in named_weights(self.model):
            if name in weights:
                mark = weights[name].stamp
                found[name] = mark if tensor.is_cpu else known.get(mark) or digest(tensor)
        return found

    def _decide(self) -> bool:
        if not self.plan.copies_weights:
            return True
        if self._wanted is not None:
            return self._wanted
        if self._packed:
            return True
        weights = [tensor for _, tensor, _ in named_weights(self.model) if tensor.dim() >= 2]
        need = sum((4 + 2 * self.keeps_short(tensor)) * tensor.numel() for tensor in weights)
        return need <= RESIDENT_SHARE * psutil.virtual_memory().available

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is, or is a view of, a parameter or buffer of the model."""
        if tensor.untyped_storage().data_ptr() in self._owners:
            return True
        return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)

    def is_head(self, weight: torch.Tensor) -> bool:
        """Whether a matrix is the model's output embedding."""
        output: Any = getattr(self.model, "get_output_embeddings", lambda: None)()
        head = getattr(output, "weight", None)
        return head is not None and head.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()

    def packed(self, weight: torch.Tensor) -> Any:
        """
        A weight `[out, in]`, any floating dtype, as the plan wants it; kept if resident and the model's own.
        """
        storage = weight.untyped_storage().data_ptr()
        if not self.resident or storage not in self._owners:
            return self.plan.pack_once(weight.detach())
        return self._kept("plan", weight, self.plan.pack)

    @staticmethod
    def keeps_short(weight: torch.Tensor) -> bool:
        """Whether a resident weight is also packed in 16 bits, for draft steps."""
        return weight.dtype == torch.bfloat16 and weight.is_cpu and multiplies_bfloat16()

    def stays(self, weight: torch.Tensor) -> bool:
        """Whether a weight is the model's own and lies where it lay at the last `refresh`: a copy of it can be kept."""
        return weight.untyped_storage().data_ptr() in self._owners

    def short(self, weight: torch.Tensor) -> Any:
        """A weight `[out, in]` in its own 16 bits, in oneDNN's layout; kept."""
        return self._kept("short", weight, reorder)

    def _kept(self, kind: str, weight: torch.Tensor, pack: Callable[[torch.Tensor], Any]) -> Any:
        storage = weight.untyped_storage().data_ptr()
        key = (storage, weight.data_ptr(), tuple(weight.shape), weight.stride(), kind)
        with self._lock:
            found = self._packed.get(key)
            if found is None:
                found = self._packed[key] = pack(weight.detach())
        return found

    def linear_shapes(self) -> Iterable[torch.Size]:
        """Distinct shapes of the model's matrices, for the probe."""
        shapes = {tensor.shape[-2:] for _, tensor, _ in named_weights(self.model) if tensor.dim() >= 2}
        return sorted(shapes, key=tuple)


@dataclass(frozen=True)
class _Entry:
    """A tensor as it was at the last `refresh`; `address` is 0 where accelerate loads it anew for each forward."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    stamp: str


def _content(entry: _Entry | None) -> tuple | None:
    return None if entry is None else (entry.shape, entry.dtype, entry.stamp)


def _fingerprint(weights: dict[str, _Entry], digests: dict[str, str], state: str) -> str:
    """Hash of names, shapes, dtypes, contents and state; addresses left out, so it is the same in every process."""
    tensors = [(name, entry.shape, entry.dtype, digests[name]) for name, entry in sorted(weights.items())]
    return hashlib.sha256(f"{tensors!r}\n{state}".encode()).hexdigest()[:32]
