"""The one road from a call of `generate` to a [`DecodeRequest`], and the one place that calls transformers' private
methods: the call's arguments are read by transformers itself, then every row gets what it would have alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..config import MarginGateConfig
from ..errors import refuse
from ..forward.adapters import row_adapters
from ..forward.architecture import architecture_of, vocabulary_of
from ..forward.devices import execution_device
from .checks import check_call, check_gate, check_generation_config, check_length, check_model, check_processors
from .gumbel import GumbelNoise
from .padding import as_prompts, unpadded
from .processors import keeps_state, row_copies
from .request import DecodeRequest
from .rows import RowRequest


@dataclass(frozen=True)
class PreparedCall:
    """
    Attributes:
        request: what is decoded.
        config: the call's generation config, the model's defaults filled in.
        input_ids: the padded batch as it came, `[rows, length]`, one row a sample; `None` where prompts were lists.
    """

    request: DecodeRequest
    config: GenerationConfig
    input_ids: torch.Tensor | None = None

    @property
    def pad(self) -> int:
        """The id behind the end of a row: pad, else the first eos, else 0."""
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad.flatten()[0])


@dataclass(frozen=True)
class _Limits:
    """How long rows may and must become; `max_length` and `min_length` count a row's own tokens, not its padding."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int

    def most(self, row: int, prompt: int) -> int:
        """New tokens that a row with a prompt of so many may have."""
        if self.max_new_tokens is not None:
            name, value, most = "max_new_tokens", self.max_new_tokens, self.max_new_tokens
        else:
            assert self.max_length is not None
            name, value, most = "max_length", self.max_length, self.max_length - prompt
        if most < 1:
            raise refuse(name, value, f"row {row} has {prompt} tokens and needs room for at least one more")
        return most

    def least(self, prompt: int) -> int:
        """Tokens that a row with a prompt of so many must reach."""
        return self.min_length if self.min_new_tokens is None else prompt + self.min_new_tokens


def prepare(
    model: Any,
    inputs: Any,
    gate: MarginGateConfig,
    generation_config: GenerationConfig | None = None,
    *,
    sample_numbers: Sequence[int] | None = None,
    stop: Callable[[list[int], list[int]], bool] | None = None,
    **arguments: Any,
) -> PreparedCall:
    """
    Everything that happens before a token is decoded: checks, processors, stopping criteria and limits of each row.

    Args:
        model (`PreTrainedModel`): the model.
        inputs: a padded batch `[rows, length]` with its `attention_mask` among the arguments, or what
            [`~margingate_hf.decoding.padding.as_prompts`] takes. `None`: one row that begins with BOS.
        gate ([`MarginGateConfig`]): settings of the gate.
        generation_config ([`~transformers.GenerationConfig`], *optional*): of the call.
        sample_numbers (`Sequence[int]`, *optional*): which sample of its prompt each row is, where one prompt is given
            several times.
        stop (`Callable`, *optional*): see [`DecodeRequest`].
        arguments: any other argument of `generate`.

    Raises:
        `ValueError`, `TypeError`, `NotImplementedError`: an argument the gate cannot honour, named.
    """
    padded = inputs is None or isinstance(inputs, torch.Tensor)
    check_model(model)
    if not padded:
        _check_no_batch(arguments)
    check_gate(model, gate)
    check_call(model, arguments, len(inputs) if padded and inputs is not None else None)
    own = {name: arguments.pop(name, None) for name in OWN}
    for name in DROPPED:
        arguments.pop(name, None)
    mode = model._extract_generation_mode_kwargs(None, arguments, own["synced_gpus"], None, own["streamer"])
    if mode.get("synced_gpus"):
        raise refuse("synced_gpus", True, "ranks would run different numbers of forwards and dead-lock")
    mask = arguments.get("attention_mask")
    limited = _is_limited(model, generation_config, arguments)
    config, model_arguments = model._prepare_generation_config(generation_config, **arguments)
    check_generation_config(config, gate, _asked_cache(generation_config, arguments))
    samples = config.num_return_sequences or 1
    if own["streamer"] is not None and samples > 1:
        raise refuse("streamer", "given", f"streamers take one row, and `num_return_sequences` is {samples}")
    model._validate_model_kwargs(dict(model_arguments))
    input_ids = None
    if padded:
        input_ids = model._maybe_initialize_input_ids_for_generation(inputs, config.bos_token_id, model_arguments)
        inputs = _read_padded(input_ids, mask, config)
        input_ids = input_ids.repeat_interleave(samples, dim=0)
    prompts = as_prompts(inputs, vocabulary_of(model))
    limits = _limits(config, limited)
    check_processors(own["logits_processor"] or [])
    prompts = [prompt for prompt in prompts for _ in range(samples)]
    reader = _RowReader(model, gate, config, limits, own, len(prompts), samples, sample_numbers)
    wants = bool(config.return_dict_in_generate)
    request = DecodeRequest(
        gate=gate,
        rows=tuple(reader.row(index, prompt) for index, prompt in enumerate(prompts)),
        eos=_ids(config.eos_token_id),
        criteria=_criteria(model, config, own["stopping_criteria"], mode.get("tokenizer")),
        stop=stop,
        keep_logits=bool(config.output_logits) and wants,
        keep_scores=bool(config.output_scores) and wants,
        on_commit=None if own["streamer"] is None else _streaming(own["streamer"]),
    )
    return PreparedCall(request, config, input_ids)


