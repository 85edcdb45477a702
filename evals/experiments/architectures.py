"""Walks every causal language model class of the installed transformers on a tiny random model and tabulates the
verdict.

python -m evals architectures --out evals/results/architectures.md

A class is *certified* when the self-test passes and a ragged batch of three equals each prompt alone, bit for bit;
*refused* when the gate names a reason; *not built* when no tiny config was found for it.
"""

from __future__ import annotations

import argparse
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from margingate_hf import MarginGateConfig, enable
from margingate_hf.cli.checkpoints import quiet_transformers

from ..machine import as_text

# Tried on every config, where it has the field. Small enough for a second, large enough to be a model.
SMALL: dict[str, Any] = dict(
    vocab_size=257,
    hidden_size=64,
    d_model=64,
    n_embd=64,
    dim=64,
    intermediate_size=96,
    ffn_dim=96,
    ffn_hidden_size=96,
    num_hidden_layers=2,
    num_layers=2,
    n_layer=2,
    n_layers=2,
    decoder_layers=2,
    encoder_layers=2,
    num_attention_heads=4,
    n_head=4,
    n_heads=4,
    attention_heads=4,
    decoder_attention_heads=4,
    encoder_attention_heads=4,
    num_key_value_heads=2,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    n_positions=512,
    max_seq_len=512,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    n_group=1,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    first_k_dense_replace=1,
    sliding_window=12,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    is_decoder=True,
    rotary_dim=8,
)
MOST_PARAMETERS = 20_000_000
SECONDS = 90
PROMPTS = (20, 3, 11)
NEW_TOKENS = 6


@dataclass(frozen=True)
class Verdict:
    """One class: `supported`, `refused` or `not built`, and why."""

    name: str
    outcome: str
    reason: str = ""


class _TimeUp(Exception):
    pass


def _shrunk(config_class: type) -> Any:
    """A tiny config; text configs inside a composite are shrunk as well."""
    plain = config_class()
    fields = {name: value for name, value in SMALL.items() if _settable(plain, name)}
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]  # latent attention has a key for every query
    if _settable(plain, "layer_types"):
        fields["layer_types"] = _few_layers(plain.layer_types)
    text = getattr(plain, "text_config", None)
    if text is not None and not isinstance(text, dict):
        fields = {"text_config": _shrunk(type(text)).to_dict()}
    return config_class(**fields)


def _settable(config: Any, name: str) -> bool:
    """Whether a config has a field, not a computed property, of that name, and uses it."""
    if isinstance(getattr(type(config), name, None), property):
        return False
    unset = name in ("head_dim", "num_key_value_heads", "pad_token_id") and hasattr(config, name)
    return unset or getattr(config, name, None) is not None


def _few_layers(types: list[str]) -> list[str]:
    """Two layers that keep the kinds a model mixes."""
    kinds = list(dict.fromkeys(types))
    return (kinds * 2)[:2]


def _build(config_class: type) -> Any:
    config = _shrunk(config_class)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters after shrinking")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _bits(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        margin_gate=MarginGateConfig(num_draft_tokens=3),
        return_dict_in_generate=True,
        output_logits=True,
    )
    return list(torch.stack(out.logits, dim=1))


def judge(config_class: type) -> Verdict:
    """The verdict on one class."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    name = name[0].__name__ if isinstance(name, tuple) else name.__name__
    try:
        model = _build(config_class)
    except _TimeUp:
        raise
    except Exception as error:
        return Verdict(name, "not built", _first_line(error))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 250, (length,), generator=generator).tolist() for length in PROMPTS]
    try:
        enable(model)
        together = _bits(model, prompts)
        alone = [_bits(model, [prompt])[0] for prompt in prompts]
    except _TimeUp:
        raise
    except (ValueError, NotImplementedError, RuntimeError, TypeError) as error:
        return Verdict(name, "refused", _first_line(error))
    if all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)):
        return Verdict(name, "supported")
    return Verdict(name, "BROKEN", "passed the self-test, but a batch differs from its rows alone")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    line = line.removeprefix("The verifier's self-test failed under every plan, so the output could not be promised: ")
    return line.replace("|", "/")[:150]


def _alarm(*_: Any) -> None:
    raise _TimeUp


def report(record: dict[str, Any]) -> str:
    """The table, supported first."""
    verdicts = [Verdict(**entry) for entry in record["verdicts"]]
    order = {"BROKEN": 0, "supported": 1, "refused": 2, "not built": 3}
    counts = Counter(verdict.outcome for verdict in verdicts)
    lines = [
        "# Every causal language model class of transformers",
        "",
        f"`{record['command']}`, {as_text(record['machine'])}.",
        "",
        "Tiny random models in BF16. Supported: the self-test passes, and a ragged batch of three equals each prompt "
        "alone, bit for bit. A class that is not built says nothing about the class, only about the generic config.",
        "",
        ", ".join(f"{counts[outcome]} {outcome}" for outcome in order if counts[outcome]) + ".",
        "",
        "| class | verdict | reason |",
        "|---|---|---|",
    ]
    for verdict in sorted(verdicts, key=lambda verdict: (order[verdict.outcome], verdict.name)):
        lines.append(f"| {verdict.name} | {verdict.outcome} | {verdict.reason} |")
    return "\n".join(lines) + "\n"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of this experiment."""
    parser.add_argument("--out", type=Path, default=Path("evals/results"))
    parser.add_argument("--only", help="a part of a class name")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A verdict on every class; `failed` if one passes the self-test and is not invariant."""
    signal.signal(signal.SIGALRM, _alarm)
    verdicts = []
    with quiet_transformers():
        for config_class in tqdm(list(MODEL_FOR_CAUSAL_LM_MAPPING), unit="class"):
            if options.only and options.only.lower() not in config_class.__name__.lower():
                continue
            signal.alarm(SECONDS)
            try:
                verdicts.append(judge(config_class))
            except _TimeUp:
                verdicts.append(Verdict(config_class.__name__, "not built", f"took over {SECONDS} s"))
            finally:
                signal.alarm(0)
    failed = any(verdict.outcome == "BROKEN" for verdict in verdicts)
    return {"verdicts": [vars(verdict) for verdict in verdicts], "failed": failed}
