"""The whole certified `generate` through the Triton path, in the interpreter, on tiny models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import margingate_kernels
from bitwise import Run, assert_same, canonical, padded, run_batch
from evals.faulty_kernels import with_fault
from margingate_hf import MarginGateConfig, MarginGateModelForCausalLM, enable
from margingate_hf.forward.context import Segment
from margingate_hf.verifier import Verifier, self_test, triton_ops, verifier_for
from margingate_hf.verifier.backends import VARIABLE
from margingate_hf.verifier.plans import CPU_PLANS
from tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9], [100] * 20, [3, 4]]
NEW_TOKENS = 6


def small(name: str = "llama", **changes: object) -> MarginGateModelForCausalLM:
    """Two layers, and texts short enough for an interpreter to run the self-test on."""
    return enable(tiny_model(name, **{"num_hidden_layers": 2, "max_position_embeddings": 28, **changes}))


@pytest.fixture(autouse=True)
def through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")


@pytest.fixture(scope="module")
def model() -> MarginGateModelForCausalLM:
    return small()


@pytest.fixture(scope="module")
def together(model) -> Iterator[list[Run]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "triton")
        yield run_batch(model, PROMPTS, NEW_TOKENS)


def test_a_row_alone_has_the_same_tokens_logits_and_columns(model, together: list[Run]) -> None:
    for index in (0, 2):
        assert_same(run_batch(model, [PROMPTS[index]], NEW_TOKENS)[0], together[index], f"prompt {index} alone")


def test_other_windows_other_company_and_the_definition(model, together: list[Run]) -> None:
    short = MarginGateConfig(schedule="fixed", num_draft_tokens=1)
    assert_same(run_batch(model, PROMPTS[1:], NEW_TOKENS, short, side="right")[0], together[1], "window 2, reordered")
    assert_same(canonical(model, PROMPTS[2], NEW_TOKENS), together[2], "one token at a time")


def test_the_same_tokens_as_the_cpu_plan(model, together: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first step whose canonical margin is under 1e-4, where two FP32 arithmetics may disagree."""
    monkeypatch.setenv(VARIABLE, "torch")
    for ours, theirs in zip(together, run_batch(model, PROMPTS, NEW_TOKENS), strict=True):
        best = theirs.logits.topk(2).values
        low = (best[:, 0] - best[:, 1] < 1e-4).tolist()
        decided = low.index(True) if True in low else len(low)
        assert decided >= 4, "a weak test: too few steps are decided"
        assert ours.tokens[:decided] == theirs.tokens[:decided]
        assert not torch.equal(ours.logits, theirs.logits), "the Triton path did not run"


def test_the_statistics_name_kernels_blocks_and_triton(model) -> None:
    out = model.generate(
        torch.tensor([PROMPTS[2]]), max_new_tokens=2, margin_gate=True, return_dict_in_generate=True, do_sample=False
    )
    plan = out.margin_gate.plan
    assert margingate_kernels.describe(torch.device("cpu")) in plan and "triton-linear" in plan and "kv-split" in plan
    assert not out.margin_gate.notes


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        pytest.param("llama", torch.float16, "split", marks=pytest.mark.long),
        pytest.param("llama", torch.float32, "auto", marks=pytest.mark.long),
        ("gemma2", torch.bfloat16, "float32"),  # soft caps, sliding windows, three planes
        pytest.param("gpt-oss", torch.bfloat16, "split", marks=pytest.mark.long),  # sinks, experts
        pytest.param("gpt2", torch.bfloat16, "auto", marks=pytest.mark.long),  # layer norms, transposed weights
        # Computes with the cached latents; keys and values of different dims.
        pytest.param("deepseek-v3", torch.bfloat16, "split", marks=pytest.mark.long),
    ],
)
def test_other_architectures_and_formats(
    name: str, dtype: torch.dtype, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable(tiny_model(name, dtype))
    text = torch.randint(3, 250, (14,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits(plan, *cuts: int) -> torch.Tensor:
        verifier = Verifier(model, plan)
        cache, start, parts = verifier.new_cache(2, kv_dtype), 0, []
        for stop in (*cuts, len(text)):
            parts.append(verifier.run(cache, [Segment(1, start, text[start:stop])]))
            start = stop
        cache.check()
        return torch.cat(parts)

    plan = triton_ops.TRITON_PLANS[name == "deepseek-v3"]
    ours = logits(plan)
    assert torch.equal(logits(plan, 1, 4, 13), ours), "cut into windows"
    monkeypatch.setenv(VARIABLE, "torch")
    theirs = logits(CPU_PLANS[0])
    # Two FP32 arithmetics over the same planes: a value next to a rounding edge may fall to either side of it.
    tolerance = 1e-5 if dtype == torch.float32 else {"auto": 2e-2, "split": 1e-4, "float32": 1e-5}[kv_dtype]
    assert float((ours - theirs).norm() / theirs.norm()) < tolerance


def test_an_attention_whose_blocks_follow_the_window_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = "        BLOCK=table.block,\n", "        BLOCK=table.block if tokens > 5 else 16,\n"
    faulty = with_fault(tmp_path, ("attention.py", right, wrong))
    monkeypatch.setattr(triton_ops.kernels, "ragged_attention", faulty.ragged_attention)
    model = small(num_hidden_layers=1, max_position_embeddings=20)
    assert "invariance" in str(self_test(Verifier(model, triton_ops.TRITON_PLANS[0])))


@pytest.mark.long
def test_latent_attention_takes_the_second_plan_and_says_so() -> None:
    model = enable(tiny_model("deepseek-v3", num_hidden_layers=2, max_position_embeddings=20))
    verifier = verifier_for(model, MarginGateConfig())
    assert verifier.plan.name == "triton-linear-summed-kv"
    assert any("a faster one failed (triton-linear: coverage" in note for note in verifier.notes())


def gated(model, **changes: object):
    config = MarginGateConfig(coverage="gated", **{"threshold": float("inf"), **changes})
    return model.generate(
        **padded(PROMPTS),
        max_new_tokens=4,
        do_sample=False,
        margin_gate=config,
        return_dict_in_generate=True,
        output_logits=True,
    )


def test_gated_coverage_on_one_plane(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fast path writes is what the kernels read; rows of one pass or each alone give the same bits."""
    together, alone = gated(model), gated(model, verify_batch_size=1)
    assert together.margin_gate.verify_forwards == 4 and alone.margin_gate.verify_forwards == 4 * len(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(together.logits, alone.logits, strict=True))
    assert together.cache.layers[0].stores[0]._planes.shape[0] == 1
    sixteen = gated(model, reference="alone")
    assert sixteen.margin_gate.verify_forwards == 4 * len(PROMPTS)
    monkeypatch.setenv(VARIABLE, "torch")
    theirs = gated(model)
    first = [(a - b).norm() / b.norm() for a, b in zip(together.logits[0], theirs.logits[0], strict=True)]
    assert max(first) < 2e-2, "the first step is computed on the same columns, its own rounded to BF16"


@pytest.mark.long
def test_operands_of_one_piece(model) -> None:
    short = MarginGateConfig(precision="bfloat16", schedule="fixed", num_draft_tokens=3)
    runs = run_batch(model, PROMPTS, NEW_TOKENS, short)
    for index in (0, 2):
        assert_same(run_batch(model, [PROMPTS[index]], NEW_TOKENS, short)[0], runs[index], f"prompt {index} alone")
    whole = run_batch(model, [PROMPTS[0]], 1)[0].logits
    assert not torch.equal(whole[0], runs[0].logits[0])
    assert (whole[0] - runs[0].logits[0]).norm() / whole[0].norm() < 0.1
