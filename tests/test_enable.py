"""enable/disable: class, names, pickling, wrappers, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM, pipeline

from bitwise import assert_same, canonical, padded, run_batch
from margingate_hf import (
    MarginGateConfig,
    MarginGateGenerationMixin,
    MarginGateModelForCausalLM,
    disable,
    enable,
    generation,
)
from margingate_hf.verifier import verifier_for
from tiny import random_prompts, tiny_config, tiny_model

PROMPTS = random_prompts([7, 15])


def tokens(model: Any, **arguments: Any) -> torch.Tensor:
    arguments = {"max_new_tokens": 8, "do_sample": False, "margin_gate": True, **arguments}
    return model.generate(**padded(PROMPTS), **arguments)


def test_the_class_keeps_its_names_and_comes_back(tmp_path: Any) -> None:
    model = tiny_model("llama")
    assert enable(model) is model
    assert enable(model) is model, "twice is once"
    assert isinstance(model, LlamaForCausalLM) and isinstance(model, MarginGateGenerationMixin)
    assert issubclass(MarginGateGenerationMixin, GenerationMixin)
    kind = type(model)
    assert (kind.__name__, kind.__module__, kind.__qualname__) == (
        LlamaForCausalLM.__name__,
        LlamaForCausalLM.__module__,
        LlamaForCausalLM.__qualname__,
    )
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["LlamaForCausalLM"]
    expected = tokens(model)
    loaded = MarginGateModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded.generation_config = model.generation_config
    assert torch.equal(tokens(loaded), expected)
    assert disable(model) is model and type(model) is LlamaForCausalLM
    assert disable(model) is model
    with pytest.raises(ValueError, match="margin_gate"):
        tokens(model)


def test_the_factory_has_no_instances() -> None:
    with pytest.raises(EnvironmentError, match="from_pretrained"):
        MarginGateModelForCausalLM()
    model = MarginGateModelForCausalLM.from_config(tiny_config("llama"))
    assert isinstance(model, MarginGateGenerationMixin) and not model.training


def test_only_models_that_generate() -> None:
    with pytest.raises(TypeError, match="`model` must be a transformers model that can generate, got Linear"):
        enable(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_stay_enabled(how: Any) -> None:
    model = enable(tiny_model("llama"))
    expected = tokens(model)
    other = how(model)
    assert isinstance(other, MarginGateGenerationMixin) and type(other) is type(model)
    assert torch.equal(tokens(other), expected)
    disable(other)
    assert torch.equal(tokens(model), expected)


@pytest.mark.parametrize("order", ["enable first", "wrap first"])
def test_peft(order: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = tiny_model("llama")
    torch.manual_seed(0)
    if order == "enable first":
        wrapped = get_peft_model(enable(model), config).eval()
    else:
        wrapped = enable(get_peft_model(model, config).eval())
    out = wrapped.generate(**padded(PROMPTS), max_new_tokens=8, do_sample=False, margin_gate=True)
    base = wrapped.get_base_model()
    for row, (prompt, run) in enumerate(zip(PROMPTS, run_batch(base, PROMPTS, 8), strict=True)):
        assert_same(run, canonical(base, prompt, 8))
        assert out[row, 15:].tolist() == run.tokens
    with wrapped.disable_adapter():
        assert not torch.equal(
            wrapped.generate(**padded(PROMPTS), max_new_tokens=8, do_sample=False, margin_gate=True), out
        )


def test_a_compiled_wrapper_is_unwrapped() -> None:
    model = tiny_model("llama")
    compiled = torch.compile(model)
    assert enable(compiled) is compiled
    assert isinstance(model, MarginGateGenerationMixin)


@pytest.mark.parametrize("order", ["enable first", "off-load first"])
def test_accelerate_cpu_offload(order: str) -> None:
    """Weights are placeholders between forwards; the verifier reads them where accelerate keeps them."""
    expected = tokens(enable(tiny_model("gpt2")))
    model = tiny_model("gpt2")
    if order == "enable first":
        enable(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    enable(model)
    assert model.device.type == "meta"
    assert torch.equal(tokens(model), expected)
    for prompt, run in zip(PROMPTS, run_batch(model, PROMPTS, 8), strict=True):
        assert_same(run, canonical(model, prompt, 8))


def test_device_map(tmp_path: Any) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    expected = tokens(enable(model))
    mapped = MarginGateModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"})
    assert torch.equal(tokens(mapped), expected)


def test_a_compiled_model_gives_the_same_bits() -> None:
    """`model.compile()` changes the fast path alone; the verifier runs the model as it was written."""
    expected = run_batch(enable(tiny_model("llama")), PROMPTS, 8)
    model = enable(tiny_model("llama"))
    model.compile(backend="eager")
    for run, right in zip(run_batch(model, PROMPTS, 8), expected, strict=True):
        assert_same(run, right)


def test_threads_do_not_see_each_other() -> None:
    """Two gated calls with different settings and a stock call, at once, on one model."""
    model = enable(tiny_model("mistral"))
    calls = [
        {"margin_gate": MarginGateConfig(num_draft_tokens=1)},
        {"margin_gate": MarginGateConfig(num_draft_tokens=8, kv_dtype="auto")},
        {"margin_gate": None},
    ]
    expected = [tokens(model, **call) for call in calls]
    found: list[list[torch.Tensor]] = [[] for _ in calls]

    def work(index: int) -> None:
        for _ in range(6):
            found[index].append(tokens(model, **calls[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, results in enumerate(found):
        assert len(results) == 6
        for result in results:
            assert torch.equal(result, expected[index]), index
    assert model.config._attn_implementation == "sdpa"


def test_a_model_and_its_fp32_weights_are_freed() -> None:
    model = enable(tiny_model("llama"))
    tokens(model)
    gone = weakref.ref(model)
    store = weakref.ref(verifier_for(model, MarginGateConfig()).store)
    del model
    gc.collect()
    assert gone() is None and store() is None


def test_a_class_that_derives_from_the_mixin() -> None:
    class Own(MarginGateGenerationMixin, LlamaForCausalLM):
        pass

    torch.manual_seed(0)
    model = Own(tiny_config("llama")).bfloat16().eval()
    model.generation_config.margin_gate = {"num_draft_tokens": 2}
    out = model.generate(**padded(PROMPTS), max_new_tokens=3, return_dict_in_generate=True)
    assert out.margin_gate.config["num_draft_tokens"] == 2


def test_auto_classes_are_untouched() -> None:
    assert not issubclass(type(AutoModelForCausalLM.from_config(tiny_config("llama"))), MarginGateGenerationMixin)


@pytest.mark.smollm2
def test_pipeline(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["The sea is", "Once upon a time there was a"]
    arguments = dict(do_sample=False, max_new_tokens=6, return_full_text=False, margin_gate=MarginGateConfig())
    alone = [pipe(text, **arguments)[0]["generated_text"] for text in texts]
    together = [out[0]["generated_text"] for out in pipe(texts, batch_size=2, **arguments)]
    assert alone == together
    built = pipeline(
        "text-generation", model=model, tokenizer=tokenizer, margin_gate=MarginGateConfig(num_draft_tokens=3)
    )
    del arguments["margin_gate"]
    with mock.patch.object(generation, "decode", wraps=generation.decode) as gated:
        assert [built(text, **arguments)[0]["generated_text"] for text in texts] == alone
    assert gated.call_count == 2, "the gate given at construction was used"
