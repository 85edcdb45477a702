"""Canonical log-probabilities of given continuations: bit-identical whatever else is scored, in whatever order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..forward.context import Segment
from ..forward.fixed_plan import fixed_plan
from ..kv_cache.cache import MarginGateCache
from ..kv_cache.prefix_cache import PREFIX_BLOCK, PrefixCache
from ..verifier import Verifier


@dataclass(frozen=True)
class Score:
    """
    Attributes:
        logprob: sum of the continuation's log-probabilities, in order, in double precision of FP32 terms.
        greedy: whether every token of it is the argmax.
    """

    logprob: float
    greedy: bool


def score_continuations(
    model: Any,
    verifier: Verifier,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    kv_dtype: str,
    rows: int = 8,
    prefixes: PrefixCache | None = None,
    tick: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """
    Scores `(context, continuation)` pairs by the verifier.

    Continuations of one context share its entries, and contexts that begin alike share those through the prefix cache;
    neither changes a bit, since an entry is a function of the tokens up to it.

    Args:
        model (`PreTrainedModel`): the model of `verifier`.
        pairs: token ids, both parts non-empty.
        kv_dtype (`str`): format of the entries, see [`MarginGateConfig`].
        rows (`int`, *optional*, defaults to 8): continuations of one verify forward.
        prefixes ([`PrefixCache`], *optional*): entries to start from and to add to.
        tick (`Callable`, *optional*): told how many pairs have been scored.

    Returns:
        One [`Score`] a pair, in the order of `pairs`.

    Raises:
        `ValueError`: an empty context or continuation.
    """
    groups: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(f"`pairs` must have a context and a continuation each; pair {index} lacks one.")
        # The rotary table follows the pair's own length, not that of the longest continuation beside it.
        long = verifier.architecture.needs_long_table(len(context) + len(continuation))
        groups.setdefault((tuple(context), long), []).append(index)
    found: dict[int, Score] = {}
    cache = verifier.new_cache(rows, kv_dtype)
    if prefixes is not None:
        prefixes.bind(cache)
    with torch.no_grad():
        # Contexts in order of their ids: those that begin alike follow each other, while their blocks are still kept.
        for context, long in sorted(groups):
            members = groups[context, long]
            for start in range(0, len(members), rows):
                part = members[start : start + rows]
                ends = [list(pairs[index][1]) for index in part]
                scores = _score_group(verifier, cache, list(context), ends, long, prefixes)
                found.update(zip(part, scores, strict=True))
                tick(len(part))
    return [found[index] for index in range(len(pairs))]


def _score_group(
    verifier: Verifier,
    cache: MarginGateCache,
    context: list[int],
    ends: list[list[int]],
    long: bool,
    prefixes: PrefixCache | None,
) -> list[Score]:
    for slot in range(len(ends)):
        cache.clear(slot)
        cache.long_rows[slot] = long
    _read(verifier, cache, context[:-1], prefixes)
    shared = len(context) - 1
    if shared and len(ends) > 1:
        columns = cache.export_entries(0, 0, shared)
        for slot in range(1, len(ends)):
            cache.touch(slot, shared)
            cache.load_entries(slot, 0, columns)
            cache.extend(slot, 0, context[:-1], verified=True)
            cache.broken[slot] = cache.broken[0]
    # The last token of the context gives the first token of the continuation, and so on.
    segments = [Segment(slot, shared, [context[-1], *end[:-1]]) for slot, end in enumerate(ends)]
    logits = verifier.run(cache, segments)
    with fixed_plan():
        logprobs = verifier.backend.log_softmax(logits)
    scores = []
    for end, logs in zip(ends, logprobs.split([len(end) for end in ends]), strict=True):
        targets = torch.tensor(end, device=logs.device)
        terms = logs.gather(1, targets[:, None])[:, 0].tolist()
        scores.append(Score(math.fsum(terms), bool((logs.argmax(-1) == targets).all())))
    return scores


def _read(verifier: Verifier, cache: MarginGateCache, tokens: list[int], prefixes: PrefixCache | None) -> None:
    """Makes row 0 hold `tokens`, from the prefix store as far as it reaches."""
    held = 0
    if prefixes is not None:
        blocks = prefixes.find(cache, 0, tokens, len(tokens))
        held = prefixes.load(cache, 0, blocks, 0)
        prefixes.missed(len(tokens) - held)
    if held < len(tokens):
        verifier.run(cache, [Segment(0, held, tokens[held:])], keep=[0])
        if prefixes is not None and len(tokens) - held >= PREFIX_BLOCK:
            prefixes.insert(cache, 0)
