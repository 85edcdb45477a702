"""Receipts and replay: one pass proves a stored text, and what has changed is told apart by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from bitwise import padded
from fault_injection import plain_verifier
from margingate_hf import MarginGateConfig, Replay, Transcript, enable, replay, replay_all
from margingate_hf.analysis.replay import read_transcripts
from margingate_hf.cli import parser
from margingate_hf.decoding.receipts import Receipt, describe_processor, hash_tokens
from margingate_hf.verifier import Verifier
from tiny import VOCABULARY, random_prompts, tiny_model

PROMPTS = random_prompts([7, 19, 4, 30])
RECEIPT = MarginGateConfig(receipt=True)


def made(model: Any, config: MarginGateConfig = RECEIPT, **arguments: Any) -> list[Transcript]:
    found = model.generate_batch(PROMPTS, **{"max_new_tokens": 14, "do_sample": False, **arguments}, margin_gate=config)
    keep = {name: value for name, value in arguments.items() if name != "max_new_tokens"}
    return [
        Transcript(output.prompt_ids, output.generated_tokens, output.receipt, dict(keep)) for output in found.values()
    ]


def check(model: Any, one: Transcript, **changes: Any) -> Replay:
    parts = {"prompt": one.prompt, "output": one.output, "receipt": one.receipt, **one.arguments, **changes}
    return replay(model, **parts)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2"])
def test_what_was_generated_is_canonical(name: str) -> None:
    model = enable(tiny_model(name))
    for result in replay_all(model, made(model)):
        assert result == Replay(True, [])


def test_generate_and_the_engine_give_the_same_receipts(llama: Any) -> None:
    out = llama.generate(
        **padded(PROMPTS), max_new_tokens=14, do_sample=False, margin_gate=RECEIPT, return_dict_in_generate=True
    )
    assert [row.receipt for row in out.margin_gate.rows] == [one.receipt for one in made(llama)]
    assert all(row.receipt["finish_reason"] == "length" for row in out.margin_gate.rows)
    plain = llama.generate(
        **padded(PROMPTS), max_new_tokens=2, do_sample=False, margin_gate=True, return_dict_in_generate=True
    )
    assert all(row.receipt is None for row in plain.margin_gate.rows)


@pytest.mark.parametrize("index", range(14))
def test_a_changed_token_is_found_where_it_stands(llama: Any, index: int) -> None:
    one = made(llama)[1]
    output = list(one.output)
    output[index] = 3 + output[index] % 200
    result = check(llama, one, output=output)
    assert not result.canonical and result.changed == ["output"]
    assert (result.index, result.found, result.expected) == (index, output[index], one.output[index])
    assert result.behind > 0 and result.margin > 0
    assert check(llama, one, output=output, receipt=None).index == index


def test_what_changed_is_named(llama: Any) -> None:
    one = made(llama)[1]
    assert check(llama, one, prompt=one.prompt[1:]).changed == ["prompt"]
    assert check(llama, one, margin_gate={"kv_dtype": "float32"}).changed == ["config"]
    assert check(llama, one, repetition_penalty=1.3).changed == ["processors"]
    assert check(llama, one, margin_gate=MarginGateConfig(num_draft_tokens=2, schedule="fixed")).canonical
    other = enable(tiny_model("llama"))
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    assert check(other, one).changed == ["checkpoint"]


def test_a_text_that_ends_too_early_or_too_late(llama: Any) -> None:
    one = made(llama)[1]
    short = check(llama, one, output=one.output[:-2])
    assert not short.canonical and (short.index, short.found, short.expected) == (12, None, None)
    assert check(llama, one, output=one.output[:-2], receipt=None).canonical, "a prefix of a canonical text"
    end = one.output[4]
    ended = made(llama, eos_token_id=end)[1]
    assert ended.receipt["finish_reason"] == "eos" and ended.output[-1] == end
    assert check(llama, ended).canonical
    late = check(llama, ended, output=one.output, receipt=None)
    assert not late.canonical and late.index == len(ended.output) and late.expected is None


def test_processors_and_samples_are_replayed(llama: Any) -> None:
    for one in made(llama, repetition_penalty=1.5, no_repeat_ngram_size=3):
        assert check(llama, one).canonical
        assert any("RepetitionPenalty" in name and "1.5" in name for name in one.receipt["processors"])
    config = MarginGateConfig(receipt=True, seed=7)
    texts = made(llama, config, do_sample=True, temperature=1.4, num_return_sequences=2)
    assert texts[0].output != texts[1].output and texts[1].receipt["sample"] == 1
    for one in texts:
        one.arguments.pop("num_return_sequences")
        assert check(llama, one).canonical
    assert check(llama, texts[0], margin_gate=config.update(seed=8)).changed == ["config"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "split"])
def test_settings_come_from_the_receipt(llama: Any, precision: str, kv_dtype: str) -> None:
    config = MarginGateConfig(receipt=True, precision=precision, kv_dtype=kv_dtype)
    for one in made(llama, config):
        assert check(llama, one).canonical


ALTERED = {
    "new_tokens": 3,
    "limit": 999,
    "finish_reason": "stop",
    "eos": [9],
    "criteria": ["X()"],
    "checkpoint": "0" * 32,
    "adapter": "other",
    "plan": "made up",
    "seed": 7,
    "sample": 3,
    "processors": ["X()"],
    "versions": {},
    "prompt": "0",
    "output": "0",
}
# What a receipt that was sealed anew may say without its text being another one: the arithmetic's place and date.
NOTED = {"plan", "versions"}


@pytest.mark.parametrize("field", ALTERED)
@pytest.mark.parametrize("forged", [False, True])
def test_an_altered_receipt_is_no_proof(field: str, forged: bool, llama: Any) -> None:
    """As it stands its seal tells; sealed anew, what it says is compared with the text and the call."""
    one = made(llama)[0]
    altered = {**one.receipt, field: ALTERED[field]}
    if forged:
        altered["seal"] = Receipt.from_dict(altered).sealed()
    result = check(llama, one, receipt=altered)
    if forged and field in NOTED:
        assert result.canonical and result.notes
    elif forged and field == "criteria":
        assert result.canonical  # a rule that ended nothing
    else:
        assert not result.canonical, (result.changed, result.notes)
        assert result.index is not None or "receipt" in result.changed or field in [*result.changed, "seed"]


@pytest.mark.parametrize(("field", "value"), [("kv_dtype", "auto"), ("precision", "bfloat16"), ("strict", False)])
def test_an_altered_setting_is_no_proof(field: str, value: Any, llama: Any) -> None:
    one = made(llama)[0]
    altered = {**one.receipt, "config": {**one.receipt["config"], field: value}}
    assert "receipt" in check(llama, one, receipt=altered).changed
    altered["seal"] = Receipt.from_dict(altered).sealed()
    result = check(llama, one, receipt=altered)
    if field == "strict":
        assert result.changed == ["config"]
    else:  # another arithmetic, under which the text is judged; it may be canonical there as well
        assert any("verified by plan" in note for note in result.notes)


def test_a_cut_text_is_no_proof_whatever_its_receipt_says(llama: Any) -> None:
    one = made(llama)[0]
    cut = one.output[:4]
    for reason, limit in (("length", one.receipt["limit"]), ("stop", one.receipt["limit"]), ("eos", 4)):
        values = {**one.receipt, "output": hash_tokens(cut), "new_tokens": 4, "finish_reason": reason, "limit": limit}
        values["seal"] = Receipt.from_dict(values).sealed()
        assert not check(llama, one, output=cut, receipt=values).canonical, reason


def test_a_rule_that_ended_a_text_is_checked_where_it_is_given(llama: Any) -> None:
    rule = StoppingCriteriaList([Stops(5)])
    (out,) = llama.generate_batch(
        [PROMPTS[0]], margin_gate=RECEIPT, max_new_tokens=12, do_sample=False, stopping_criteria=rule
    ).values()
    assert out.receipt["finish_reason"] == "stop" and len(out.generated_tokens) == 5
    assert out.receipt["criteria"] == ['Stops({"count": 5})']
    arguments = {"model": llama, "prompt": PROMPTS[0], "output": out.generated_tokens, "receipt": out.receipt}
    unseen = replay(**arguments)
    assert unseen.canonical and "was not checked" in unseen.notes[0]
    assert replay(**arguments, stopping_criteria=rule).canonical
    other = replay(**arguments, stopping_criteria=StoppingCriteriaList([Stops(4)]))
    assert not other.canonical and "criteria" in other.changed


class Stops(StoppingCriteria):
    """Ends a text of nine prompt tokens behind its `count`-th new one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= len(PROMPTS[0]) + self.count])


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequence_bias": {(5,): 2.0}},
        {"sequence_bias": [[[5], 2.0]]},
        {"bad_words_ids": [[5, 6]]},
        {"suppress_tokens": [5, 6]},
        {"exponential_decay_length_penalty": (3, 1.1)},
        {"no_repeat_ngram_size": 2},
        {"begin_suppress_tokens": [9]},
        {"min_new_tokens": 4},
    ],
    ids=str,
)
def test_every_processor_can_be_described_and_replayed(arguments: dict[str, Any], llama: Any) -> None:
    (one,) = llama.generate_batch(
        [PROMPTS[0]], margin_gate=RECEIPT, max_new_tokens=6, do_sample=False, **arguments
    ).values()
    assert one.receipt["processors"]
    json.dumps(one.receipt)
    assert replay(llama, one.prompt_ids, one.generated_tokens, one.receipt, **arguments).canonical
    assert replay(llama, one.prompt_ids, one.generated_tokens, one.receipt).changed == ["processors"]


