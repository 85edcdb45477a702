"""Bad input: one clear error that names the argument, before any forward; and a model that is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Qwen3NextConfig,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from bitwise import padded
from margingate_hf import MarginGateConfig, MarginGateEngine, disable, enable
from margingate_hf.verifier import VerifierError
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([7, 12])


class Silent(BaseStreamer):
    """Does nothing."""

    def put(self, value: Any) -> None:
        pass

    def end(self) -> None:
        pass


CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "do_sample": ({"do_sample": True}, ValueError, "`do_sample`=True"),
    "num_beams": ({"num_beams": 3}, ValueError, "`num_beams`=3"),
    "num_return_sequences": ({"num_return_sequences": 2}, ValueError, "`num_return_sequences`"),
    "prompt_lookup": ({"prompt_lookup_num_tokens": 2}, ValueError, "`prompt_lookup_num_tokens`=2"),
    "use_cache": ({"use_cache": False}, ValueError, "`use_cache`=False"),
    "static": ({"cache_implementation": "static"}, ValueError, "`cache_implementation`='static'"),
    "quantized": ({"cache_implementation": "quantized"}, ValueError, "`cache_implementation`='quantized'"),
    "cache": ({"cache": DynamicCache()}, ValueError, "`cache`='DynamicCache'"),
    "embeds": ({"inputs_embeds": torch.zeros(2, 12, 64)}, ValueError, "`inputs_embeds`"),
    "positions": ({"position_ids": torch.zeros(2, 12, dtype=torch.long)}, ValueError, "`position_ids`"),
    "images": ({"pixel_values": torch.zeros(1, 3, 8, 8)}, ValueError, "`pixel_values`"),
    "synced": ({"synced_gpus": True}, ValueError, "`synced_gpus`=True"),
    "guidance": ({"guidance_scale": 1.5}, ValueError, "`guidance_scale`=1.5"),
    "negative": ({"negative_prompt_ids": torch.ones(1, 2, dtype=torch.long)}, ValueError, "`negative_prompt_ids`"),
    "attentions": ({"output_attentions": True}, ValueError, "`output_attentions`=True"),
    "hidden": ({"output_hidden_states": True}, ValueError, "`output_hidden_states`=True"),
    "streamer": ({"streamer": Silent()}, ValueError, "`streamer`='Silent'.*got 2"),
    "reference": ({"margin_gate": {"reference": "fp64"}}, ValueError, "`reference`.*'fp32', 'alone'"),
    "rows": ({"margin_gate": {"verify_batch_size": 0}}, ValueError, "`verify_batch_size` must be between 1"),
    "no calibration": ({"margin_gate": {"calibration": "nowhere"}}, ValueError, "`calibration`='nowhere' holds no"),
    "calibration": ({"margin_gate": {"calibration": 3}}, TypeError, "`calibration`.*got 3"),
    "unknown": ({"margin_gate": {"kv_dtyp": 3}}, ValueError, "`kv_dtyp`.*Did you mean `kv_dtype`"),
    "type": ({"margin_gate": "yes"}, TypeError, "`margin_gate`.*'yes'"),
    "no room": ({"max_new_tokens": None, "max_length": 10}, ValueError, "`max_length`=10.*row 1 has 12 tokens"),
    "stateful": (
        {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)]},
        ValueError,
        "`logits_processor`='UnbatchedClassifierFreeGuidanceLogitsProcessor'",
    ),
    "seeds": (
        {"do_sample": True, "margin_gate": MarginGateConfig(seed=[1, 2, 3])},
        ValueError,
        r"`seed`=\[1, 2, 3\].*each of the 2 prompts",
    ),
    "custom": ({"custom_generate": lambda *a, **k: None}, ValueError, "`custom_generate`"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_before_any_forward(name: str) -> None:
    arguments, kind, text = CASES[name]
    model = enable(tiny_model("llama"))
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass ran"))
    before = (type(model), model.config._attn_implementation, dict(vars(model.generation_config)))
    call = {**padded(PROMPTS), "max_new_tokens": 4, "margin_gate": True, **arguments}
    with pytest.raises(kind, match=text):
        model.generate(**call)
    assert (type(model), model.config._attn_implementation, dict(vars(model.generation_config))) == before


def test_an_assistant_model_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="`assistant_model`"):
        llama.generate(**padded(PROMPTS[:1]), assistant_model=tiny_model("llama"), margin_gate=True)


def generate(model: Any, **arguments: Any) -> Any:
    return model.generate(**{**padded(PROMPTS), "max_new_tokens": 4, "margin_gate": True, **arguments})


def test_a_mask_with_holes(llama: Any) -> None:
    batch = padded(PROMPTS)
    batch["attention_mask"][1, 4] = 0
    with pytest.raises(ValueError, match="`attention_mask` row 1 has a hole: 0 between 1s at position 4"):
        generate(llama, **batch)


def test_an_empty_row(llama: Any) -> None:
    batch = padded(PROMPTS)
    batch["attention_mask"][0] = 0
    with pytest.raises(ValueError, match="`input_ids` row 0 holds no token"):
        generate(llama, **batch)


def test_pad_is_eos_and_no_mask(llama: Any) -> None:
    ids = padded(PROMPTS, pad=2)["input_ids"]
    with pytest.raises(ValueError, match="`attention_mask` is missing and row 0 begins or ends with the pad/eos id"):
        llama.generate(ids, max_new_tokens=2, pad_token_id=2, margin_gate=True)
    mask = (ids != 2).long()
    masked = llama.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=2, margin_gate=True)
    assert torch.equal(
        masked[0, -2:], llama.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2, margin_gate=True)[0, -2:]
    )
    llama.generate(torch.tensor([PROMPTS[1]] * 2), max_new_tokens=2, pad_token_id=2, margin_gate=True)


def test_pad_is_not_eos_and_no_mask(llama: Any) -> None:
    """Transformers infers the mask from the pad id then, and so do we."""
    inferred = llama.generate(padded(PROMPTS)["input_ids"], max_new_tokens=4, margin_gate=True)
    assert torch.equal(inferred, generate(llama))


def test_training_mode(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"`model.training`=True.*eval\(\)"):
        generate(llama.train())


def test_an_encoder_decoder() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(ValueError, match="encoder-decoder"):
        enable(model.eval()).generate(torch.tensor([[4, 5]]), margin_gate=True)


def test_quantised_weights(llama: Any) -> None:
    llama.is_quantized = True
    with pytest.raises(ValueError, match="`quantization_config`"):
        generate(llama)


def test_dynamic_rope_beyond_its_original_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = enable(tiny_model("llama", rope_parameters=rope, max_position_embeddings=14))
    generate(model, max_new_tokens=2)
    with pytest.raises(ValueError, match="`rope_type`='dynamic'.*row 1 may reach 15 tokens, beyond the original 14"):
        generate(model, max_new_tokens=3)


def test_rope_that_follows_the_batch_by_layer() -> None:
    model = enable(tiny_model("llama"))
    model.config.rope_parameters = {"full_attention": {"rope_type": "longrope"}}
    with pytest.raises(NotImplementedError, match="`rope_type`='longrope'"):
        generate(model)


def test_linear_attention_layers() -> None:
    model = enable(tiny_model("qwen3"))
    model.config.layer_types = Qwen3NextConfig(num_hidden_layers=4).layer_types[:3]
    assert "linear_attention" in model.config.layer_types
    with pytest.raises(ValueError, match=r"\['linear_attention'\] layers keep a state that cannot roll back"):
        generate(model)


def test_a_model_that_ignores_the_registered_attention() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=257, hidden_size=32, n_layer=2, n_head=2)).eval()
    with pytest.raises(VerifierError, match="coverage"):
        enable(model).generate(**padded(PROMPTS[:1]), max_new_tokens=2, margin_gate=True)


def test_a_model_that_was_not_enabled_refuses_the_argument() -> None:
    """By transformers' own check: this package patches nothing for the sake of a message."""
    with pytest.raises(ValueError, match="margin_gate"):
        generate(tiny_model("llama"))


def _stock(model: Any) -> torch.Tensor:
    return model.generate(**padded(PROMPTS), max_new_tokens=4)


def test_a_disabled_model_generates_whatever_its_config_says() -> None:
    model = enable(tiny_model("llama"))
    model.generation_config.margin_gate = MarginGateConfig()
    engine = MarginGateEngine(model, True)
    disable(model)
    assert torch.equal(_stock(model), _stock(tiny_model("llama")))
    with pytest.raises(ValueError, match=r"`model`='LlamaForCausalLM'.*it was disabled; call `margingate_hf.enable"):
        engine.iterate(PROMPTS)


class Raises(StoppingCriteria):
    """Raises at the third committed token."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise self.error("from a callback")
        return torch.tensor([False])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_a_callback_leaves_the_model_usable(error: type[BaseException]) -> None:
    model = enable(tiny_model("llama"))
    before = (type(model), model.config._attn_implementation)
    expected = generate(model)
    plain = generate(model, margin_gate=None)
    with pytest.raises(error, match="from a callback"):
        generate(model, stopping_criteria=[Raises(error)])
    assert (type(model), model.config._attn_implementation) == before
    assert torch.equal(generate(model, margin_gate=None), plain)
    assert torch.equal(generate(model), expected)
