"""The systems of the field as settings: who verifies what, and that the fully covered ones give the canonical bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitwise import assert_same, canonical, padded, run_batch
from fault_injection import plain_verifier
from margingate_hf import MarginGateConfig, enable
from margingate_hf.config import PRESETS
from margingate_hf.decoding.accept import compare
from margingate_hf.verifier.plans import CPU_PLANS, PrepackedPlan, probe_linear
from margingate_hf.verifier.reference import reference_logits
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([33, 1, 12, 70, 5])
NEW_TOKENS = 12


def statistics_of(model: Any, config: MarginGateConfig | None, prompts: list[list[int]] = PROMPTS) -> Any:
    out = model.generate(
        **padded(prompts),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        margin_gate=config,
        return_dict_in_generate=True,
    )
    return out.margin_gate


@pytest.mark.parametrize(
    "preset", [name for name, preset in PRESETS.items() if preset.fields is not None and name != "paper"]
)
def test_covered_presets_give_the_canonical_bits(preset: str) -> None:
    model = enable(tiny_model("llama"))
    config = MarginGateConfig.preset(preset)
    for prompts in (PROMPTS, PROMPTS[2:4]):
        for prompt, run in zip(prompts, run_batch(model, prompts, NEW_TOKENS, config), strict=True):
            assert_same(run, canonical(model, prompt, NEW_TOKENS, config), f"{preset}, {len(prompt)} tokens")


@pytest.mark.parametrize(
    "config", [MarginGateConfig(schedule="step"), MarginGateConfig(verify_batch_size=2, num_draft_tokens=3)]
)
def test_settings_of_passes_change_no_bit(config: MarginGateConfig) -> None:
    model = enable(tiny_model("mistral"))
    for prompt, run in zip(PROMPTS, run_batch(model, PROMPTS, NEW_TOKENS, config), strict=True):
        assert_same(run, canonical(model, prompt, NEW_TOKENS), f"{len(prompt)} tokens")


def test_always_on_verifies_every_step_of_every_row_alone(llama: Any) -> None:
    always = statistics_of(llama, MarginGateConfig.preset("always"))
    steps = sum(row.new_tokens - 1 for row in always.rows)  # a prompt's own pass gives the first token
    assert always.verify_forwards == always.verified_tokens == always.drafted_tokens == always.repaired_columns == steps
    together = statistics_of(llama, MarginGateConfig(schedule="step"))
    assert together.verify_forwards == together.draft_steps == NEW_TOKENS - 1
    assert always.wasted_tokens == together.wasted_tokens == 0


def test_verifier_only_presets_draft_nothing(llama: Any) -> None:
    for preset in ("layercast", "invariant"):
        assert statistics_of(llama, MarginGateConfig.preset(preset)).drafted_tokens == 0


def test_off_is_stock_generate(llama: Any) -> None:
    assert MarginGateConfig.preset("off") is None
    assert statistics_of_stock(llama, MarginGateConfig.preset("off"))


def statistics_of_stock(model: Any, config: MarginGateConfig | None) -> bool:
    ours = model.generate(**padded(PROMPTS), max_new_tokens=4, do_sample=False, margin_gate=config)
    stock = tiny_model("llama").generate(**padded(PROMPTS), max_new_tokens=4, do_sample=False)
    return torch.equal(ours, stock)


def test_nothing_beyond_the_drafts_is_committed_unread() -> None:
    assert compare([4, 5], lambda index: [4, 5][index], beyond=False).committed == (4, 5)
    assert compare([4, 5], lambda index: [4, 6][index], beyond=False).committed == (4, 6)
    assert compare([], lambda index: pytest.fail("read"), beyond=False).committed == ()


# BF16 operands


SHORT = MarginGateConfig(precision="bfloat16", num_draft_tokens=4, schedule="fixed")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt2", "gemma2", "mixtral"])
def test_short_operands_are_as_invariant(name: str) -> None:
    model = enable(tiny_model(name))
    for prompt, run in zip(PROMPTS, run_batch(model, PROMPTS, NEW_TOKENS, SHORT), strict=True):
        assert_same(run, canonical(model, prompt, NEW_TOKENS, SHORT), f"{name}, {len(prompt)} tokens")


def test_the_check_of_short_operands_can_fail(llama: Any) -> None:
    with plain_verifier(llama), pytest.raises(AssertionError, match="differ"):
        for prompt, run in zip(PROMPTS, run_batch(llama, PROMPTS, NEW_TOKENS, SHORT), strict=True):
            assert_same(run, canonical(llama, prompt, NEW_TOKENS, SHORT))


def test_short_operands_are_rounded_ones_and_the_head_is_whole() -> None:
    """Against a model whose linears but the head round what goes in, in FP32: a text of its own, and a near one."""
    model = enable(tiny_model("llama"))
    run = canonical(model, PROMPTS[2], NEW_TOKENS, SHORT)
    whole = canonical(model, PROMPTS[2], NEW_TOKENS)
    assert not torch.equal(run.logits[0], whole.logits[0])

    def rounds(module: Any, args: Any) -> Any:
        with torch._C.DisableTorchFunction():  # the reference leaves casts of the model's own out
            return (args[0].bfloat16().float(), *args[1:])

    handles = [
        module.register_forward_pre_hook(rounds)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    text = [*PROMPTS[2], *run.tokens[:-1]]
    rounded = reference_logits(model, text)[-NEW_TOKENS:]
    for handle in handles:
        handle.remove()
    plain = reference_logits(model, text)[-NEW_TOKENS:]
    ours, theirs = ((run.logits - other).norm() for other in (rounded, plain))
    assert ours < theirs / 2, (ours, theirs)


def test_the_text_of_short_operands_has_another_identity(llama: Any) -> None:
    plans_of = [statistics_of(llama, config).plan for config in (SHORT, MarginGateConfig(schedule="fixed"))]
    assert "bfloat16-operands" in plans_of[0] and "bfloat16" not in plans_of[1]
    out = llama.generate(
        **padded(PROMPTS), max_new_tokens=3, do_sample=False, margin_gate=SHORT, return_dict_in_generate=True
    )
    with pytest.raises(ValueError, match="`cache`.*"):
        llama.generate(**padded(PROMPTS), max_new_tokens=3, do_sample=False, margin_gate=True, cache=out.cache)


def test_short_operands_need_a_bf16_model() -> None:
    model = enable(tiny_model("llama", dtype=torch.float16))
    with pytest.raises(ValueError, match="`precision`='bfloat16'.*torch.float16"):
        statistics_of(model, SHORT)


@pytest.mark.parametrize("plan", CPU_PLANS, ids=lambda plan: plan.name)
def test_the_probe_accepts_every_plan_with_short_operands(plan: Any) -> None:
    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert probe_linear(plan, weight, "bfloat16") is None


def test_the_probe_sees_products_that_round_more() -> None:
    class Coarse(PrepackedPlan):
        def linear(self, rows: torch.Tensor, packed: Any, precision: str = "float32") -> torch.Tensor:
            out = super().linear(rows, packed, precision)
            return out.bfloat16().float() if precision == "bfloat16" else out

    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert "away from FP32's" in (probe_linear(Coarse(), weight, "bfloat16") or "")


def test_short_operands_change_no_setting_of_the_process(llama: Any) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    seen = set()
    handle = llama.lm_head.register_forward_pre_hook(
        lambda module, args: seen.add(torch.backends.mkldnn.matmul.fp32_precision)
    )
    run_batch(llama, PROMPTS[:2], 4, SHORT)
    handle.remove()
    assert seen == {before} and torch.backends.mkldnn.matmul.fp32_precision == before
