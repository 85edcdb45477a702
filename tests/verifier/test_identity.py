"""What a kept column, a verdict and a receipt are functions of: an edit of any of it is noticed, nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, PeftModel, get_peft_model

from bitwise import assert_same, padded, run_batch
from margingate_hf import MarginGateConfig, MarginGateEngine, enable
from margingate_hf.verifier import forget_verifiers, verifier_for
from tiny import random_prompts, tiny_model

GATE = MarginGateConfig(schedule="fixed", num_draft_tokens=5)
PROMPTS = random_prompts([40, 9, 21, 5])


def generate(model: Any, prompts: list[list[int]] = PROMPTS[:1], **arguments: Any) -> Any:
    return model.generate(
        **padded(prompts),
        **{"max_new_tokens": 8, "do_sample": False, "margin_gate": GATE, **arguments},
        return_dict_in_generate=True,
    )


def lora(names: tuple[str, ...] = ("one",), seed: int = 0, **fields: Any) -> Any:
    """A tiny Llama with adapters that matter."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **fields)
    model = get_peft_model(tiny_model("llama"), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(30)
    return enable(model.eval())


def alone(model: PeftModel, adapter: str | None, prompt: list[int]) -> Any:
    """The run of one prompt with one adapter active on a model of its own."""
    other = copy.deepcopy(model)
    if adapter is None:
        with other.disable_adapter():
            return run_batch(other, [prompt], 8, GATE)[0]
    other.set_adapter(adapter)
    return run_batch(other, [prompt], 8, GATE)[0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w[:, -1].neg_(),
        lambda w: w[:, 3::4].neg_(),
        lambda w: w[:, -1].mul_(2),
        lambda w: w[:, -1].mul_(-2),
        lambda w: w[5:7, 3].neg_(),
    ],
)
def test_an_edit_of_weights_is_another_model(edit: Callable) -> None:
    """Edits that a linear checksum misses: sign bits at the top of a word cancel in pairs."""
    model = enable(tiny_model("llama", seed=2))
    before = generate(model)
    with torch.no_grad():
        edit(model.model.layers[0].mlp.down_proj.weight)
    after = generate(model)
    assert before.margin_gate.fingerprint != after.margin_gate.fingerprint
    fresh = enable(tiny_model("llama", seed=2))
    fresh.load_state_dict(model.state_dict())
    assert generate(fresh).margin_gate.fingerprint == after.margin_gate.fingerprint
    assert_same(run_batch(model, PROMPTS[:1], 6, GATE)[0], run_batch(fresh, PROMPTS[:1], 6, GATE)[0])


def _scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.5


def _epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def _config(model: Any) -> None:
    model.config.rms_norm_eps = 0.25


def _hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: output * 0.5)


@pytest.mark.parametrize("change", [_scaling, _epsilon, _config, _hook])
def test_a_change_outside_the_tensors_is_another_model(change: Callable) -> None:
    model = enable(tiny_model("llama"))
    before = generate(model)
    change(model)
    with pytest.raises(ValueError, match="it was computed with weights"):
        generate(model, cache=before.cache)
    assert generate(model).margin_gate.fingerprint != before.margin_gate.fingerprint


def test_what_no_forward_reads_is_the_same_model() -> None:
    model = enable(tiny_model("llama"))
    before = generate(model)
    model.config.name_or_path = "elsewhere"
    model.model.gradient_checkpointing = True
    model.config.transformers_version = "0.0"
    assert generate(model).margin_gate.fingerprint == before.margin_gate.fingerprint
    assert generate(copy.deepcopy(model)).margin_gate.fingerprint == before.margin_gate.fingerprint


@pytest.mark.parametrize("rank", [3, 8])
def test_adapters_added_later_are_tested_anew(rank: int) -> None:
    """A verdict is of a structure: the products of new layers were not in it."""
    model = enable(tiny_model("llama"))
    gate = MarginGateConfig(precision="bfloat16", schedule="fixed", num_draft_tokens=5)
    before = verifier_for(model, gate)
    config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    tuned = get_peft_model(model, config).eval()
    after = verifier_for(model, gate)
    assert after is not before
    assert verifier_for(model, gate) is after
    for prompt, run in zip(PROMPTS, run_batch(tuned, PROMPTS, 8, gate), strict=True):
        assert_same(run, run_batch(tuned, [prompt], 8, gate)[0])


def test_other_weights_of_the_same_structure_need_no_new_verdict() -> None:
    model = enable(tiny_model("llama"))
    kept = verifier_for(model, GATE)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert verifier_for(model, GATE) is kept


# Adapters a row


NAMES = ["two", "one", "__base__", "two"]


