"""MarginGateConfig: validation, JSON round trip, unknown keys."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from margingate_hf import MarginGateConfig

CONFIGS = st.builds(
    MarginGateConfig,
    threshold=st.one_of(st.floats(0, 1e6), st.just(math.inf)),
    coverage=st.sampled_from(["exact", "gated"]),
    num_draft_tokens=st.integers(0, 511),
    schedule=st.sampled_from(["cost", "margin", "fixed"]),
    low_margin_limit=st.integers(1, 511),
    precision=st.sampled_from(["float32", "bfloat16"]),
    kv_dtype=st.sampled_from(["auto", "split", "float32"]),
    strict=st.booleans(),
    resident_weights=st.sampled_from([None, True, False]),
    seed=st.one_of(st.none(), st.integers(0, 2**63 - 1), st.lists(st.integers(0, 9), max_size=3)),
)


@given(CONFIGS)
def test_json_round_trip(config: MarginGateConfig) -> None:
    text = config.to_json_string()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert MarginGateConfig.from_json_string(text) == config


@given(CONFIGS)
def test_update_replaces_one_field(config: MarginGateConfig) -> None:
    changed = config.update(num_draft_tokens=6)
    assert changed.num_draft_tokens == 6
    assert dataclasses.replace(config, num_draft_tokens=6) == changed


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("threshold", -0.1, ValueError),
        ("threshold", math.nan, ValueError),
        ("threshold", "wide", ValueError),
        ("threshold", True, TypeError),
        ("threshold", None, TypeError),
        ("coverage", "partial", ValueError),
        ("schedule", "sometimes", ValueError),
        ("precision", "float16", ValueError),
        ("num_draft_tokens", -1, ValueError),
        ("num_draft_tokens", 512, ValueError),
        ("num_draft_tokens", 8.0, TypeError),
        ("num_draft_tokens", True, TypeError),
        ("low_margin_limit", 0, ValueError),
        ("kv_dtype", "bfloat16", ValueError),
        ("kv_dtype", 2, ValueError),
        ("strict", 1, TypeError),
        ("resident_weights", "yes", TypeError),
        ("seed", -1, ValueError),
        ("seed", 2**63, ValueError),
        ("seed", 1.5, TypeError),
    ],
)
def test_bad_values_name_field_and_value(field: str, value: object, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        MarginGateConfig(**{field: value})
    assert f"`{field}`" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_unknown_key_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"`treshold` is not a field.*Did you mean `threshold`\?"):
        MarginGateConfig.from_dict({"treshold": 0.5})
    with pytest.raises(ValueError, match="Did you mean 'gated'"):
        MarginGateConfig(coverage="gate")


def test_coerce() -> None:
    assert MarginGateConfig.coerce(None) is None
    assert MarginGateConfig.coerce(False) is None
    assert MarginGateConfig.coerce(True) == MarginGateConfig()
    assert MarginGateConfig.coerce({"num_draft_tokens": 3}) == MarginGateConfig(num_draft_tokens=3)
    with pytest.raises(TypeError, match="`margin_gate`.*got 3"):
        MarginGateConfig.coerce(3)


def test_coerce_sees_a_field_set_after_construction() -> None:
    config = MarginGateConfig()
    config.num_draft_tokens = -1
    with pytest.raises(ValueError, match="`num_draft_tokens`"):
        MarginGateConfig.coerce(config)


def test_rides_on_a_generation_config(tmp_path: object) -> None:
    config = GenerationConfig(margin_gate=MarginGateConfig(num_draft_tokens=4, threshold=math.inf))
    config.save_pretrained(tmp_path)
    back = GenerationConfig.from_pretrained(tmp_path)
    assert MarginGateConfig.coerce(back.margin_gate) == MarginGateConfig(num_draft_tokens=4, threshold=math.inf)


def test_presets() -> None:
    assert MarginGateConfig.preset("exact") == MarginGateConfig()
    assert MarginGateConfig.preset("layercast").num_draft_tokens == 0
    assert MarginGateConfig.preset("grouped") == MarginGateConfig(schedule="fixed", num_draft_tokens=15)
    assert MarginGateConfig.preset("paper").coverage == "gated"
    assert MarginGateConfig.preset("always").verify_batch_size == 1
    assert MarginGateConfig.preset("invariant").precision == "bfloat16"
    assert MarginGateConfig.preset("off") is None
    with pytest.raises(ValueError, match="`preset` must be one of 'exact', 'paper', .*got 'exatc'. Did"):
        MarginGateConfig.preset("exatc")
