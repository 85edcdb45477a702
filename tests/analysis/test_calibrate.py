"""Bounds, thresholds, curves, the record and where it is used."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwise import padded
from fault_injection import disturbed_drafts
from margingate_hf import MarginGateCalibration, MarginGateConfig, MarginGateEngine, calibrate, enable
from margingate_hf.analysis.bounds import binomial_upper_bound, smallest_threshold
from margingate_hf.analysis.calibrate import Observation, flip_curve, observe
from margingate_hf.cli import parser
from margingate_hf.decoding.schedule import FlipCurve, flip_probability
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([7, 19, 4, 30])


@pytest.mark.parametrize("trials", [1, 10, 1000, 29_957])
def test_no_miss_is_the_rule_of_three(trials: int) -> None:
    assert binomial_upper_bound(0, trials, 0.95) == pytest.approx(1 - 0.05 ** (1 / trials), rel=1e-6)


def test_the_bound_is_that_of_the_tables() -> None:
    # Clopper-Pearson, one-sided 95 %: quantiles of the beta distribution.
    assert binomial_upper_bound(1, 10, 0.95) == pytest.approx(0.39416, abs=1e-5)
    assert binomial_upper_bound(5, 100, 0.95) == pytest.approx(0.10225, abs=1e-5)
    assert binomial_upper_bound(7, 7, 0.95) == 1.0


def test_the_bound_holds_as_often_as_it_says() -> None:
    """Exact coverage: over all outcomes of 60 trials, the bound lies above the rate with at least 90 %."""
    for rate in (0.01, 0.05, 0.2, 0.5):
        covered = sum(
            math.comb(60, misses) * rate**misses * (1 - rate) ** (60 - misses)
            for misses in range(61)
            if binomial_upper_bound(misses, 60, 0.9) >= rate
        )
        assert covered >= 0.9


@pytest.mark.parametrize("arguments", [(3, 2, 0.9), (-1, 2, 0.9), (1, 2, 1.0), (1, 2, 0.0)])
def test_bad_bounds(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="must be between"):
        binomial_upper_bound(*arguments)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=200),
    rate=st.sampled_from([0.02, 0.1, 0.3]),
)
def test_the_threshold_is_the_smallest_that_is_bounded(steps: list[tuple[int, bool]], rate: float) -> None:
    margins, flipped = [margin / 8 for margin, _ in steps], [flip for _, flip in steps]
    found = smallest_threshold(margins, flipped, rate, 0.95)

    def misses(threshold: float) -> int:
        return sum(flip and margin >= threshold for margin, flip in zip(margins, flipped, strict=True))

    assert found.misses == misses(found.value)
    assert found.bound == pytest.approx(binomial_upper_bound(found.misses, len(steps), 0.95))
    assert found.sufficient == (binomial_upper_bound(0, len(steps), 0.95) <= rate)
    if found.sufficient:
        assert found.bound <= rate
        smaller = [margin for margin in {*margins, 0.0} if margin < found.value]
        assert all(binomial_upper_bound(misses(value), len(steps), 0.95) > rate for value in smaller)
    else:
        assert found.misses == 0


def test_nan_is_a_tie_and_an_empty_sample_an_error() -> None:
    assert smallest_threshold([math.nan] + [1.0] * 99, [True] + [False] * 99, 0.04, 0.95).value == 1.0
    with pytest.raises(ValueError, match="`margins`"):
        smallest_threshold([], [], 0.1, 0.9)


def seen(pairs: list[tuple[float, bool]], top: float = 20.0) -> list[Observation]:
    return [Observation(0, 1, index, margin, top, flipped) for index, (margin, flipped) in enumerate(pairs)]


def test_the_curve_falls_and_is_the_share_of_flips() -> None:
    pairs = (
        [(0.0, i < 50) for i in range(100)] + [(0.3, i < 2) for i in range(100)] + [(0.6, i < 8) for i in range(100)]
    )
    curve = flip_curve(seen([*pairs, *[(9.0, False)] * 100]))
    assert list(curve.probabilities) == sorted(curve.probabilities, reverse=True)
    assert curve(0.0) == curve(math.nan) == pytest.approx(50.5 / 101)
    assert curve(0.3) == curve(0.6) == pytest.approx(10.5 / 201), "neighbours that rise are pooled"
    assert curve(100.0) == curve(9.0) == pytest.approx(0.5 / 101)


def test_a_margin_in_bf16_steps() -> None:
    assert seen([(0.25, False)], top=20.0)[0].steps == 0.25 / 0.125
    assert seen([(0.25, False)], top=3.0)[0].steps == 0.25 / 2**-6


@pytest.fixture(scope="module")
def model() -> Any:
    return enable(tiny_model("llama"))


@pytest.fixture(scope="module")
def found(model: Any) -> MarginGateCalibration:
    return calibrate(model, PROMPTS, batch_sizes=(1, 3), miss_rate=0.05, max_new_tokens=24)


def test_the_fast_path_is_compared_with_the_canonical_text(model: Any) -> None:
    """By hand: the stock BF16 forward of each text alone must show the same tokens where batch size is 1."""
    engine = MarginGateEngine(model)
    texts = [o.generated_tokens for o in engine.generate(PROMPTS, max_new_tokens=16, do_sample=False).values()]
    steps = observe(model, PROMPTS, texts, 1, "float32")
    assert len(steps) == sum(map(len, texts))
    agreeing = 0
    for prompt, text in enumerate(texts):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*PROMPTS[prompt], *text[:-1]]])).logits[0, -len(text) :].float()
        for step in (one for one in steps if one.prompt == prompt):
            # Read in one forward, BF16 rounds otherwise than step by step: near ties may fall either way.
            best = logits[step.index].topk(2).values
            if best[0] - best[1] > 0.5:
                assert step.flipped == (int(logits[step.index].argmax()) != text[step.index])
                assert step.margin == pytest.approx(float(best[0] - best[1]), abs=0.5)
                agreeing += 1
    assert agreeing > 20


def test_planted_flips_are_counted(model: Any) -> None:
    texts = [[5, 6, 7, 8], [9, 10, 11, 12]]  # not what the model says: nearly every step is a flip
    steps = observe(model, PROMPTS[:2], texts, 2, "float32")
    assert sum(step.flipped for step in steps) >= 7
    own = [
        o.generated_tokens
        for o in MarginGateEngine(model).generate(PROMPTS, max_new_tokens=9, do_sample=False).values()
    ]
    plain = sum(step.flipped for step in observe(model, PROMPTS, own, 4, "float32"))
    with disturbed_drafts(model, lambda position: position % 2 == 0):
        assert sum(step.flipped for step in observe(model, PROMPTS, own, 4, "float32")) > plain + 8


def test_counts_add_up(found: MarginGateCalibration) -> None:
    assert [row.batch_size for row in found.batch_sizes] == [1, 3]
    assert sum(row.steps for row in found.batch_sizes) == found.steps == 2 * 24 * len(PROMPTS)
    assert sum(row.flips for row in found.batch_sizes) == found.flips
    assert all(row.near_ties + row.confident == row.flips for row in found.batch_sizes)
    assert found.sufficient and found.miss_bound <= 0.05
    assert 0 < found.trigger_rate < 1 and found.prompts == len(PROMPTS)
    assert found.fingerprint["batch_sizes"] == [1, 3]


def test_too_small_a_sample_says_so(model: Any) -> None:
    small = calibrate(model, PROMPTS[:1], batch_sizes=(1,), miss_rate=1e-6, max_new_tokens=3)
    assert not small.sufficient and small.miss_bound > 0.5


def test_saved_and_read(found: MarginGateCalibration, tmp_path: Path) -> None:
    found.save_pretrained(tmp_path / "new")
    path = tmp_path / "new" / "margin_gate.json"
    for source in (tmp_path / "new", path, str(path)):
        assert MarginGateCalibration.from_pretrained(source) == found
    record = json.loads(path.read_text())
    del record["steps"]
    with pytest.raises(ValueError, match=r"missing \['steps'\].*calibrate"):
        MarginGateCalibration.from_dict(record)
    with pytest.raises(OSError):
        MarginGateCalibration.from_pretrained(tmp_path)


def test_push_to_hub_is_transformers_own(
    found: MarginGateCalibration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pushed = []
    monkeypatch.setattr(
        MarginGateCalibration, "push_to_hub", lambda self, repo, **kwargs: pushed.append((repo, kwargs))
    )
    found.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/gate", private=True)
    assert pushed == [("me/gate", {"private": True})]


def run(model: Any, config: MarginGateConfig) -> Any:
    out = model.generate(
        **padded(PROMPTS), max_new_tokens=8, do_sample=False, margin_gate=config, return_dict_in_generate=True
    )
    return out


def test_a_gated_run_reports_the_bound(model: Any, found: MarginGateCalibration, tmp_path: Path) -> None:
    statistics = run(model, found.config()).margin_gate
    assert statistics.miss_bound == found.miss_bound
    assert any("calibrated to at most" in note for note in statistics.notes)
    looser = run(model, found.config().update(threshold=found.threshold / 2)).margin_gate
    assert looser.miss_bound is None
    found.save_pretrained(tmp_path)
    by_path = MarginGateConfig(coverage="gated", threshold=found.threshold, calibration=str(tmp_path))
    assert run(model, by_path).margin_gate.miss_bound == found.miss_bound


def test_full_coverage_takes_the_curve_and_keeps_its_bits(
    model: Any, found: MarginGateCalibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(FlipCurve, "__call__", lambda self, margin: asked.append(margin) or 0.01)
    out = run(model, found.config("exact", schedule="fixed"))
    assert asked and not out.margin_gate.notes
    assert torch.equal(out.sequences, run(model, MarginGateConfig()).sequences)


def test_another_model_is_warned_of_once(found: MarginGateCalibration, caplog: pytest.LogCaptureFixture) -> None:
    other = enable(tiny_model("llama", seed=3))
    logging.getLogger("margingate_hf.decoding.calibration_record").warning_once.cache_clear()
    for _ in range(2):
        statistics = run(other, found.config()).margin_gate
        assert statistics.miss_bound is None
        assert any("checkpoint" in note for note in statistics.notes)
    lines = [record for record in caplog.records if "made with another setting" in record.getMessage()]
    assert len(lines) <= 2 and "checkpoint" in lines[0].getMessage()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"miss_rate": 0.0}, "`miss_rate`=0.0"),
        ({"confidence": 1.0}, "`confidence`=1.0"),
        ({"batch_sizes": ()}, "`batch_sizes`"),
        ({"batch_sizes": (0,)}, "`batch_sizes`"),
        ({"prompts": []}, "`prompts`"),
    ],
)
def test_bad_arguments(model: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        calibrate(model, **{"prompts": PROMPTS, **changes})


def test_the_prior_is_used_without_a_record() -> None:
    from margingate_hf.decoding.calibration_record import Calibrated, calibrated

    assert calibrated(MarginGateConfig(), None) == Calibrated(flip_probability, None, ())  # type: ignore[arg-type]


@pytest.mark.smollm2
def test_the_command(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The sea is\n\nName three causes of inflation:\n")
    command = ["calibrate", "--model", str(tiny_checkpoint), "--prompts", str(prompts), "--batch-sizes", "1,2"]
    tail = ["--max-new-tokens", "6", "--no-progress", "--out", str(tmp_path)]
    assert parser.main([*command, *tail, "--miss-rate", "0.2"]) == 0
    assert "threshold" in capsys.readouterr().out
    assert MarginGateCalibration.from_pretrained(tmp_path).prompts == 2
    assert parser.main([*command, *tail, "--miss-rate", "0.0001"]) == 1
    assert "too small" in capsys.readouterr().out
    assert parser.main(["calibrate", "--model", str(tiny_checkpoint), "--prompts", "nowhere.txt", "--no-progress"]) == 2
    assert "`prompts`" in capsys.readouterr().err


def test_the_record_is_plain_json(found: MarginGateCalibration) -> None:
    again = MarginGateCalibration.from_dict(json.loads(json.dumps(found.to_dict())))
    assert dataclasses.asdict(again) == dataclasses.asdict(found)
    assert MarginGateConfig.from_json_string(found.config().to_json_string()).threshold == found.threshold
