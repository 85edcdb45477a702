"""Packed products of the fast step: near the model's own, never part of a token, gone when the call is over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwise import DRAFTING, assert_same, canonical, padded, run_batch
from margingate_hf import MarginGateConfig, enable
from margingate_hf.forward.draft_linear import DraftLinear, is_plain_linear
from margingate_hf.verifier import verifier_for, weights
from margingate_hf.verifier.draft_products import UPCAST_ROWS, DraftProducts
from margingate_hf.verifier.plans import PrepackedPlan, TilePlan
from margingate_hf.verifier.precision import multiplies_bfloat16
from margingate_hf.verifier.weights import WeightStore
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([5, 11, 3, 9, 4, 6, 7, 8])
SHORT = pytest.param(
    True, marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor has no BF16 products")
)


def products(model: Any, short: bool, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> DraftProducts:
    """Of a fresh store; `short=False` is a processor without BF16 products."""
    monkeypatch.setattr(weights, "multiplies_bfloat16", lambda: short)
    return DraftProducts(WeightStore(model, PrepackedPlan(), **{"resident": True, **arguments}))


@pytest.mark.parametrize("short", [SHORT, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, UPCAST_ROWS, 21])
def test_a_product_is_that_of_the_model(
    short: bool, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").to(dtype)
    product = products(model, short, monkeypatch)
    for module in filter(is_plain_linear, model.modules()):
        input = torch.randn(rows, module.in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
        out = product(input, module.weight)
        if rows < UPCAST_ROWS and not (short and dtype == torch.bfloat16):
            assert out is None, "too few rows for an up-cast product"
            continue
        assert out is not None and out.dtype == dtype and out.shape == (rows, module.out_features)
        exact = input.double() @ module.weight.double().T
        # One rounding to the result's dtype, and FP32 sums of at most 112 terms.
        allowed = torch.finfo(dtype).eps * exact.abs() + 112 * 2.0**-24 * exact.abs().max()
        assert ((out.double() - exact).abs() <= allowed).all()


def test_declined_where_there_is_nothing_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    weight = model.lm_head.weight
    rows = torch.ones(UPCAST_ROWS, weight.shape[1], dtype=torch.bfloat16)
    assert products(model, False, monkeypatch)(rows, weight) is not None
    assert products(model, False, monkeypatch)(rows.float(), weight) is None, "autocast, or a processor of its own"
    assert products(model, False, monkeypatch, resident=False)(rows, weight) is None
    assert DraftProducts(WeightStore(model, TilePlan(16), True))(rows, weight) is None


@pytest.mark.parametrize("short", [SHORT, False])
def test_an_edited_weight_is_packed_anew(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    product = products(model, short, monkeypatch)
    weight = model.lm_head.weight
    rows = torch.ones(UPCAST_ROWS, weight.shape[1], dtype=torch.bfloat16)
    before = product(rows, weight)
    weight.data.mul_(2)
    assert product.store.refresh() == {"lm_head.weight"}
    after = product(rows, weight)
    assert before is not None and after is not None and torch.equal(after, 2 * before)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "gpt-neox", "deepseek-v3"])
def test_wrong_drafts_move_no_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products take no part in a token: with noise for all of them the text, its logits and columns stay."""
    model = enable(tiny_model(kind))
    expected = [canonical(model, prompt, 12) for prompt in PROMPTS]

    def noise(self: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.randn(rows.shape[0], weight.shape[0], generator=torch.Generator().manual_seed(7)).to(rows.dtype)

    monkeypatch.setattr(DraftProducts, "__call__", noise)
    for run, right in zip(run_batch(model, PROMPTS, 12), expected, strict=True):
        assert_same(run, right)
    out = model.generate(
        **padded(PROMPTS), max_new_tokens=12, do_sample=False, margin_gate=DRAFTING, return_dict_in_generate=True
    )
    assert out.margin_gate.flips > len(PROMPTS), "the noise was not used"


def test_products_are_used_by_full_coverage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated run may hand out what the fast path drafted: there it is the model's own."""
    model = enable(tiny_model("llama"))
    used: list[int] = []
    stock = DraftProducts.__call__

    def counted(self: Any, rows: torch.Tensor, weight: torch.Tensor) -> Any:
        used.append(rows.shape[0])
        return stock(self, rows, weight)

    monkeypatch.setattr(DraftProducts, "__call__", counted)
    run_batch(model, PROMPTS, 4)
    assert used
    used.clear()
    model.generate(**padded(PROMPTS), max_new_tokens=4, do_sample=False, margin_gate=MarginGateConfig.preset("paper"))
    assert not used


def test_where_onednn_may_not_use_what_the_processor_has() -> None:
    """`ONEDNN_MAX_CPU_ISA` below AVX-512: oneDNN refuses BF16, and the fast step must not ask it."""
    program = (
        "from margingate_hf import enable; from bitwise import run_batch; "
        "from tiny import random_prompts, tiny_model; "
        "print(sum(len(run.tokens) for run in run_batch(enable(tiny_model('llama')), random_prompts([5, 7] * 5), 4)))"
    )
    here = str(Path(__file__).parents[1])
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    environment["PYTHONPATH"] = os.pathsep.join([here, environment.get("PYTHONPATH", "")])
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr[-2000:]
    assert int(out.stdout) >= 10


def test_products_are_put_into_a_copy() -> None:
    model = enable(tiny_model("llama"))
    run_batch(model, PROMPTS, 4)
    twin = verifier_for(model, DRAFTING).twin_for()
    assert type(twin.lm_head) is DraftLinear and twin.lm_head.weight is model.lm_head.weight
    assert not any(isinstance(module, DraftLinear) or "forward" in module.__dict__ for module in model.modules())


def test_a_hooked_layer_is_left_alone() -> None:
    """Something else has put its own forward there, such as accelerate's off-loading."""
    model = enable(tiny_model("llama"))
    layer = model.model.layers[0].mlp.up_proj
    seen: list[torch.dtype] = []
    own = layer.forward

    def hooked(input: torch.Tensor) -> torch.Tensor:
        seen.append(input.dtype)
        return own(input)

    layer.forward = hooked
    assert not is_plain_linear(layer)
    verifier_for(model, DRAFTING)
    seen.clear()
    run_batch(model, PROMPTS, 4)
    assert {torch.bfloat16, torch.float32} <= set(seen), "in fast steps and in passes"
    assert layer.forward is hooked
