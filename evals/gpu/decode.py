"""Verify forwards, draft steps and exact `generate` on a device. Part of `evals gpu`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from margingate_hf import MarginGateConfig, enable
from margingate_hf.analysis.compare import decode_all, divergence
from margingate_hf.cli.loading import as_prompts, load
from margingate_hf.cli.prompts import PROMPTS
from margingate_hf.forward.context import Segment, verify_context
from margingate_hf.verifier import Verifier, forget_verifiers, verifier_for

from .kernels import Clock, Row

SIZES: dict[str, dict[str, int]] = {
    "llama-1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32),
    "llama-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "tiny": dict(hidden_size=64, intermediate_size=112, num_hidden_layers=1, num_attention_heads=4),
}


def random_model(size: str, device: torch.device) -> Any:
    """A randomly initialised BF16 Llama; matrices are scaled up so that logits spread and texts do not loop at once."""
    tiny = size == "tiny"
    config = LlamaConfig(
        **SIZES[size],
        num_key_value_heads=2 if tiny else 8,
        vocab_size=257 if tiny else 128256,
        max_position_embeddings=20 if tiny else 8192,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name:
                parameter.mul_(math.sqrt(4.0 / parameter.shape[1]) / 0.02)
    return enable(model)


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """The same work as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def verify_against_draft(
    model: Any, device: torch.device, context: int, counts: tuple[tuple[int, int], ...]
) -> list[Row]:
    """
    A verifier pass over `rows x tokens` and a stock decode step of as many rows, eager and captured, and the bytes of
    weights that either reads.
    """
    clock = Clock(device)
    verifier = verifier_for(model, MarginGateConfig())
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed_tokens" not in name)
    found = []
    for rows, tokens in counts:
        step = _stock_step(model, device, rows, context)
        run = _verifier_pass(verifier, rows, tokens, context)
        row: Row = {"rows": rows, "tokens a row": tokens, "context": context, "weights, GB": weights / 1e9}
        for name, work in (("step", step), ("pass", run)):
            with torch.no_grad():
                row[f"{name} eager, us"] = clock.microseconds(work)
                if device.type == "cuda":
                    try:
                        row[f"{name} captured, us"] = clock.microseconds(captured(work))
                    except Exception as error:
                        row[f"{name} captured, us"] = f"not captured: {type(error).__name__}: {str(error)[:80]}"
        found.append(row)
    return found


def _stock_step(model: Any, device: torch.device, rows: int, context: int) -> Callable[[], object]:
    cache = StaticCache(config=model.config, max_cache_len=context + 2)
    ids = torch.full((rows, context), 7, device=device)
    with torch.no_grad():
        model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    one, position = ids[:, :1].clone(), torch.full((rows, 1), context, device=device)
    return lambda: model(input_ids=one, position_ids=position, cache=cache, use_cache=True).logits


def _verifier_pass(verifier: Verifier, rows: int, tokens: int, context: int) -> Callable[[], object]:
    cache = verifier.new_cache(rows, "split")
    for slot in range(rows):
        verifier.run(cache, [Segment(slot, 0, [7] * context)], keep="last")
    cache.reserve(context + tokens)
    context = verify_context(
        [Segment(slot, context, [7] * tokens) for slot in range(rows)], verifier.device, verifier.backend
    )
    ids = torch.full((1, rows * tokens), 7, device=verifier.device)
    twin = verifier.twin_for()

    def work() -> object:
        with verifier.scope(context):
            return twin(input_ids=ids, position_ids=context.positions[None], cache=cache, use_cache=True).logits

    return work


def exact_against_stock(model: Any, device: torch.device, prompt: int, new_tokens: int, rows: int) -> list[Row]:
    """Random prompts alone and in a batch, stock, certified and verified at every step: who differs, flips, seconds."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (rows, prompt), generator=generator).to(device)
    found = []
    systems = {
        "stock": None,
        "exact": MarginGateConfig(),
        "verifier alone": MarginGateConfig(num_draft_tokens=0, schedule="fixed"),
    }
    seconds: dict[str, float] = {}
    for name, gate in systems.items():
        call = dict(max_new_tokens=new_tokens, do_sample=False, margin_gate=gate, return_dict_in_generate=True)
        model.generate(ids, **{**call, "max_new_tokens": 2})  # compiles
        _synchronise(device)
        started = time.perf_counter()
        together = model.generate(ids, **call)
        _synchronise(device)
        seconds[name] = time.perf_counter() - started
        row: Row = {"system": name, "rows": rows, "new tokens": new_tokens, "seconds": seconds[name]}
        row["over stock"] = seconds[name] / seconds["stock"]
        if name != "verifier alone":
            alone = [model.generate(ids[i : i + 1], **call).sequences[0] for i in range(rows)]
            row["differ from alone"] = sum(
                not torch.equal(a, together.sequences[i][: len(a)]) for i, a in enumerate(alone)
            )
        if gate is not None:
            statistics = together.margin_gate
            row |= {
                "flips": statistics.flips,
                "verify_forwards": statistics.verify_forwards,
                "notes": "; ".join(statistics.notes),
            }
            row |= {"plan": statistics.plan}
        found.append(row)
    extra = {name: max(seconds[name] - seconds["stock"], 1e-9) for name in ("exact", "verifier alone")}
    found.append(
        {
            "system": "latency increment, verifier alone over exact",
            "over stock": extra["verifier alone"] / extra["exact"],
        }
    )
    return found


def real_checkpoint(path: str, device: torch.device, new_tokens: int) -> list[Row]:
    """The project's prompts on a real checkpoint, alone and in batches, stock and certified."""
    model, tokenizer = load(path, progress=False)
    model.to(device)
    texts = as_prompts(tokenizer, PROMPTS)
    found = []
    for name, gate in (("stock", None), ("exact", MarginGateConfig())):
        alone = decode_all(model, tokenizer, texts, 1, new_tokens, gate)
        for batch in (1, 2, 4, 8, 16):
            run = decode_all(model, tokenizer, texts, batch, new_tokens, gate)
            apart = divergence(alone, run)
            row: Row = {"system": name, "batch": batch, "differ from alone": apart.prompts, "first at": apart.first}
            row |= {"tokens/s": run.new_tokens / run.seconds, "flips": sum(s.flips for s in run.statistics)}
            found.append(row)
    return found


def on_random(size: str, device: torch.device, work: Callable[[Any], list[Row]]) -> list[Row]:
    """Runs `work` on a random model and lets its memory go."""
    model = random_model(size, device)
    try:
        return work(model)
    finally:
        forget_verifiers(model)
        del model
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
