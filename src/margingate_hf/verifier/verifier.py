"""The verifier: canonical FP32 logits for tokens of several rows in one forward pass, written through to the cache."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..forward.architecture import architecture_of
from ..forward.context import Segment, VerifyContext, context_scope, verify_context
from ..forward.devices import execution_device
from ..forward.forward_twin import forward_twin
from ..kv_cache.cache import CacheIdentity, MarginGateCache
from .backends import backend_for
from .mode import VerifierMode
from .plans import LinearPlan
from .weights import WeightStore

# Tokens of one forward. Longer inputs are cut, which bounds memory and cannot change a bit.
FORWARD_TOKENS = 512


class Verifier:
    """
    Runs a model's own forward under [`VerifierMode`].

    Args:
        model (`PreTrainedModel`): a decoder-only model, in eval mode.
        plan ([`LinearPlan`]): how matrix products are grouped.
        strict (`bool`): see [`MarginGateConfig`].
        resident (`bool`, *optional*): see [`MarginGateConfig`].
        precision (`str`, *optional*, defaults to `"float32"`): see [`MarginGateConfig`].
    """

    def __init__(
        self,
        model: Any,
        plan: LinearPlan,
        strict: bool = True,
        resident: bool | None = None,
        precision: str = "float32",
    ):
        self.device = execution_device(model)
        self.backend = backend_for(self.device)
        self.architecture = architecture_of(model)
        self.plan = plan
        self.store = WeightStore(model, plan, resident)
        self.precision = precision
        self.mode = VerifierMode(self.store, self.backend, strict, precision)
        self.passed_over: list[str] = []
        # Whether the model computes with what the cache returns before it calls attention; the self-test finds out.
        self.transforms_cached_kv = False
        self.entry_bytes = 0  # of the last cache it ran on; the self-test leaves the largest there is
        self.short = False  # whether lengths are lowered for the self-test
        self._twins: dict[str | None, Any] = {}

    @property
    def model(self) -> Any:
        """The user's model, held weakly by the weight store."""
        return self.store.model

    def refresh(self) -> set[str]:
        """
        Takes up what has changed in the model since the last call: weights, adapters, hooks.

        Returns:
            Names of the tensors that had changed.
        """
        changed = self.store.refresh()
        self._twins = {}
        return changed

    def twin_for(self, adapter: str | None = None) -> Any:
        """
        The copy of the model, as it stood at the last `refresh`, that forwards run on.

        Args:
            adapter (`str`, *optional*): the PEFT adapter that acts on it; by default those active in the model.
        """
        twins = self._twins
        if adapter not in twins:
            twins[adapter] = forward_twin(self.model, self.short, adapter)
        return twins[adapter]

    @property
    def name(self) -> str:
        """The plan in one line; two verifiers of one name and one processor type compute the same bits."""
        device = self.device
        operands = "" if self.precision == "float32" else f"/{self.precision}-operands"
        return f"{self.backend.describe(device)}/{self.plan.name}{operands}/torch-{torch.__version__}"

    def notes(self) -> list[str]:
        """Every slower or weaker path this verifier is on, in words."""
        found = [f"verifier plan {self.plan.name} is used; a faster one failed ({why})" for why in self.passed_over]
        if self.mode.unplanned:
            found.append(f"strict=False: no fixed plan, and no guarantee, for {sorted(self.mode.unplanned)}")
        if not self.store.resident:
            found.append("weights are up-cast at every use: an FP32 copy does not fit or was not wanted")
        return found

    def new_cache(self, rows: int, kv_dtype: str) -> MarginGateCache:
        """An empty cache for this model."""
        cache = MarginGateCache(self.architecture.n_layers, rows, self.model.dtype, kv_dtype, self._store(gated=False))
        cache.identity = self.identity
        return cache

    def new_gated_cache(self, rows: int) -> MarginGateCache:
        """
        An empty cache of one plane, where what the draft path writes is what the verifier reads. It has no identity:
        its entries depend on the rest of the batch, and no later call may build on them.
        """
        return MarginGateCache(self.architecture.n_layers, rows, self.model.dtype, "auto", self._store(gated=True))

    def _store(self, gated: bool) -> Any:
        """What makes the stores of this model's cache."""
        return self.backend.store(self.transforms_cached_kv or self.plan.sums_planes, gated)

    @property
    def identity(self) -> CacheIdentity:
        """What makes this verifier's entries comparable with others."""
        return CacheIdentity(self.store.fingerprint, self.name, self.precision)

    def run(
        self, cache: MarginGateCache, segments: Sequence[Segment], keep: str | Sequence[int] = "all"
    ) -> torch.Tensor:
        """
        Verifies the segments: writes their entries and computes canonical logits.

        Args:
            cache ([`MarginGateCache`]): each segment must start at its row's first unverified position.
            segments (`Sequence[Segment]`): at most one per row, none empty.
            keep (`str` or `Sequence[int]`, *optional*, defaults to `"all"`): whose logits: `"all"`: every token's;
                `"last"`: each segment's last; or how many of the last tokens of each segment.

        Returns:
            `torch.Tensor` of shape `[tokens kept, vocabulary]`, float32, in the segments' order.
        """
        cache.reserve(max(segment.stop for segment in segments))
        counts = [_count(segment, keep, index) for index, segment in enumerate(segments)]
        found: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(segments))}
        joined: list[torch.Tensor] = []
        groups = _by_adapter(cache, segments)
        for members in groups:
            for part in _passes([segments[index] for index in members], [counts[index] for index in members]):
                joined.append(self._forward(cache, part))
                for piece, logits in zip(part, joined[-1].split([piece.kept for piece in part]), strict=True):
                    cache.extend(piece.segment.slot, piece.segment.start, piece.segment.tokens, verified=True)
                    found[members[piece.index]].append(logits)
        self.entry_bytes = cache.entry_bytes
        if len(groups) == 1:
            return _joined(joined)  # in order as they come
        return torch.cat([logits for index in range(len(segments)) for logits in found[index]])

    def recompute(self, cache: MarginGateCache, segments: Sequence[Segment]) -> torch.Tensor:
        """
        Computes tokens again on the cache as it stands, verified or not, and writes their entries.

        Args:
            cache ([`MarginGateCache`]): of [`~Verifier.new_gated_cache`]; holds every entry before the segments.
            segments (`Sequence[Segment]`): at most one per row, none empty.

        Returns:
            `torch.Tensor` of shape `[tokens, vocabulary]`, float32, in the segments' order.
        """
        counts = [len(segment.tokens) for segment in segments]
        return _joined([self._forward(cache, part) for part in _passes(segments, counts)])

    def _forward(self, cache: MarginGateCache, part: list[_Piece]) -> torch.Tensor:
        """Logits of the tokens that are kept, `[kept, vocabulary]`, float32."""
        device = self.device
        segments = [piece.segment for piece in part]
        for segment in segments:
            cache.touch(segment.slot, segment.stop)
        context = verify_context(segments, device, self.backend)
        context.long = cache.long_flags(context.slots.tolist(), device)
        ids = torch.tensor([[token for segment in segments for token in segment.tokens]], device=device)
        stops = itertools.accumulate(len(segment.tokens) for segment in segments)
        indices = [i for piece, stop in zip(part, stops, strict=True) for i in range(stop - piece.kept, stop)]
        # A forward must return some logits, also where the caller takes none of them.
        wanted = torch.tensor(indices or [0], device=device)
        extra = {"logits_to_keep": wanted} if self.architecture.keeps_logits else {}
        twin = self.twin_for(cache.adapters[segments[0].slot])  # made outside the scope: rotary tables are no forward
        with self.scope(context):
            logits = twin(
                input_ids=ids, position_ids=context.positions[None], cache=cache, use_cache=True, **extra
            ).logits[0]
        logits = (logits if self.architecture.keeps_logits else logits[wanted])[: len(indices)]
        if logits.dtype != torch.float32:
            raise RuntimeError(f"the verifier's logits came out as {logits.dtype}, not float32.")
        if context.broken is not None:
            for index in context.broken.nonzero().flatten().tolist():
                cache.mark_broken(int(context.slots[index]), int(context.positions[index]))
        for kept, index in enumerate(indices if any(first is not None for first in cache.broken) else ()):
            first = cache.broken[int(context.slots[index])]
            if first is not None and int(context.positions[index]) >= first:
                logits[kept] = float("nan")  # computed from a replacement
        return logits

    @contextlib.contextmanager
    def scope(self, context: VerifyContext) -> Iterator[None]:
        """Everything that makes one forward of the model a verify forward, undone on every way out."""
        self.backend.check_settings()
        VerifierMode.drop_stale()
        kind = self.device.type
        autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
        with torch.no_grad(), autocast, context_scope(context), self.mode:
            if not torch._C._is_torch_function_enabled():
                raise RuntimeError(
                    "torch functions are disabled in this thread, so the verifier cannot see the model's."
                )
            yield
        self.backend.check_settings()  # another thread may have lowered it meanwhile


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """`torch.cat`, without the copy where there is one part: logits of a verify forward are its largest tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_adapter(cache: MarginGateCache, segments: Sequence[Segment]) -> list[list[int]]:
    """Indices of the segments whose rows share an adapter: one forward has one."""
    groups: dict[str | None, list[int]] = {}
    for index, segment in enumerate(segments):
        groups.setdefault(cache.adapters[segment.slot], []).append(index)
    return list(groups.values())


@dataclass(frozen=True)
class _Piece:
    """What one forward reads of segment `index`, and of how many of its last tokens logits are wanted."""

    index: int
    segment: Segment
    kept: int


def _count(segment: Segment, keep: str | Sequence[int], index: int) -> int:
    if isinstance(keep, str):
        return len(segment.tokens) if keep == "all" else 1
    return keep[index]


def _passes(segments: Sequence[Segment], counts: Sequence[int]) -> Iterator[list[_Piece]]:
    """
    Cuts segments into forwards of at most `FORWARD_TOKENS`; `counts[i]` last tokens of segment `i` are kept.
    """
    part: list[_Piece] = []
    room = FORWARD_TOKENS
    for index, segment in enumerate(segments):
        done = 0
        while done < len(segment.tokens):
            take = min(room, len(segment.tokens) - done)
            piece = Segment(segment.slot, segment.start + done, segment.tokens[done : done + take])
            done += take
            room -= take
            dropped = len(segment.tokens) - counts[index]
            part.append(_Piece(index, piece, max(0, min(take, done - dropped))))
            if not room:
                yield part
                part, room = [], FORWARD_TOKENS
    if part:
        yield part