# Parameters of `generate` that are neither entries of a generation config nor inputs of the model.
OWN = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "synced_gpus")
# Those that `check_call` has refused unless they are `None`, or that mean nothing here.
DROPPED = (
    "input_ids assistant_model negative_prompt_ids negative_prompt_attention_mask custom_generate trust_remote_code "
    "past_key_values cache_params cache"
).split()


def _check_no_batch(arguments: dict[str, Any]) -> None:
    """Refuses what is about one padded batch beside lists of ids."""
    for name in ("input_ids", "attention_mask", "cache", "past_key_values", "streamer"):
        if arguments.get(name) is not None:
            raise refuse(name, "given", "it belongs to one padded batch; `inputs` are lists of token ids")


def _streaming(streamer: Any) -> Callable[[int, int], None]:
    return lambda _, token: streamer.put(torch.tensor([token]))


def _asked_cache(generation_config: GenerationConfig | None, arguments: dict[str, Any]) -> Any:
    """The cache format that the call itself asks for; a checkpoint's own choice has no meaning here."""
    return arguments.get("cache_implementation", getattr(generation_config, "cache_implementation", None))


def _is_limited(model: Any, generation_config: GenerationConfig | None, arguments: dict[str, Any]) -> bool:
    """Whether anybody has set `max_length`; transformers' own default counts new tokens."""
    places = (
        arguments.get("max_length"),
        getattr(generation_config, "max_length", None),
        model.generation_config.max_length,
    )
    return any(value is not None for value in places)


def _limits(config: GenerationConfig, limited: bool) -> _Limits:
    longest = config.max_new_tokens
    if longest is None and config.max_length is None:
        raise refuse("max_length", None, "a row needs a limit; pass `max_new_tokens`")
    if longest is None and not limited:
        longest = config.max_length
        warnings.warn(
            f"Neither `max_new_tokens` nor `max_length` is set, so at most {longest} new tokens are generated. "
            "Pass `max_new_tokens`.",
            UserWarning,
            stacklevel=2,
        )
    return _Limits(longest, config.max_length, config.min_new_tokens, config.min_length or 0)


def _ids(value: Any) -> frozenset[int]:
    """Token ids of a config's entry: one, several, a tensor or none."""
    if value is None:
        return frozenset()
    return frozenset(torch.as_tensor(value).flatten().tolist())


