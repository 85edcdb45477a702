"""A server is nothing but threads: gated and stock calls side by side, with first calls, copies and interrupts."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitwise import assert_same, padded, run_batch
from margingate_hf import MarginGateConfig, MarginGateEngine, enable
from margingate_hf.forward.forward_twin import forward_twin
from margingate_hf.verifier import VerifierMode, forget_verifiers, verifier_for
from tiny import random_prompts, tiny_model

PROMPTS = random_prompts([9, 30, 4, 17])
NEW_TOKENS = 10
SETTINGS = {
    "float32": MarginGateConfig(schedule="fixed", num_draft_tokens=3),
    "bfloat16 operands": MarginGateConfig(precision="bfloat16", schedule="fixed", num_draft_tokens=2),
    "one plane": MarginGateConfig(kv_dtype="auto", schedule="margin", num_draft_tokens=4),
}


def stock_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**padded(PROMPTS)).logits


def settings_of_the_process() -> tuple:
    return (
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch._dynamo.eval_frame._stance.stance,
        torch.are_deterministic_algorithms_enabled(),
    )


def attributes_of(model: Any) -> list[tuple]:
    """What a call could leave behind on a model: classes, forwards, hooks and the names that configs hold."""
    found: list[tuple] = [
        (type(model).__name__, model.config._attn_implementation, model.config._experts_implementation)
    ]
    for name, module in model.named_modules():
        found.append((name, type(module), sorted(module.__dict__), len(module._forward_pre_hooks)))
    return found


class Stress:
    """Workers that compare each of their outputs with the single-threaded one, for a number of seconds."""

    def __init__(self) -> None:
        self.model = enable(tiny_model("llama", seed=3))
        self.stock = stock_logits(self.model)
        self.expected = {
            (name, index): run_batch(self.model, [prompt], NEW_TOKENS, gate)[0]
            for name, gate in SETTINGS.items()
            for index, prompt in enumerate(PROMPTS)
        }
        forget_verifiers(self.model)  # the first calls, self-tests included, are made by the threads
        self.failures: list[str] = []
        self.counts: dict[str, int] = {}
        self.over = threading.Event()

    def gated(self, chance: random.Random) -> None:
        name = chance.choice(list(SETTINGS))
        chosen = chance.sample(range(len(PROMPTS)), chance.randint(1, len(PROMPTS)))
        runs = run_batch(self.model, [PROMPTS[index] for index in chosen], NEW_TOKENS, SETTINGS[name])
        for index, run in zip(chosen, runs, strict=True):
            assert_same(run, self.expected[name, index], f"{name}, prompt {index}")

    def stocked(self, chance: random.Random) -> None:
        time.sleep(0.02)  # else two cores have no time for the rest
        assert torch.equal(stock_logits(self.model), self.stock), "stock logits moved"

    def copied(self, chance: random.Random) -> None:
        """Copies taken while others are in the middle of their calls are ordinary models."""
        time.sleep(0.1)
        if chance.random() < 0.5:
            other = copy.deepcopy(self.model)
        else:
            buffer = io.BytesIO()
            torch.save(self.model, buffer)
            buffer.seek(0)
            other = torch.load(buffer, weights_only=False)
        assert other.config._attn_implementation == "sdpa"
        assert torch.equal(stock_logits(other), self.stock), "a copy's logits moved"
        if chance.random() < 0.02:
            forget_verifiers(self.model)  # the next call is a first one again

    def loop(self, kind: str, work: Callable[[random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        while not self.over.is_set():
            try:
                work(chance)
                self.counts[kind] = self.counts.get(kind, 0) + 1
            except KeyboardInterrupt:
                self.counts["interrupted"] = self.counts.get("interrupted", 0) + 1
            except BaseException as error:
                self.failures.append(f"{kind}: {type(error).__name__}: {str(error)[:300]}")
                self.over.set()

    def run(self, seconds: float) -> None:
        workers = [
            ("gated", self.gated),
            ("gated", self.gated),
            ("interrupted gated", self.gated),
            ("stock", self.stocked),
            ("copies", self.copied),
        ]
        threads = [
            threading.Thread(target=self.loop, args=(kind, work, seed), daemon=True)
            for seed, (kind, work) in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + seconds
        chance = random.Random(99)
        while time.monotonic() < ends and not self.over.is_set():
            time.sleep(0.3 + 2 * chance.random())
            ident = ctypes.c_ulong(threads[2].ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))
        self.over.set()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a worker hangs"


def stress(seconds: float) -> None:
    before = settings_of_the_process()
    test = Stress()
    attributes = attributes_of(test.model)
    test.run(seconds)
    assert not test.failures, test.failures
    assert settings_of_the_process() == before
    assert attributes_of(test.model) == attributes
    assert torch.equal(stock_logits(test.model), test.stock)
    for kind in ("gated", "interrupted gated", "stock", "copies", "interrupted"):
        assert test.counts.get(kind, 0) > 1, f"{kind} hardly ran: a weak test ({test.counts})"


def test_thirty_seconds_of_five_threads() -> None:
    stress(30)


@pytest.mark.long
def test_ten_minutes_of_five_threads() -> None:
    stress(float(os.environ.get("MARGINGATE_STRESS_SECONDS", "600")))


def test_a_self_test_beside_a_running_call_and_stock_calls() -> None:
    """The fault that left attention without a mask: a second setting is used for the first time beside a long call."""
    model = enable(tiny_model("llama"))
    stock = stock_logits(model)
    gate = MarginGateConfig(num_draft_tokens=1, schedule="fixed")
    expected = run_batch(model, PROMPTS[:1], 120, gate)[0]
    found: list[Any] = []
    moved: list[bool] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            moved.append(not torch.equal(stock_logits(model), stock))

    running = threading.Thread(target=lambda: found.append(run_batch(model, PROMPTS[:1], 120, gate)[0]))
    serving = threading.Thread(target=serve)
    running.start(), serving.start()
    verifier_for(model, MarginGateConfig(strict=False))
    running.join(), over.set(), serving.join()
    assert_same(found[0], expected)
    assert moved and not any(moved)
    assert model.config._attn_implementation == "sdpa"


def test_a_copy_taken_inside_a_forward_is_an_ordinary_model() -> None:
    model = enable(tiny_model("llama"))
    expected = run_batch(model, PROMPTS, NEW_TOKENS)
    stock = stock_logits(model)
    copies: list[Any] = []

    def take(module: Any, args: Any) -> None:
        if len(copies) < 3:
            copies.append(copy.deepcopy(model))

    handle = model.model.layers[1].register_forward_pre_hook(take)
    run_batch(model, PROMPTS, NEW_TOKENS)
    handle.remove()
    assert len(copies) == 3
    for other in copies:
        other.model.layers[1]._forward_pre_hooks.clear()
        assert torch.equal(stock_logits(other), stock)
        for mine, theirs in zip(run_batch(other, PROMPTS, NEW_TOKENS), expected, strict=True):
            assert_same(mine, theirs)


def test_our_attention_outside_a_forward_of_ours_raises() -> None:
    """Never attention without a mask: what escapes from a forward of ours cannot be used by itself."""
    twin = forward_twin(enable(tiny_model("llama")))
    with pytest.raises(RuntimeError, match="outside a forward of the margin gate"):
        twin(**padded(PROMPTS))
    with pytest.raises(RuntimeError, match="outside a forward of the margin gate"):
        forward_twin(enable(tiny_model("mixtral")))(**padded(PROMPTS))


def test_an_operator_mode_that_an_interrupt_left_behind_does_nothing() -> None:
    model = enable(tiny_model("llama"))
    expected, stock = run_batch(model, PROMPTS, NEW_TOKENS), stock_logits(model)
    mode = verifier_for(model, MarginGateConfig()).mode
    mode.__enter__()  # and never left
    try:
        assert torch.equal(stock_logits(model), stock)
        assert torch.nn.functional.silu(torch.ones(3)).dtype == torch.float32
        for mine, theirs in zip(run_batch(model, PROMPTS, NEW_TOKENS), expected, strict=True):
            assert_same(mine, theirs)
    finally:
        VerifierMode.drop_stale()
    assert not torch.overrides._get_current_function_mode_stack()


def test_compiled_layers_and_models_run_uncompiled_in_our_forwards_and_compiled_elsewhere() -> None:
    plain = enable(tiny_model("llama"))
    expected = run_batch(plain, PROMPTS[:2], 6)
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = enable(tiny_model("llama"))
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend=backend)
    model.lm_head.compile(backend=backend)
    for mine, theirs in zip(run_batch(model, PROMPTS[:2], 6), expected, strict=True):
        assert_same(mine, theirs)
    assert not compiled, "a forward of ours was compiled"
    with torch.no_grad():
        model(**padded(PROMPTS))
    assert compiled, "torch.compile no longer works on this model"


def test_one_engine_in_three_threads() -> None:
    model = enable(tiny_model("llama"))
    gate = SETTINGS["float32"]
    shared = random_prompts([70], seed=8)[0]
    prompts = [[*shared, *tail] for tail in random_prompts([3, 9, 20, 5], seed=9)]
    expected = [run_batch(model, [prompt], 6, gate)[0].tokens for prompt in prompts]
    per_block = 3 * 2 * 2 * 16 * 32 * 4
    engine = MarginGateEngine(model, gate, max_batch_size=2, prefix_bytes=5 * per_block)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(6):
            out = engine.generate(prompts, max_new_tokens=6, do_sample=False)
            found = [out[f"req_{index}"].generated_tokens for index in range(len(prompts))]
            if found != expected:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert engine.prefixes.nbytes == sum(block.nbytes for block in engine.prefixes._blocks()) <= 5 * per_block


def test_cancel_names_a_run_where_two_are_live() -> None:
    engine = MarginGateEngine(enable(tiny_model("llama")), SETTINGS["float32"], max_batch_size=2)
    first, second = (engine.iterate(PROMPTS[:2], max_new_tokens=30, do_sample=False) for _ in range(2))
    with pytest.raises(ValueError, match="'req_1' is in 2 runs of this engine"):
        engine.cancel("req_1")
    first.cancel("req_1")
    lengths = [{out.request_id: len(out.generated_tokens) for out in run} for run in (first, second)]
    assert lengths[0]["req_1"] < lengths[1]["req_1"] == lengths[0]["req_0"] == 30
    with pytest.raises(KeyError):
        engine.cancel("req_1")
