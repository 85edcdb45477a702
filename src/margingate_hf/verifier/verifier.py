"""The verifier: canonical FP32 logits for tokens of several rows in one forward pass, written through to the cache."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..cache import CacheIdentity, MarginGateCache
from ..dispatch import implementation
from ..geometry import Segment, VerifyGeometry, geometry_scope, verify_geometry
from ..interfaces import installed
from ..placement import execution_device
from ..schedule import CostMeter
from .mode import VerifierMode
from .plans import LinearPlan
from .precision import full_precision
from .weights import WeightStore

# Tokens of one pass. Longer prompts are cut; the cut cannot change a bit, it bounds the memory of a pass.
PASS_TOKENS = 512


class Verifier:
    """
    Runs a model's own forward under [`VerifierMode`].

    Args:
        model (`PreTrainedModel`): a decoder-only model, in eval mode.
        plan ([`LinearPlan`]): how matrix products are grouped.
        strict (`bool`): see [`MarginGateConfig`].
        resident (`bool`, *optional*): see [`MarginGateConfig`].
    """

    def __init__(self, model: Any, plan: LinearPlan, strict: bool = True, resident: bool | None = None):
        self.device = execution_device(model)
        self.plan = plan
        self.store = WeightStore(model, plan, resident)
        self.mode = VerifierMode(self.store, strict)
        self.passed_over: list[str] = []
        self.meter = CostMeter()
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def model(self) -> Any:
        """The model, held weakly by the weight store."""
        return self.store.model

    @property
    def name(self) -> str:
        """The plan in one line; two verifiers of one name and one processor type compute the same bits."""
        device = self.device
        return f"{implementation('describe', device)(device)}/{self.plan.name}/torch-{torch.__version__}"

    def notes(self) -> list[str]:
        """Every slower or weaker path this verifier is on, in words."""
        found = [f"verifier plan {self.plan.name} is used; a faster one failed ({why})" for why in self.passed_over]
        if self.mode.unplanned:
            found.append(f"strict=False: no fixed plan, and no guarantee, for {sorted(self.mode.unplanned)}")
        if not self.store.resident:
            found.append("weights are up-cast at every use: an FP32 copy does not fit or was not wanted")
        return found

    def new_cache(self, rows: int, kv_planes: int) -> MarginGateCache:
        """An empty cache for this model."""
        cache = MarginGateCache(n_layers(self.model), rows, self.model.dtype, kv_planes, self.plan.column_store)
        cache.identity = self.identity
        return cache

    @property
    def identity(self) -> CacheIdentity:
        """What makes this verifier's columns comparable with others."""
        return CacheIdentity(self.store.fingerprint, self.name, "float32")

    def run(self, cache: MarginGateCache, segments: Sequence[Segment], keep: str = "all") -> torch.Tensor:
        """
        Verifies the segments: writes their columns and computes canonical logits.

        Args:
            cache ([`MarginGateCache`]): each segment must start at its row's first unverified position.
            segments (`Sequence[Segment]`): at most one per row, none empty.
            keep (`str`, *optional*, defaults to `"all"`): `"all"`: logits of every token; `"last"`: of each segment's
                last.

        Returns:
            `torch.Tensor` of shape `[tokens, vocabulary]` or `[segments, vocabulary]`, float32, in the segments' order.
        """
        cache.reserve(max(segment.stop for segment in segments))
        kept: dict[int, torch.Tensor] = {}
        for part in _passes(segments):
            logits = self._forward(cache, [segment for _, segment, _ in part], keep, [last for *_, last in part])
            for segment_index, segment, last in part:
                count = len(segment.tokens) if keep == "all" else int(last)
                piece, logits = logits[:count], logits[count:]
                if count:
                    before = kept.get(segment_index)
                    kept[segment_index] = piece if before is None else torch.cat([before, piece])
                cache.extend(segment.slot, segment.start, segment.tokens, verified=True)
        return torch.cat([kept[index] for index in range(len(segments))])

    def _forward(
        self, cache: MarginGateCache, segments: list[Segment], keep: str, ends_segment: list[bool]
    ) -> torch.Tensor:
        device = self.device
        geometry = verify_geometry(segments, device)
        geometry.long = cache.long_flags(geometry.slots.tolist(), device)
        ids = torch.tensor([[token for segment in segments for token in segment.tokens]], device=device)
        wanted = torch.arange(ids.shape[1], device=device)
        if keep == "last":
            stops = torch.tensor([len(segment.tokens) for segment in segments], device=device).cumsum(0) - 1
            wanted = stops[torch.tensor(ends_segment, device=device)]
            if not len(wanted):
                wanted = stops[:1]  # a forward must return some logits; the caller takes none of them
        extra = {"logits_to_keep": wanted} if self._keeps_logits else {}
        with self.scope(geometry):
            logits = self.model(
                input_ids=ids, position_ids=geometry.positions[None], cache=cache, use_cache=True, **extra
            ).logits[0]
        logits = logits if self._keeps_logits else logits[wanted]
        if logits.dtype != torch.float32:
            raise RuntimeError(f"the verifier's logits came out as {logits.dtype}, not float32.")
        return logits

    @contextlib.contextmanager
    def scope(self, geometry: VerifyGeometry) -> Iterator[None]:
        """Everything that makes one forward of the model a verifier pass, undone on every way out."""
        with (
            torch.no_grad(),
            torch.autocast(self.device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
            full_precision(),
            installed(self.model),
            geometry_scope(geometry),
            self.mode,
        ):
            yield


def n_layers(model: Any) -> int:
    """Attention layers of a decoder-only model."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _passes(segments: Sequence[Segment]) -> Iterator[list[tuple[int, Segment, bool]]]:
    """
    Cuts segments into passes of at most `PASS_TOKENS`: `(index of the segment, piece, is it the segment's last piece)`.
    """
    part: list[tuple[int, Segment, bool]] = []
    room = PASS_TOKENS
    for index, segment in enumerate(segments):
        done = 0
        while done < len(segment.tokens):
            take = min(room, len(segment.tokens) - done)
            piece = Segment(segment.slot, segment.start + done, segment.tokens[done : done + take])
            done += take
            room -= take
            part.append((index, piece, done == len(segment.tokens)))
            if not room:
                yield part
                part, room = [], PASS_TOKENS
    if part:
        yield part
