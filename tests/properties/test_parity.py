"""Parity with stock transformers: on FP32 models the gate's output equals stock `generate`'s, up to the first near-tie.

FP32 stock and the verifier differ by rounding alone, so up to the first step whose stock margin is under 1e-3 every
token, flag and length must agree: processors, criteria, output flags.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, TextIteratorStreamer, TextStreamer

from bitwise import padded
from margingate_hf import enable
from tiny import random_prompts, tiny_model

NEAR_TIE = 1e-3
NEW_TOKENS = 14
PROMPTS = random_prompts([9, 30, 2])
ARCHITECTURES = ["llama", "qwen3", "mistral", "gpt2", "gemma2", "mixtral"]


@functools.cache
def model_of(name: str) -> Any:
    return enable(tiny_model(name, dtype=torch.float32))


class AtLength(StoppingCriteria):
    """Stops when the text has one of these lengths."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] in (16, 38, 11))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[token] for token in range(20, 100)]},
    "min_new_tokens": {"min_new_tokens": 10, "eos_token_id": list(range(2, 60))},
    "min_length": {"min_length": 20, "eos_token_id": list(range(2, 60))},
    "suppress": {"suppress_tokens": list(range(3, 90))},
    "begin_suppress": {"begin_suppress_tokens": list(range(3, 200))},
    "forced_bos": {"forced_bos_token_id": 17},
    "forced_eos": {"forced_eos_token_id": 2},
    "sequence_bias": {"sequence_bias": [[[17], 6.0], [[40, 41], 4.0]]},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(30, 120))},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.4)},
    "remove_invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True},
    "eos_list": {"eos_token_id": list(range(2, 60))},
    "max_length": {"max_new_tokens": None, "max_length": 37},
    "criterion": {"stopping_criteria": [AtLength()]},
    "encoder_repetition": {"encoder_repetition_penalty": 1.4},
    "encoder_ngram": {"encoder_no_repeat_ngram_size": 1},
}


def both(name: str, prompts: list[list[int]], **arguments: Any) -> tuple[Any, Any]:
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **arguments}
    flags = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    model = model_of(name)
    return tuple(model.generate(**padded(prompts), **flags, margin_gate=gate, **arguments) for gate in (None, True))


def check(stock: Any, ours: Any, width: int, row: int = 0) -> int:
    """Compares a row up to its first near-tie; returns how many steps were compared."""
    for step, scores in enumerate(stock.scores):
        best = scores[row].topk(2).values
        if not best[0] - best[1] >= NEAR_TIE:
            return step
        assert step < len(ours.scores), f"stock goes on at step {step}"
        assert stock.sequences[row, width + step] == ours.sequences[row, width + step], f"step {step}"
        if stock.sequences[row, width + step] == 0:
            return step  # a finished row; what stock computes behind its end means nothing
        for name in ("scores", "logits"):
            mine, theirs = getattr(ours, name)[step][row], getattr(stock, name)[step][row]
            finite = theirs.isfinite()
            assert torch.equal(finite, mine.isfinite()), f"{name} at step {step}"
            assert (mine - theirs)[finite].norm() <= 1e-2 * theirs[finite].norm(), f"{name} at step {step}"
    assert len(ours.scores) == len(stock.scores)
    return len(stock.scores)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_one_row(name: str, case: str) -> None:
    compared = 0
    for prompt in PROMPTS:
        stock, ours = both(name, [prompt], **CASES[case])
        compared += check(stock, ours, len(prompt))
    assert compared >= 10, "hardly a step was compared"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_padded_batch(name: str) -> None:
    stock, ours = both(name, PROMPTS)
    assert stock.sequences.shape == ours.sequences.shape
    assert [step.shape for step in stock.logits] == [step.shape for step in ours.logits]
    assert sum(check(stock, ours, 30, row) for row in range(3)) >= 20


@pytest.mark.smollm2
def test_stop_strings_and_time(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    texts = ["The capital of France is", "Once upon a time there was", "Water boils at"]
    arguments = dict(max_new_tokens=20, do_sample=False, margin_gate=True, tokenizer=tokenizer, stop_strings=[".", ","])
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    together = model.generate(**batch, **arguments)
    ends = tokenizer.batch_decode(together[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    for text, end in zip(texts, ends, strict=True):
        one = tokenizer([text], return_tensors="pt")
        alone = model.generate(**one, **arguments)[0, one.input_ids.shape[1] :]
        assert tokenizer.decode(alone, skip_special_tokens=True) == end
        assert len(alone) == 20 or end[-1] in ".," or "." in end[-3:] or "," in end[-3:]
    timed = model.generate(**batch, max_new_tokens=200, do_sample=False, margin_gate=True, max_time=0.01)
    assert timed.shape[1] == batch.input_ids.shape[1] + 1, "time is up after the first token"


@pytest.mark.smollm2
def test_streamers(smollm2: tuple[Any, Any], capsys: pytest.CaptureFixture) -> None:
    model, tokenizer = smollm2
    one = tokenizer(["The sea is"], return_tensors="pt")
    arguments = dict(max_new_tokens=8, do_sample=False, margin_gate=True)
    expected = tokenizer.decode(model.generate(**one, **arguments)[0, one.input_ids.shape[1] :])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    model.generate(**one, **arguments, streamer=streamer)
    assert "".join(streamer) == expected
    model.generate(**one, **arguments, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == expected.strip()
