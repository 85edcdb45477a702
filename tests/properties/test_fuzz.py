"""Random legal and illegal arguments: a result or one clear error, never a crash from inside, never a changed model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from bitwise import padded
from margingate_hf import MarginGateConfig, enable
from tiny import random_prompts, tiny_model

MODEL = enable(tiny_model("llama"))

OPTIONS: dict[str, st.SearchStrategy] = {
    "max_new_tokens": st.sampled_from([1, 2, 7, 0, -1, None]),
    "max_length": st.sampled_from([None, 1, 12, 40]),
    "do_sample": st.sampled_from([False, False, False, True]),
    "num_beams": st.sampled_from([1, 1, 1, 2]),
    "num_return_sequences": st.sampled_from([1, 1, 2]),
    "temperature": st.sampled_from([None, 0.7, 1.0]),
    "top_k": st.sampled_from([None, 3]),
    "repetition_penalty": st.sampled_from([None, 1.3]),
    "min_new_tokens": st.sampled_from([None, 3, 50]),
    "no_repeat_ngram_size": st.sampled_from([None, 2]),
    "eos_token_id": st.sampled_from([2, [2, 5, 9], list(range(2, 120))]),
    "pad_token_id": st.sampled_from([0, 2]),
    "use_cache": st.sampled_from([True, True, False]),
    "cache_implementation": st.sampled_from([None, None, None, "static", "dynamic"]),
    "output_logits": st.booleans(),
    "output_scores": st.booleans(),
    "return_dict_in_generate": st.booleans(),
    "output_attentions": st.sampled_from([False, False, False, True]),
    "synced_gpus": st.sampled_from([None, None, True]),
    "guidance_scale": st.sampled_from([None, None, 1.0, 2.0]),
    "cache": st.sampled_from([None, None, None, DynamicCache()]),
    "nonsense": st.sampled_from([None, None, None, 3]),
}
GATES = st.one_of(
    st.just(True),
    st.builds(
        MarginGateConfig,
        num_draft_tokens=st.integers(0, 8),
        kv_dtype=st.sampled_from(["auto", "split", "float32"]),
        seed=st.sampled_from([None, 4]),
    ),
    st.sampled_from([{"num_draft_tokens": 2}, {"num_draft_tokens": -2}, {"widow": 3}, {"seed": [1, 2]}, "on", 7]),
    st.just(MarginGateConfig(coverage="gated")),
)


OUTCOMES: Counter[str] = Counter()


def state() -> tuple:
    config = {name: value for name, value in vars(MODEL.generation_config).items()}
    return type(MODEL), MODEL.config._attn_implementation, MODEL.training, repr(config)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    options=st.dictionaries(st.sampled_from(sorted(OPTIONS)), st.none(), max_size=6).flatmap(
        lambda chosen: st.fixed_dictionaries({name: OPTIONS[name] for name in chosen})
    ),
    gate=GATES,
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    mask=st.sampled_from(["right", "left", "none", "wrong"]),
)
def test_any_call_gives_a_result_or_one_clear_error(options: dict, gate: Any, lengths: list[int], mask: str) -> None:
    before = state()
    batch = padded(random_prompts(lengths), "right" if mask == "right" else "left")
    if mask == "none":
        del batch["attention_mask"]
    if mask == "wrong":
        batch["attention_mask"] = batch["attention_mask"][:, :-1]
    try:
        out = MODEL.generate(**batch, **{"max_new_tokens": 3, **options}, margin_gate=gate)
    except (ValueError, NotImplementedError) as error:
        assert len(str(error)) > 20, repr(error)
        OUTCOMES["refused"] += 1
    except TypeError as error:
        assert "`margin_gate`" in str(error), repr(error)
    else:
        OUTCOMES["decoded"] += 1
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        count = len(lengths) * (options.get("num_return_sequences") or 1)
        assert sequences.shape[0] == count
        assert torch.equal(sequences[:: count // len(lengths), : max(lengths)], batch["input_ids"])
    assert state() == before


def test_the_fuzz_met_both_kinds() -> None:
    assert OUTCOMES["decoded"] >= 30 and OUTCOMES["refused"] >= 30, OUTCOMES
