"""Gated coverage: what is trusted, what is computed again, and what is replaced."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, TextIteratorStreamer

from bitwise import padded
from fault_injection import disturbed_drafts
from margingate_hf import MarginGateConfig, enable
from margingate_hf.forward.forward_twin import forward_twin
from margingate_hf.verifier.reference import PlainMode, eager_twin
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([7, 19, 4])
NEW_TOKENS = 10


def gated(model: Any, prompts: list[list[int]] = PROMPTS, **changes: Any) -> Any:
    config = MarginGateConfig(coverage="gated", **changes.pop("gate", {}))
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True, **changes}
    return model.generate(**padded(prompts), margin_gate=config, return_dict_in_generate=True, **arguments)


class Rounding(DynamicCache):
    """FP32 arithmetic on columns that are kept in BF16, the step's own included."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # the reference leaves casts of the model's own out
            keys, values = keys.bfloat16().float(), values.bfloat16().float()
        return super().update(keys, values, *args, **kwargs)


# A column that falls between two BF16 numbers may be rounded to either: a relative 2^-8 of one value of one column.
CLOSE = 1e-3


def fp32_step(model: Any, cache: Any, slot: int, position: int, token: int) -> tuple[torch.Tensor, DynamicCache]:
    """The stock FP32 forward of one token on a row's columns as they stand: logits `[vocabulary]`, and the cache."""
    past = Rounding()
    for index, layer in enumerate(cache.layers):
        held = [store.draft[slot : slot + 1, :, :position].float() for store in layer.stores]
        past.update(*held, index)
    twin = eager_twin(model)
    with torch.no_grad(), PlainMode():
        out = twin(
            input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[position]]), cache=past, use_cache=True
        )
    return out.logits[0, -1], past


def stock_prefill(model: Any, prompt: list[int]) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen3", "deepseek-v3"])
def test_a_recomputed_step_is_fp32_on_the_cache_as_it_stands(name: str) -> None:
    model = enable(tiny_model(name))
    out = gated(model, gate={"threshold": math.inf})
    width = out.sequences.shape[1] - len(out.logits)
    for slot, prompt in enumerate(PROMPTS):
        new = out.sequences[slot, width:].tolist()
        text = [*prompt, *new]
        for index in range(len(new)):
            position = len(prompt) + index - 1
            expected, _ = fp32_step(model, out.cache, slot, position, text[position])
            ours = out.logits[index][slot]
            assert (ours - expected).norm() / expected.norm() < CLOSE, (slot, index)
            assert new[index] == int(ours.argmax())


def test_only_the_column_of_a_wrong_token_is_replaced() -> None:
    """Drafts are made wrong at some positions: there the column is FP32's, rounded; elsewhere the fast path's own."""
    model = enable(tiny_model("llama"))
    wrong = {9, 12}
    with disturbed_drafts(model, lambda position: position in wrong):
        out = gated(model, [PROMPTS[0]], gate={"threshold": math.inf})
    prompt, new = PROMPTS[0], out.sequences[0, len(PROMPTS[0]) :].tolist()
    text = [*prompt, *new]
    replaced = 0
    for position in range(len(prompt), len(text) - 1):
        _, past = fp32_step(model, out.cache, 0, position, text[position])
        fast = fast_column(model, out.cache, position, text[position])
        for index, layer in enumerate(out.cache.layers):
            held = layer.stores[0].draft[0, :, position]
            rounded = past.layers[index].keys[0, :, position].bfloat16()
            if position in wrong:
                # The stock FP32 product may round to the neighbouring BF16 number where it falls between two.
                assert torch.isclose(held.float(), rounded.float(), rtol=2**-7, atol=1e-6).all()
                replaced += not torch.equal(held, fast[index])
            else:
                assert torch.equal(held, fast[index]), (position, index)
    assert replaced, "the replaced columns are the fast path's: a weak test"
    assert out.margin_gate.flips == out.margin_gate.repaired_columns >= len(wrong)


