"""The lm-eval-harness model type `margingate-hf`: scores that do not move with the batch size."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import hash_string
from tqdm.auto import tqdm

from ..config import MarginGateConfig
from ..decoding.checks import check_gate
from ..enabling import enable
from ..engine import MarginGateEngine, MarginGateGenerationOutput
from ..verifier import verifier_for
from ..version import __version__
from .scoring import score_continuations

logger = logging.getLogger(__name__)

DEFAULT_ROWS = 8  # for `--batch_size auto`, which has nothing to find out here
COUNTS = (
    "new_tokens",
    "drafted_tokens",
    "low_margin_steps",
    "flips",
    "wasted_tokens",
    "verified_tokens",
    "verify_forwards",
    "draft_steps",
    "prefill_tokens",
    "reused_tokens",
)
SECONDS = ("prefill_seconds", "decode_seconds", "verify_seconds")


class StopStrings:
    """
    Whether a row's own output holds a stop string; asked after every token, as for a batch of one.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): special tokens are part of what is searched.
        strings (`Sequence[str]`): stops.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]):
        self.tokenizer = tokenizer
        self.strings = [string for string in strings if string]
        # A stop string may begin in the middle of a token and end in the middle of another.
        lengths = [len(tokenizer.encode(string, add_special_tokens=False)) for string in self.strings]
        self.window = max(lengths, default=0) + 2

    def __call__(self, prompt: Sequence[int], generated: Sequence[int]) -> bool:
        """
        Args:
            prompt, generated (`Sequence[int]`): token ids of the row.
        """
        text = self.tokenizer.decode(list(generated[-self.window :]), skip_special_tokens=False)
        return any(string in text for string in self.strings)


