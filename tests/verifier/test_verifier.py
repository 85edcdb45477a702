"""The verifier as a whole: strictness, weights that change, the self-test and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

from bitwise import assert_same, canonical, padded, run_batch
from fault_injection import PlainPlan, plain_attention
from margingate_hf import MarginGateConfig, enable
from margingate_hf.forward import attention
from margingate_hf.forward.context import AttentionOptions, Segment
from margingate_hf.verifier import (
    CPU_PLANS,
    PrepackedPlan,
    StrictVerifierError,
    TilePlan,
    Verifier,
    VerifierError,
    forget_verifiers,
    hashing,
    precision,
    reference_logits,
    self_test,
    verifier_for,
)
from margingate_hf.verifier.precision import lowered_precision
from margingate_hf.verifier.torch_cpu import TorchCPU
from margingate_hf.verifier.weights import WeightStore
from tiny import random_prompts, tiny_model

PROMPT = random_prompts([30])[0]


def logits_of(model: Any, config: MarginGateConfig | None = None, plans: Any = CPU_PLANS) -> torch.Tensor:
    config = config or MarginGateConfig()
    verifier = verifier_for(model, config, plans)
    with torch.no_grad():
        return verifier.run(verifier.new_cache(1, config.kv_dtype), [Segment(0, 0, PROMPT)])


# Closeness


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2"])
def test_logits_are_close_to_float64(name: str) -> None:
    """Random weights scaled far up amplify a rounding error about a thousandfold; a wrong formula gives over 1e-2."""
    model = tiny_model(name, scale=8.0)
    with torch.no_grad():
        exact = reference_logits(model, PROMPT, torch.float64)
    for kv_dtype, allowed in (("float32", 2e-5), ("split", 1e-3), ("auto", 0.3)):
        error = (logits_of(model, MarginGateConfig(kv_dtype=kv_dtype)) - exact).norm() / exact.norm()
        assert error < allowed, f"{kv_dtype}: {error:.1e}"


def test_plans_agree_up_to_rounding() -> None:
    model = tiny_model("llama", scale=8.0)
    outputs = [logits_of(model, plans=(plan,)) for plan in (PrepackedPlan(), TilePlan(16), TilePlan(1))]
    for other in outputs[1:]:
        assert (other - outputs[0]).norm() / outputs[0].norm() < 1e-3


@pytest.mark.parametrize(
    ("name", "transforms_cached_kv"), [("llama", False), ("gpt2", False), ("gemma2", False), ("deepseek-v3", True)]
)
def test_a_model_that_computes_with_the_cache_is_given_its_own_dtype(name: str, transforms_cached_kv: bool) -> None:
    model = tiny_model(name)
    verifier = verifier_for(model, MarginGateConfig())
    cache = verifier.new_cache(1, "split")
    with torch.no_grad():
        verifier.run(cache, [Segment(0, 0, PROMPT)])
    assert verifier.transforms_cached_kv == transforms_cached_kv
    assert cache.layers[0].keys.dtype == (torch.bfloat16 if transforms_cached_kv else torch.float32)


# Strictness


def planted_forward(model: Any, op: Any) -> None:
    """Puts `op` behind the last norm of the model."""
    model.model.norm.register_forward_hook(lambda module, args, output: op(output))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (lambda x: torch.add(x, x, out=torch.empty_like(x, dtype=torch.bfloat16)), "empty_like"),
        (lambda x: torch.einsum("bqd->bqd", x), "einsum"),
        (lambda x: x.cumsum(-1), "cumsum"),
        (lambda x: x * x.norm(), "norm"),
        (lambda x: x.pow(1.5), "pow"),
        (lambda x: x @ x.transpose(-1, -2) @ x, "matmul"),
        (lambda x: x + x.sum(0, keepdim=True), "sum"),
        (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
        (lambda x: F.mish(x), "mish"),
    ],
)
def test_an_operation_without_a_plan_raises(op: Any, name: str) -> None:
    model = tiny_model("llama")
    planted_forward(model, op)
    with pytest.raises(StrictVerifierError, match=name):
        logits_of(model)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.to(torch.bfloat16).to(x.dtype),
        lambda x: x.to(dtype=torch.float16).to(x.dtype),
        lambda x: x.bfloat16(),
        lambda x: x.half().to(x.dtype),
        lambda x: x.type(torch.bfloat16),
        lambda x: x.type_as(torch.ones(1, dtype=torch.bfloat16)),
    ],
)
def test_a_cast_of_an_activation_to_16_bits_is_left_out(op: Any) -> None:
    """As an adapter or a router in 16 bits does it; in the verifier, and in the FP32 forward it is compared with."""
    model = tiny_model("llama")
    before = logits_of(model)
    planted_forward(model, op)
    assert torch.equal(logits_of(model), before)


def test_strict_false_runs_it_and_says_so() -> None:
    model = enable(tiny_model("llama"))
    planted_forward(model, lambda x: x + 0 * x.cumsum(-1))
    out = model.generate(
        **padded([PROMPT]),
        max_new_tokens=2,
        margin_gate=MarginGateConfig(strict=False),
        return_dict_in_generate=True,
    )
    assert any("cumsum" in note for note in out.margin_gate.notes)


def test_a_scripted_operation_is_seen_below_python() -> None:
    """A scripted function never reaches torch's Python functions; the operator audit of the self-test sees it."""

    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)

    model = tiny_model("llama")
    planted_forward(model, scripted)
    with pytest.raises(VerifierError, match="coverage.*silu"):
        logits_of(model)


