"""Decodes prompts alone and in batches, stock and exact, and says where the outputs diverge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import MarginGateConfig
from ..decoding.margin import MarginGateLogitsProcessor
from ..outputs import MarginGateStatistics


@dataclass
class Decoded:
    """
    All prompts under one system at one batch size.

    Attributes:
        tokens: new tokens of each prompt, its end included.
        margins: margin of each step, in logits.
        seconds: wall clock of the `generate` calls.
        statistics: of the calls with the gate, one a batch.
    """

    system: str
    batch_size: int
    tokens: list[list[int]] = field(default_factory=list)
    margins: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    statistics: list[MarginGateStatistics] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        """Tokens decoded, over all prompts."""
        return sum(len(row) for row in self.tokens)


@dataclass(frozen=True)
class Divergence:
    """
    Attributes:
        prompts: how many prompts give other tokens than they do alone.
        first: index of the earliest differing token, `None` if none differs.
        margin: the batched run's margin at that token.
    """

    prompts: int
    first: int | None
    margin: float | None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; a missing one counts; `None` if the lists are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def divergence(alone: Decoded, batched: Decoded) -> Divergence:
    """Where outputs in a batch diverge from those of the prompts alone."""
    found = []
    for row, (a, b) in enumerate(zip(alone.tokens, batched.tokens, strict=True)):
        index = first_difference(a, b)
        if index is not None:
            margins = batched.margins[row]
            found.append((index, margins[index] if index < len(margins) else None))
    if not found:
        return Divergence(0, None, None)
    index, margin = min(found, key=lambda item: item[0])
    return Divergence(len(found), index, margin)


def decode_all(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    batch_size: int,
    new_tokens: int,
    gate: MarginGateConfig | None,
    tick: Callable[[int], None] = lambda count: None,
) -> Decoded:
    """
    Decodes `prompts` greedily in batches of `batch_size`, left-padded.

    Args:
        model (`PreTrainedModel`): an enabled model.
        tokenizer (`PreTrainedTokenizerBase`): with `padding_side="left"`.
        prompts (`Sequence[str]`): chat template applied.
        gate ([`MarginGateConfig`], *optional*): `None` decodes as transformers does.
        tick (`Callable`): told how many prompts each batch has finished.
    """
    result = Decoded("exact" if gate else "stock", batch_size)
    recorder = MarginGateLogitsProcessor()
    arguments = {"max_new_tokens": new_tokens, "margin_gate": gate, "logits_processor": None if gate else [recorder]}
    for out, rows, seconds in generate_batches(model, tokenizer, prompts, batch_size, **arguments):
        result.seconds += seconds
        result.tokens += rows
        if gate:
            result.margins += [row.margins for row in out.margin_gate.rows]
            result.statistics.append(out.margin_gate)
        else:
            result.margins += [row[: len(tokens)] for row, tokens in zip(recorder.margins.tolist(), rows, strict=True)]
            recorder.reset()
        tick(len(rows))
    return result


def generate_batches(
    model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int, **arguments: Any
) -> Iterator[tuple[Any, list[list[int]], float]]:
    """
    Greedy `generate` on left-padded batches of `prompts`.

    Args:
        arguments: of `generate`.

    Yields:
        `(output, new tokens of each prompt with its end included, seconds)` a batch.
    """
    eos = eos_ids(model)
    for start in range(0, len(prompts), batch_size):
        part = list(prompts[start : start + batch_size])
        batch = tokenizer(part, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        began = time.perf_counter()
        out = model.generate(**batch, do_sample=False, return_dict_in_generate=True, **arguments)
        seconds = time.perf_counter() - began
        width = batch["input_ids"].shape[1]
        yield out, [until_end(row, eos) for row in out.sequences[:, width:].tolist()], seconds


def eos_ids(model: Any) -> set[int]:
    """Token ids that end an output of a model."""
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(torch.tensor(eos).flatten().tolist())


def until_end(tokens: list[int], eos: set[int]) -> list[int]:
    """Tokens up to and including the first of `eos`; in a batch padding follows."""
    for index, token in enumerate(tokens):
        if token in eos:
            return tokens[: index + 1]
    return tokens
