"""Continuous batching: many prompts through a few batch slots, each exactly as if decoded alone."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .config import MarginGateConfig
from .decoding.loop import DecodeLoop
from .decoding.padding import as_prompts
from .decoding.prepare import prepare
from .decoding.request import DecodeRequest
from .decoding.rows import Row
from .errors import refuse
from .forward.architecture import vocabulary_of
from .forward.context import whole_blocks
from .kv_cache.prefix_cache import PREFIX_BLOCK, PrefixCache, shared_blocks
from .outputs import MarginGateStatistics
from .verifier import Verifier, verifier_for

logger = logging.getLogger(__name__)

ORDERS = ("longest", "arrival")
# Share of the memory free at the time that entries kept for reuse may take when the user left the choice to us.
PREFIX_SHARE = 0.125


@dataclass
class MarginGateGenerationOutput(GenerationOutput):
    """
    One prompt of a batch, as transformers' own [`GenerationOutput`], and what the gate saw of it.

    Attributes:
        margins: canonical top-1/top-2 margin of each generated token, in logits of the processed scores.
        flips: drafts the verifier replaced.
        reused_tokens: prompt tokens whose entries another prompt had left.
        receipt: see [`Receipt`], with `MarginGateConfig(receipt=True)`.
    """

    margins: list[float] = field(default_factory=list)
    flips: int = 0
    reused_tokens: int = 0
    receipt: dict[str, Any] | None = None


class MarginGateEngine:
    """
    Continuous batching with at most `max_batch_size` concurrent sequences. A finished sequence's slot is reused at
    once, prompts are prefilled in chunks beside decoding, and shared prefixes are prefilled once. Output is identical
    to calling `generate(..., margin_gate=...)` on each prompt alone.

    An engine keeps verified entries between calls, so a conversation's next turn, or the next task with the same
    examples, starts where the last one left.

    Args:
        model (`PreTrainedModel`): an enabled model.
        margin_gate ([`MarginGateConfig`], `dict` or `True`, *optional*): settings of the gate.
        max_batch_size (`int`, *optional*, defaults to 8): prompts decoded at once.
        kv_bytes (`int`, *optional*): bytes the K/V cache may take; fewer slots are made where they would not fit.
        prefix_bytes (`int`, *optional*): bytes for entries kept for reuse, 0 for none. `None`: an eighth of the memory
            that is free.
        order (`str`, *optional*, defaults to `"longest"`): `"longest"` admits long prompts first, which leaves no long
            one to decode alone at the end; `"arrival"` keeps the caller's order.
        chunk (`int`, *optional*, defaults to 256): prompt tokens one verify forward reads beside the rows that decode.
        reuse_later (`bool`, *optional*, defaults to `True`): keep entries for later calls. `False` keeps only what
            several prompts of one call begin with, which takes less memory.

    Raises:
        `ValueError`, `TypeError`: an argument outside its range, named.

    Example:

    ```python
    >>> engine = MarginGateEngine(model, max_batch_size=8)
    >>> for output in engine.iterate(prompts, max_new_tokens=128):
    ...     print(output.request_id, output.generated_tokens)
    ```
    """

    def __init__(
        self,
        model: Any,
        margin_gate: MarginGateConfig | dict | bool = True,
        max_batch_size: int = 8,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
        order: str = "longest",
        chunk: int = 256,
        reuse_later: bool = True,
    ):
        if not getattr(model, "_margin_gate_enabled", False):
            raise refuse("model", type(model).__name__, "call `margingate_hf.enable(model)` first")
        gate = MarginGateConfig.coerce(margin_gate)
        if gate is None:
            raise refuse("margin_gate", margin_gate, "an engine needs the gate; pass a MarginGateConfig or True")
        for name, value, least in (
            ("max_batch_size", max_batch_size, 1),
            ("chunk", chunk, PREFIX_BLOCK),
            ("kv_bytes", kv_bytes, 1),
            ("prefix_bytes", prefix_bytes, 0),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise refuse(name, value, f"it must be an integer of at least {least}")
        if order not in ORDERS:
            raise refuse("order", order, f"it must be one of {', '.join(map(repr, ORDERS))}")
        if not isinstance(reuse_later, bool):
            raise refuse("reuse_later", reuse_later, "it must be True or False")
        self.model = model
        self.gate = gate
        self.reuse_later = reuse_later
        self.max_batch_size, self.kv_bytes, self.order, self.chunk = max_batch_size, kv_bytes, order, chunk
        if prefix_bytes is None:
            prefix_bytes = int(PREFIX_SHARE * psutil.virtual_memory().available)
        self.prefixes = PrefixCache(prefix_bytes)
        self.statistics = MarginGateStatistics()
        self._runs: weakref.WeakSet[EngineRun] = weakref.WeakSet()
        self._lock = threading.Lock()

    def iterate(
        self,
        inputs: Any,
        generation_config: Any = None,
        progress_bar: bool = False,
        stop: Callable[[list[int], list[int]], bool] | None = None,
        sample_numbers: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> EngineRun:
        """
        Decodes prompts and yields each as it finishes.

        Args:
            inputs (`Sequence[Sequence[int]]`): token ids of each prompt, no padding. Also a 2-D tensor, a
                [`~transformers.BatchEncoding`] with its mask, or any iterable of prompts.
            generation_config ([`~transformers.GenerationConfig`], *optional*): as for `generate`.
            progress_bar (`bool`, *optional*, defaults to `False`): show one.
            stop (`Callable`, *optional*): asked after every committed token with a prompt's ids and its new ones,
                whether it ends there.
            sample_numbers (`Sequence[int]`, *optional*): which sample of its prompt each prompt is, where one is given
                several times with `do_sample=True`; all 0 by default.
            kwargs: any argument of `generate` that is not about one padded batch: `max_new_tokens`,
                `stopping_criteria`, `logits_processor`, `stop_strings`, `tokenizer`, ...

        Returns:
            [`EngineRun`], an iterator of [`MarginGateGenerationOutput`] in the order of finishing. `request_id` is
            `"req_{i}"` for prompt `i`, with `"__child#{k}"` behind it for the further samples of
            `num_return_sequences`. A prompt whose own processor or criterion raised, or whose logits are not finite,
            has status `FAILED` and the `error`; the others are untouched. So have all that are unfinished when the
            model's weights are changed meanwhile.

        Raises:
            As `generate`, before any work starts.
        """
        if not getattr(self.model, "_margin_gate_enabled", False):
            raise refuse(
                "model", type(self.model).__name__, "it was disabled; call `margingate_hf.enable(model)` again"
            )
        prompts = as_prompts(inputs, vocabulary_of(self.model))
        request = None
        if prompts:
            request = prepare(
                self.model, prompts, self.gate, generation_config, sample_numbers=sample_numbers, stop=stop, **kwargs
            ).request
        samples = len(request.rows) // len(prompts) if request is not None else 1
        run = EngineRun(self, request, samples, progress_bar)
        with self._lock:
            self._runs.add(run)
        return run

    def generate(
        self, inputs: Any, generation_config: Any = None, progress_bar: bool = False, **kwargs: Any
    ) -> dict[str, MarginGateGenerationOutput]:
        """All of [`~MarginGateEngine.iterate`], by `request_id`, in the order of the prompts."""
        run = self.iterate(inputs, generation_config, progress_bar, **kwargs)
        found = {output.request_id: output for output in run}
        return {name: found[name] for name in run.request_ids}

    def cancel(self, request_id: str) -> None:
        """
        Ends a prompt of the running [`~MarginGateEngine.iterate`]; it is yielded with the tokens it has.

        Raises:
            `KeyError`: no such prompt. `ValueError`: several runs have one; use [`EngineRun.cancel`].
        """
        with self._lock:
            runs = [run for run in self._runs if request_id in run.request_ids and not run.finished]
        if not runs:
            raise KeyError(request_id)
        if len(runs) > 1:
            raise ValueError(
                f"`request_id`={request_id!r} is in {len(runs)} runs of this engine; call `cancel` of the iterator "
                "that `iterate` returned."
            )
        runs[0].cancel(request_id)

    def admitted(self, request: DecodeRequest, verifier: Verifier) -> DecodeRequest:
        """A request with this engine's slots, chunk, prefix cache and order of admission."""
        longest = max(row.length for row in request.rows)
        slots = self.max_batch_size
        if self.kv_bytes is not None:
            needed = verifier.entry_bytes * whole_blocks(longest)
            if needed > self.kv_bytes:
                raise refuse("kv_bytes", self.kv_bytes, f"one prompt of {longest} tokens takes {needed} bytes")
            slots = min(slots, self.kv_bytes // needed)
        rows = request.rows
        if self.order == "longest":
            rows = tuple(sorted(rows, key=lambda row: (-len(row.prompt), row.index)))
        # An entry that was trusted, not verified, is no function of its tokens: nothing to share.
        exact = self.gate.coverage == "exact"
        return replace(
            request,
            rows=rows,
            max_batch_size=slots,
            chunk=self.chunk,
            isolate=True,
            prefixes=self.prefixes if self.prefixes.budget and exact else None,
            shared=None if self.reuse_later else shared_blocks([row.prompt for row in request.rows]),
        )


class EngineRun(Iterator[MarginGateGenerationOutput]):
    """
    One call of [`~MarginGateEngine.iterate`]: an iterator of outputs in the order of finishing.

    Attributes:
        request_ids: of all its prompts and samples, in order.
        finished: whether every prompt has ended or the run was closed.
    """

    def __init__(self, engine: MarginGateEngine, request: DecodeRequest | None, samples: int, progress_bar: bool):
        self._engine = engine
        self._names: dict[str, int] = {}
        self._cancelled: set[int] = set()
        self._outputs: Iterator[MarginGateGenerationOutput] = iter(())
        self.finished = request is None
        if request is not None:
            self._names = {_name(row.index, samples): row.index for row in request.rows}
            self._outputs = self._decode(replace(request, is_cancelled=self._cancelled.__contains__), progress_bar)

    @property
    def request_ids(self) -> list[str]:
        """Of all prompts and samples, in order."""
        return list(self._names)

    def __next__(self) -> MarginGateGenerationOutput:
        return next(self._outputs)

    def cancel(self, request_id: str) -> None:
        """
        Ends a prompt; it is yielded with the tokens it has.

        Raises:
            `KeyError`: no such prompt in this run.
        """
        self._cancelled.add(self._names[request_id])

    def close(self) -> None:
        """Gives up what is unfinished."""
        self.finished = True
        self._outputs = iter(())

    def _decode(self, request: DecodeRequest, progress_bar: bool) -> Iterator[MarginGateGenerationOutput]:
        engine = self._engine
        names = {index: name for name, index in self._names.items()}
        verifier = verifier_for(engine.model, engine.gate)
        loop = DecodeLoop(engine.model, verifier, engine.admitted(request, verifier))
        bar = tqdm(total=len(request.rows), disable=not progress_bar, desc="prompts", unit="prompt")
        try:
            with logging_redirect_tqdm([logger]), bar:
                while loop.unfinished:
                    with torch.no_grad():
                        finished = loop.step()
                    for row in finished:
                        bar.update(1)
                        yield _output(names[row.index], row, loop.receipt(row))
                    if finished and loop.unfinished:
                        verifier.refresh()  # the caller had the model for a while; `step` looks whether it is the same
        finally:
            self.finished = True
        verifier.refresh()
        if verifier.store.fingerprint != loop.weights:
            engine.prefixes.clear()  # some of what was kept may be of neither
        engine.statistics = loop.totals()


def _name(index: int, samples: int) -> str:
    prompt, sample = divmod(index, samples)
    return f"req_{prompt}" if not sample else f"req_{prompt}__child#{sample - 1}"


def _output(name: str, row: Row, receipt: dict[str, Any] | None) -> MarginGateGenerationOutput:
    return MarginGateGenerationOutput(
        request_id=name,
        prompt_ids=row.prompt,
        generated_tokens=row.committed,
        error=None if row.error is None else f"{type(row.error).__name__}: {row.error}",
        status=RequestStatus.FAILED if row.error is not None else RequestStatus.FINISHED,
        margins=row.margins,
        flips=row.counts.flips,
        reused_tokens=row.counts.reused,
        receipt=receipt,
    )