@pytest.mark.parametrize("token", [VOCABULARY, -1, 10**6, 1.5])
def test_a_token_out_of_range_is_named(token: Any, llama: Any) -> None:
    with pytest.raises(ValueError, match=rf"`output`={token}.*token 1 of transcript 0.*0 to {VOCABULARY - 1}"):
        replay(llama, [5, 6], [7, token])
    with pytest.raises(ValueError, match="`prompt`"):
        replay(llama, [5, token], [7, 8])


def test_many_texts_share_passes(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = made(llama) * 3
    calls = []
    run = Verifier.run
    monkeypatch.setattr(Verifier, "run", lambda self, *args, **kwargs: calls.append(1) or run(self, *args, **kwargs))
    assert all(result.canonical for result in replay_all(llama, texts))
    assert len(calls) == 1
    monkeypatch.setattr("margingate_hf.analysis.replay.TOGETHER", 30)
    assert all(result.canonical for result in replay_all(llama, texts))
    assert len(calls) == 1 + 6


def test_a_verifier_that_is_not_invariant_is_no_witness(llama: Any) -> None:
    """Logits of the teacher-forced pass and of decoding differ in bits without fixed plans."""
    from margingate_hf.forward.context import Segment

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        verifier = registry()
        prompt, text = PROMPTS[3], made(llama)[3].output
        whole, steps = verifier.new_cache(1, "split"), verifier.new_cache(1, "split")
        with torch.no_grad():
            one = verifier.run(whole, [Segment(0, 0, [*prompt, *text])], keep=[len(text)])
            verifier.run(steps, [Segment(0, 0, prompt)], keep=[0])
            cut = [verifier.run(steps, [Segment(0, len(prompt) + i, [token])]) for i, token in enumerate(text)]
        return one, torch.cat(cut)

    def registry() -> Any:
        import bitwise

        return bitwise.verifier_for(llama, RECEIPT)

    assert torch.equal(*both())
    with plain_verifier(llama):
        assert not torch.equal(*both())


def test_bad_input(llama: Any) -> None:
    with pytest.raises(ValueError, match="`output`"):
        replay(llama, [1, 2], [])
    with pytest.raises(ValueError, match="`coverage`"):
        replay(llama, [1, 2], [3], margin_gate={"coverage": "gated"})
    with pytest.raises(ValueError, match="`receipt` is not a receipt"):
        replay(llama, [1, 2], [3], receipt={"prompt": "x"})


def test_hashes_and_descriptions() -> None:
    assert hash_tokens([1, 2]) == hash_tokens(torch.tensor([1, 2]).tolist()) != hash_tokens([12])
    from transformers import TemperatureLogitsWarper

    assert describe_processor(TemperatureLogitsWarper(0.5)) == 'TemperatureLogitsWarper({"temperature": 0.5})'
    values = made(enable(tiny_model("llama")))[0].receipt
    assert Receipt.from_dict(json.loads(json.dumps(values))).to_dict() == values


@pytest.mark.smollm2
def test_the_command(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from margingate_hf.cli.loading import load

    model, tokenizer = load(str(tiny_checkpoint), progress=False)
    found = model.generate_batch(PROMPTS, max_new_tokens=6, do_sample=False, margin_gate=RECEIPT)
    records = [
        {"prompt_ids": one.prompt_ids, "output_ids": one.generated_tokens, "receipt": one.receipt}
        for one in found.values()
    ]
    path = tmp_path / "transcripts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["replay", str(path), "--model", str(tiny_checkpoint), "--no-progress"]
    assert parser.main([*command, "--json", str(tmp_path / "out.jsonl")]) == 0
    assert "4 of 4 transcripts are canonical" in capsys.readouterr().out
    assert [json.loads(line)["canonical"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [True] * 4
    records[2]["output_ids"][3] += 1
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert parser.main(command) == 1
    out = capsys.readouterr().out
    assert "3 of 4" in out and "transcript 2: changed: output; token 3 is" in out
    path.write_text('{"prompt_ids": [1]}\n')
    assert parser.main(command) == 2
    assert "line 1: no 'output'" in capsys.readouterr().err


def test_text_is_encoded_where_there_are_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "ab", "output": "c", "arguments": {"temperature": 1.0}}\n\n')

    class Letters:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    assert read_transcripts(path, Letters()) == [Transcript([97, 98], [99], None, {"temperature": 1.0})]
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no transcript"):
        read_transcripts(path)