def test_autocast_changes_nothing() -> None:
    model = tiny_model("llama")
    before = logits_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("way", ["set_float32_matmul_precision", "mkldnn.matmul", "backends"])
def test_a_lowered_product_precision_is_refused_or_harmless_and_left_alone(way: str) -> None:
    """A setting of the whole process: where this processor would round by it, one clear error; else the same bits."""
    model = tiny_model("llama")
    before = logits_of(model)
    try:
        if way == "set_float32_matmul_precision":
            torch.set_float32_matmul_precision("medium")
        elif way == "mkldnn.matmul":
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        else:
            torch.backends.fp32_precision = "bf16"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        if lowered_precision():
            with pytest.raises(ValueError, match="fp32_precision='bf16'.*set_float32_matmul_precision"):
                logits_of(model)
        else:
            assert torch.equal(logits_of(model), before)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_a_processor_that_rounds_refuses_before_and_behind_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the setting rounds here, and another thread lowers it in the middle of a forward."""
    model = tiny_model("llama")
    before = logits_of(model)
    monkeypatch.setattr(precision, "_rounds", lambda setting: True)
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with pytest.raises(ValueError, match="whole process"):
            logits_of(model)
        torch.backends.mkldnn.matmul.fp32_precision = "none"

        def lowers(module: Any, args: Any) -> None:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"

        handle = model.register_forward_pre_hook(lowers)
        with pytest.raises(ValueError, match="whole process"):
            logits_of(model)
        handle.remove()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert torch.equal(logits_of(model), before)


# Weights


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "last column negated": lambda x: x[:, -1].neg_(),
    "first column negated": lambda x: x[:, 0].neg_(),
    "two neighbours negated": lambda x: x[5:7, 3].neg_(),
    "every fourth column negated": lambda x: x[:, 3::4].neg_(),
    "a row negated": lambda x: x[3].neg_(),
    "all negated": lambda x: x.neg_(),
    "last column doubled": lambda x: x[:, -1].mul_(2),
    "last column halved": lambda x: x[:, -1].mul_(0.5),
    "last column times -2": lambda x: x[:, -1].mul_(-2),
    "one element": lambda x: x[17, 5].add_(1),
    "two rows exchanged": lambda x: x.copy_(x[[1, 0, *range(2, len(x))]]),
    "two columns exchanged": lambda x: x.copy_(x[:, [1, 0, *range(2, x.shape[1])]]),
}


@pytest.mark.parametrize("edit", EDITS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("form", [hashing.digest, hashing._mixed], ids=["xxh3", "device"])
def test_both_hashes_see_every_edit(form: Callable, edit: str) -> None:
    """The device form runs on any device; edits that a linear checksum misses are among them."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = form(weight)
        assert form(weight.clone()) == before
        changed = weight.clone()
        EDITS[edit](changed)
        assert form(changed) != before, dtype