class MarginGateLM(HFLM):
    """
    `hf` with the gate: every output and every log-probability is that of the prompt alone.

    Args:
        pretrained (`str` or `PreTrainedModel`): as for `hf`.
        preset (`str`, *optional*): see [`MarginGateConfig.preset`]; fields given beside it replace its own.
        gate_log (`str`, *optional*): a file that takes one JSON line a generated sample, keyed by lm-eval's
            `prompt_hash`.
        prefix_bytes (`int`, *optional*): see [`MarginGateEngine`].
        kwargs: fields of [`MarginGateConfig`]; everything else goes to `HFLM`.

    Raises:
        `ValueError`, `TypeError`: an unknown preset or a bad field, an encoder-decoder, `--use_cache`.
    """

    def __init__(
        self,
        pretrained: Any,
        preset: str | None = None,
        gate_log: str | None = None,
        prefix_bytes: int | None = None,
        **kwargs: Any,
    ):
        names = {field.name for field in dataclasses.fields(MarginGateConfig)}
        chosen = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        self.preset = preset or "exact"
        base = MarginGateConfig.preset(self.preset)
        if base is None:
            raise ValueError('`preset`="off" is plain decoding; use `--model hf`.')
        self.gate = base.update(**chosen)
        self._gate_log = Path(gate_log) if gate_log else None
        super().__init__(pretrained=pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"`pretrained`={self.pretrained!r} is an encoder-decoder; margingate-hf needs a decoder-only model."
            )
        self.model.eval()
        enable(self.model)
        check_gate(self.model, self.gate)
        rows = DEFAULT_ROWS if self.batch_size == "auto" else int(self.batch_size)
        self.engine = MarginGateEngine(self.model, self.gate, max_batch_size=rows, prefix_bytes=prefix_bytes)
        self._own: dict[str, float] = dict.fromkeys((*COUNTS, *SECONDS), 0)
        self.counts: dict[str, float] = dict.fromkeys((*COUNTS, "scored_tokens", *SECONDS), 0)
        self.notes: list[str] = []

    def set_cache_hook(self, cache_hook: Any) -> None:
        """
        Refuses `--use_cache`: lm-eval keys it by the request alone, so another setting would get these answers.
        """
        if getattr(cache_hook, "dbdict", None) is not None:
            raise ValueError(
                "`use_cache` is keyed by the request alone, not by model and settings; leave it out "
                "(a shared beginning is reused anyway)."
            )
        super().set_cache_hook(cache_hook)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """
        Continues each request to its own first stop.

        Args:
            requests (`list[Instance]`): `(context, gen_kwargs)` each; at most `batch_size` are decoded at once.

        Returns:
            One output a request, post-processed as `hf` does.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        texts: dict[int, str] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests")
        with bar:
            for members in groups.values():
                part = [requests[index].args for index in members]
                for place, text in self._generate_group(part):
                    texts[members[place]] = text
                    bar.update(1)
        self._add_up()
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def _generate_group(self, part: Sequence[tuple[str, dict]]) -> Any:
        """Requests of the same settings; yields `(place, text)` as they finish."""
        settings = normalize_gen_kwargs(dict(part[0][1]), self.max_gen_toks)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(settings.pop("until", None), eos=eos)
        new_tokens = settings.pop("max_gen_toks")
        if "max_length" in settings:
            logger.warning("`max_length` in generation kwargs is not used; give `max_gen_toks`.")
            settings.pop("max_length")
        if not settings.get("do_sample"):
            settings = {name: value for name, value in settings.items() if name != "temperature"}
        room = self.max_length - new_tokens
        if room < 1:
            raise ValueError(
                f"`max_gen_toks` must be less than the model's length {self.max_length}, got {new_tokens}."
            )
        prompts = [self._encode(context, room) for context, _ in part]
        running = self.engine.iterate(
            prompts,
            stop=StopStrings(self.tokenizer, until),
            sample_numbers=_occurrences(prompts),
            max_new_tokens=new_tokens,
            **settings,
        )
        for output in running:
            place = int(output.request_id.removeprefix("req_"))
            if output.error is not None:
                raise RuntimeError(f"request {place} failed: {output.error}")
            self._log(part[place][0], output, settings)
            yield place, self._text(output.generated_tokens, until)
        self._count()

    def _encode(self, context: str, room: int) -> list[int]:
        """A context as `hf` encodes it alone: with BOS where the tokenizer adds one, cut on the left."""
        ids, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        tokens: list[int] = ids[0].tolist()
        return tokens

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """The text of new tokens after thinking and before the first stop, as `hf` gives it."""
        thinking = self.think_end_token
        if isinstance(thinking, int) and thinking in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(thinking) :]
        text = self.tok_decode(tokens)
        text = text.lstrip() if isinstance(thinking, int) else text
        cut: str = postprocess_generated_text(text, until, thinking if isinstance(thinking, str) else None)
        return cut

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """
        Canonical log-probabilities.

        Args:
            requests: `((context, continuation), context ids, continuation ids)` each.

        Returns:
            `(sum of log-probabilities, is the continuation greedy)` each.
        """
        pairs = []
        for _, context, continuation in requests:
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            pairs.append((tokens[: -len(continuation)], list(continuation)))
        bar = tqdm(total=len(pairs), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        prefixes = self.engine.prefixes if self.engine.prefixes.budget else None
        with bar:
            scores = score_continuations(
                self.model,
                verifier_for(self.model, self.gate),
                pairs,
                self.gate.kv_dtype,
                self.engine.max_batch_size,
                prefixes,
                bar.update,
            )
        self.counts["scored_tokens"] += sum(len(continuation) for _, continuation in pairs)
        for (names, *_), score in zip(requests, scores, strict=True):
            if names is not None:
                self.cache_hook.add_partial("loglikelihood", names, (score.logprob, score.greedy))
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """As `hf`, with a number of windows at a time where the batch size is `auto`."""
        before = self.batch_size_per_gpu  # type: ignore[has-type]
        self.batch_size_per_gpu = self.engine.max_batch_size
        try:
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = before
        return found

    def _log(self, context: str, output: MarginGateGenerationOutput, settings: dict[str, Any]) -> None:
        if self._gate_log is None:
            return
        record = {
            "prompt_hash": hash_string(context),
            "new_tokens": len(output.generated_tokens),
            "flips": output.flips,
            "reused_tokens": output.reused_tokens,
            "smallest_margin": min(output.margins, default=None),
        }
        if output.receipt is not None:  # then the line is a transcript that `margingate replay` reads
            record["prompt_ids"], record["output_ids"] = output.prompt_ids, output.generated_tokens
            record["receipt"], record["arguments"] = output.receipt, settings
        with self._gate_log.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _count(self) -> None:
        """Takes up the statistics of one run of the engine."""
        for name in self._own:
            self._own[name] += getattr(self.engine.statistics, name)
        self.notes = sorted({*self.notes, *self.engine.statistics.notes})

    def _add_up(self) -> None:
        """
        Adds what this process counted, summed over the processes of `accelerate launch`. Every process calls this.
        """
        values = torch.tensor([float(value) for value in self._own.values()], dtype=torch.float64)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(values)
        for name, value in zip(self._own, values.tolist(), strict=True):
            self.counts[name] += value
            self._own[name] = 0

    def get_model_info(self) -> dict[str, Any]:
        """`hf`'s own, and under `margingate` the settings and what the gate did; part of the results file."""
        counts = {name: round(value, 3) if name in SECONDS else int(value) for name, value in self.counts.items()}
        compared = counts["drafted_tokens"] - counts["wasted_tokens"]
        rates = {
            "trigger_rate": counts["low_margin_steps"] / counts["drafted_tokens"] if counts["drafted_tokens"] else 0.0,
            "flip_rate": counts["flips"] / compared if compared else 0.0,
        }
        work = sum(counts[name] for name in ("prefill_seconds", "decode_seconds", "verify_seconds"))
        rates["verify_share"] = counts["verify_seconds"] / work if work else 0.0
        plan = f"{verifier_for(self.model, self.gate).name}/kv-{self.gate.kv_dtype}"
        about = {
            "version": __version__,
            "preset": self.preset,
            **self.gate.to_dict(),
            "plan": plan,
            "notes": self.notes,
        }
        return {**super().get_model_info(), "margingate": {**about, **rates, **counts}}


def _occurrences(prompts: Sequence[Sequence[int]]) -> list[int]:
    """How often each prompt was asked before: `repeats` of a task ask again, and each answer is another sample."""
    seen: Counter[tuple[int, ...]] = Counter()
    numbers = []
    for prompt in prompts:
        numbers.append(seen[tuple(prompt)])
        seen[tuple(prompt)] += 1
    return numbers
