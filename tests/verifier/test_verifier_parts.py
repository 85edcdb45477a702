"""The verifier's pieces: linear plans, arithmetic, attention. Bits and closeness to float64 are tested apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from fault_injection import PlainPlan
from margingate_hf.forward.attention import verify_attention
from margingate_hf.forward.context import KV_BLOCK, QUERY_TILE, AttentionOptions, Segment, verify_context
from margingate_hf.verifier import CPU_PLANS, LinearPlan, arithmetic
from margingate_hf.verifier.plans import probe_linear

CPU = torch.device("cpu")
ROWS = [1, 2, 3, 15, 16, 17, 33, 64, 128, 129, 257]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("plan", CPU_PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (192, 576), (67, 129), (300, 1536)])
def test_linear_bits_do_not_depend_on_company(plan: LinearPlan, n: int, k: int) -> None:
    if not plan.available():
        pytest.skip(f"{plan.name} needs oneDNN")
    packed = plan.pack(randn(n, k, seed=1))
    x = randn(257, k)
    whole = plan.linear(x, packed)
    for count in ROWS:
        assert torch.equal(plan.linear(x[:count], packed), whole[:count]), count
    order = torch.randperm(257, generator=torch.Generator().manual_seed(2))
    assert torch.equal(plan.linear(x[order], packed), whole[order])
    poisoned = x.clone()
    poisoned[1::2] = math.nan
    assert torch.equal(plan.linear(poisoned, packed)[::2], whole[::2])
    buffer = torch.empty(257 * k + 16)
    for offset in (1, 3, 8):
        unaligned = buffer[offset : offset + 257 * k].view(257, k).copy_(x)
        assert torch.equal(plan.linear(unaligned, packed), whole), f"{4 * offset} bytes off"
        assert torch.equal(plan.linear(unaligned[5:7], packed), whole[5:7]), f"{4 * offset} bytes off"
    assert probe_linear(plan, randn(n, k, seed=1)) is None


@pytest.mark.parametrize("plan", CPU_PLANS, ids=lambda plan: plan.name)
def test_linear_is_close_to_float64(plan: LinearPlan) -> None:
    """An FP32 dot product of k terms errs by about sqrt(k) half-ulps of its norm; 8 of them are allowed."""
    n, k = 200, 1536
    weight, x = randn(n, k, seed=1), randn(40, k)
    exact = x.double() @ weight.double().T
    error = (plan.linear(x, plan.pack(weight)) - exact).norm() / exact.norm()
    assert error < 8 * math.sqrt(k) * 2.0**-24


def test_the_probe_refuses_plain_linear() -> None:
    plan = PlainPlan()
    plan.sizes = (1, 2, 4, 16, 64)
    assert "bits change" in str(probe_linear(plan, randn(576, 1536)))


def test_the_probe_refuses_rows_that_leak() -> None:
    class Leaky(PlainPlan):
        sizes = (4,)

        def linear(self, rows: torch.Tensor, packed: torch.Tensor, precision: str = "float32") -> torch.Tensor:
            return torch.cat([F.linear(row[None], packed) for row in rows]) + 0 * rows.sum()

    assert "NaN neighbours" in str(probe_linear(Leaky(), randn(8, 8)))


def test_elementwise_and_reduction_probes_pass_here() -> None:
    assert arithmetic.probe_elementwise() is None
    assert arithmetic.probe_reductions() is None


def test_the_elementwise_probe_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector body and a scalar tail that differ by one bit, as `F.silu` has on some processors."""

    def tail(x: torch.Tensor) -> torch.Tensor:
        out = x.exp()
        out[x.numel() // 8 * 8 :] *= 1 + 2.0**-22
        return out

    monkeypatch.setattr(arithmetic, "ELEMENTWISE", (tail,))
    assert "tail" in str(arithmetic.probe_elementwise())


ACTIVATIONS = {
    "silu": (arithmetic.silu, F.silu),
    "sigmoid": (arithmetic.sigmoid, torch.sigmoid),
    "gelu": (arithmetic.gelu, F.gelu),
    "gelu_tanh": (lambda x: arithmetic.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "softplus": (arithmetic.softplus, F.softplus),
    "softmax": (arithmetic.softmax, lambda x: x.softmax(-1)),
    "log_softmax": (arithmetic.log_softmax, lambda x: x.log_softmax(-1)),
    "rms_norm": (
        lambda x: arithmetic.rms_norm(x, x.new_ones(x.shape[-1]), 1e-6),
        lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    ),
    "layer_norm": (
        lambda x: arithmetic.layer_norm(x, None, x.new_full((x.shape[-1],), 0.5), 1e-5),
        lambda x: F.layer_norm(x, x.shape[-1:], bias=x.new_full((x.shape[-1],), 0.5)),
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_arithmetic_is_row_invariant_and_right(name: str) -> None:
    ours, library = ACTIVATIONS[name]
    for width in (7, 64, 129, 576):
        x = randn(33, width) * 4
        whole = ours(x)
        for row in (0, 1, 32):
            assert torch.equal(ours(x[row : row + 1].clone()), whole[row : row + 1])
        assert torch.equal(ours(x[3:10].clone()), whole[3:10])
        exact = library(x.double())
        assert ((whole - exact).norm() / exact.norm()) < 1e-6  # a handful of FP32 roundings, 6e-8 each


@dataclass(frozen=True)
class Problem:
    """An attention problem; `lengths` are the rows' keys, the last `window` of them are queries."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    lengths: tuple[int, ...] = (300, 41, 129)
    window: int = 33
    sliding: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def id(self) -> str:
        return f"h{self.heads}/{self.kv_heads}-d{self.dim}-sw{self.sliding}-cap{self.softcap}-sink{self.sinks}"


PROBLEMS = [
    Problem(),
    Problem(heads=9, kv_heads=3, dim=64),
    Problem(heads=4, kv_heads=1, dim=80),
    Problem(heads=4, kv_heads=4, dim=24, sliding=20),
    Problem(sliding=150, softcap=20.0),
    Problem(sinks=True),
    Problem(sinks=True, sliding=40),
]


def stores(problem: Problem, capacity: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values in the verifier's layout; columns that no row holds are poisoned with huge numbers."""
    blocks = capacity // KV_BLOCK
    out = []
    for seed in (1, 2):
        store = torch.full((len(problem.lengths), blocks * KV_BLOCK, problem.kv_heads, problem.dim), 1e30)
        for row, length in enumerate(problem.lengths):
            store[row, :length] = randn(length, problem.kv_heads, problem.dim, seed=10 * row + seed)
        out.append(store.transpose(1, 2).contiguous())
    return out


def attend(problem: Problem, rows: list[int], cuts: list[tuple[int, int]], capacity: int = 384) -> list[torch.Tensor]:
    """Runs queries `[a, b)` of each row's window in one pass; returns `[b - a, heads, dim]` a (row, cut)."""
    keys, values = stores(problem, capacity)
    sinks = randn(problem.heads, seed=5) if problem.sinks else None
    queries = [randn(problem.window, problem.heads, problem.dim, seed=100 + row) for row in range(len(problem.lengths))]
    out: list[torch.Tensor] = []
    for a, b in cuts:
        segments = [Segment(row, problem.lengths[row] - problem.window + a, [0] * (b - a)) for row in rows]
        query = torch.cat([queries[row][a:b] for row in rows]).transpose(0, 1)[None]
        result = verify_attention(
            query,
            keys,
            values,
            verify_context(segments, CPU),
            AttentionOptions(0.25, problem.sliding, problem.softcap, sinks),
        )
        out += list(result[0].split(b - a))
    return out


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_attention_bits_do_not_depend_on_company_window_or_capacity(problem: Problem) -> None:
    rows = [0, 1, 2]
    whole = attend(problem, rows, [(0, problem.window)])
    for row in rows:
        assert torch.equal(attend(problem, [row], [(0, problem.window)])[0], whole[row]), "alone"
    for row, other in zip([2, 0], attend(problem, [2, 0], [(0, problem.window)]), strict=True):
        assert torch.equal(other, whole[row]), "other order"
    for row, other in zip(rows, attend(problem, rows, [(0, problem.window)], capacity=768), strict=True):
        assert torch.equal(other, whole[row]), "larger cache"
    for size in (1, 4, QUERY_TILE, 13):
        cuts = [(a, min(a + size, problem.window)) for a in range(0, problem.window, size)]
        parts = attend(problem, rows, cuts)
        for row in rows:
            assert torch.equal(torch.cat(parts[row :: len(rows)]), whole[row]), f"windows of {size}"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_attention_is_close_to_float64(problem: Problem) -> None:
    """Scores, exponentials and sums round by 2^-24 each; 1e-6 of the output's norm leaves room for 300 keys."""
    keys, values = stores(problem, 384)
    result = attend(problem, [0, 1, 2], [(0, problem.window)])
    group = problem.heads // problem.kv_heads
    for row, length in enumerate(problem.lengths):
        q = randn(problem.window, problem.heads, problem.dim, seed=100 + row).double()
        k, v = (s[row][:, :length].double() for s in (keys, values))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hkd->hqk", q, k) * 0.25
        if problem.softcap:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        query_position = torch.arange(length - problem.window, length)[:, None]
        hidden = torch.arange(length)[None] > query_position
        if problem.sliding:
            hidden |= torch.arange(length)[None] <= query_position - problem.sliding
        scores = scores.masked_fill(hidden, -math.inf)
        if problem.sinks:
            column = randn(problem.heads, seed=5).double().view(-1, 1, 1).expand(-1, problem.window, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        exact = torch.einsum("hqk,hkd->qhd", weights, v)
        assert (result[row] - exact).norm() / exact.norm() < 1e-6