def test_hashes_of_odd_shapes_and_strides() -> None:
    base = torch.randn(5001, generator=torch.Generator().manual_seed(0))
    for form in (hashing.digest, hashing._mixed):
        found = {form(base[:size]) for size in (1, 2, 3, 7, 8, 4096, 5001)}
        assert len(found) == 7
        assert form(base[1:9]) == form(base[1:9].clone()) and form(base[::2]) == form(base[::2].contiguous())
        assert form(base[:8].bfloat16()[1:]) == form(base[1:8].bfloat16())


def test_resident_and_per_use_weights_give_the_same_bits() -> None:
    model = tiny_model("qwen2")
    kept = logits_of(model, MarginGateConfig(resident_weights=True))
    used = logits_of(model, MarginGateConfig(resident_weights=False))
    assert torch.equal(kept, used)
    store = WeightStore(model, PrepackedPlan(), resident=False)
    store.packed(model.lm_head.weight)
    assert not store._packed


def test_per_use_weights_are_recorded() -> None:
    model = enable(tiny_model("llama"))
    out = model.generate(
        **padded([PROMPT]),
        max_new_tokens=2,
        margin_gate=MarginGateConfig(resident_weights=False),
        return_dict_in_generate=True,
    )
    assert any("up-cast at every use" in note for note in out.margin_gate.notes)


def test_no_memory_means_no_resident_copy() -> None:
    with mock.patch("margingate_hf.verifier.weights.psutil.virtual_memory") as memory:
        memory.return_value.available = 1000
        assert not WeightStore(tiny_model("llama"), PrepackedPlan()).resident
        memory.return_value.available = 1 << 40
        assert WeightStore(tiny_model("llama"), PrepackedPlan()).resident


