"""The model's weights, up-cast to FP32 and packed for the linear plan; never stale.

`p.data` edits do not bump a tensor's version counter, so every `generate` call compares an exact integer checksum of
every
parameter and buffer with the one its packed copy was made from (one read of the weights), and drops what changed.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch

from ..placement import named_weights
from .plans import LinearPlan, reorder
from .precision import multiplies_bfloat16

# Share of the memory free at the time that an FP32 copy may take when the user left the choice to us.
RESIDENT_SHARE = 0.5


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """
    Two exact integer sums over a tensor's bits: over columns and over rows of a fixed layout, each position with its
    own odd weight. Any single changed element changes both; swapped elements change at least one.

    Args:
        tensor (`torch.Tensor`, any dtype and shape).

    Returns:
        Two int64 values. Equal for equal bits, on every machine of one byte order.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    tail = flat.numel() % 8
    if tail or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    words = flat.view(torch.int64)
    width = 4096
    body = words[: words.numel() // width * width].view(-1, width)
    rest = words[body.numel() :]
    by_column = body.sum(0) * _odd_weights(width, flat.device)
    by_row = body.sum(1)
    by_row = by_row * _odd_weights(by_row.numel(), flat.device)
    last = rest * _odd_weights(rest.numel(), flat.device)
    return int(by_column.sum() + last.sum()), int(by_row.sum() - 3 * last.sum())


def _odd_weights(count: int, device: torch.device) -> torch.Tensor:
    """Distinct odd multipliers; int64 arithmetic wraps, so an odd factor loses no bit."""
    return torch.arange(count, dtype=torch.int64, device=device) * 0x5851F42D4C957F2D * 2 + 1


class WeightStore:
    """
    FP32 weights for the verifier.

    Args:
        model (`torch.nn.Module`): the model; only its parameters and buffers are read.
        plan ([`LinearPlan`]): how a weight is packed.
        resident (`bool`, *optional*): keep packed weights between passes; `None` decides by free memory.
    """

    def __init__(self, model: torch.nn.Module, plan: LinearPlan, resident: bool | None = None):
        # Weak: the registry keeps a verifier as long as its model, and must not be what keeps the model.
        self._model = weakref.ref(model)
        self.plan = plan
        self._wanted = resident
        self._lock = threading.Lock()
        self._packed: dict[tuple, Any] = {}
        self._sums: dict[str, tuple] = {}
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
        Compares checksums and drops packed copies of what changed.

        Returns:
            Names of what had changed.
        """
        sums: dict[str, tuple] = {}
        owners: dict[int, str] = {}
        for name, tensor in named_weights(self.model):
            owners[tensor.untyped_storage().data_ptr()] = name
            sums[name] = (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype), *checksum(tensor))
        with self._lock:
            changed = {name for name in sums.keys() | self._sums.keys() if sums.get(name) != self._sums.get(name)}
            if changed:
                stale = {self._sums[name][0] for name in changed if name in self._sums}
                stale |= {sums[name][0] for name in changed if name in sums}
                storages = {ptr for ptr, name in (*owners.items(), *self._owners.items()) if name in changed}
                self._packed = {
                    key: value for key, value in self._packed.items() if key[0] not in storages and key[1] not in stale
                }
                self._sums, self._owners = sums, owners
            # Also where no tensor changed: the active adapter is not in any of them.
            self.fingerprint = _digest(sums, _adapters(self.model))
            self.resident = self._decide()
            if not self.resident:
                self._packed.clear()
        return changed

    def _decide(self) -> bool:
        if not self.plan.copies_weights:
            return True
        if self._wanted is not None:
            return self._wanted
        if self._packed:
            return True
        weights = [tensor for _, tensor in named_weights(self.model) if tensor.dim() >= 2]
        need = sum((4 + 2 * self.keeps_short(tensor)) * tensor.numel() for tensor in weights)
        return need <= RESIDENT_SHARE * psutil.virtual_memory().available

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is, or is a view of, a parameter or buffer of the model."""
        return tensor.untyped_storage().data_ptr() in self._owners

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
        """Whether a resident weight is also packed in 16 bits, for fast steps."""
        return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and multiplies_bfloat16()

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
        shapes = {tensor.shape[-2:] for _, tensor in named_weights(self.model) if tensor.dim() >= 2}
        return sorted(shapes, key=tuple)


def _adapters(model: torch.nn.Module) -> list[str]:
    """State of PEFT layers that is not in any tensor: which adapters act, merged or not, and how strongly."""
    found = []
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters"):
            scaling = sorted(dict(getattr(module, "scaling", {})).items())
            state = (module.active_adapters, module.merged_adapters, module.disable_adapters, scaling)
            found.append(f"{name}:{state}")
    return found


def _digest(sums: dict[str, tuple], adapters: list[str]) -> str:
    """Hash of names, shapes, dtypes and checksums; addresses left out, so it is the same in every process."""
    text = repr([(name, entry[1:]) for name, entry in sorted(sums.items())]) + repr(adapters)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
