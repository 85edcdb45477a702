"""How one layer keeps its keys, or its values: what the draft path reads, what the verifier reads, and the repair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from ..forward.context import KV_BLOCK, DecodeContext, VerifyContext
from .buffers import zeros
from .formats import largest_held, round_to_planes, split_planes


class KVStore(ABC):
    """
    Entries of `rows` rows, up to a capacity.

    Args:
        rows, heads, capacity, dim (`int`): sizes.
        dtype (`torch.dtype`): the model's dtype, that of a plane.
        planes (`int`): format of committed entries, see [`MarginGateConfig`].
        device (`torch.device`): where.
    """

    # Tensor attributes of the store. Dimension -4 is the row, dimension -2 the position.
    tensors: ClassVar[tuple[str, ...]]
    # How they are allocated, and whether to look for values that cannot be held before replacing them: a look is cheap
    # where tensors lie in the host's memory.
    zeros: Callable[..., torch.Tensor] = staticmethod(zeros)
    looks_first = True

    def __init__(
        self, rows: int, heads: int, capacity: int, dim: int, dtype: torch.dtype, planes: int, device: torch.device
    ):
        self.rows, self.heads, self.capacity, self.dim = rows, heads, capacity, dim
        self.dtype, self.planes, self.device = dtype, planes, device
        # A buffer made in inference mode could not be written by a later, ordinary call. Zeros, not garbage: a masked
        # entry is multiplied by an exact 0, which only a finite number survives.
        with torch.inference_mode(False):
            self._allocate()

    @abstractmethod
    def _allocate(self) -> None: ...

    def held(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Keys or values as the store can hold them. A masked key is weighed by an exact 0, which NaN and infinity would
        survive, so they are replaced.

        Args:
            states (`torch.Tensor` of shape `[tokens, heads, dim]`, float32).

        Returns:
            `(states, replaced)`: `replaced` bool `[tokens]`, or `None` where nothing had to be.
        """
        limit = largest_held(self.dtype, self.planes)
        if self.looks_first:
            low, high = (float(value) for value in states.aminmax())
            if -limit <= low and high <= limit:
                return states, None
        replaced = ~(states.abs().amax((1, 2)) <= limit)
        return states.nan_to_num(0.0, limit, -limit).clamp(-limit, limit), replaced

    @property
    @abstractmethod
    def draft(self) -> torch.Tensor:
        """What the draft path reads and writes, `[rows, heads, capacity, dim]`."""

    @abstractmethod
    def repair(self, states: torch.Tensor, context: VerifyContext) -> torch.Tensor:
        """Writes verified entries, float32 `[tokens, heads, dim]`; returns what the verifier's attention reads."""

    def drafted(self, context: DecodeContext) -> torch.Tensor:
        """What the draft step's attention reads: a view `[rows, heads, length, dim]` of `draft`."""
        return self.draft[context.first : context.first + context.n_rows, :, : context.length]

    @abstractmethod
    def committed(self, slot: int, count: int) -> torch.Tensor:
        """The first `count` entries of a row as the verifier reads them, float32 `[heads, count, dim]`."""

    @abstractmethod
    def repaired(self, slot: int, count: int) -> bool:
        """Whether the draft path reads what was committed in the first `count` entries of a row."""

    def write_draft(self, states: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        """
        Writes one drafted entry a row, `[rows, heads, dim]`; returns what the draft step's attention reads. Finite: a
        dropped draft stays where the verifier weighs it by an exact 0.
        """
        self.draft[context.slots, :, context.positions] = states.to(self.draft.dtype).nan_to_num()
        return self.drafted(context)

    def write_trusted(self, slot: int, columns: torch.Tensor) -> None:
        """
        Writes a row's first entries as another cache of the model's own forward holds them, `[heads, count, dim]`, in
        the model's dtype. For gated runs, whose stores keep one plane: what the draft path wrote is what the verifier
        reads, as the cache stands.
        """
        self.draft[slot, :, : columns.shape[1]] = columns

    def export(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """A copy of committed entries in the store's own format, `[..., heads, stop - start, dim]`; see `load`."""
        return self.committed(slot, stop)[:, start:].clone()

    @abstractmethod
    def load(self, slot: int, start: int, columns: torch.Tensor) -> None:
        """Writes entries that a store of the same format has exported, bit for bit."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        held = [getattr(self, name) for name in self.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Zeroes entries of a row: what is masked is multiplied by an exact 0, which NaN would survive."""
        for name in self.tensors:
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.movedim(-4, 0)[slot, ..., start:stop, :].zero_()

    def taken(self, rows: Sequence[int]) -> KVStore:
        """A new store that holds copies of the given rows, in that order."""
        copy = type(self)(len(rows), self.heads, self.capacity, self.dim, self.dtype, self.planes, self.device)
        for name in self.tensors:
            mine, theirs = getattr(self, name), getattr(copy, name)
            if mine is not None:
                theirs.movedim(-4, 0).copy_(mine.movedim(-4, 0)[list(rows)])
        return copy

    def grown(self, capacity: int, counts: Sequence[int]) -> KVStore:
        """A larger store that holds the same first `counts[slot]` entries of each row."""
        larger = type(self)(self.rows, self.heads, capacity, self.dim, self.dtype, self.planes, self.device)
        for name in self.tensors:
            mine, theirs = getattr(self, name), getattr(larger, name)
            if mine is None:
                continue
            for before, after, count in zip(mine.movedim(-4, 0), theirs.movedim(-4, 0), counts, strict=True):
                after[..., :count, :] = before[..., :count, :]
        return larger

    def swap_rows(self, a: int, b: int, count: int) -> None:
        """Exchanges the first `count` entries of two rows in place."""
        for name in self.tensors:
            tensor = getattr(self, name)
            if tensor is not None:
                rows = tensor.movedim(-4, 0)[..., :count, :]
                kept = rows[a].clone()
                rows[a] = rows[b]
                rows[b] = kept


class WholeStore(KVStore):
    """
    For CPU: one FP32 value for verify forwards and draft steps. It is the planes' sum once a verify forward has
    written it, and the model's own until then.

    As large as two 16-bit planes. A draft step that attends in FP32 takes no longer than in BF16 here, and drafts from
    what was committed, unrounded.
    """

    tensors = ("exact",)

    def _allocate(self) -> None:
        shape = (self.rows, self.heads, self.capacity, self.dim)
        self.exact = self.zeros(shape, dtype=torch.float32, device=self.device)

    @property
    def draft(self) -> torch.Tensor:
        """See [`KVStore`]; float32."""
        return self.exact

    def repair(self, states: torch.Tensor, context: VerifyContext) -> torch.Tensor:
        """See [`KVStore`]; returns whole blocks, a view `[rows, heads, length, dim]`."""
        self.exact[context.slots, :, context.positions] = round_to_planes(states, self.dtype, self.planes)
        return self.exact[: context.n_rows, :, : context.n_blocks * KV_BLOCK]

    def committed(self, slot: int, count: int) -> torch.Tensor:
        """See [`KVStore`]; a view."""
        return self.exact[slot, :, :count]

    def load(self, slot: int, start: int, columns: torch.Tensor) -> None:
        """See [`KVStore`]; entries are float32 `[heads, count, dim]`."""
        self.exact[slot, :, start : start + columns.shape[1]] = columns

    def repaired(self, slot: int, count: int) -> bool:
        """See [`KVStore`]: there is one value."""
        return True


class PlaneStore(KVStore):
    """
    The planes as they are, `[planes, rows, heads, capacity, dim]` in the model's dtype: the draft path reads the first,
    the verifier the sum of all of them. Three planes keep the value whole, in FP32, beside what the draft path reads.

    On CPU the sum is a copy of the rows of a verify forward. Used where a draft step must read the model's own dtype:
    one plane, a gated run, and models that compute with what the cache returns before they call attention (latent
    attention).
    """

    tensors = ("_planes", "whole")

    def _allocate(self) -> None:
        keeps_whole = self.planes == 3 and self.dtype != torch.float32
        count = 2 if self.planes == 2 and self.dtype != torch.float32 else 1
        shape = (count, self.rows, self.heads, self.capacity, self.dim)
        self._planes = self.zeros(shape, dtype=self.dtype, device=self.device)
        self.whole = None
        if keeps_whole:
            self.whole = self.zeros((1, *shape[1:]), dtype=torch.float32, device=self.device)

    @property
    def draft(self) -> torch.Tensor:
        """See [`KVStore`]."""
        return self._planes[0]

    @property
    def _kept(self) -> torch.Tensor:
        """What the committed value is the sum of, `[n, rows, heads, capacity, dim]`."""
        return self._planes if self.whole is None else self.whole

    def repair(self, states: torch.Tensor, context: VerifyContext) -> torch.Tensor:
        """See [`KVStore`]; returns whole blocks `[rows, heads, length, dim]`, float32."""
        at = context.slots, slice(None), context.positions
        if self.whole is not None:
            self.whole[0][at] = states
        count = 1 if self.whole is None and len(self._planes) == 1 else 2  # of two the first saturates
        for plane, part in zip(self._planes, split_planes(states, self.dtype, count), strict=False):
            plane[at] = part
        return self._summed(context)

    def _summed(self, context: VerifyContext) -> torch.Tensor:
        """The rows of a verify forward, the planes added; other rows are zeros."""
        length = context.n_blocks * KV_BLOCK
        kept = self._kept[:, : context.n_rows, :, :length]
        if kept.dtype == torch.float32:
            return kept[0]
        out = torch.zeros(kept.shape[1:], dtype=torch.float32, device=self.device)
        for slot in {span[0] for span in context.spans}:
            for plane in kept[:, slot]:
                out[slot] += plane
        return out

    def committed(self, slot: int, count: int) -> torch.Tensor:
        """See [`KVStore`]; a new tensor, the planes' sum."""
        return self._kept[:, slot, :, :count].float().sum(0)

    def export(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """See [`KVStore`]; the planes, `[planes, heads, stop - start, dim]`."""
        return self._kept[:, slot, :, start:stop].clone()

    def load(self, slot: int, start: int, columns: torch.Tensor) -> None:
        """See [`KVStore`]."""
        stop = start + columns.shape[2]
        self._kept[:, slot, :, start:stop] = columns
        if self.whole is not None:
            self._planes[0, slot, :, start:stop], _ = split_planes(columns[0], self.dtype, 2)

    def repaired(self, slot: int, count: int) -> bool:
        """See [`KVStore`]: the first plane is one of the committed planes, or the whole value rounded."""
        if self.whole is None:
            return True
        first, _ = split_planes(self.whole[0, slot, :, :count], self.dtype, 2)
        return torch.equal(self.draft[slot, :, :count], first)


def cpu_store(
    rows: int, heads: int, capacity: int, dim: int, dtype: torch.dtype, planes: int, device: torch.device
) -> KVStore:
    """
    The store of an exact run on CPU; arguments as for [`KVStore`]. One plane is half as large as it stands.
    """
    kind = PlaneStore if planes == 1 and dtype != torch.float32 else WholeStore
    return kind(rows, heads, capacity, dim, dtype, planes, device)