def test_each_row_has_its_own_adapter() -> None:
    model = lora(("one", "two"))
    runs = run_batch(model, PROMPTS, 8, GATE, adapter_names=NAMES)
    backwards = run_batch(model, PROMPTS[::-1], 8, GATE, adapter_names=NAMES[::-1])[::-1]
    texts = set()
    for prompt, name, run, other in zip(PROMPTS, NAMES, runs, backwards, strict=True):
        expected = alone(model, None if name == "__base__" else name, prompt)
        assert_same(run, expected, name)
        assert_same(other, expected, name)
        texts.add(tuple(run_batch(model, [PROMPTS[0]], 8, GATE, adapter_names=[name])[0].tokens))
    assert len(texts) == 3, "adapters do not matter: a weak test"


def test_a_cache_of_one_adapter_is_not_read_for_another() -> None:
    model = lora(("one", "two"))
    one = generate(model, adapter_names=["one"])
    two = generate(model, adapter_names=["two"], cache=one.cache)
    assert two.margin_gate.reused_tokens == 0
    assert two.margin_gate.fingerprint != one.margin_gate.fingerprint
    assert two.sequences[0, 40:].tolist() == alone(model, "two", PROMPTS[0]).tokens
    again = generate(model, adapter_names=["two"], cache=two.cache)
    assert again.margin_gate.reused_tokens == 39
    assert torch.equal(again.sequences, two.sequences)


def test_names_that_cannot_be_honoured() -> None:
    model = lora(("one", "two"))
    with pytest.raises(ValueError, match="`adapter_names`.*one name for each of the 4 rows"):
        generate(model, PROMPTS, adapter_names=["one"])
    with pytest.raises(ValueError, match='`adapter_names`.*coverage="exact"'):
        generate(model, PROMPTS, adapter_names=NAMES, margin_gate={"coverage": "gated"})


def test_switched_adapters_are_another_model() -> None:
    model = lora(("one", "two"))
    one = generate(model)
    model.set_adapter("two")
    with pytest.raises(ValueError, match="it was computed with weights"):
        generate(model, cache=one.cache)
    assert generate(model).sequences[0, 40:].tolist() == alone(model, "two", PROMPTS[0]).tokens


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"short": True}, {"use_dora": True, "short": True}], ids=str)
def test_dora_and_adapters_in_bf16(fields: dict[str, Any]) -> None:
    short = fields.pop("short", False)
    model = lora(**fields)
    if short:
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.bfloat16()
    runs = run_batch(model, PROMPTS, 6, GATE)
    for prompt, run in zip(PROMPTS, runs, strict=True):
        assert_same(run, run_batch(model, [prompt], 6, GATE)[0])
    merged = enable(copy.deepcopy(model).float().merge_and_unload().eval())
    other = run_batch(merged, PROMPTS[:1], 1, GATE)[0].logits[0]
    # FP32 sums on both sides, of products in another order; merged weights are rounded once more: 2^-24 of them.
    assert (runs[0].logits[0] - other).norm() < 1e-3 * other.norm()


# Weights that change, or move, behind our back


def test_weights_changed_while_an_iteration_is_paused_poison_nothing() -> None:
    model = enable(tiny_model("llama", seed=4))
    prompts = random_prompts([70, 75], seed=1)
    engine = MarginGateEngine(model, GATE, max_batch_size=2)
    run = engine.iterate(prompts, max_new_tokens=12, do_sample=False, stop=lambda prompt, new: prompt == prompts[0])
    first = next(run)
    assert first.error is None
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    rest = list(run)
    assert [out.status.name for out in rest] == ["FAILED"] and "changed while this prompt was decoded" in rest[0].error
    later = engine.generate([prompts[1]], max_new_tokens=12, do_sample=False)["req_0"]
    assert later.reused_tokens == 0
    assert later.generated_tokens == run_batch(model, [prompts[1]], 12, GATE)[0].tokens


def test_a_run_bound_to_older_weights_gives_nothing_to_the_store() -> None:
    model = enable(tiny_model("llama", seed=4))
    prompts = random_prompts([70, 75], seed=1)
    engine = MarginGateEngine(model, GATE, max_batch_size=2)
    paused = engine.iterate(prompts, max_new_tokens=12, do_sample=False, stop=lambda prompt, new: prompt == prompts[0])
    next(paused)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    engine.generate([[5] * 40], max_new_tokens=3, do_sample=False)
    list(paused)
    later = engine.generate([prompts[1]], max_new_tokens=12, do_sample=False)["req_0"]
    assert later.generated_tokens == run_batch(model, [prompts[1]], 12, GATE)[0].tokens


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_off_loaded_weights_keep_their_identity(where: str, tmp_path: Any) -> None:
    expected = run_batch(enable(tiny_model("llama")), PROMPTS, 6, GATE)
    model = tiny_model("llama")
    if where == "disk":
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        cpu_offload(model, execution_device=torch.device("cpu"))
    enable(model)
    for _ in range(2):
        for run, right in zip(run_batch(model, PROMPTS, 6, GATE), expected, strict=True):
            assert_same(run, right)
    first, second = (generate(model).margin_gate.fingerprint for _ in range(2))
    assert first == second
    packed = len(verifier_for(model, GATE).store._packed)
    generate(model)
    assert len(verifier_for(model, GATE).store._packed) == packed, "weights at passing addresses were kept"
    forget_verifiers(model)