def fast_column(model: Any, cache: Any, position: int, token: int) -> list[torch.Tensor]:
    """Keys `[heads, dim]` of each layer that a fast step writes at `position`; the cache is put back."""
    from margingate_hf.forward.context import DecodeContext, context_scope
    from margingate_hf.verifier.torch_cpu import TorchCPU

    before = cache.export_entries(0, position, position + 1)
    context = DecodeContext(torch.tensor([position]), position + 1, backend=TorchCPU())
    with torch.no_grad(), context_scope(context):
        forward_twin(model)(
            input_ids=torch.tensor([[token]]), position_ids=context.positions[:, None], cache=cache, use_cache=True
        )
    found = [layer.stores[0].draft[0, :, position].clone() for layer in cache.layers]
    cache.load_entries(0, position, before)
    return found


def test_prompts_are_read_by_the_stock_forward() -> None:
    model = enable(tiny_model("llama"))
    out = gated(model, [PROMPTS[1]], gate={"threshold": 0.0})
    stock = stock_prefill(model, PROMPTS[1])
    for ours, theirs in zip(out.cache.layers, stock.layers, strict=True):
        assert torch.equal(ours.stores[0].draft[0, :, : len(PROMPTS[1])], theirs.keys[0])
        assert torch.equal(ours.stores[1].committed(0, len(PROMPTS[1])), theirs.values[0].float())


def test_wide_steps_are_trusted(llama: Any) -> None:
    nothing = gated(llama, gate={"threshold": 0.0}).margin_gate
    assert nothing.verify_forwards == nothing.low_margin_steps == nothing.repaired_columns == 0
    some = gated(llama, gate={"threshold": 1.0, "verify_batch_size": 1}).margin_gate
    assert 0 < some.low_margin_steps < some.drafted_tokens
    assert some.verify_forwards == some.verified_tokens == some.low_margin_steps
    together = gated(llama, gate={"threshold": 1.0}).margin_gate
    assert together.verify_forwards < some.verify_forwards and together.low_margin_steps == some.low_margin_steps


def test_rows_in_one_pass_or_each_alone_give_the_same_bits(llama: Any) -> None:
    runs = [gated(llama, gate={"threshold": 2.0, "verify_batch_size": size}) for size in (None, 1, 2)]
    for other in runs[1:]:
        assert torch.equal(other.sequences, runs[0].sequences)
        for mine, theirs in zip(runs[0].logits, other.logits, strict=True):
            assert torch.equal(mine, theirs)


def test_recomputed_alone_a_batch_of_one_never_flips(llama: Any) -> None:
    """The same 16-bit step as a batch of one is, for a batch of one, the same step."""
    trusted = gated(llama, [PROMPTS[0]], gate={"threshold": 0.0})
    again = gated(llama, [PROMPTS[0]], gate={"threshold": math.inf, "reference": "alone"})
    assert again.margin_gate.verify_forwards == again.margin_gate.drafted_tokens == NEW_TOKENS
    assert again.margin_gate.flips == 0
    assert torch.equal(trusted.sequences, again.sequences)
    # The first token is computed again on a cache, not with its prompt: equal in value, not in bits.
    assert all(torch.equal(a, b) for a, b in zip(trusted.logits[1:], again.logits[1:], strict=True))


def test_recomputed_alone_replaces_what_the_batch_got_wrong(llama: Any) -> None:
    with disturbed_drafts(llama, lambda position: position == 21):
        plain = gated(llama, gate={"threshold": 0.0})
    calls = []

    def first_of_two(position: int) -> bool:  # the step alone comes second and is left as it is
        calls.append(position)
        return position == 21 and calls.count(21) == 1

    with disturbed_drafts(llama, first_of_two):
        mended = gated(llama, gate={"threshold": math.inf, "reference": "alone"})
    assert mended.margin_gate.flips >= 1
    assert not torch.equal(plain.sequences[1], mended.sequences[1])


