"""What people ask for is honoured or refused by name: nothing is dropped without a word."""

from __future__ import annotations

import copy
import inspect
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import BatchEncoding, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from bitwise import assert_same, padded, run_batch
from margingate_hf import MarginGateConfig, MarginGateLogitsProcessor, MarginGateModelForCausalLM, enable
from margingate_hf.decoding.checks import HARMLESS_FIELDS, HONOURED_FIELDS, REFUSED_FIELDS
from tiny import VOCABULARY, random_prompts, tiny_config, tiny_model

PROMPTS = random_prompts([9, 21, 4])
GATE = MarginGateConfig(schedule="fixed", num_draft_tokens=4)


def generate(model: Any, prompts: list[list[int]] = PROMPTS, **arguments: Any) -> Any:
    return model.generate(
        **padded(prompts), **{"max_new_tokens": 10, "do_sample": False, "margin_gate": GATE, **arguments}
    )


# Inputs of the forward


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_soft_prompts_are_refused_and_stock_calls_go_on(kind: type) -> None:
    fields = {"encoder_hidden_size": 64} if kind is not PromptTuningConfig else {}
    tuned = get_peft_model(
        tiny_model("llama"), kind(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=6, **fields)
    ).eval()
    enable(tuned)
    with pytest.raises(NotImplementedError, match="`prepare_inputs_for_generation`.*soft prompts.*LoRA"):
        generate(tuned, PROMPTS[:1])
    stock = generate(tuned, PROMPTS[:1], margin_gate=None)
    base = enable(tuned.get_base_model())
    assert stock.shape == generate(base, PROMPTS[:1]).shape, "the base model is gated as ever"


def test_a_method_of_the_models_own_that_shapes_inputs_is_refused() -> None:
    stock = type(tiny_model("llama"))

    class Own(stock):  # type: ignore[misc, valid-type]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(*args, **kwargs)

    with pytest.raises(NotImplementedError, match=r"`prepare_inputs_for_generation`='test_asked_for.*Own'"):
        generate(enable(Own(tiny_config("llama")).bfloat16().eval()))


def test_arguments_of_the_forward_are_refused_by_name() -> None:
    model = enable(tiny_model("gpt2"))
    ids = torch.zeros_like(padded(PROMPTS)["input_ids"])
    with pytest.raises(ValueError, match="`token_type_ids`='given'.*leave it out"):
        generate(model, token_type_ids=ids)
    assert torch.equal(generate(model, token_type_ids=None), generate(model))


