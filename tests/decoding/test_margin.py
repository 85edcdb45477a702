"""Margins: values, ties, NaN; the recorder in stock generate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bitwise import padded
from margingate_hf import MarginGateLogitsProcessor, enable
from margingate_hf.verifier.top2 import top2_margin
from tiny import random_prompts, tiny_model


def test_margin_is_the_gap_in_float32() -> None:
    tokens, margins = top2_margin(torch.tensor([[1.0, 4.0, 2.5], [0.0, -1.0, -7.0]]))
    assert tokens.tolist() == [1, 0]
    assert margins.tolist() == [1.5, 1.0]
    assert margins.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    scores = torch.zeros(2, 50_000, dtype=dtype)
    scores[0, [40_000, 777, 9_999]] = 5
    tokens, margins = top2_margin(scores)
    assert tokens.tolist() == [777, 0]
    assert margins.tolist() == [0.0, 0.0]


def test_one_finite_score_has_an_infinite_margin() -> None:
    scores = torch.full((1, 9), -math.inf)
    scores[0, 4] = 1.0
    tokens, margins = top2_margin(scores)
    assert tokens.tolist() == [4]
    assert margins.tolist() == [math.inf]


def test_nan_is_low() -> None:
    processor = MarginGateLogitsProcessor(threshold=0.0)
    processor(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[0.0, math.nan, 2.0]]))
    processor(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 3), -math.inf))
    assert processor.margins.isnan().all()
    assert processor.is_low.tolist() == [[True, True]]


def test_records_in_a_stock_call_without_changing_it() -> None:
    model: Any = tiny_model("llama")
    batch = padded(random_prompts([5, 9]))
    gate = MarginGateLogitsProcessor(threshold=1.0)
    plain = model.generate(**batch, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    seen = model.generate(**batch, max_new_tokens=6, do_sample=False, logits_processor=[gate])
    assert torch.equal(plain.sequences, seen)
    best = torch.stack(plain.logits, 1).float().topk(2).values
    assert torch.equal(gate.margins, best[..., 0] - best[..., 1])
    assert torch.equal(gate.tokens[:, :6], seen[:, 9:])
    assert torch.equal(gate.is_low, gate.margins < 1.0)
    gate.reset()
    assert gate.margins.numel() == 0


def test_the_margins_of_a_gated_call_are_the_canonical_ones() -> None:
    model = enable(tiny_model("llama"))
    out = model.generate(
        **padded(random_prompts([5, 9])),
        max_new_tokens=6,
        do_sample=False,
        margin_gate=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for row, statistics in enumerate(out.margin_gate.rows):
        best = torch.stack([step[row] for step in out.logits]).topk(2).values
        assert statistics.margins == (best[:, 0] - best[:, 1]).tolist()
