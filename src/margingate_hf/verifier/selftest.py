"""Checks a verifier on this machine and this model before it is trusted, and takes the next safer plan where it fails.

Parts, on ragged sequences longer than a K/V block, a query tile, the default number of drafts, and every length that
the config names (sliding windows, chunks, the original rotary length), which are lowered for the test:

- *coverage*: every layer is of a type we know, our attention was called exactly once per layer, no operator ran
  unplanned, a forward leaves weights and buffers as they are;
- *correctness*: logits equal the model's stock eager FP32 forward of each sequence alone within `TOLERANCE`;
- *invariance*: the same tokens cut otherwise, in other batches and orders, give the same bits, logits and cache.

Everything runs on copies that share the model's weights: a call in another thread sees nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import MarginGateConfig
from ..forward.adapters import BASE, row_adapters
from ..forward.architecture import architecture_of, vocabulary_of
from ..forward.context import KV_BLOCK, AttentionRecord, Segment, verify_context
from ..forward.devices import execution_device
from ..forward.rope import rotary_modules
from ..kv_cache.cache import MarginGateCache
from .arithmetic import probe_elementwise, probe_reductions
from .backends import backend_for
from .mode import StrictVerifierError
from .operator_audit import OperatorAudit
from .plans import LinearPlan, probe_linear
from .precision import LoweredPrecisionError
from .reference import eager_twin, reference_logits
from .verifier import Verifier

# With exact K/V (three planes) verifier and reference differ by FP32 rounding alone. One operation rounds by 2^-24; a
# logit is the end of a chain of products over up to thousands of terms and tens of layers whose errors add at random,
# measured at 7e-7 of the logits' norm on a 30-layer model. A wrong scale, mask, position or cap moves logits by 1e-2
# or more of their norm.
TOLERANCE = 1e-4
WINDOWS = (1, 2, 5, 8, 17, 33)


class VerifierError(RuntimeError):
    """No plan makes this model's verifier invariant and correct on this machine."""


def choose_verifier(model: Any, config: MarginGateConfig, plans: Sequence[LinearPlan]) -> Verifier:
    """
    The first plan that passes the self-test.

    Raises:
        `VerifierError`: none does; names the plans, the part each failed and how.
    """
    device = execution_device(model)
    row_sum = backend_for(device).row_sum
    uncovered = architecture_of(model).uncovered
    problem = f"coverage: {uncovered}" if uncovered else None
    problem = problem or probe_elementwise(device) or probe_reductions(row_sum, device)
    if problem:
        raise VerifierError(f"The verifier's self-test failed: {problem}.")
    failures: list[str] = []
    for plan in plans:
        if not plan.available():
            continue
        problem, verifier = _try_plan(model, config, plan)
        if problem is None:
            assert verifier is not None
            verifier.passed_over = failures
            return verifier
        failures.append(f"{plan.name}: {problem}")
    raise VerifierError(
        "The verifier's self-test failed under every plan, so the output could not be promised: "
        + "; ".join(failures)
        + ". Use margin_gate=None for plain decoding."
    )


def _try_plan(model: Any, config: MarginGateConfig, plan: LinearPlan) -> tuple[str | None, Verifier | None]:
    verifier = Verifier(model, plan, config.strict, config.resident_weights, config.precision)
    dtype = torch.float32 if plan.copies_weights else model.dtype
    for shape in verifier.store.linear_shapes():
        generator = torch.Generator(verifier.device).manual_seed(1)
        weight = torch.randn(shape, generator=generator, device=verifier.device, dtype=torch.float32)
        rounded = weight.to(model.dtype) if config.precision == "bfloat16" else weight
        problem = probe_linear(plan, rounded.to(dtype), config.precision)
        if problem:
            return f"invariance: {problem}", None
    verifier.short = True
    problem = self_test(verifier)
    verifier.short = False
    verifier.refresh()
    return problem, verifier


def self_test(verifier: Verifier) -> str | None:
    """
    Runs the three parts.

    Returns:
        `None` if all hold, otherwise a sentence that starts with the part that does not.
    """
    sequences = _sequences(verifier.model)
    problem = _coverage(verifier, sequences[-1])
    if problem:
        return problem
    alone = [_run(verifier, [sequence])[0] for sequence in sequences]
    whole = alone
    if verifier.precision != "float32":
        # What the rounding of operands does to a logit cannot be told from a fault; the probe has compared the rounded
        # products, the model is compared without.
        with verifier.mode.whole_operands():
            whole = [_run(verifier, [sequence])[0] for sequence in sequences]
    return (
        _correctness(verifier, sequences, whole)
        or _invariance(verifier, sequences, alone)
        or _memory(verifier, sequences[-1])
    )


