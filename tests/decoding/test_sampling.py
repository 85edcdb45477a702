"""Seeded sampling: independent of the batch, the right distribution, n different samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwise import assert_same, padded, run_batch
from fault_injection import disturbed_drafts
from margingate_hf import MarginGateConfig
from margingate_hf.decoding.gumbel import GumbelNoise, mix
from tiny import random_prompts

PROMPTS = random_prompts([7, 19, 4])
WARPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5, "temperature": 3.0},
    "top_p": {"top_p": 0.8, "top_k": 0, "temperature": 2.0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "penalty": {"repetition_penalty": 1.3, "temperature": 2.0},
}


def test_splitmix64_reference_values() -> None:
    """The first outputs of SplitMix64 seeded with 0 and with 1234567 (published test values)."""
    gamma = 0x9E3779B97F4A7C15
    assert mix(gamma) == 0xE220A8397B1DCDAF
    assert mix(2 * gamma) == 0x6E789E6AA1B965F4
    assert mix(1234567 + gamma) == 6457827717110365317


@given(st.integers(0, 2**63 - 1), st.integers(0, 5), st.integers(0, 4000))
@settings(max_examples=50, deadline=None)
def test_noise_is_the_stream_of_its_key(seed: int, sample: int, position: int) -> None:
    """The tensor form equals SplitMix64 in Python integers, token by token, and does not depend on the vocabulary."""
    noise = GumbelNoise(seed, sample)
    values = noise(position, 300)
    assert torch.equal(noise(position, 37), values[:37])
    for token in (0, 1, 36, 299):
        bits = mix(noise.key(position) + (token + 1) * 0x9E3779B97F4A7C15) >> 11
        expected = -math.log(-math.log((bits + 0.5) * 2.0**-53))
        assert abs(float(values[token]) - expected) <= 1e-6 * max(1.0, abs(expected))


def test_noise_is_gumbel() -> None:
    """Mean is Euler's constant, variance pi^2/6; five standard errors are allowed."""
    values = torch.cat([GumbelNoise(seed)(position, 5000) for seed in range(4) for position in range(10)]).double()
    error = math.sqrt(math.pi**2 / 6 / values.numel())
    assert abs(values.mean() - 0.5772156649) < 5 * error
    assert abs(values.var() - math.pi**2 / 6) < 5 * 2.1 * math.pi**2 / 6 / math.sqrt(values.numel())
    streams = [GumbelNoise(1), GumbelNoise(2), GumbelNoise(1, sample=1)]
    drawn = torch.stack([stream(position, 5000).double() for stream in streams for position in (0, 1, 2)])
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlation.abs().max() < 5 / math.sqrt(5000), "seeds, samples or positions share noise"


@pytest.mark.parametrize("name", WARPERS)
def test_a_sampled_text_does_not_depend_on_its_batch(llama: Any, name: str) -> None:
    arguments = {"do_sample": True, **WARPERS[name]}
    config = MarginGateConfig(seed=11, num_draft_tokens=7, schedule="fixed")
    together = run_batch(llama, PROMPTS, 12, config, **arguments)
    backwards = run_batch(llama, PROMPTS[::-1], 12, config.update(num_draft_tokens=2), side="right", **arguments)[::-1]
    with disturbed_drafts(llama, lambda position: position % 3 == 0):
        disturbed = run_batch(llama, PROMPTS, 12, config, **arguments)
    for prompt, run, other, third in zip(PROMPTS, together, backwards, disturbed, strict=True):
        assert_same(run, run_batch(llama, [prompt], 12, config.update(threshold=0), **arguments)[0], name)
        assert_same(run, other, name)
        assert_same(run, third, name)
    assert together[0].tokens != run_batch(llama, PROMPTS[:1], 12)[0].tokens, "no noise: a weak test"


def test_seeds(llama: Any) -> None:
    def sample(seed: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        return [run.tokens for run in run_batch(llama, prompts, 8, MarginGateConfig(seed=seed), do_sample=True)]

    assert sample(1) == sample(1) != sample(2)
    assert sample([5, 6, 7])[1] == sample(6)[1]
    twice = sample([3, 4], [PROMPTS[0], PROMPTS[0]])
    assert twice[0] != twice[1]


def test_n_samples_of_a_prompt(llama: Any) -> None:
    arguments = dict(max_new_tokens=8, do_sample=True, temperature=2.0, return_dict_in_generate=True)
    config = MarginGateConfig(seed=4)
    out = llama.generate(**padded(PROMPTS), num_return_sequences=3, margin_gate=config, **arguments)
    assert out.sequences.shape[0] == 9
    new = out.sequences[:, 19:].tolist()
    for row in range(3):
        assert len({tuple(text) for text in new[3 * row : 3 * row + 3]}) == 3
    alone = llama.generate(**padded(PROMPTS[1:2]), num_return_sequences=2, margin_gate=config, **arguments)
    assert alone.sequences[:, 19:].tolist() == new[3:5]
    single = llama.generate(**padded(PROMPTS[2:]), margin_gate=config, **arguments)
    assert single.sequences[0, 4:].tolist() == new[6]


def test_the_distribution_is_that_of_stock_sampling(llama: Any) -> None:
    """
    Chi-square of 3000 first tokens against the warped softmax; 0.9999 quantile, so a fair sampler fails 1 in 10^4.
    """
    prompt = PROMPTS[0]
    count = 3000
    arguments = dict(max_new_tokens=1, do_sample=True, temperature=4.0, top_k=12, return_dict_in_generate=True)
    config = MarginGateConfig(seed=list(range(count // 100)))
    batch = padded([prompt] * (count // 100))
    out = llama.generate(**batch, num_return_sequences=100, margin_gate=config, output_scores=True, **arguments)
    probabilities = out.scores[0][0].double().softmax(-1)
    tokens = out.sequences[:, -1]
    assert (probabilities > 0).sum() == 12
    kept = probabilities * count >= 5
    observed = torch.bincount(tokens, minlength=probabilities.numel())[kept].double()
    expected = probabilities[kept] * count
    assert observed.sum() >= 0.97 * count
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    # Wilson-Hilferty: the 0.9999 quantile of chi-square with `freedom` degrees.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"{statistic:.1f} >= {limit:.1f}"


def test_margins_are_those_of_the_perturbed_scores(llama: Any) -> None:
    config = MarginGateConfig(seed=2)
    arguments = dict(max_new_tokens=4, do_sample=True, margin_gate=config, return_dict_in_generate=True)
    out = llama.generate(**padded(PROMPTS[:1]), output_scores=True, **arguments)
    for step, (scores, margin) in enumerate(zip(out.scores, out.margin_gate.rows[0].margins, strict=True)):
        best = (scores[0] + GumbelNoise(2)(7 + step, 257)).topk(2)
        assert int(best.indices[0]) == int(out.sequences[0, 7 + step])
        assert float(best.values[0] - best.values[1]) == margin


def test_no_seed_no_sampling(llama: Any) -> None:
    with pytest.raises(ValueError, match="`do_sample`=True.*seed"):
        llama.generate(**padded(PROMPTS), do_sample=True, max_new_tokens=2, margin_gate=True)
