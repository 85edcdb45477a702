"""Continuous batching and prefix reuse: each prompt's tokens and bits are those of the prompt alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.continuous_batching.requests import RequestStatus

from bitwise import canonical
from fault_injection import plain_verifier
from margingate_hf import MarginGateConfig, MarginGateEngine, enable
from margingate_hf.kv_cache.prefix_cache import PREFIX_BLOCK, PrefixCache, shared_blocks
from margingate_hf.verifier import verifier_for
from tiny import random_prompts, tiny_model

GATE = MarginGateConfig(schedule="fixed", num_draft_tokens=3)
NEW_TOKENS = 10
SHARED = random_prompts([70], seed=9)[0]
PROMPTS = [
    *random_prompts([5, 60, 2, 33, 21], seed=3),
    SHARED,
    SHARED[:64] + [7, 8, 9],
    SHARED[:40] + [11] * 30,
    SHARED + [5],
    SHARED[:33],
    [4],
]
POISON = 251  # a token whose prompt makes the processor below raise


class Raises(LogitsProcessor):
    """A processor that fails on one prompt and changes the scores of the others."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if int(input_ids[0, 0]) == POISON and input_ids.shape[1] > 6:
            raise RuntimeError("no more of this")
        scores[:, int(input_ids[0, -1])] -= 1.0
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    return enable(tiny_model("llama"))


@pytest.fixture(scope="module")
def alone(model: Any) -> list[tuple[list[int], list[float]]]:
    return [one(model, prompt) for prompt in PROMPTS]


def one(
    model: Any, prompt: list[int], gate: MarginGateConfig = GATE, **arguments: Any
) -> tuple[list[int], list[float]]:
    """Tokens and canonical margins, whose bits follow the logits', of a prompt alone."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "margin_gate": gate, **arguments},
        return_dict_in_generate=True,
    )
    row = out.margin_gate.rows[0]
    return out.sequences[0, len(prompt) :].tolist()[: row.new_tokens], row.margins


@pytest.mark.parametrize("order", ["longest", "arrival"])
@pytest.mark.parametrize(("max_batch_size", "chunk"), [(1, 32), (3, 32), (4, 100), (64, 256)])
def test_each_prompt_is_decoded_as_alone(model: Any, alone: list, order: str, max_batch_size: int, chunk: int) -> None:
    out = model.generate_batch(
        PROMPTS,
        margin_gate=GATE,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        order=order,
        max_batch_size=max_batch_size,
        chunk=chunk,
    )
    assert list(out) == [f"req_{index}" for index in range(len(PROMPTS))]
    for index, (tokens, margins) in enumerate(alone):
        found = out[f"req_{index}"]
        assert found.prompt_ids == PROMPTS[index] and found.status == RequestStatus.FINISHED and found.error is None
        assert found.generated_tokens == tokens, index
        assert found.margins == margins, f"prompt {index}: canonical logits differ"


def test_a_verifier_that_is_not_invariant_is_caught(model: Any) -> None:
    """The same comparison, with plain FP32 products in the verifier's place."""
    big = enable(tiny_model("llama", hidden_size=128, intermediate_size=512))
    with plain_verifier(big):
        expected = [one(big, prompt) for prompt in PROMPTS]
        out = big.generate_batch(
            PROMPTS, margin_gate=GATE, max_new_tokens=NEW_TOKENS, do_sample=False, max_batch_size=4
        )
    assert [out[f"req_{i}"].margins for i in range(len(PROMPTS))] != [margins for _, margins in expected]