@pytest.mark.parametrize("which", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_an_edit_through_data_is_noticed(which: str) -> None:
    model = tiny_model("llama")
    before = logits_of(model)
    store = verifier_for(model, MarginGateConfig()).store
    mark = store.fingerprint
    parameter = model.get_parameter(which)
    version = parameter._version
    parameter.data[3:5] *= 2
    assert parameter._version == version, "the edit this test is about leaves no trace in the version counter"
    after = logits_of(model)
    assert not torch.equal(before, after)
    assert store.fingerprint != mark
    with torch.no_grad():
        exact = reference_logits(model, PROMPT, torch.float64)
    assert (after - exact).norm() / exact.norm() < 1e-2
    parameter.data[3:5] /= 2
    assert torch.equal(logits_of(model), before)
    assert store.fingerprint == mark


def test_swapping_a_lora_adapter_is_noticed() -> None:
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(tiny_model("llama"), config)
    wrapped.add_adapter("other", config)
    wrapped.eval()
    enable(wrapped)
    prompts = random_prompts([9, 20])
    results, marks = {}, {}
    for name in ("default", "other", "default"):
        wrapped.set_adapter(name)
        out = wrapped.generate(
            **padded(prompts),
            max_new_tokens=8,
            do_sample=False,
            margin_gate=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        if name in results:
            assert torch.equal(torch.stack(out.logits), results[name])
            assert out.margin_gate.fingerprint == marks[name]
        results[name] = torch.stack(out.logits)
        marks[name] = out.margin_gate.fingerprint
    assert not torch.equal(results["default"][0], results["other"][0])
    assert marks["default"] != marks["other"]
    model = wrapped.get_base_model()
    for prompt, run in zip(prompts, run_batch(model, prompts, 8), strict=True):
        assert_same(run, canonical(model, prompt, 8))


def test_the_fingerprint_is_that_of_the_weights_not_of_the_process() -> None:
    one, two, other = (WeightStore(tiny_model("llama", seed=seed), PrepackedPlan()) for seed in (0, 0, 1))
    assert one.fingerprint == two.fingerprint != other.fingerprint


# The self-test


def test_a_plan_that_is_not_invariant_is_passed_over() -> None:
    class Planted(PlainPlan):
        sizes = (1, 2, 4, 16, 64)

    model = tiny_model("llama", hidden_size=128, intermediate_size=512)
    verifier = verifier_for(model, MarginGateConfig(), (Planted(), TilePlan(16)))
    assert verifier.plan.name == "tile-16"
    assert any("plain: invariance" in note for note in verifier.notes()), "said in the statistics of every call"
    with pytest.raises(VerifierError, match="every plan.*plain: invariance"):
        verifier_for(tiny_model("llama", hidden_size=128, intermediate_size=512), MarginGateConfig(), (Planted(),))


def test_an_attention_that_is_not_invariant_is_refused() -> None:
    model = tiny_model("llama")
    with (
        mock.patch.object(TorchCPU, "verify_attention", staticmethod(plain_attention)),
        pytest.raises(VerifierError, match="invariance: .* positions change their bits"),
    ):
        verifier_for(model, MarginGateConfig())


def test_an_attention_that_is_never_called_is_refused() -> None:
    model = tiny_model("llama")
    own = modeling_llama.eager_attention_forward

    def deaf(*args: Any, attention_interface: Any = None, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    with mock.patch.object(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: deaf):
        problem = self_test_problem(model)
    assert problem.startswith("coverage")


def self_test_problem(model: Any) -> str:
    """The self-test's verdict, or the error a forward that makes no sense ends in."""
    try:
        return str(self_test(Verifier(model, PrepackedPlan())))
    except (StrictVerifierError, RuntimeError, ValueError) as error:
        return f"coverage: {error}"


def test_a_forward_that_changes_its_buffers_is_refused() -> None:
    """CTRL rounds its position table to the dtype of the forward before: an earlier call would move a text."""
    model = tiny_model("llama")
    model.register_buffer("table", torch.zeros(4))

    def count(module: Any, args: Any, output: Any) -> None:
        module.table += 1

    model.register_forward_hook(count)
    with pytest.raises(VerifierError, match=r"coverage.*changes its weights or buffers \['table'\]"):
        verifier_for(model, MarginGateConfig())


def test_a_layer_that_skips_our_attention_is_refused() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kwargs: (hidden_states * 0.5, None)
    with pytest.raises(VerifierError, match=r"coverage.*layers never reached: \[1\]"):
        verifier_for(model, MarginGateConfig())


def test_a_mask_with_more_than_causal_and_sliding_is_refused() -> None:
    """Chunked attention lives in the mask alone: without it the result is invariant, and wrong."""

    def chunked(*args: Any, **kwargs: Any) -> Any:
        kwargs["and_mask_function"] = lambda batch, head, q, k: q // 16 == k // 16
        return create_causal_mask(*args, **kwargs)

    model = tiny_model("llama")
    with (
        mock.patch.object(modeling_llama, "create_causal_mask", chunked),
        pytest.raises(VerifierError, match="correctness"),
    ):
        verifier_for(model, MarginGateConfig())


def test_an_undeclared_layer_type_is_refused() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(VerifierError, match="coverage.*chunked_attention"):
        verifier_for(model, MarginGateConfig())


@pytest.mark.parametrize("fault", ["scale", "causality", "rope"])
def test_a_wrong_but_invariant_verifier_is_refused(fault: str) -> None:
    model = tiny_model("llama")
    right = attention.verify_attention

    def wrong(query: Any, keys: Any, values: Any, context: Any, options: AttentionOptions) -> Any:
        if fault == "scale":
            return right(query, keys, values, context, replace(options, scaling=options.scaling * 1.05))
        if fault == "causality":
            return right(query, keys, values, context, replace(options, sliding_window=7))
        return right(query.roll(1, -1), keys, values, context, options)

    with (
        mock.patch.object(TorchCPU, "verify_attention", staticmethod(wrong)),
        pytest.raises(VerifierError, match="correctness"),
    ):
        verifier_for(model, MarginGateConfig())


def test_it_runs_once_for_a_model() -> None:
    model = tiny_model("llama")
    with mock.patch("margingate_hf.verifier.selftest.self_test", return_value=None) as ran:
        first = verifier_for(model, MarginGateConfig())
        assert verifier_for(model, MarginGateConfig(num_draft_tokens=2)) is first
        assert ran.call_count == 1
        forget_verifiers(model)
        assert verifier_for(model, MarginGateConfig()) is not first
    assert math.isfinite(logits_of(model).sum())