def _read_padded(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, config: GenerationConfig
) -> list[list[int]]:
    """Prompts of a padded batch `[rows, length]`; without a mask transformers infers one, where pad is no eos."""
    if input_ids.dim() != 2:
        raise refuse("input_ids", tuple(input_ids.shape), "it must be of shape [rows, length]", TypeError)
    eos = _ids(config.eos_token_id)
    pad = _ids(config.pad_token_id) or frozenset(list(eos)[:1])
    if attention_mask is None and config.pad_token_id is not None and not pad & eos:
        held = input_ids.ne(next(iter(pad)))
        attention_mask = None if held.all() else held.long()
    if attention_mask is not None and attention_mask.dim() != 2:
        raise refuse("attention_mask", tuple(attention_mask.shape), f"it must be {tuple(input_ids.shape)}")
    return unpadded(input_ids, attention_mask, pad & eos)


def _criteria(model: Any, config: GenerationConfig, own: Any, tokenizer: Any) -> StoppingCriteriaList:
    """Stopping criteria of the call, without those that the loop has itself: length and EOS."""
    bare = copy.copy(config)
    bare.max_length, bare._eos_token_tensor = None, None
    found: StoppingCriteriaList = model._get_stopping_criteria(
        generation_config=bare, stopping_criteria=own or StoppingCriteriaList(), tokenizer=tokenizer
    )
    return found


class _RowReader:
    """Makes each row's request: what it would have alone and without padding."""

    def __init__(
        self,
        model: Any,
        gate: MarginGateConfig,
        config: GenerationConfig,
        limits: _Limits,
        own: dict[str, Any],
        count: int,
        samples: int,
        sample_numbers: Sequence[int] | None,
    ):
        self.model, self.gate, self.config, self.limits, self.own = model, gate, config, limits, own
        self.count, self.samples, self.sample_numbers = count, samples, sample_numbers
        self.architecture = architecture_of(model)
        self.device = execution_device(model)
        self.adapters = self._adapters()
        model._prepare_special_tokens(config, True, device=self.device, batch_size=count)

    def row(self, index: int, prompt: list[int]) -> RowRequest:
        """The request of a row."""
        limit = self.limits.most(index, len(prompt))
        processors = self._processors(index, prompt, limit)
        check_length(self.architecture, len(prompt) + limit, index, self.gate.coverage)
        noise = self._noise(index) if self.config.do_sample else None
        stateful = any(map(keeps_state, processors or ()))
        if stateful and self.gate.coverage == "gated":
            raise refuse("coverage", "gated", "a logits processor keeps a state, and steps are computed again")
        return RowRequest(index, prompt, limit, processors, noise, self.adapters[index], stateful)

    def _processors(self, index: int, prompt: list[int], limit: int) -> LogitsProcessorList | None:
        config = copy.copy(self.config)
        config.max_length = len(prompt) + limit
        config.min_length = self.limits.least(len(prompt))
        allowed = self.own["prefix_allowed_tokens_fn"]
        processors: LogitsProcessorList = self.model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([prompt], device=self.device),
            prefix_allowed_tokens_fn=None if allowed is None else lambda _, ids: allowed(index, ids),
            logits_processor=row_copies(self.own["logits_processor"] or []),
            device=self.device,
            model_kwargs={},
        )
        return processors if len(processors) else None

    def _adapters(self) -> list[str | None]:
        """Each row's own PEFT adapter, `None` where the call does not name them."""
        names = row_adapters(self.model)
        if names is None:
            return [None] * self.count
        if self.gate.coverage == "gated":
            raise refuse("adapter_names", names, 'it needs coverage="exact"; use one adapter for the batch')
        if len(names) * self.samples == self.count:
            names = [name for name in names for _ in range(self.samples)]
        if len(names) != self.count:
            raise refuse("adapter_names", names, f"one name for each of the {self.count} rows")
        return list(names)

    def _noise(self, index: int) -> GumbelNoise:
        seed = self.gate.seed
        prompt, sample = divmod(index, self.samples)
        if self.sample_numbers is not None:
            sample = self.sample_numbers[index]
        if isinstance(seed, list):
            if len(seed) * self.samples != self.count:
                raise refuse("seed", seed, f"one seed or one for each of the {self.count // self.samples} prompts")
            return GumbelNoise(seed[prompt], sample)
        assert seed is not None
        return GumbelNoise(seed, sample)