@settings(max_examples=12, deadline=None)
@given(
    order=st.permutations(range(len(PROMPTS) + 1)),
    max_batch_size=st.integers(1, 6),
    chunk=st.integers(32, 90),
    cancelled=st.sets(st.integers(0, len(PROMPTS)), max_size=3),
    after=st.integers(0, 30),
    keeps=st.booleans(),
    later=st.booleans(),
)
def test_arrivals_cancellations_and_errors_touch_no_other_prompt(
    order: list[int], max_batch_size: int, chunk: int, cancelled: set[int], after: int, keeps: bool, later: bool
) -> None:
    model, expected = _with_processor()
    prompts = [*PROMPTS, [POISON, 5, 6]]
    budget = 1 << 28 if keeps else 0
    engine = MarginGateEngine(
        model, GATE, max_batch_size=max_batch_size, chunk=chunk, order="arrival", prefix_bytes=budget, reuse_later=later
    )
    running = engine.iterate(
        [prompts[index] for index in order],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([Raises()]),
    )
    seen = {}
    for count, output in enumerate(running):
        seen[output.request_id] = output
        if count == after // 3:
            for index in cancelled:
                engine.cancel(f"req_{order.index(index)}")
    assert len(seen) == len(prompts)
    for place, index in enumerate(order):
        output = seen[f"req_{place}"]
        if index == len(PROMPTS):
            assert index in cancelled or (output.status == RequestStatus.FAILED and "no more of this" in output.error)
        elif index in cancelled:
            assert output.generated_tokens == expected[index][0][: len(output.generated_tokens)]
        else:
            assert (output.generated_tokens, output.margins) == expected[index], index


_reference: list[Any] = []


def _with_processor() -> tuple[Any, list]:
    if not _reference:
        model = enable(tiny_model("llama"))
        processor = LogitsProcessorList([Raises()])
        _reference[:] = [model, [one(model, prompt, logits_processor=processor) for prompt in PROMPTS]]
    return _reference[0], _reference[1]


@pytest.mark.parametrize("name", ["gemma3-text", "deepseek-v3", "gpt2"])
def test_other_architectures(name: str) -> None:
    other = enable(tiny_model(name))
    out = other.generate_batch(PROMPTS, margin_gate=GATE, max_new_tokens=6, do_sample=False, max_batch_size=3, chunk=64)
    for index in (0, 5, 6, 8):
        expected = one(other, PROMPTS[index], max_new_tokens=6)
        assert (out[f"req_{index}"].generated_tokens, out[f"req_{index}"].margins) == expected
    assert sum(output.reused_tokens for output in out.values()) > 0


def test_a_shared_beginning_is_read_once_and_its_columns_are_the_same_bits(model: Any) -> None:
    engine = MarginGateEngine(model, GATE, max_batch_size=8)
    out = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    reused = [out[f"req_{index}"].reused_tokens for index in range(len(PROMPTS))]
    # The longest reads the two blocks of the shared beginning, the others take what they share of them.
    assert reused == [0] * 5 + [64, 64, 32, 0, 32, 0]
    assert engine.statistics.reused_tokens == sum(reused) == engine.prefixes.hits
    assert engine.statistics.prefill_tokens == sum(map(len, PROMPTS)) - sum(reused) == engine.prefixes.misses
    verifier = verifier_for(model, GATE)
    for prompt in (PROMPTS[5], PROMPTS[8]):
        cache = verifier.new_cache(1, GATE.kv_dtype)
        cache.long_rows = [False]
        blocks = engine.prefixes.find(cache, 0, prompt, len(prompt))
        assert len(blocks) == 2
        assert engine.prefixes.load(cache, 0, blocks, 0) == 64
        expected = canonical(model, prompt, 1, GATE)
        for layer in range(len(cache.layers)):
            for ours, theirs in zip(cache.committed(layer, 0), expected.columns[layer], strict=True):
                assert torch.equal(ours, theirs[:, :64])
        cache.check()


def test_an_engine_keeps_columns_for_the_next_turn(model: Any) -> None:
    engine = MarginGateEngine(model, GATE, max_batch_size=2)
    first = engine.generate([SHARED], max_new_tokens=40, do_sample=False)["req_0"]
    turn = [*first.prompt_ids, *first.generated_tokens, 9, 9]
    second = engine.generate([turn], max_new_tokens=NEW_TOKENS, do_sample=False)["req_0"]
    # Everything but the last generated token, whose column no pass has written, in whole blocks.
    assert second.reused_tokens == (len(turn) - 3) // PREFIX_BLOCK * PREFIX_BLOCK
    assert (second.generated_tokens, second.margins) == one(model, turn)