def _sequences(model: Any) -> list[list[int]]:
    vocabulary = vocabulary_of(model)
    generator = torch.Generator().manual_seed(0)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or KV_BLOCK + 9
    lengths = (min(KV_BLOCK + 9, limit), min(21, limit), min(5, limit))
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def _coverage(verifier: Verifier, sequence: list[int]) -> str | None:
    cache = _cache(verifier, 1)
    cache.reserve(len(sequence))
    context = verify_context([Segment(0, 0, sequence)], verifier.device, verifier.backend)
    record = context.record = AttentionRecord()
    audit = OperatorAudit()
    twin = verifier.twin_for(cache.adapters[0])
    try:
        with audit, verifier.scope(context):
            twin(
                input_ids=torch.tensor([sequence], device=verifier.device),
                position_ids=context.positions[None],
                cache=cache,
                use_cache=True,
            )
    except (StrictVerifierError, LoweredPrecisionError):
        raise
    except Exception as error:
        return f"coverage: the model's forward does not run as a verify forward ({type(error).__name__}: {error})"
    verifier.transforms_cached_kv = record.transforms_cached_kv
    expected = {layer: 1 for layer in range(verifier.architecture.n_layers)}
    if record.calls != expected:
        missing = sorted(expected.keys() - record.calls.keys())
        return (
            "coverage: the model does not call the registered attention once per layer "
            f"(layers never reached: {missing}, calls: {record.calls})"
        )
    if audit.found and verifier.mode.strict:
        return f"coverage: operators {sorted(audit.found)} ran outside the fixed plan"
    return None


def _correctness(verifier: Verifier, sequences: list[list[int]], alone: list[torch.Tensor]) -> str | None:
    for sequence, logits in zip(sequences, alone, strict=True):
        with torch.no_grad():
            reference = reference_logits(verifier.model, sequence, short=True, adapter=_adapter(verifier))
        error = float((logits - reference).norm() / reference.norm())
        if not error <= TOLERANCE:
            return (
                f"correctness: logits of {len(sequence)} tokens are {error:.1e} (relative) away from the model's "
                f"own eager FP32 forward, allowed {TOLERANCE:.0e}"
            )
    return None


def _invariance(verifier: Verifier, sequences: list[list[int]], alone: list[torch.Tensor]) -> str | None:
    # One after the other: the logits of all of them at once would be the largest memory of a run.
    ways: dict[str, Callable[[], list[torch.Tensor]]] = {
        "all in one verify forward": lambda: _run(verifier, sequences),
        "in reverse order": lambda: _run(verifier, sequences[::-1])[::-1],
        "in small parts": lambda: [_run_cut(verifier, sequence) for sequence in sequences],
    }
    for name, way in ways.items():
        for sequence, first, other in zip(sequences, alone, way(), strict=True):
            if not torch.equal(first, other):
                differing = int((first != other).any(-1).sum())
                return f"invariance: {differing} of {len(sequence)} positions change their bits {name}"
    return None


def _memory(verifier: Verifier, sequence: list[int]) -> str | None:
    """
    A forward that changes its own buffers (CTRL rounds its position table) makes an output depend on earlier calls.
    """
    twin = eager_twin(verifier.model, adapter=_adapter(verifier))
    for module in twin.modules():  # the model's own stay as they are
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    before = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    with torch.no_grad():
        twin(input_ids=torch.tensor([sequence], device=verifier.device), use_cache=False)
    after = dict(twin.named_buffers())
    changed = {name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name))}
    changed |= verifier.store.refresh()
    changed -= {name for name in changed if "inv_freq" in name and rotary_modules(twin)}  # ours are pinned
    return f"coverage: the model's own forward changes its weights or buffers {sorted(changed)}" if changed else None


def _same(before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    return before is not None and after is not None and torch.equal(before, after)


def _adapter(verifier: Verifier) -> str | None:
    """The adapter the test runs with where the call gives each row its own."""
    return next((name for name in row_adapters(verifier.model) or () if name != BASE), None)


def _cache(verifier: Verifier, rows: int) -> MarginGateCache:
    cache = verifier.new_cache(rows, "float32")
    cache.adapters = [_adapter(verifier)] * rows
    return cache


def _run(verifier: Verifier, sequences: list[list[int]]) -> list[torch.Tensor]:
    cache = _cache(verifier, len(sequences))
    cache.long_rows = [architecture_of(verifier.twin_for()).needs_long_table(len(sequence)) for sequence in sequences]
    logits = verifier.run(cache, [Segment(slot, 0, sequence) for slot, sequence in enumerate(sequences)])
    return list(logits.split([len(sequence) for sequence in sequences]))


def _run_cut(verifier: Verifier, sequence: list[int]) -> torch.Tensor:
    cache = _cache(verifier, 1)
    cache.long_rows = [architecture_of(verifier.twin_for()).needs_long_table(len(sequence))]
    parts, start, turn = [], 0, 0
    while start < len(sequence):
        size = WINDOWS[turn] if turn < len(WINDOWS) else len(sequence)
        parts.append(verifier.run(cache, [Segment(0, start, sequence[start : start + size])]))
        start, turn = start + size, turn + 1
    return torch.cat(parts)
