"""`generate(..., margin_gate=...)` and `generate_batch`: the mixin that [`enable`] puts in front of a model's class."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from .config import MarginGateConfig
from .decoding.loop import decode
from .decoding.padding import sequences_of, stacked
from .decoding.prepare import PreparedCall, prepare
from .decoding.request import DecodeRequest
from .engine import MarginGateEngine
from .errors import refuse
from .kv_cache.cache import MarginGateCache
from .outputs import MarginGateOutput
from .verifier import Verifier, verifier_for

_POSITIONAL = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]


class MarginGateGenerationMixin(GenerationMixin):
    """
    Adds `margin_gate` to `generate`. Use [`enable`], which puts it in front of a loaded model's class.

    Without `margin_gate`, or with `None`/`False`, every method hands over to transformers' own.
    """

    _margin_gate_enabled = True

    def generate(self, *args: Any, margin_gate: Any = ..., **kwargs: Any) -> Any:
        """
        Transformers' `generate`, and one argument more.

        Args:
            margin_gate ([`MarginGateConfig`], `dict` or `bool`, *optional*):
                Decode batch-invariantly. Defaults to the entry of that name in the call's or the model's generation
                config; `None` or `False` turns it off. Everything else as in
                [`~transformers.GenerationMixin.generate`].

        Returns:
            As transformers; with `return_dict_in_generate=True` a [`MarginGateOutput`].

        Raises:
            `ValueError`, `NotImplementedError`: an argument the gate cannot honour, named, before any work starts.
        """
        named = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        streamer = named.get("streamer")
        with _ends_on_error(streamer):
            gate = self._resolve_gate(margin_gate, named.get("generation_config"))
            if gate is not None:
                started = time.perf_counter()
                call = self._prepare(gate, named)
                verifier = verifier_for(self, gate)
                request = _continued(call.request, named.get("cache"), verifier)
                return _decoded(self, verifier, dataclasses.replace(call, request=request), streamer, started)
        # Passed on only where it must override an entry of a generation config; stock code would refuse it.
        extra = {} if margin_gate is ... else {"margin_gate": None}
        return super().generate(*args, **extra, **kwargs)

    def _prepare(self, gate: MarginGateConfig, named: dict[str, Any]) -> PreparedCall:
        inputs, ids = named.pop("inputs", None), named.get("input_ids")
        if inputs is not None and ids is not None:
            raise refuse("inputs", "given", "`input_ids` is given too; pass one of them")
        inputs = ids if inputs is None else inputs
        if inputs is not None and not isinstance(inputs, torch.Tensor):
            raise refuse(
                "input_ids",
                type(inputs).__name__,
                "it must be a tensor [rows, length]; lists of ids go to `generate_batch`",
                TypeError,
            )
        return prepare(self, inputs, gate, named.pop("generation_config", None), **named)

    def generate_batch(
        self,
        inputs: Any,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        margin_gate: Any = ...,
        engine: MarginGateEngine | None = None,
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> Any:
        """
        Transformers' `generate_batch`, and with `margin_gate` the same by a [`MarginGateEngine`]: each prompt's tokens
        are those of `generate(..., margin_gate=...)` on it alone.

        Args:
            inputs (`Sequence[Sequence[int]]`): token ids of each prompt, no padding. Also a 2-D tensor, a
                [`~transformers.BatchEncoding`] with its mask, or any iterable of prompts.
            generation_config ([`~transformers.GenerationConfig`], *optional*): as for `generate`.
            margin_gate ([`MarginGateConfig`], `dict` or `bool`, *optional*): as for `generate`.
            engine ([`MarginGateEngine`], *optional*): one to use, whose prefix cache is kept for the next call.
            progress_bar (`bool`, *optional*, defaults to `False`): show one.
            kwargs: arguments of `generate` that are not about one padded batch, and without `engine` those of
                [`MarginGateEngine`]: `max_batch_size`, `kv_bytes`, `prefix_bytes`, `order`, `chunk`.

        Returns:
            `dict[str, MarginGateGenerationOutput]` by request id, `"req_0"` for the first prompt.
        """
        gate = self._resolve_gate(margin_gate, generation_config) if engine is None else engine.gate
        if gate is None:
            return super().generate_batch(inputs, generation_config, *args, progress_bar=progress_bar, **kwargs)
        if args or kwargs.get("continuous_batching_config") is not None:
            raise refuse(
                "continuous_batching_config", "given", "it is of transformers' own scheduler; use `max_batch_size`"
            )
        if engine is None:
            names = ("max_batch_size", "kv_bytes", "prefix_bytes", "order", "chunk")
            given = {name: kwargs.pop(name) for name in names if name in kwargs}
            engine = MarginGateEngine(self, gate, reuse_later=False, **given)
        elif margin_gate not in (..., True) and MarginGateConfig.coerce(margin_gate) != engine.gate:
            raise refuse("margin_gate", margin_gate, "the engine has settings of its own; pass one of the two")
        return engine.generate(inputs, generation_config, progress_bar, **kwargs)

    def _resolve_gate(self, value: Any, generation_config: GenerationConfig | None) -> MarginGateConfig | None:
        if value is ...:
            value = getattr(generation_config, "margin_gate", None)
            if generation_config is None or not hasattr(generation_config, "margin_gate"):
                value = getattr(self.generation_config, "margin_gate", None)
        return MarginGateConfig.coerce(value)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers; an entry `margin_gate` of the generation config survives loading."""
        config = self.generation_config
        if getattr(config, "margin_gate", None) is not None:
            # Loading drops whatever transformers does not know from a config that says it was derived from the model's.
            config._from_model_config = False
        return super().save_pretrained(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles by the original class, since a class made at run time cannot be found by name."""
        stock = getattr(type(self), "_margin_gate_stock_class", None)
        if stock is None:
            return super().__reduce_ex__(protocol)
        return _rebuild, (stock,), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__


def _decoded(model: Any, verifier: Verifier, call: PreparedCall, streamer: Any, started: float) -> Any:
    """Decodes a call and gives it transformers' form."""
    assert call.input_ids is not None
    if streamer is not None:
        streamer.put(call.input_ids.cpu())
    setup = time.perf_counter() - started
    found = decode(model, verifier, call.request)
    found.statistics.setup_seconds = setup
    if streamer is not None:
        streamer.end()
    sequences = sequences_of(call.input_ids, found.rows, call.pad)
    if not call.config.return_dict_in_generate:
        return sequences
    return MarginGateOutput(
        sequences=sequences,
        scores=stacked([row.scores for row in found.rows]) if call.request.keep_scores else None,
        logits=stacked([row.logits for row in found.rows]) if call.request.keep_logits else None,
        cache=found.cache,
        margin_gate=found.statistics,
    )


def _continued(request: DecodeRequest, cache: MarginGateCache | None, verifier: Verifier) -> DecodeRequest:
    """The request on the caller's cache, cut back to what the rows share with it."""
    if cache is None:
        return request
    if cache.rows != len(request.rows):
        raise refuse("cache", f"MarginGateCache of {cache.rows} rows", f"this call has {len(request.rows)}")
    if request.gate.coverage == "gated":
        raise refuse("cache", "MarginGateCache", 'with coverage="gated" entries are not exact; leave it out')
    if cache.kv_dtype != request.gate.kv_dtype:
        raise refuse(
            "cache",
            f"MarginGateCache with kv_dtype={cache.kv_dtype!r}",
            f"this call asks for {request.gate.kv_dtype!r}",
        )
    different = None if cache.identity is None else cache.identity.mismatch(verifier.identity)
    if cache.identity is None or different:
        raise refuse("cache", "MarginGateCache", f"it was computed with {different or 'nothing known'}; leave it out")
    rows = []
    for row in request.rows:
        # The last prompt token is always read again: its logits are needed.
        reused = min(cache.common_prefix(row.index, row.prompt), len(row.prompt) - 1)
        # Keys of another rotary table or another adapter are no use.
        if cache.variant(row.index) != (verifier.architecture.needs_long_table(row.length), row.adapter):
            reused = 0
        cache.rollback(row.index, reused)
        rows.append(dataclasses.replace(row, reused=reused))
    return dataclasses.replace(request, rows=tuple(rows), cache=cache)


@contextlib.contextmanager
def _ends_on_error(streamer: Any) -> Iterator[None]:
    """Ends a streamer where the block raises: its consumer in another thread would wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            streamer.end()
        raise


_enabled_classes: dict[type, type] = {}


def enabled_class(stock: type) -> type:
    """The subclass of a model class with the mixin in front; keeps the names that transformers reads from a class."""
    if stock not in _enabled_classes:
        names = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "_margin_gate_stock_class": stock,
        }
        _enabled_classes[stock] = type(stock.__name__, (MarginGateGenerationMixin, stock), names)
    return _enabled_classes[stock]


def _rebuild(stock: type) -> Any:
    enabled = enabled_class(stock)
    return object.__new__(enabled)
