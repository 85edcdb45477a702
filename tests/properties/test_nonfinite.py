"""NaN and overflow: one row ends by an error of its own, no other row, and no later text, sees anything of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitwise import Run, assert_same, padded, run_batch
from fault_injection import disturbed_drafts
from margingate_hf import MarginGateConfig, MarginGateEngine, enable
from margingate_hf.config import KV_DTYPES
from margingate_hf.decoding.accept import leading_finite
from margingate_hf.forward.context import Segment
from margingate_hf.kv_cache.formats import largest_held, round_to_planes, split_planes
from margingate_hf.verifier import verifier_for
from tiny import random_prompts, tiny_model

POISON = 7
GATE = MarginGateConfig(schedule="fixed", num_draft_tokens=7)
PROMPTS = [[token if token != POISON else 8 for token in prompt] for prompt in random_prompts([30, 12, 75], seed=2)]


def poisoned(kind: str) -> Any:
    """A model whose token `POISON` has a NaN embedding, or values that FP16 cannot hold in two planes."""
    if kind == "nan":
        model = tiny_model("llama", scale=10.0)
        with torch.no_grad():
            model.model.embed_tokens.weight[POISON] = float("nan")
        return enable(model)
    model = tiny_model("llama", dtype=torch.float16, scale=10.0)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.fill_(1.0)
        direction = torch.randn(64, generator=torch.Generator().manual_seed(0)).sign()
        model.model.embed_tokens.weight[POISON] = direction
        model.model.layers[0].self_attn.v_proj.weight[0] = direction * 2100  # 64 * 2100, beyond 131,008
    return enable(model)


def generate(model: Any, prompts: list[list[int]], **arguments: Any) -> Any:
    return model.generate(
        **padded(prompts),
        **{"max_new_tokens": 8, "do_sample": False, "margin_gate": GATE, **arguments},
        return_dict_in_generate=True,
        output_logits=True,
    )


@pytest.mark.parametrize("kind", ["nan", "overflow"])
def test_a_row_ends_by_its_own_error_and_the_others_go_on(kind: str) -> None:
    model = poisoned(kind)
    bad = [*PROMPTS[0][:20], POISON, *PROMPTS[0][20:]]
    out = generate(model, [PROMPTS[1], bad, PROMPTS[2]])
    assert [row.finish_reason for row in out.margin_gate.rows][1] == "error"
    assert out.margin_gate.rows[1].new_tokens == 0
    assert any("row 1 ended early: the canonical logits of new token 0" in note for note in out.margin_gate.notes)
    for row, prompt in ((0, PROMPTS[1]), (2, PROMPTS[2])):
        right = generate(model, [prompt])
        count = out.margin_gate.rows[row].new_tokens
        assert count == right.margin_gate.rows[0].new_tokens > 2
        assert torch.equal(torch.stack(out.logits)[:count, row], torch.stack(right.logits)[:, 0])


@pytest.mark.parametrize("kind", ["nan", "overflow"])
def test_earlier_positions_of_the_same_forward_are_untouched(kind: str) -> None:
    """A masked key is weighed by 0, which NaN would survive: it must not reach the queries before it."""
    model = poisoned(kind)
    verifier = verifier_for(model, GATE)
    tail = [POISON, *PROMPTS[1]]
    with torch.no_grad():
        clean = verifier.run(verifier.new_cache(1, "split"), [Segment(0, 0, PROMPTS[0])])
        cache = verifier.new_cache(1, "split")
        mixed = verifier.run(cache, [Segment(0, 0, [*PROMPTS[0], *tail])])
    assert torch.equal(mixed[: len(PROMPTS[0])], clean)
    assert torch.isnan(mixed[len(PROMPTS[0]) :]).all()
    assert cache.sound(0) == len(PROMPTS[0]) < cache.verified[0]
    cache.check()


@pytest.mark.parametrize("kind", ["nan", "overflow"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_later_text_of_the_row_is_untouched(kind: str, kv_dtype: str) -> None:
    model = poisoned(kind)
    gate = GATE.update(kv_dtype=kv_dtype)
    right = generate(model, PROMPTS[:1], margin_gate=gate)
    first = generate(model, [[*PROMPTS[0][:25], POISON, *PROMPTS[0][25:]]], margin_gate=gate)
    again = generate(model, PROMPTS[:1], margin_gate=gate, cache=first.cache)
    assert again.margin_gate.reused_tokens == 25
    assert torch.equal(torch.stack(again.logits), torch.stack(right.logits))


def test_a_poisoned_draft_moves_no_token() -> None:
    """A wrong draft may be the poisoned token itself; the verifier drops it like any other."""
    model = poisoned("nan")
    expected = run_batch(model, PROMPTS, 10, GATE.update(num_draft_tokens=0))

    def hook(module: Any, args: Any, output: Any) -> Any:
        return output

    with disturbed_drafts(model, lambda position: position % 3 == 0):
        handle = model.register_forward_hook(_drafts_poison)
        for run, right in zip(run_batch(model, PROMPTS, 10, GATE), expected, strict=True):
            assert_same(run, right)
        handle.remove()


def _drafts_poison(module: Any, args: Any, output: Any) -> Any:
    from margingate_hf.forward.context import DecodeContext, current_context

    context = current_context()
    if isinstance(context, DecodeContext):
        for row, position in enumerate(context.positions.tolist()):
            if position % 3 == 0:
                output.logits[row, -1, POISON] = 1e4
    return output


def test_the_engine_reports_it_and_keeps_nothing_of_it() -> None:
    model = poisoned("nan")
    shared = PROMPTS[2]
    engine = MarginGateEngine(model, GATE, max_batch_size=2)
    bad = [*shared[:40], POISON, *shared[40:]]
    out = engine.generate([bad, shared], max_new_tokens=6, do_sample=False)
    assert out["req_0"].status.name == "FAILED" and "not finite" in out["req_0"].error
    assert out["req_1"].error is None
    right: Run = run_batch(model, [shared], 6, GATE)[0]
    assert out["req_1"].generated_tokens == right.tokens
    again = engine.generate([shared], max_new_tokens=6, do_sample=False)["req_0"]
    assert again.generated_tokens == right.tokens and again.reused_tokens == 64


def test_values_beyond_one_fp16_plane_are_held_in_two() -> None:
    model = tiny_model("llama", dtype=torch.float16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(9000)
            layer.self_attn.o_proj.weight.mul_(1e-4)
    enable(model)
    two, three = (
        generate(model, random_prompts([20], seed=2), margin_gate=GATE.update(kv_dtype=name))
        for name in ("split", "float32")
    )
    assert max(store.exact.abs().max() for layer in two.cache.layers for store in layer.stores) > 65504
    assert torch.isfinite(torch.stack(two.logits)).all() and not two.margin_gate.notes
    assert torch.equal(two.sequences, three.sequences)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_planes_hold_twice_the_largest_value(dtype: torch.dtype) -> None:
    limit = largest_held(dtype, 2)
    x = torch.tensor([limit * 0.999, -limit * 0.7, torch.finfo(dtype).max, 1.0, 0.0])
    again = round_to_planes(x, dtype, 2)
    assert torch.isfinite(again).all()
    assert ((again - x).abs() <= 2.0**-12 * x.abs()).all()  # the second plane may have to hold half of the value
    assert torch.isinf(split_planes(torch.tensor([70000.0]), torch.float16, 1)[0]).all()


def test_which_logits_can_be_chosen_from() -> None:
    row, hidden = torch.zeros(5), torch.full((5,), float("-inf"))
    some = torch.tensor([0.0, float("-inf"), 1.0, 2.0, float("-inf")])
    for bad in (hidden, torch.full((5,), float("nan")), torch.tensor([0.0, float("inf"), 0, 0, 0])):
        assert leading_finite(torch.stack([row, some, bad, row])) == 2
    assert leading_finite(torch.stack([row, some])) == 2
