"""A cache from an earlier call: exact continuation, the longest common prefix, refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitwise import padded, run_batch
from margingate_hf import MarginGateCache, MarginGateConfig, enable
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([7, 150, 4])
TURNS = random_prompts([5, 3, 9], seed=8)


def call(model: Any, prompts: list[list[int]], cache: MarginGateCache | None = None, **arguments: Any) -> Any:
    arguments = {"max_new_tokens": 10, "margin_gate": MarginGateConfig(), **arguments}
    return model.generate(
        **padded(prompts), do_sample=False, cache=cache, return_dict_in_generate=True, output_logits=True, **arguments
    )


def texts(out: Any, prompts: list[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    rows = out.margin_gate.rows
    return [p + out.sequences[i, width : width + rows[i].new_tokens].tolist() for i, p in enumerate(prompts)]


def test_a_chat_goes_on_as_if_given_at_once(llama: Any) -> None:
    first = call(llama, PROMPTS)
    held = list(first.cache.verified)
    longer = [text + turn for text, turn in zip(texts(first, PROMPTS), TURNS, strict=True)]
    second = call(llama, longer, first.cache)
    assert second.cache is first.cache
    assert second.margin_gate.reused_tokens == sum(held)
    assert second.margin_gate.prefill_tokens == sum(map(len, longer)) - sum(held)
    second.cache.check()
    fresh = call(llama, longer)
    assert torch.equal(second.sequences, fresh.sequences)
    assert all(torch.equal(a, b) for a, b in zip(second.logits, fresh.logits, strict=True))
    for layer in range(3):
        for row in range(3):
            for a, b in zip(second.cache.committed(layer, row), fresh.cache.committed(layer, row), strict=True):
                assert torch.equal(a, b)


def test_only_the_common_prefix_is_kept(llama: Any) -> None:
    first = call(llama, PROMPTS)
    edited = [PROMPTS[0][:5] + [9, 9], PROMPTS[1][:100] + TURNS[1], TURNS[2]]
    second = call(llama, edited, first.cache)
    assert second.margin_gate.reused_tokens == 5 + 100 + 0
    for run, prompt in zip(texts(second, edited), edited, strict=True):
        assert run == prompt + run_batch(llama, [prompt], 10)[0].tokens


def test_the_same_prompt_again_reads_one_token(llama: Any) -> None:
    first = call(llama, PROMPTS)
    second = call(llama, PROMPTS, first.cache)
    assert second.margin_gate.prefill_tokens == 3
    assert torch.equal(first.sequences, second.sequences)


def test_sampling_goes_on_as_well(llama: Any) -> None:
    arguments = dict(do_sample=True, margin_gate=MarginGateConfig(seed=3), max_new_tokens=6)
    first = llama.generate(**padded(PROMPTS), return_dict_in_generate=True, **arguments)
    longer = [text + turn for text, turn in zip(texts(first, PROMPTS), TURNS, strict=True)]
    second = llama.generate(**padded(longer), cache=first.cache, **arguments)
    assert torch.equal(second, llama.generate(**padded(longer), **arguments))


def test_refusals_name_what_differs(llama: Any) -> None:
    first = call(llama, PROMPTS)
    before = list(first.cache.verified)
    with pytest.raises(ValueError, match="`cache`='MarginGateCache of 3 rows'.*has 2"):
        call(llama, PROMPTS[:2], first.cache)
    with pytest.raises(ValueError, match="kv_dtype='split'.*asks for 'float32'"):
        call(llama, PROMPTS, first.cache, margin_gate=MarginGateConfig(kv_dtype="float32"))
    llama.lm_head.weight.data[0] += 1
    with pytest.raises(ValueError, match="computed with weights"):
        call(llama, PROMPTS, first.cache)
    llama.lm_head.weight.data[0] -= 1
    other = enable(tiny_model("llama", seed=1))
    with pytest.raises(ValueError, match="computed with weights"):
        call(other, PROMPTS, first.cache)
    with pytest.raises(ValueError, match="nothing known"):
        call(llama, PROMPTS, MarginGateCache(3, 3, torch.bfloat16))
    assert first.cache.verified == before, "a refused call changes nothing"
    first.cache.check()


def test_an_error_leaves_the_cache_in_order(llama: Any) -> None:
    first = call(llama, PROMPTS)
    longer = [text + turn for text, turn in zip(texts(first, PROMPTS), TURNS, strict=True)]

    def broken(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] > len(longer[2]) + 4:
            raise RuntimeError("from a callback")
        return torch.tensor([ids.shape[1] == len(longer[0]) + 2])

    with pytest.raises(RuntimeError, match="from a callback"):
        call(llama, longer, first.cache, stopping_criteria=[broken])
    first.cache.check()
    assert first.cache.lengths == first.cache.verified
    for row, text in enumerate(longer):
        held = first.cache.tokens[row]
        assert held[: len(text)] == text[: len(held)], "rows are in the caller's order"
    assert torch.equal(call(llama, longer, first.cache).sequences, call(llama, longer).sequences)
