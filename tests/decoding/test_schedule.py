"""The schedule: pure decisions, cost learning, and that it can change no bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwise import assert_same, canonical, run_batch
from margingate_hf import MarginGateConfig
from margingate_hf.decoding.cost_meter import CostMeter, Costs, Line
from margingate_hf.decoding.schedule import (
    FLIP_AT_TIE,
    FLIP_BEFORE_DRAFT,
    FLIP_DECAY,
    Pending,
    drafting_pays,
    flip_probability,
    should_verify,
)
from tiny import random_prompts

COST = MarginGateConfig(schedule="cost", num_draft_tokens=63)


def row(*margins: float) -> Pending:
    survival, expected = 1.0, 1.0
    for margin in margins:
        survival *= 1 - flip_probability(margin)
        expected += survival
    return Pending(len(margins), 0, False, survival, expected)


def test_flip_probability_falls_from_a_coin_toss() -> None:
    assert flip_probability(0.0) == flip_probability(math.nan) == 0.5
    values = [flip_probability(margin / 10) for margin in range(60)]
    assert all(a > b for a, b in zip(values, values[1:], strict=False)) and values[-1] < 1e-12
    assert flip_probability(math.inf) == 0


def test_without_measurements_the_window_decides() -> None:
    assert not should_verify([row(0.0, 0.0)], COST)
    assert not should_verify([Pending(6, 0, False)], COST)
    assert should_verify([Pending(7, 0, False)], COST), "a short one while nothing is measured"
    free = Costs(draft_fixed=0, draft_row=1e-9, verify_fixed=1, verify_token=0)
    assert not should_verify([row(*[9.0] * 62)], COST, free)
    assert should_verify([Pending(63, 0, False)], COST, free)
    assert should_verify([Pending(1, 0, True)], COST, Costs(1, 0, 1, 0))


def test_a_step_dearer_than_a_pass_is_never_taken() -> None:
    """Then the verifier decodes alone: a draft saves a pass's fixed cost and costs a step."""
    assert not drafting_pays(
        [row()] * 8, Costs(draft_fixed=0.2, draft_row=0.005, verify_fixed=0.17, verify_token=0.003)
    )
    assert drafting_pays([row()] * 8, Costs(draft_fixed=0.1, draft_row=0.005, verify_fixed=0.17, verify_token=0.003))


def test_a_pending_near_tie_ends_the_cycle_earlier() -> None:
    costs = Costs(draft_fixed=0.05, draft_row=0.0, verify_fixed=0.1, verify_token=0.002)
    assert drafting_pays([row(9.0, 9.0, 9.0)], costs)
    assert not drafting_pays([row(9.0, 0.0, 0.05)], costs)


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 0.05))
def test_stopping_is_the_best_length_of_a_cycle(step: float, fixed: float, each: float) -> None:
    """For drafts as sure as the schedule expects them, no other number of drafts gives more tokens a second."""
    costs = Costs(step, 0.0, fixed, each)
    margin = FLIP_DECAY * math.log(FLIP_AT_TIE / FLIP_BEFORE_DRAFT)
    assert flip_probability(margin) == pytest.approx(FLIP_BEFORE_DRAFT)

    def rate(drafts: int) -> float:
        return row(*[margin] * drafts).expected / (drafts * step + fixed + each * (drafts + 1))

    stop = next((k for k in range(200) if not drafting_pays([row(*[margin] * k)], costs)), 200)
    assert rate(stop) >= max(rate(k) for k in range(201)) * (1 - 1e-9)


def test_line_learns_a_line_and_forgets() -> None:
    line = Line()
    assert line.fit() is None
    line.add(8, 0.4)
    assert line.fit() == (0.4, 0.0)
    for count in (1, 4, 16, 64) * 3:
        line.add(count, 0.1 + 0.01 * count)
    for count in (1, 4, 16, 64) * 100:
        line.add(count, 0.3 + 0.02 * count)
    fixed, each = line.fit()
    assert fixed == pytest.approx(0.3, rel=1e-3) and each == pytest.approx(0.02, rel=1e-3)


def test_line_is_never_negative() -> None:
    line = Line()
    for count, seconds in ((1, 0.5), (10, 0.1), (20, 0.05)):
        line.add(count, seconds)
    assert min(line.fit()) >= 0
    line = Line()
    for count, seconds in ((10, 0.01), (20, 0.5)):
        line.add(count, seconds)
    assert min(line.fit()) >= 0


def test_the_meter_needs_both() -> None:
    meter = CostMeter()
    meter.add_draft_step(4, 9.0)
    meter.add_verify(16, 0.2)
    assert meter.costs() is None, "the first step packs weights"
    meter.add_draft_step(4, 0.1)
    assert meter.costs() == Costs(0.1, 0.0, 0.2, 0.0)


def test_a_step_that_seemed_dear_is_tried_again() -> None:
    meter = CostMeter(warm=True)
    meter.add_verify(8, 0.1)
    meter.add_draft_step(8, 60.0)  # the machine was busy
    for _ in range(CostMeter.RETRY):
        costs = meter.costs()
        assert costs is not None and should_verify([Pending(0, 0, False)] * 8, COST, costs), "nothing is drafted"
        meter.add_verify(8, 0.1)
    assert meter.costs() is None
    assert not should_verify([Pending(0, 0, False)] * 8, COST, None)
    meter.add_draft_step(8, 0.01)
    costs = meter.costs()
    assert costs is not None and not should_verify([Pending(0, 0, False)] * 8, COST, costs)


@pytest.mark.parametrize("costs", [None, Costs(1, 0, 0.1, 0), Costs(0.01, 0, 1, 0), Costs(0.1, 0.01, 0.15, 0.01)])
def test_whatever_it_answers_the_bits_are_the_same(llama: Any, costs: Costs | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(CostMeter, "costs", lambda self: costs)
    prompts = random_prompts([9, 30, 4])
    for prompt, run in zip(prompts, run_batch(llama, prompts, 16, COST), strict=True):
        assert_same(run, canonical(llama, prompt, 16))
