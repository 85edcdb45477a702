"""ragged_attention in Triton's interpreter: bits across windows, company and capacity; float64; NaN; planted faults."""

from dataclasses import dataclass, field

import pytest
import torch

import margingate_kernels
from evals.faulty_kernels import with_fault
from margingate_kernels import group_tile

ROWS = (301, 130, 37)  # past a split, past a block, within one


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """Three rows' keys, values and queries, laid into a cache as a call needs them."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    planes: int = 2
    queries: int = 9  # last positions of each row that ask
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = [self._planes(length, self.dim, 10 + i) for i, length in enumerate(ROWS)]
        self.values = [self._planes(length, self.value_dim, 20 + i) for i, length in enumerate(ROWS)]
        self.asked = [randn(length, self.heads, self.dim, seed=30 + i) * 2 for i, length in enumerate(ROWS)]
        if self.options.get("sinks"):
            self.options = {**self.options, "sinks": randn(self.heads, seed=40)}

    def _planes(self, length: int, dim: int, seed: int) -> torch.Tensor:
        x = randn(self.kv_heads, length, dim, seed=seed)
        high = x.to(self.dtype)
        return torch.stack([high, (x - high.float()).to(self.dtype)][: self.planes])

    def store(self, parts: list[torch.Tensor], rows: list[int], capacity: int) -> torch.Tensor:
        out = torch.full(
            (self.planes, len(rows), self.kv_heads, capacity, parts[0].shape[-1]), float("nan"), dtype=self.dtype
        )
        for place, row in enumerate(rows):
            out[:, place, :, : ROWS[row]] = parts[row]
        return out

    def run(self, segments: list[tuple[int, int, int]], capacity: int = 320, module=margingate_kernels) -> torch.Tensor:
        """`segments`: `(row, first position, tokens)`; rows in the order they come lie in the cache in that order."""
        rows = list(dict.fromkeys(row for row, *_ in segments))
        together = 16 // group_tile(self.heads // self.kv_heads)
        tiles, slots, positions, queries = [], [], [], []
        for row, first, count in segments:
            base = len(slots)
            tiles += [(base + i, min(together, count - i)) for i in range(0, count, together)]
            slots += [rows.index(row)] * count
            positions += range(first, first + count)
            queries.append(self.asked[row][first : first + count])
        return module.ragged_attention(
            torch.cat(queries),
            self.store(self.keys, rows, capacity),
            self.store(self.values, rows, capacity),
            torch.tensor(tiles, dtype=torch.int32),
            torch.tensor(slots),
            torch.tensor(positions),
            max(positions) + 1,
            self.dim**-0.5,
            **self.options,
        )

    def ends(self) -> list[tuple[int, int, int]]:
        """The last positions of every row."""
        return [(row, length - self.queries, self.queries) for row, length in enumerate(ROWS)]

    def exact(self, row: int, position: int) -> torch.Tensor:
        """The textbook formula in float64."""
        window = self.options.get("sliding_window") or 10**9
        seen = slice(max(0, position - window + 1), position + 1)
        group = self.heads // self.kv_heads
        k, v = (x[row].double().sum(0)[:, seen].repeat_interleave(group, 0) for x in (self.keys, self.values))
        scores = torch.einsum("hd,hkd->hk", self.asked[row][position].double(), k) * self.dim**-0.5
        if cap := self.options.get("softcap"):
            scores = torch.tanh(scores / cap) * cap
        if (sinks := self.options.get("sinks")) is not None:
            weights = torch.cat([scores, sinks.double()[:, None]], -1).softmax(-1)[:, :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hk,hkd->hd", weights, v)


CASES = {
    "grouped queries": Case(),
    "one plane": Case(planes=1),
    "multi-query, 3 heads": Case(heads=3, kv_heads=1),
    "17 heads on one": Case(heads=17, kv_heads=1, planes=1, queries=2),
    "fp16": Case(heads=2, dtype=torch.float16),
    "fp32": Case(heads=2, dtype=torch.float32, planes=1),
    "dim 256": Case(heads=2, kv_heads=1, dim=256, value_dim=256, planes=1),
    "odd dims": Case(heads=2, dim=24, value_dim=80),
    "sliding window": Case(options={"sliding_window": 70}),
    "window of a block": Case(heads=2, options={"sliding_window": 64}),
    "softcap": Case(heads=2, options={"softcap": 5.0}),
    "sinks": Case(heads=2, options={"sinks": True}),
    "everything": Case(heads=4, dim=80, value_dim=80, options={"sinks": True, "softcap": 3.0, "sliding_window": 40}),
    "decode": Case(planes=1, options={"precision": "bfloat16"}),
}


# Covered by others in short runs: each costs the interpreter several seconds.
AT_LENGTH = ("one plane", "multi-query, 3 heads", "window of a block", "softcap", "sinks", "sliding window")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in AT_LENGTH)) for n in CASES])
def test_bits_depend_on_the_query_and_what_it_sees_alone(name: str) -> None:
    case = CASES[name]
    whole, asked = case.run(case.ends()), case.queries
    assert torch.isfinite(whole).all(), "a slot that nobody may see was read"
    for row, length in enumerate(ROWS):
        mine = whole[row * asked : (row + 1) * asked]
        assert torch.equal(case.run([(row, length - asked, asked)], capacity=length), mine), "alone, no spare room"
        cuts = [(0, 1), (1, 2), (3, 5), (8, 1)] if asked == 9 else [(0, 1), (1, 1)]
        parts = [case.run([(row, length - asked + at, count)]) for at, count in cuts]
        assert torch.equal(torch.cat(parts), mine), "cut into windows"
    assert torch.equal(case.run(case.ends()[::-1], capacity=704), torch.cat(list(whole.split(asked))[::-1])), (
        "order, room"
    )


@pytest.mark.parametrize("name", CASES)
def test_close_to_float64(name: str) -> None:
    case = CASES[name]
    found, asked = case.run(case.ends()), case.queries
    # FP32: a chain of 2^-24 roundings over a few hundred keys. BF16 operands: 2^-9 each, at random.
    tolerance = 1e-2 if case.options.get("precision") == "bfloat16" else 2e-6
    for row, length in enumerate(ROWS):
        for index in (0, asked - 1):
            exact = case.exact(row, length - asked + index)
            error = float((found[row * asked + index].double() - exact).norm() / exact.norm())
            assert error < tolerance, (row, index, error)


@pytest.mark.parametrize("position", [0, 1, 15, 63, 64, 127, 255, 256, 300])
def test_positions_at_the_edges_of_blocks_and_splits(position: int) -> None:
    case = CASES["sliding window"]
    exact = case.exact(0, position)
    found = case.run([(0, position, 1)])[0].double()
    assert float((found - exact).norm() / exact.norm()) < 2e-6
    if position >= 4:
        assert torch.equal(case.run([(0, position - 4, 5)])[4], case.run([(0, position, 1)])[0])


def test_an_unmasked_value_load_is_caught(tmp_path) -> None:
    faulty = with_fault(tmp_path, ("attention.py", "v_mask = exists[:, None] &", "v_mask = (p[:, None] >= 0) &"))
    case = CASES["grouped queries"]
    last = [(row, length - 1, 1) for row, length in enumerate(ROWS)]
    assert case.run(last, module=faulty).isnan().any()
    assert torch.isfinite(case.run(last)).all()


def test_a_split_taken_from_the_length_is_caught(tmp_path) -> None:
    by_length = "table = attention_launch(launch_for(device), max(dim, value_dim), keys.dtype)"
    faulty = with_fault(
        tmp_path, ("attention.py", by_length, by_length + "._replace(split=256 if length > 200 else 64)")
    )
    case = CASES["grouped queries"]
    together = case.run(case.ends(), module=faulty)[2 * case.queries - 1]
    assert not torch.equal(case.run([(1, 129, 1)], module=faulty)[0], together)


def test_tanh_of_the_soft_cap() -> None:
    """One key of weight 1 shows nothing; two keys show `tanh` through the ratio of their weights."""
    case = Case(heads=2, options={"softcap": 0.5})
    exact, found = case.exact(2, 1), case.run([(2, 1, 1)])[0].double()
    assert float((found - exact).norm() / exact.norm()) < 5e-7


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(query=torch.zeros(2, 4)), "`query` must be"),
        (dict(keys=torch.zeros(3, 1, 2, 8, 16)), "`keys` must be"),
        (dict(keys=torch.zeros(1, 1, 2, 8, 16, dtype=torch.float64)), "got torch.float64"),
        (dict(values=torch.zeros(1, 1, 2, 9, 16)), "`values` must match"),
        (dict(query=torch.zeros(2, 3, 16)), "does not fit"),
        (dict(slots=torch.zeros(3)), r"must have shape \[2\]"),
        (dict(precision="half"), "`precision` must be"),
        (dict(query=torch.zeros(2, 4, 300), keys=torch.zeros(1, 1, 2, 8, 300)), "`dim` must be at most 256"),
    ],
)
def test_bad_input(change: dict, text: str) -> None:
    arguments = dict(
        query=torch.zeros(2, 4, 16),
        keys=torch.zeros(1, 1, 2, 8, 16),
        values=torch.zeros(1, 1, 2, 8, 16),
        tiles=torch.tensor([[0, 2]], dtype=torch.int32),
        slots=torch.zeros(2, dtype=torch.long),
        positions=torch.tensor([0, 1]),
        length=2,
        scaling=1.0,
    )
    with pytest.raises(ValueError, match=text):
        margingate_kernels.ragged_attention(**(arguments | change))