def test_it_is_said_to_be_statistical(llama: Any) -> None:
    out = gated(llama)
    assert any("gated" in note and "no calibration" in note for note in out.margin_gate.notes)
    assert out.margin_gate.miss_bound is None and "gated-fp32" in out.margin_gate.plan
    assert out.cache.identity is None
    with pytest.raises(ValueError, match="`cache`"):
        llama.generate(**padded(PROMPTS), max_new_tokens=2, do_sample=False, margin_gate=True, cache=out.cache)


def test_rows_end_by_themselves_and_come_back_in_order(llama: Any) -> None:
    alone = [gated(llama, [prompt], gate={"threshold": math.inf}) for prompt in PROMPTS]
    ends = alone[1].sequences[0, len(PROMPTS[1]) + 2].item()
    out = gated(llama, gate={"threshold": math.inf}, eos_token_id=ends)
    lengths = [row.new_tokens for row in out.margin_gate.rows]
    assert lengths[1] <= 3
    for slot, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        new = out.sequences[slot, -len(out.logits) :].tolist()[:length]
        assert out.cache.tokens[slot] == [*prompt, *new[:-1]]


def test_processors_sampling_and_streaming(llama: Any) -> None:
    plain = gated(llama, gate={"threshold": math.inf})
    penalised = gated(llama, gate={"threshold": math.inf}, repetition_penalty=1.8, output_scores=True)
    assert not torch.equal(plain.sequences, penalised.sequences)
    new = penalised.sequences[0, -len(penalised.scores) :]
    assert new.tolist() == [int(scores[0].argmax()) for scores in penalised.scores]
    sampled = [gated(llama, gate={"seed": seed}, do_sample=True).sequences for seed in (1, 1, 2)]
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])

    class Ids:
        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(map(str, torch.as_tensor(ids).tolist())) + " "

    streamer = TextIteratorStreamer(Ids(), skip_prompt=True)
    out = gated(llama, [PROMPTS[0]], streamer=streamer)
    assert "".join(streamer).split() == [str(i) for i in out.sequences[0, len(PROMPTS[0]) :].tolist()]


def test_continuous_batching_without_reuse(llama: Any) -> None:
    prompts = [PROMPTS[1], PROMPTS[1], *PROMPTS]
    gate = MarginGateConfig(coverage="gated", threshold=math.inf)
    found = llama.generate_batch(prompts, max_new_tokens=6, do_sample=False, margin_gate=gate, max_batch_size=2)
    assert [len(output.generated_tokens) for output in found.values()] == [6] * 5
    assert all(output.reused_tokens == 0 for output in found.values())


def test_nothing_stays_patched_after_an_error(llama: Any) -> None:
    before = llama.config._attn_implementation

    def fail(*_: Any) -> Any:
        raise RuntimeError("from a processor")

    with pytest.raises(RuntimeError, match="from a processor"):
        gated(llama, logits_processor=[fail])
    assert llama.config._attn_implementation == before
    gated(llama)


def test_longrope_beyond_its_original_length_is_refused() -> None:
    from margingate_hf.forward.rope import original_length

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16,
    }
    model = enable(tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=16))
    assert original_length(model) == 16
    gated(model, [PROMPTS[0]], max_new_tokens=4)
    with pytest.raises(ValueError, match="`coverage`='gated'.*original 16"):
        gated(model, [PROMPTS[1]])


def test_plain_bf16_moves_where_the_gate_at_every_step_repairs() -> None:
    """Of the repairs, those of flips: with every step verified on clean prompts no text moves on this sample."""
    model = enable(tiny_model("llama"))
    prompts = random_prompts([33, 5, 12, 21, 8, 40], seed=3)
    moved = {}
    for threshold in (0.0, math.inf):
        alone = [gated(model, [prompt], gate={"threshold": threshold}) for prompt in prompts]
        batch = gated(model, prompts, gate={"threshold": threshold})
        new = batch.sequences[:, -len(batch.logits) :]
        moved[threshold] = sum(
            not torch.equal(one.sequences[0, -len(one.logits) :], F.pad(row, (0, 0)))
            for one, row in zip(alone, new, strict=True)
        )
    assert moved[math.inf] <= moved[0.0]
