"""The layout of outputs, EOS, lengths, processors, criteria, streaming, statistics; and that no gate means stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from bitwise import assert_same, canonical, padded, run_batch
from margingate_hf import MarginGateCache, MarginGateConfig, MarginGateOutput, enable
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([7, 19, 4])


def gated(model: Any, prompts: list[list[int]] = PROMPTS, side: str = "left", **arguments: Any) -> Any:
    arguments = {"max_new_tokens": 12, "do_sample": False, "margin_gate": True, **arguments}
    return model.generate(**padded(prompts, side), return_dict_in_generate=True, **arguments)


@pytest.mark.parametrize("gate", [{}, {"margin_gate": None}, {"margin_gate": False}], ids=str)
def test_without_a_gate_it_is_stock_generate(gate: dict) -> None:
    stock, ours = tiny_model("llama"), enable(tiny_model("llama"))
    for arguments in ({"do_sample": False}, {"num_beams": 2}, {"do_sample": True, "temperature": 0.7}):
        results = []
        for model in (stock, ours):
            torch.manual_seed(3)
            extra = gate if model is ours else {}
            results.append(model.generate(**padded(PROMPTS), max_new_tokens=8, **arguments, **extra))
        assert torch.equal(*results)


def test_false_overrides_an_entry_of_the_model() -> None:
    model = enable(tiny_model("llama"))
    model.generation_config.margin_gate = {"num_draft_tokens": 3}
    out = gated(model, margin_gate=False)
    assert not isinstance(out, MarginGateOutput)


def test_every_way_to_pass_a_config(tmp_path: Any) -> None:
    model = enable(tiny_model("llama"))
    expected = gated(model, margin_gate=MarginGateConfig(num_draft_tokens=2))
    assert isinstance(expected, MarginGateOutput)
    batch = padded(PROMPTS)
    wanted = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, pad_token_id=0, eos_token_id=2)
    config = GenerationConfig(**wanted, margin_gate=MarginGateConfig(num_draft_tokens=2))
    config.save_pretrained(tmp_path)
    from_file = GenerationConfig.from_pretrained(tmp_path)
    assert isinstance(from_file.margin_gate, dict)
    others = [
        gated(model, margin_gate={"num_draft_tokens": 2}),
        model.generate(**batch, generation_config=config),
        model.generate(**batch, generation_config=from_file),
    ]
    model.generation_config.margin_gate = MarginGateConfig(num_draft_tokens=2)
    others.append(model.generate(**batch, max_new_tokens=12, do_sample=False, return_dict_in_generate=True))
    for other in others:
        assert torch.equal(other.sequences, expected.sequences)
        assert other.margin_gate.config["num_draft_tokens"] == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_layout_is_that_of_transformers(side: str) -> None:
    model = enable(tiny_model("llama"))
    ends = [canonical(model, prompt, 12).tokens[at] for prompt, at in zip(PROMPTS, (3, 11, 6), strict=True)]
    model.generation_config.eos_token_id = sorted(set(ends))
    batch = padded(PROMPTS, side)
    out = gated(model, side=side)
    width = batch["input_ids"].shape[1]
    assert torch.equal(out.sequences[:, :width], batch["input_ids"])
    lengths = [row.new_tokens for row in out.margin_gate.rows]
    assert out.sequences.shape[1] == width + max(lengths)
    for row, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        new = out.sequences[row, width:].tolist()
        assert set(new[length:]) <= {0}, "pad after the end"
        assert new[length - 1] in ends or length == 12
        assert not set(new[: length - 1]) & set(ends)
        assert new[:length] == canonical(model, prompt, 12, eos=-1).tokens[:length]
    plain = model.generate(**batch, max_new_tokens=12, do_sample=False)
    assert plain.shape[0] == 3 and torch.equal(plain[:, :width], out.sequences[:, :width])


def test_without_a_dict_it_returns_the_tensor(llama: Any) -> None:
    tensor = llama.generate(**padded(PROMPTS), max_new_tokens=12, do_sample=False, margin_gate=True)
    assert torch.equal(tensor, gated(llama).sequences)


def test_eos_in_the_middle_of_a_window_ends_the_row_there(llama: Any) -> None:
    whole = canonical(llama, PROMPTS[1], 12).tokens
    for at in range(12):
        first = whole.index(whole[at])
        runs = run_batch(llama, PROMPTS, 12, MarginGateConfig(num_draft_tokens=4), eos_token_id=whole[at])
        assert runs[1].tokens == whole[: first + 1]


def test_rows_that_end_leave_the_batch(llama: Any) -> None:
    first = canonical(llama, PROMPTS[0], 1).tokens[0]
    out = gated(llama, eos_token_id=first, margin_gate=MarginGateConfig(num_draft_tokens=7, schedule="fixed"))
    rows = out.margin_gate.rows
    assert rows[0].new_tokens == 1
    assert out.margin_gate.drafted_tokens < 2 * out.margin_gate.draft_steps + 1


def test_max_length_counts_the_rows_own_tokens(llama: Any) -> None:
    out = gated(llama, max_new_tokens=None, max_length=24)
    assert [row.new_tokens for row in out.margin_gate.rows] == [17, 5, 20]
    for row, prompt in enumerate(PROMPTS):
        alone = gated(llama, [prompt], max_new_tokens=None, max_length=24)
        assert alone.margin_gate.rows[0].new_tokens == out.margin_gate.rows[row].new_tokens


def test_default_length_is_twenty_new_tokens(llama: Any) -> None:
    out = llama.generate(**padded(PROMPTS), margin_gate=True, return_dict_in_generate=True, eos_token_id=None)
    assert [row.new_tokens for row in out.margin_gate.rows] == [20, 20, 20]


def test_logits_are_canonical_and_float32(llama: Any) -> None:
    out = gated(llama, output_logits=True, output_scores=True)
    assert all(step.dtype == torch.float32 and step.shape == (3, 257) for step in out.logits)
    assert len(out.logits) == len(out.scores) == 12
    for row, prompt in enumerate(PROMPTS):
        expected = canonical(llama, prompt, 12).logits
        assert torch.equal(torch.stack([step[row] for step in out.logits])[: len(expected)], expected)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, out.scores, strict=True))


def test_the_cache_holds_rows_in_the_callers_order(llama: Any) -> None:
    out = gated(llama, eos_token_id=canonical(llama, PROMPTS[0], 3).tokens[2])
    assert isinstance(out.cache, MarginGateCache)
    for row, prompt in enumerate(PROMPTS):
        assert out.cache.tokens[row][: len(prompt)] == prompt


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 9},
    "min_length": {"min_length": 14},
    "bad_words": {"bad_words_ids": [[token] for token in range(20, 120)]},
    "suppress": {"suppress_tokens": list(range(3, 120))},
    "forced_eos": {"forced_eos_token_id": 2},
    "sequence_bias": {"sequence_bias": [[[17], 6.0], [[40], 4.0]]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_see_each_row_alone(llama: Any, name: str) -> None:
    """Built and called as for one unpadded row, so they cannot see padding or company."""
    arguments = {**PROCESSORS[name], "eos_token_id": 2}
    if name.startswith("min"):
        arguments["eos_token_id"] = [canonical(llama, prompt, 3).tokens[1] for prompt in PROMPTS]
    together = run_batch(llama, PROMPTS, 12, **arguments)
    moved = False
    for prompt, run in zip(PROMPTS, together, strict=True):
        assert_same(run, run_batch(llama, [prompt], 12, MarginGateConfig(num_draft_tokens=2), **arguments)[0], name)
        moved |= run.tokens != run_batch(llama, [prompt], 12, eos_token_id=arguments["eos_token_id"])[0].tokens
    assert moved, "the processor changed nothing: a weak test"


def test_prefix_allowed_tokens_gets_the_callers_row(llama: Any) -> None:
    seen: set[tuple[int, int]] = set()

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        seen.add((row, tuple(ids[:2].tolist())))
        return list(range(20 + 20 * row, 40 + 20 * row))

    out = gated(llama, prefix_allowed_tokens_fn=allowed)
    assert seen == {(row, tuple(prompt[:2])) for row, prompt in enumerate(PROMPTS)}
    for row in range(3):
        assert all(20 + 20 * row <= token < 40 + 20 * row for token in out.sequences[row, 19:].tolist())


def test_a_custom_processor_is_called_with_one_row(llama: Any) -> None:
    class Downward(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert input_ids.shape[0] == scores.shape[0] == 1 and scores.dtype == torch.float32
            scores[:, input_ids[0, -1] :] = -torch.inf  # in place, as some do
            return scores

    out = gated(llama, logits_processor=[Downward()], output_logits=True)
    for row in range(3):
        tokens = out.sequences[row, 18:].tolist()
        if row == 1:
            assert all(b < a for a, b in zip(tokens, tokens[1:], strict=False) if b > 2)
    assert torch.isfinite(torch.stack(out.logits)).all(), "raw logits stay raw"


class AfterToken(StoppingCriteria):
    """Stops behind any of some tokens; remembers what it was shown."""

    def __init__(self, tokens: set[int]) -> None:
        self.tokens = tokens
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert input_ids.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([int(input_ids[0, -1]) in self.tokens])


def test_criteria_see_committed_tokens_only_row_by_row(llama: Any) -> None:
    texts = [canonical(llama, prompt, 12).tokens for prompt in PROMPTS]
    criterion = AfterToken({texts[0][4], texts[1][9]})
    out = gated(llama, stopping_criteria=[criterion])
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        stop = next((i for i, token in enumerate(text) if token in criterion.tokens), 11)
        assert out.margin_gate.rows[row].new_tokens == stop + 1
        mine = [ids for ids in criterion.seen if ids[: len(prompt)] == prompt]
        assert mine == [prompt + text[: i + 1] for i in range(len(mine))], "every token, in order, none uncommitted"


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.values += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def test_streamer_gets_committed_tokens_in_order_and_an_end(llama: Any) -> None:
    streamer = Recorder()
    out = gated(llama, PROMPTS[:1], streamer=streamer)
    assert streamer.values == out.sequences[0].tolist()
    assert streamer.ended == 1


def test_streamer_ends_when_a_callback_raises(llama: Any) -> None:
    class Broken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            raise KeyboardInterrupt

    streamer = Recorder()
    with pytest.raises(KeyboardInterrupt):
        gated(llama, PROMPTS[:1], streamer=streamer, stopping_criteria=[Broken()])
    assert streamer.ended == 1
    assert issubclass(TextIteratorStreamer, BaseStreamer)


def test_statistics_add_up(llama: Any) -> None:
    out = gated(
        llama, margin_gate=MarginGateConfig(threshold=2.0, num_draft_tokens=3, schedule="fixed"), eos_token_id=None
    )
    statistics = out.margin_gate
    assert statistics.prefill_tokens == sum(map(len, PROMPTS))
    assert statistics.new_tokens == 36 == sum(row.new_tokens for row in statistics.rows)
    assert 0 <= statistics.flips <= statistics.drafted_tokens
    assert statistics.low_margin_steps == sum(row.low_margin_steps for row in statistics.rows)
    committed_by_passes = statistics.new_tokens - len(PROMPTS)
    assert statistics.verified_tokens == committed_by_passes + statistics.wasted_tokens + statistics.flips
    assert statistics.notes == []
    assert statistics.plan.endswith("/kv-split")
    values = statistics.to_dict()
    assert values["trigger_rate"] == statistics.trigger_rate and values["config"]["num_draft_tokens"] == 3


def test_window_one_is_verifier_only(llama: Any) -> None:
    out = gated(llama, margin_gate=MarginGateConfig(num_draft_tokens=0))
    assert out.margin_gate.draft_steps == 0
    assert out.margin_gate.verify_forwards == 11


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = enable(tiny_model("llama", dtype=dtype))
    for prompt, run in zip(PROMPTS, run_batch(model, PROMPTS, 12), strict=True):
        assert_same(run, canonical(model, prompt, 12), str(dtype))


def test_an_eos_criterion_of_the_callers_own_is_asked(llama: Any) -> None:
    """Beside the call's own EOS ids, which the loop knows itself."""
    from transformers.generation.stopping_criteria import EosTokenCriteria

    (whole,) = run_batch(llama, PROMPTS[:1], 10, eos_token_id=None)
    ends_at = 4
    assert whole.tokens[ends_at] not in whole.tokens[:ends_at]
    criterion = StoppingCriteriaList([EosTokenCriteria(torch.tensor([whole.tokens[ends_at]]))])
    (run,) = run_batch(llama, PROMPTS[:1], 10, eos_token_id=None, stopping_criteria=criterion)
    assert run.tokens == whole.tokens[: ends_at + 1]


def test_a_list_of_ids_and_ids_outside_the_vocabulary_are_refused(llama: Any) -> None:
    arguments = {"max_new_tokens": 2, "do_sample": False, "margin_gate": True}
    with pytest.raises(TypeError, match="`input_ids`='list'.*generate_batch"):
        llama.generate([[5, 6, 7]], **arguments)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llama.generate(torch.tensor([[5, 99_999]]), **arguments)
