"""`generate(..., margin_gate=...)` and `generate_batch`: the mixin that [`enable`] puts in front of a model's class."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .config import MarginGateConfig
from .decoding.checks import (
    check_call,
    check_gate,
    check_generation_config,
    check_length,
    check_model,
    check_processors,
    unpadded_prompts,
)
from .decoding.gumbel import GumbelNoise
from .decoding.loop import DecodeRequest
from .decoding.processors import keeps_state, row_copies
from .decoding.prompts import as_prompts
from .decoding.rows import Row
from .decoding.run import decode
from .decoding.sequences import sequences_of, stacked
from .engine import MarginGateEngine
from .errors import refuse
from .forward.adapters import row_adapters
from .forward.architecture import architecture_of
from .forward.devices import execution_device
from .kv_cache.cache import CacheIdentity, MarginGateCache
from .outputs import MarginGateOutput
from .verifier import verifier_for


@dataclass
class _Call:
    """What one gated call knows beyond its generation config; rides on the call's own copy of that config."""

    config: MarginGateConfig
    mask_given: bool = False
    cache: MarginGateCache | None = None
    samples: int = 1
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int = 0
    processor_arguments: dict[str, Any] | None = None
    streams: bool = False
    prepare_only: bool = False
    sample_numbers: Sequence[int] | None = None

    def limit(self, prompt: int) -> int:
        """New tokens of a row; `max_length` counts the row's own tokens, not its padding."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        assert self.max_length is not None
        return self.max_length - prompt


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
        names = ("inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        streamer = named.get("streamer")
        with _ends_on_error(streamer):
            gate = self._resolve_gate(margin_gate, named.get("generation_config"))
        if gate is None:
            # Passed on only where it must override an entry of a generation config; stock code would refuse it.
            extra = {} if margin_gate is ... else {"margin_gate": None}
            return super().generate(*args, **extra, **kwargs)
        with _ends_on_error(streamer):
            ids = named.get("inputs", named.get("input_ids"))
            check_model(self)
            check_gate(self, gate)
            check_call(self, named, None if ids is None else len(ids))
            call = _Call(
                gate,
                mask_given=named.get("attention_mask") is not None,
                cache=kwargs.pop("cache", None),
                streams=streamer is not None,
            )
            return super().generate(*args, margin_gate=call, **kwargs)

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
            engine ([`MarginGateEngine`], *optional*): one to use, whose columns are kept for the next call.
            progress_bar (`bool`, *optional*, defaults to `False`): show one.
            kwargs: arguments of `generate` that are not about one padded batch, and without `engine` those of
                [`MarginGateEngine`]: `max_rows`, `kv_bytes`, `prefix_bytes`, `order`, `chunk`.

        Returns:
            `dict[str, MarginGateGenerationOutput]` by request id, `"req_0"` for the first prompt.
        """
        gate = self._resolve_gate(margin_gate, generation_config) if engine is None else engine.gate
        if gate is None:
            return super().generate_batch(inputs, generation_config, *args, progress_bar=progress_bar, **kwargs)
        if args or kwargs.get("continuous_batching_config") is not None:
            raise refuse("continuous_batching_config", "given", "it is of transformers' own scheduler; use `max_rows`")
        if engine is None:
            names = ("max_rows", "kv_bytes", "prefix_bytes", "order", "chunk")
            given = {name: kwargs.pop(name) for name in names if name in kwargs}
            engine = MarginGateEngine(self, gate, reuse_later=False, **given)
        elif margin_gate not in (..., True) and MarginGateConfig.coerce(margin_gate) != engine.gate:
            raise refuse("margin_gate", margin_gate, "the engine has settings of its own; pass one of the two")
        return engine.generate(inputs, generation_config, progress_bar, **kwargs)

    def prepare_batch(
        self,
        inputs: Sequence[Sequence[int]],
        gate: MarginGateConfig,
        generation_config: GenerationConfig | None = None,
        sample_numbers: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> DecodeRequest:
        """
        Everything `generate` does before it decodes: checks, processors and limits of each prompt. For the engine.

        Args:
            inputs (`Sequence[Sequence[int]]`): token ids of each prompt, no padding, none empty.
            sample_numbers (`Sequence[int]`, *optional*): which sample of its prompt each row is, where one prompt is
                given several times.

        Raises:
            As `generate`.
        """
        check_model(self)
        inputs = as_prompts(inputs, self)
        for name in ("input_ids", "attention_mask", "cache", "past_key_values", "streamer"):
            if kwargs.get(name) is not None:
                raise refuse(name, "given", "it belongs to one padded batch; `inputs` are lists of token ids")
        width = max(map(len, inputs))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in inputs])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in inputs])
        device = execution_device(self)
        call = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        check_gate(self, gate)
        check_call(self, {**kwargs, **call, "generation_config": generation_config}, len(ids))
        riding = _Call(gate, mask_given=True, prepare_only=True, sample_numbers=sample_numbers)
        return super().generate(generation_config=generation_config, margin_gate=riding, **call, **kwargs)

    def _resolve_gate(self, value: Any, generation_config: GenerationConfig | None) -> MarginGateConfig | None:
        if value is ...:
            value = getattr(generation_config, "margin_gate", None)
            if generation_config is None or not hasattr(generation_config, "margin_gate"):
                value = getattr(self.generation_config, "margin_gate", None)
        return MarginGateConfig.coerce(value)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict]:
        call = kwargs.pop("margin_gate", None)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if isinstance(call, _Call):
            asked = generation_config if generation_config is not None else GenerationConfig()
            check_generation_config(
                prepared, call.config, kwargs.get("cache_implementation", asked.cache_implementation)
            )
            call.samples = prepared.num_return_sequences or 1
            if call.streams and call.samples > 1:
                raise refuse(
                    "streamer", "given", f"streamers take one row, and `num_return_sequences` is {call.samples}"
                )
            prepared.cache_implementation = None  # a checkpoint's own choice; the gate brings its cache
            prepared._margin_gate_call = call
        return prepared, model_kwargs

    def _prepare_generated_length(self, generation_config: GenerationConfig, **kwargs: Any) -> GenerationConfig:
        call = _call_of(generation_config)
        if call is not None:
            call.max_new_tokens, call.max_length = generation_config.max_new_tokens, generation_config.max_length
            if call.max_new_tokens is None and call.max_length is None:
                raise refuse("max_length", None, "a row needs a limit; pass `max_new_tokens`")
            if call.max_new_tokens is None and kwargs["has_default_max_length"]:
                call.max_new_tokens = generation_config.max_length
            call.min_new_tokens, call.min_length = generation_config.min_new_tokens, generation_config.min_length or 0
        return super()._prepare_generated_length(generation_config=generation_config, **kwargs)

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        # Stock compares the limits with the padded width; `_rows` compares them with each row's own length.
        if _call_of(generation_config) is None or has_default_max_length:
            super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        call = _call_of(generation_config)
        if call is not None and call.processor_arguments is None:
            check_processors(kwargs.get("logits_processor") or [])
            call.processor_arguments = dict(kwargs)
        return super()._get_logits_processor(generation_config, *args, **kwargs)

    def _row_processors(self, generation_config: GenerationConfig, call: _Call, row: int, prompt: list[int]) -> Any:
        """The processors a row would have alone and unpadded, or `None`."""
        arguments = dict(call.processor_arguments or {})
        own = copy.copy(generation_config)
        own.max_length = len(prompt) + call.limit(len(prompt))
        own.min_length = call.min_length if call.min_new_tokens is None else len(prompt) + call.min_new_tokens
        allowed = arguments.get("prefix_allowed_tokens_fn")
        if allowed is not None:
            arguments["prefix_allowed_tokens_fn"] = lambda _, ids: allowed(row, ids)
        arguments.update(
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([prompt], device=execution_device(self)),
            model_kwargs={},
            logits_processor=row_copies(arguments.get("logits_processor") or []),
        )
        processors = super()._get_logits_processor(own, **arguments)
        return processors if len(processors) else None

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        call = _call_of(generation_config)
        if call is None:
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        if synced_gpus:
            raise refuse("synced_gpus", True, "ranks would run different numbers of passes and dead-lock")
        started = time.perf_counter()
        prompts = unpadded_prompts(
            input_ids, model_kwargs.get("attention_mask"), _special_ids(generation_config), call.mask_given
        )
        rows = self._rows(prompts, generation_config, call)
        request = DecodeRequest(
            config=call.config,
            rows=rows,
            eos=_ids_of(generation_config._eos_token_tensor),
            criteria=_custom_criteria(stopping_criteria, generation_config),
            keep_logits=bool(generation_config.output_logits and generation_config.return_dict_in_generate),
            keep_scores=bool(generation_config.output_scores and generation_config.return_dict_in_generate),
            on_commit=None if streamer is None else lambda _, token: streamer.put(torch.tensor([token])),
        )
        if call.prepare_only:
            return request
        verifier = verifier_for(self, call.config)
        request.cache = _continued(self, call, rows, verifier.identity)
        setup = time.perf_counter() - started
        cache, statistics = decode(self, verifier, request)
        statistics.setup_seconds = setup
        if streamer is not None:
            streamer.end()
        sequences = sequences_of(input_ids, request.rows, generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        return MarginGateOutput(
            sequences=sequences,
            scores=stacked([row.scores for row in request.rows]) if request.keep_scores else None,
            logits=stacked([row.logits for row in request.rows]) if request.keep_logits else None,
            cache=cache,
            margin_gate=statistics,
        )

    def _rows(self, prompts: list[list[int]], generation_config: GenerationConfig, call: _Call) -> list[Row]:
        rows = []
        adapters = _adapters_of(self, call, len(prompts))
        for index, prompt in enumerate(prompts):
            limit = call.limit(len(prompt))
            if limit < 1:
                name, value = (
                    ("max_new_tokens", limit) if call.max_new_tokens is not None else ("max_length", call.max_length)
                )
                raise refuse(name, value, f"row {index} has {len(prompt)} tokens and needs room for at least one more")
            processors = self._row_processors(generation_config, call, index, prompt)
            check_length(architecture_of(self), len(prompt) + limit, index, call.config.coverage)
            noise = _row_noise(call, index, len(prompts)) if generation_config.do_sample else None
            stateful = any(map(keeps_state, processors or ()))
            if stateful and call.config.coverage == "gated":
                raise refuse("coverage", "gated", "a logits processor keeps a state, and steps are computed again")
            rows.append(Row(index, index, prompt, limit, processors, noise, adapters[index], stateful))
        return rows

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


@contextlib.contextmanager
def _ends_on_error(streamer: Any) -> Iterator[None]:
    """Ends a streamer where the block raises: its consumer in another thread would wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            streamer.end()
        raise


def _adapters_of(model: Any, call: _Call, rows: int) -> list[str | None]:
    """Each row's own PEFT adapter, `None` where the call does not name them."""
    names = row_adapters(model)
    if names is None:
        return [None] * rows
    if call.config.coverage == "gated":
        raise refuse("adapter_names", names, 'it needs coverage="full"; use one adapter for the batch')
    if len(names) * call.samples == rows:
        names = [name for name in names for _ in range(call.samples)]
    if len(names) != rows:
        raise refuse("adapter_names", names, f"one name for each of the {rows} rows")
    return list(names)


def _row_noise(call: _Call, index: int, rows: int) -> GumbelNoise:
    seed = call.config.seed
    prompt, sample = divmod(index, call.samples)
    if call.sample_numbers is not None:
        sample = call.sample_numbers[index]
    if isinstance(seed, list):
        if len(seed) * call.samples != rows:
            raise refuse("seed", seed, f"one seed or one for each of the {rows // call.samples} prompts")
        return GumbelNoise(seed[prompt], sample)
    assert seed is not None
    return GumbelNoise(seed, sample)


def _continued(model: Any, call: _Call, rows: list[Row], identity: CacheIdentity) -> MarginGateCache | None:
    """The caller's cache cut back to what the prompts share with it, or `None` where none was passed."""
    cache = call.cache
    if cache is None:
        return None
    if cache.rows != len(rows):
        raise refuse("cache", f"MarginGateCache of {cache.rows} rows", f"this call has {len(rows)}")
    if call.config.coverage == "gated":
        raise refuse("cache", "MarginGateCache", 'with coverage="gated" columns are not exact; leave it out')
    if cache.kv_planes != call.config.kv_planes:
        raise refuse("cache", f"MarginGateCache of {cache.kv_planes} planes", f"`kv_planes` is {call.config.kv_planes}")
    different = None if cache.identity is None else cache.identity.mismatch(identity)
    if cache.identity is None or different:
        raise refuse("cache", "MarginGateCache", f"it was computed with {different or 'nothing known'}; leave it out")
    for row in rows:
        # The last prompt token is always read again: its logits are needed.
        row.reused = min(cache.common_prefix(row.index, row.prompt), len(row.prompt) - 1)
        if cache.long_rows[row.index] != architecture_of(model).needs_long_table(len(row.prompt) + row.limit):
            row.reused = 0  # its keys are rotated by the other table
        if cache.adapters[row.index] != row.adapter:
            row.reused = 0
        cache.rollback(row.index, row.reused)
    return cache


def _call_of(generation_config: GenerationConfig) -> _Call | None:
    return getattr(generation_config, "_margin_gate_call", None)


def _ids_of(tensor: torch.Tensor | None) -> frozenset[int]:
    return frozenset() if tensor is None else frozenset(tensor.flatten().tolist())


def _special_ids(config: GenerationConfig) -> set[int]:
    """Ids that may be padding where no mask tells: pad where it is also an eos, eos where no pad is set."""
    eos, pad = _ids_of(config._eos_token_tensor), _ids_of(config._pad_token_tensor)
    return set(pad & eos)


def _custom_criteria(criteria: StoppingCriteriaList, config: GenerationConfig) -> StoppingCriteriaList:
    """What is left when the loop's own length and EOS rules are taken out."""
    return StoppingCriteriaList(
        item
        for item in criteria
        if not isinstance(item, EosTokenCriteria)
        and not (isinstance(item, MaxLengthCriteria) and item.max_length == config.max_length)
    )


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
