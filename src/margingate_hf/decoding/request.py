"""What is to be decoded, frozen: the one record that `generate`, the engine, calibration and replay all make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import StoppingCriteriaList

from ..config import MarginGateConfig
from ..kv_cache.cache import MarginGateCache
from ..kv_cache.prefix_cache import PrefixCache
from .receipts import Rules, describe_processor
from .rows import RowRequest


def _never(index: int) -> bool:
    return False


@dataclass(frozen=True)
class DecodeRequest:
    """
    Rows to decode, and the rules that hold for all of them.

    Attributes:
        gate: settings of the gate.
        rows: in the order of admission. Without `max_batch_size` that is the caller's order.
        cache: an earlier call's cache to build on, cut back to what the rows share with it; `None`: an empty one.
        eos: token ids that end a row.
        criteria: stopping criteria, asked after every committed token with `[1, length]`.
        stop: asked after every committed token with the row's prompt and its new tokens, whether the row ends there.
        keep_logits, keep_scores: record canonical values of every step.
        on_commit: called with a row's index and each committed token, in order (streaming).
        is_cancelled: asked for each row between forwards.
        max_batch_size: rows decoded at once, others wait for a slot. `None`: all, and the cache keeps them.
        chunk: prompt tokens that one verify forward reads. `None`: whole prompts.
        prefixes: verified K/V blocks to start from and to add to; needs `max_batch_size`.
        shared: the only blocks to add to them, see [`shared_blocks`]; `None`: all.
        isolate: an exception of a row's own processors or criteria ends that row alone.
    """

    gate: MarginGateConfig
    rows: tuple[RowRequest, ...]
    cache: MarginGateCache | None = None
    eos: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    stop: Callable[[list[int], list[int]], bool] | None = None
    keep_logits: bool = False
    keep_scores: bool = False
    on_commit: Callable[[int, int], None] | None = None
    is_cancelled: Callable[[int], bool] = _never
    max_batch_size: int | None = None
    chunk: int | None = None
    prefixes: PrefixCache | None = None
    shared: frozenset[int] | None = None
    isolate: bool = False

    @property
    def rules(self) -> Rules:
        """What may end a row beside its limit."""
        rules = [*self.criteria, *([] if self.stop is None else [self.stop])]
        return Rules(tuple(sorted(self.eos)), tuple(map(describe_processor, rules)))