def test_every_field_of_a_generation_config_is_accounted_for() -> None:
    """A field that transformers adds fails here until somebody has decided what the gate does with it."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    known = HONOURED_FIELDS | REFUSED_FIELDS | HARMLESS_FIELDS
    assert fields <= known, f"nobody has looked at {sorted(fields - known)}"
    assert REFUSED.keys() == REFUSED_FIELDS
    assert not (HONOURED_FIELDS & REFUSED_FIELDS) and not (HARMLESS_FIELDS & (REFUSED_FIELDS | HONOURED_FIELDS))


REFUSED = {
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "output_attentions": True,
    "output_hidden_states": True,
    "constraints": [object()],
    "force_words_ids": [[5]],
    "token_healing": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "use_mtp": True,
    "use_cache": False,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "cache_implementation": "static",
}


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_every_field_that_is_refused_is_refused_by_name(name: str, llama: Any) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=name):
        generate(llama, **{name: REFUSED[name]})
    assert torch.equal(generate(llama), generate(llama)), "nothing stays behind"


@pytest.mark.parametrize("implementation", ["static", "sliding_window", "hybrid", "quantized", "offloaded"])
def test_a_cache_that_the_checkpoint_chooses_does_not_matter(implementation: str, llama: Any) -> None:
    expected = generate(llama)
    llama.generation_config.cache_implementation = implementation
    assert torch.equal(generate(llama), expected)
    with pytest.raises(ValueError, match=f"`cache_implementation`='{implementation}'"):
        generate(llama, cache_implementation=implementation)


def test_an_entry_of_a_saved_generation_config_survives(tmp_path: Any) -> None:
    model = enable(tiny_model("llama"))
    assert model.generation_config._from_model_config, "else the fault cannot show: a weak test"
    model.generation_config.margin_gate = {"num_draft_tokens": 3}
    model.save_pretrained(tmp_path)
    again = MarginGateModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.generation_config.margin_gate == {"num_draft_tokens": 3}
    file = tmp_path / "generation_config.json"  # as an earlier version wrote it
    file.write_text(file.read_text().replace('"_from_model_config": false', '"_from_model_config": true'))
    again = MarginGateModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    out = generate(again, margin_gate=..., return_dict_in_generate=True)
    assert out.margin_gate.config["num_draft_tokens"] == 3


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox"])
def test_learned_positions_end_somewhere(name: str) -> None:
    model = enable(tiny_model(name))
    long = random_prompts([505])
    if name == "gpt-neox":  # rotary: beyond is a matter of quality
        assert generate(model, long).shape[1] > 505
        return
    with pytest.raises(ValueError, match="`max_new_tokens`.*may reach 515 tokens.*512 learned positions"):
        generate(model, long)
    assert generate(model, long, max_new_tokens=7).shape[1] <= 512


# Batches


def batches() -> dict[str, Callable[[], Any]]:
    batch = padded(PROMPTS)
    return {
        "lists": lambda: PROMPTS,
        "generator": lambda: (prompt for prompt in PROMPTS),
        "tensors": lambda: [torch.tensor(prompt) for prompt in PROMPTS],
        "BatchEncoding": lambda: BatchEncoding(batch),
        "right-padded": lambda: padded(PROMPTS, "right"),
        "ragged BatchEncoding": lambda: BatchEncoding({"input_ids": PROMPTS}),
        "masked lists": lambda: {
            "input_ids": batch["input_ids"].tolist(),
            "attention_mask": batch["attention_mask"].tolist(),
        },
    }


@pytest.mark.parametrize("kind", batches())
def test_batches_people_pass(kind: str, llama: Any) -> None:
    expected = [run.tokens for run in run_batch(llama, PROMPTS, 6, GATE)]
    out = llama.generate_batch(batches()[kind](), max_new_tokens=6, do_sample=False, margin_gate=GATE)
    assert [one.generated_tokens for one in out.values()] == expected


def test_a_tensor_of_prompts(llama: Any) -> None:
    ids = torch.tensor(random_prompts([8, 8]))
    out = llama.generate_batch(ids, max_new_tokens=4, do_sample=False, margin_gate=GATE)
    assert [one.prompt_ids for one in out.values()] == ids.tolist()
    assert llama.generate_batch([], max_new_tokens=4, margin_gate=GATE) == {}


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ("text", TypeError, "`inputs`='text'.*encode text with the tokenizer"),
        (["text"], TypeError, "`inputs`='text'.*encode text with the tokenizer"),
        ([5, 6, 7], TypeError, r"`inputs`=5.*one prompt as `\[ids\]`"),
        (torch.tensor([5, 6]), TypeError, r"tensor of shape \(2,\)"),
        ([[5, 6.5]], TypeError, "`inputs`=6.5"),
        ([[5, True]], TypeError, "`inputs`=True"),
        ([[5], [VOCABULARY]], ValueError, f"`inputs`={VOCABULARY}.*prompt 1 holds an id outside the vocabulary"),
        ([[-1]], ValueError, "`inputs`=-1"),
        ([[5], []], ValueError, "prompt 1 is empty"),
        ({"attention_mask": [[1]]}, ValueError, "a mapping must have `input_ids`"),
        (7, TypeError, "`inputs`=7"),
    ],
)
def test_batches_that_cannot_be_read(inputs: Any, error: type, message: str, llama: Any) -> None:
    with pytest.raises(error, match=message):
        llama.generate_batch(inputs, max_new_tokens=4, margin_gate=GATE)


# Processors


class Alternate(LogitsProcessor):
    """Even and odd ids in turn; like many grammar guides it counts its own calls."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(scores, float("-inf"))
        out[:, self.turn :: 2] = scores[:, self.turn :: 2]
        self.turn = 1 - self.turn
        return out


class Resettable(Alternate):
    def reset(self) -> None:
        self.turn = 0


class Copyable(Alternate):
    def copy(self) -> Copyable:
        other = Copyable()
        other.turn = self.turn
        return other