def test_an_edited_weight_drops_what_was_kept() -> None:
    model = enable(tiny_model("llama", seed=5))
    engine = MarginGateEngine(model, GATE, max_batch_size=2)
    engine.generate([SHARED], max_new_tokens=2, do_sample=False)
    model.lm_head.weight.data[3] += 1.0
    again = engine.generate([SHARED], max_new_tokens=NEW_TOKENS, do_sample=False)["req_0"]
    assert again.reused_tokens == 0
    assert (again.generated_tokens, again.margins) == one(model, SHARED)


@pytest.mark.parametrize("max_batch_size", [1, 3, 64])
def test_one_call_keeps_only_what_its_prompts_share(model: Any, max_batch_size: int) -> None:
    kept = {}
    for later in (True, False):
        engine = MarginGateEngine(model, GATE, max_batch_size=max_batch_size, reuse_later=later)
        out = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
        kept[later] = (engine.statistics.reused_tokens, [out[f"req_{i}"].margins for i in range(len(PROMPTS))])
        per_block = 3 * 2 * 2 * 16 * PREFIX_BLOCK * 4
        blocks = engine.prefixes.nbytes // per_block
        if not later:
            assert blocks == len(shared_blocks(PROMPTS)) > 0
            assert engine.generate([[5] * 70], max_new_tokens=4, do_sample=False)["req_0"].reused_tokens == 0
            assert engine.prefixes.nbytes == blocks * per_block
    assert kept[True] == kept[False] and kept[True][0] > 0
    with pytest.raises(ValueError, match="`reuse_later`"):
        MarginGateEngine(model, GATE, reuse_later="no")


def test_the_budget_of_kept_columns_holds(model: Any) -> None:
    verifier = verifier_for(model, GATE)
    block = verifier.new_cache(1, GATE.kv_dtype)
    engine = MarginGateEngine(model, GATE, max_batch_size=3, prefix_bytes=0)
    assert engine.generate(PROMPTS, max_new_tokens=4, do_sample=False)["req_6"].reused_tokens == 0
    assert engine.prefixes.nbytes == 0
    per_block = 3 * 2 * 2 * 16 * PREFIX_BLOCK * 4  # layers, keys and values, heads, dim, columns, FP32
    engine = MarginGateEngine(model, GATE, max_batch_size=3, prefix_bytes=3 * per_block)
    out = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert 0 < engine.prefixes.nbytes <= 3 * per_block
    assert [out[f"req_{i}"].margins for i in range(len(PROMPTS))] == [one(model, prompt)[1] for prompt in PROMPTS]
    assert block.entry_bytes == 0 and verifier.entry_bytes == 3 * 2 * 2 * 16 * 4
    with pytest.raises(ValueError, match="`budget` must be 0 or more bytes, got -1"):
        PrefixCache(-1)


def test_a_bounded_cache_makes_fewer_places(model: Any, alone: list) -> None:
    verifier = verifier_for(model, GATE)
    length = 128  # the longest prompt and its new tokens, in whole blocks
    engine = MarginGateEngine(model, GATE, max_batch_size=8, kv_bytes=2 * verifier.entry_bytes * length)
    seen = []
    with mock.patch("margingate_hf.decoding.exact.ExactCoverage.advance", autospec=True, side_effect=_recording(seen)):
        out = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert max(seen) == 2
    assert [out[f"req_{i}"].generated_tokens for i in range(len(PROMPTS))] == [tokens for tokens, _ in alone]
    small = MarginGateEngine(model, GATE, kv_bytes=1000)
    with pytest.raises(ValueError, match="`kv_bytes`.*one prompt of 81 tokens takes"):
        small.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)


