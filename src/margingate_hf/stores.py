"""How one layer keeps its keys, or its values: what the fast path reads, what the verifier reads, and the repair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from .geometry import KV_BLOCK, DecodeGeometry, VerifyGeometry
from .planes import round_to_planes


class ColumnStore(ABC):
    """
    Columns of `rows` rows, up to a capacity.

    Args:
        rows, heads, capacity, dim (`int`): sizes.
        dtype (`torch.dtype`): the model's dtype, in which the fast path reads and writes.
        planes (`int`): format of committed columns, see [`MarginGateConfig`].
        device (`torch.device`): where.
    """

    # Names of the tensors; rows are the dimension `row_dim` of each, positions the last but one.
    tensors: ClassVar[tuple[str, ...]]

    def __init__(
        self, rows: int, heads: int, capacity: int, dim: int, dtype: torch.dtype, planes: int, device: torch.device
    ):
        self.rows, self.heads, self.capacity, self.dim = rows, heads, capacity, dim
        self.dtype, self.planes, self.device = dtype, planes, device
        # A buffer made in inference mode could not be written by a later, ordinary call. Zeros, not garbage: a masked
        # column is multiplied by an exact 0, which only a finite number survives.
        with torch.inference_mode(False):
            self._allocate()

    @abstractmethod
    def _allocate(self) -> None: ...

    @property
    @abstractmethod
    def draft(self) -> torch.Tensor:
        """What the fast path reads and writes, `[rows, heads, capacity, dim]`, the model's dtype."""

    @abstractmethod
    def repair(self, states: torch.Tensor, geometry: VerifyGeometry) -> torch.Tensor:
        """Writes verified columns, float32 `[tokens, heads, dim]`; returns what the verifier's attention reads."""

    @abstractmethod
    def drafted(self, geometry: DecodeGeometry) -> torch.Tensor:
        """What the fast step's attention reads."""

    @abstractmethod
    def committed(self, slot: int, count: int) -> torch.Tensor:
        """The first `count` columns of a row as the verifier reads them, float32 `[heads, count, dim]`."""

    @abstractmethod
    def repaired(self, slot: int, count: int) -> bool:
        """Whether the fast path reads what was committed in the first `count` columns of a row."""

    def write_draft(self, states: torch.Tensor, geometry: DecodeGeometry) -> torch.Tensor:
        """Writes one drafted column a row, `[rows, heads, dim]`; returns what the fast step's attention reads."""
        self.draft[geometry.slots, :, geometry.positions] = states
        return self.drafted(geometry)

    def trust(self, slot: int, columns: torch.Tensor) -> None:
        """
        Writes a row's first columns as another cache of the model's own forward holds them, `[heads, count, dim]`, in
        the model's dtype; see [`MirroredStore`].
        """
        self.draft[slot, :, : columns.shape[1]] = columns

    def export(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """A copy of committed columns in the store's own format, `[..., heads, stop - start, dim]`; see `load`."""
        return self.committed(slot, stop)[:, start:].clone()

    @abstractmethod
    def load(self, slot: int, start: int, columns: torch.Tensor) -> None:
        """Writes columns that a store of the same format has exported, bit for bit."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        held = [getattr(self, name) for name in self.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def clear(self, slot: int) -> None:
        """Zeroes a row, which may hold anything of the text before."""
        for name in self.tensors:
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.movedim(-4, 0)[slot].zero_()

    def grown(self, capacity: int) -> ColumnStore:
        """A larger store that holds the same columns."""
        larger = type(self)(self.rows, self.heads, capacity, self.dim, self.dtype, self.planes, self.device)
        for name in self.tensors:
            mine, theirs = getattr(self, name), getattr(larger, name)
            if mine is not None:
                theirs[..., : self.capacity, :] = mine
        return larger

    def swap_rows(self, a: int, b: int) -> None:
        """Exchanges two rows in place."""
        for name in self.tensors:
            tensor = getattr(self, name)
            if tensor is not None:
                rows = tensor.movedim(-4, 0)
                kept = rows[a].clone()
                rows[a] = rows[b]
                rows[b] = kept


class SummedStore(ColumnStore):
    """
    For CPU: the committed value of all planes summed in FP32, beside the draft in the model's dtype.

    Six bytes a value instead of the four of two 16-bit planes; summing planes at every pass would cost about 5 % of it.
    """

    tensors = ("_draft", "exact")

    def _allocate(self) -> None:
        shape = (self.rows, self.heads, self.capacity, self.dim)
        self._draft = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.exact = torch.zeros(shape, dtype=torch.float32, device=self.device)

    @property
    def draft(self) -> torch.Tensor:
        """See [`ColumnStore`]."""
        return self._draft

    def repair(self, states: torch.Tensor, geometry: VerifyGeometry) -> torch.Tensor:
        """See [`ColumnStore`]; returns whole blocks of the exact store, a view `[rows, heads, length, dim]`."""
        columns = round_to_planes(states, self.dtype, self.planes)
        self.exact[geometry.slots, :, geometry.positions] = columns
        self._draft[geometry.slots, :, geometry.positions] = columns.to(self.dtype)
        return self.exact[: geometry.n_rows, :, : geometry.n_blocks * KV_BLOCK]

    def drafted(self, geometry: DecodeGeometry) -> torch.Tensor:
        """See [`ColumnStore`]; a view `[rows, heads, length, dim]`."""
        return self._draft[geometry.first : geometry.first + geometry.n_rows, :, : geometry.length]

    def committed(self, slot: int, count: int) -> torch.Tensor:
        """See [`ColumnStore`]; a view."""
        return self.exact[slot, :, :count]

    def load(self, slot: int, start: int, columns: torch.Tensor) -> None:
        """See [`ColumnStore`]; columns are float32 `[heads, count, dim]`."""
        stop = start + columns.shape[1]
        self.exact[slot, :, start:stop] = columns
        self._draft[slot, :, start:stop] = columns.to(self.dtype)

    def repaired(self, slot: int, count: int) -> bool:
        """See [`ColumnStore`]: the committed value, rounded to the model's dtype."""
        return torch.equal(self._draft[slot, :, :count], self.committed(slot, count).to(self.dtype))


class MirroredStore(SummedStore):
    """
    For `coverage="gated"`: whatever the fast path writes is what the verifier reads, as the cache stands.
    """

    def write_draft(self, states: torch.Tensor, geometry: DecodeGeometry) -> torch.Tensor:
        """See [`ColumnStore`]."""
        self.exact[geometry.slots, :, geometry.positions] = states.float()
        return super().write_draft(states, geometry)

    def trust(self, slot: int, columns: torch.Tensor) -> None:
        """See [`ColumnStore`]."""
        self.exact[slot, :, : columns.shape[1]] = columns.float()
        super().trust(slot, columns)