class Late(LogitsProcessor):
    """Two calls on one step agree; it is the eighth call that does something else."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return -scores if self.calls == 8 else scores


@pytest.mark.parametrize("kind", [Alternate, Late])
def test_a_processor_that_keeps_a_state_is_refused(kind: type, llama: Any) -> None:
    with pytest.raises(ValueError, match=f"`logits_processor`='{kind.__name__}'.*keeps a state.*`copy\\(\\)` or"):
        generate(llama, logits_processor=LogitsProcessorList([kind()]))


@pytest.mark.parametrize("kind", [Resettable, Copyable])
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_one_that_offers_a_copy_or_a_reset_is_right_in_every_row(kind: type, num_draft_tokens: int, llama: Any) -> None:
    processor = kind()
    out = generate(
        llama,
        logits_processor=LogitsProcessorList([processor]),
        margin_gate=GATE.update(num_draft_tokens=num_draft_tokens),
        return_dict_in_generate=True,
    )
    assert processor.turn == 0, "the caller's own was called"
    new = out.sequences[:, -len(out.sequences[0]) + padded(PROMPTS)["input_ids"].shape[1] :]
    for row, statistics in enumerate(out.margin_gate.rows):
        assert [int(token) % 2 for token in new[row, : statistics.new_tokens]] == [
            index % 2 for index in range(statistics.new_tokens)
        ]
        alone = generate(llama, [PROMPTS[row]], logits_processor=LogitsProcessorList([kind()]))
        count = statistics.new_tokens
        assert alone[0, len(PROMPTS[row]) :][:count].tolist() == new[row, :count].tolist()
    if num_draft_tokens:
        assert out.margin_gate.drafted_tokens > 0, "nothing was drafted: a weak test"


def test_a_state_and_gated_coverage_do_not_go_together(llama: Any) -> None:
    with pytest.raises(ValueError, match="`coverage`='gated'.*keeps a state"):
        generate(llama, logits_processor=LogitsProcessorList([Resettable()]), margin_gate={"coverage": "gated"})


@pytest.mark.parametrize("kind", [Alternate, Late])
def test_one_without_a_copy_is_refused_under_gated_coverage_too(kind: type, llama: Any) -> None:
    with pytest.raises(ValueError, match=f"`logits_processor`='{kind.__name__}'.*keeps a state"):
        generate(llama, logits_processor=LogitsProcessorList([kind()]), margin_gate={"coverage": "gated"})


def test_a_recorder_that_says_it_is_pure_is_let_through(llama: Any) -> None:
    gate = MarginGateLogitsProcessor()
    assert torch.equal(generate(llama, logits_processor=LogitsProcessorList([gate])), generate(llama))
    assert gate.margins.numel()


# Streamers and clocks


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.queue: queue.Queue = queue.Queue()

    def put(self, value: torch.Tensor) -> None:
        self.queue.put(value)

    def end(self) -> None:
        self.queue.put(None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_beams": 2},
        {"margin_gate": {"treshold": 1}},
        {"margin_gate": 3},
        {"nonsense": 1},
        {"pixel_values": torch.ones(1)},
        {"max_new_tokens": 0},
        {"num_return_sequences": 2, "do_sample": True, "margin_gate": {"seed": 1}},
    ],
    ids=str,
)
def test_a_refusal_ends_the_stream(wrong: dict[str, Any], llama: Any) -> None:
    streamer = Streamer()
    with pytest.raises((ValueError, TypeError, NotImplementedError)):
        generate(llama, PROMPTS[:1], streamer=streamer, **wrong)
    seen = [streamer.queue.get(timeout=5)]
    while seen[-1] is not None:
        seen.append(streamer.queue.get(timeout=5))
    assert streamer.queue.empty(), "it was ended twice"


def test_a_stream_of_a_model_in_training_ends(llama: Any) -> None:
    streamer = Streamer()
    with pytest.raises(ValueError, match="training"):
        generate(llama.train(), PROMPTS[:1], streamer=streamer)
    assert streamer.queue.get(timeout=5) is None


def test_a_streams_consumer_in_another_thread_gets_the_output(llama: Any) -> None:
    streamer = Streamer()
    worker = threading.Thread(target=lambda: generate(llama, PROMPTS[:1], streamer=streamer))
    worker.start()
    seen = []
    while (value := streamer.queue.get(timeout=60)) is not None:
        seen += value.flatten().tolist()
    worker.join()
    assert seen == generate(llama, PROMPTS[:1])[0].tolist()


def test_max_time_is_honoured_and_said(llama: Any) -> None:
    class Slow(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return scores

    whole = generate(llama, PROMPTS[:1], max_new_tokens=60, eos_token_id=None)
    out = generate(
        llama,
        PROMPTS[:1],
        max_new_tokens=60,
        eos_token_id=None,
        max_time=0.3,
        logits_processor=LogitsProcessorList([Slow()]),
        return_dict_in_generate=True,
    )
    count = out.margin_gate.rows[0].new_tokens
    assert 0 < count < 60 and out.margin_gate.rows[0].finish_reason == "stop"
    assert torch.equal(out.sequences[0], whole[0, : 9 + count]), "what there is of it is canonical"
    assert any("max_time=0.3" in note and "speed" in note for note in out.margin_gate.notes)


# The process's defaults


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_default_dtype_of_float64_changes_nothing(name: str) -> None:
    expected = run_batch(enable(tiny_model(name)), PROMPTS, 6, GATE)
    model = enable(tiny_model(name))
    torch.set_default_dtype(torch.float64)
    try:
        runs = run_batch(model, PROMPTS, 6, GATE)
    finally:
        torch.set_default_dtype(torch.float32)
    for run, right in zip(runs, expected, strict=True):
        assert_same(run, right)


def test_a_copy_of_an_enabled_model_is_enabled() -> None:
    model = enable(tiny_model("llama"))
    assert torch.equal(generate(copy.deepcopy(model)), generate(model))
    assert "margin_gate" in inspect.signature(copy.deepcopy(model).generate).parameters