def _recording(seen: list[int]) -> Any:
    from margingate_hf.decoding.exact import ExactCoverage

    advance = ExactCoverage.advance

    def record(coverage: Any) -> None:
        seen.append(len(coverage.run.slots.active))
        advance(coverage)

    return record


def test_criteria_stop_strings_seeds_and_samples_are_the_prompts_own(model: Any) -> None:
    class Even(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] % 5 == 0

    rule = {"stopping_criteria": StoppingCriteriaList([Even()])}
    out = model.generate_batch(PROMPTS, margin_gate=GATE, max_new_tokens=30, do_sample=False, max_batch_size=3, **rule)
    ended = 0
    for index, prompt in enumerate(PROMPTS):
        tokens, _ = one(model, prompt, max_new_tokens=30, **rule)
        assert out[f"req_{index}"].generated_tokens == tokens
        ended += len(tokens) < 30
    assert ended > 3, "a weak test"
    seeded = GATE.update(seed=11)
    sampling = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6}
    out = model.generate_batch(PROMPTS[:4], margin_gate=seeded, max_batch_size=3, **sampling)
    assert list(out)[:3] == ["req_0", "req_0__child#0", "req_1"]
    for index in range(4):
        both = model.generate(torch.tensor([PROMPTS[index]]), margin_gate=seeded, **sampling)[:, len(PROMPTS[index]) :]
        names = (f"req_{index}", f"req_{index}__child#0")
        for row, name in zip(both.tolist(), names, strict=True):
            assert out[name].generated_tokens == row[: len(out[name].generated_tokens)]


def test_without_the_gate_it_is_transformers_own(model: Any) -> None:
    with mock.patch.object(ContinuousMixin, "generate_batch", return_value="stock") as stock:
        assert model.generate_batch(PROMPTS, max_new_tokens=4, progress_bar=True) == "stock"
        assert model.generate_batch(PROMPTS, margin_gate=None) == "stock"
    assert stock.call_args_list[0].kwargs == {"max_new_tokens": 4, "progress_bar": True}
    assert model.generate_batch([], margin_gate=GATE) == {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_batch_size": 0}, "`max_batch_size`.*at least 1"),
        ({"max_batch_size": 2.0}, "`max_batch_size`.*integer"),
        ({"chunk": 8}, "`chunk`.*at least 32"),
        ({"prefix_bytes": -1}, "`prefix_bytes`.*at least 0"),
        ({"order": "shortest"}, "`order`.*'longest', 'arrival'"),
        ({"num_beams": 2}, "`num_beams`"),
        ({"attention_mask": torch.ones(1, 3)}, "`attention_mask`.*lists of token ids"),
        ({"continuous_batching_config": object()}, "`continuous_batching_config`.*max_batch_size"),
        ({"max_new_token": 3}, "max_new_token"),
    ],
)
def test_bad_input(model: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=text):
        model.generate_batch([[3, 4, 5]], **{"margin_gate": GATE, "max_new_tokens": 3, "do_sample": False, **arguments})


def test_bad_prompts_engines_and_gates(model: Any) -> None:
    with pytest.raises(ValueError, match="`inputs`.*prompt 1 is empty"):
        model.generate_batch([[3], []], margin_gate=GATE, max_new_tokens=3)
    with pytest.raises(ValueError, match="`model`.*enable"):
        MarginGateEngine(tiny_model("llama"))
    with pytest.raises(ValueError, match="`margin_gate`.*an engine needs the gate"):
        MarginGateEngine(model, None)  # type: ignore[arg-type]
    engine = MarginGateEngine(model, GATE)
    with pytest.raises(ValueError, match="`margin_gate`.*settings of its own"):
        model.generate_batch([[3]], engine=engine, margin_gate=MarginGateConfig(num_draft_tokens=1), max_new_tokens=3)
    with pytest.raises(KeyError):
        engine.cancel("req_7")
