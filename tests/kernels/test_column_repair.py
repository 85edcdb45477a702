"""repair_columns in Triton's interpreter: rounding, scatter, bounds."""

import pytest
import torch

from margingate_kernels import repair_columns

ROWS, HEADS, CAPACITY, DIM = 3, 2, 40, 24


def planes(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    nines = torch.full((ROWS, HEADS, CAPACITY, DIM), 9.0, dtype=dtype)
    return nines, nines.clone()


def states(tokens: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    x[0, 0, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 0.0])  # ties, both ways
    x[0, 0, 4:8] = torch.tensor([3.4e38, -3.4e38, 1e-40, float("inf")])
    return x


SLOTS, POSITIONS = torch.tensor([2, 0, 2, 1]), torch.tensor([0, 39, 17, 5])


@pytest.mark.parametrize("two", [False, True])
def test_rounds_to_nearest_even_and_touches_nothing_else(two: bool) -> None:
    high, low = planes()
    x = states(4)
    repair_columns(x, high, low if two else None, SLOTS, POSITIONS)
    expected_high, expected_low = planes()
    limit = torch.finfo(torch.bfloat16).max
    rounded = (x.clamp(-limit, limit) if two else x).bfloat16()
    expected_high[SLOTS, :, POSITIONS] = rounded
    if two:
        expected_low[SLOTS, :, POSITIONS] = (x - rounded.float()).bfloat16()
    assert torch.equal(high, expected_high) and torch.equal(low, expected_low)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_writes_what_split_planes_gives(dtype: torch.dtype) -> None:
    """Also for values that one plane cannot hold: two can up to twice its largest, beyond that the sum is infinite."""
    planes_module = pytest.importorskip("margingate_hf.kv_cache.formats")
    limit = torch.finfo(dtype).max
    x = states(4)
    x[2, 0, :6] = torch.tensor(
        [
            1.05 * min(limit, 3.2e38),
            -1.05 * min(limit, 3.2e38),
            2.5 * min(limit, 1e38),
            float("inf"),
            float("-inf"),
            0.0,
        ]
    )
    high, low = planes(dtype)
    repair_columns(x, high, low, SLOTS, POSITIONS)
    for mine, theirs in zip((high, low), planes_module.split_planes(x, dtype, 2), strict=True):
        assert torch.equal(mine[SLOTS, :, POSITIONS], theirs)


def test_fp16_planes_round_to_nearest_even() -> None:
    high, low = planes(torch.float16)
    x = states(4).clamp(-60000, 60000)
    x[1, 1, :2] = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11])  # ties
    repair_columns(x, high, low, SLOTS, POSITIONS)
    expected_high, expected_low = planes(torch.float16)
    expected_high[SLOTS, :, POSITIONS] = x.half()
    expected_low[SLOTS, :, POSITIONS] = (x - x.half().float()).half()
    assert torch.equal(high, expected_high) and torch.equal(low, expected_low)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_three_planes_keep_the_value_itself(dtype: torch.dtype) -> None:
    high, whole = planes(dtype)[0], planes(torch.float32)[0]
    x = states(4)
    repair_columns(x, high, whole, SLOTS, POSITIONS)
    expected = planes(torch.float32)[0]
    expected[SLOTS, :, POSITIONS] = x
    limit = torch.finfo(dtype).max
    assert torch.equal(whole, expected)
    assert torch.equal(high[SLOTS, :, POSITIONS], x.clamp(-limit, limit).to(dtype))


def test_a_float32_cache_is_one_plane() -> None:
    whole = planes(torch.float32)[0]
    repair_columns(states(4), whole, None, SLOTS, POSITIONS)
    assert torch.equal(whole[SLOTS, :, POSITIONS], states(4))


def test_nan_stays_nan() -> None:
    high, low = planes()
    x = states(4)
    x[1] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a NaN whose upper half looks like inf
    repair_columns(x, high, low, SLOTS, POSITIONS)
    assert high[0, :, 39].isnan().all()


@pytest.mark.parametrize(("slot", "position"), [(3, 0), (-1, 0), (0, 40), (0, -1)])
def test_a_token_outside_the_cache_is_skipped(slot: int, position: int) -> None:
    high, low = planes()
    repair_columns(states(1), high, low, torch.tensor([slot]), torch.tensor([position]))
    assert torch.equal(high, planes()[0]) and torch.equal(low, planes()[1])


def test_strided_states() -> None:
    high, low = planes()
    x = states(8)
    repair_columns(x[::2], high, low, SLOTS, POSITIONS)
    again = planes()
    repair_columns(x[::2].contiguous(), *again, SLOTS, POSITIONS)
    assert torch.equal(high, again[0])


def test_bad_input() -> None:
    high, low = planes()
    with pytest.raises(ValueError, match="`states` must be float32"):
        repair_columns(states(4).bfloat16(), high, low, SLOTS, POSITIONS)
    with pytest.raises(ValueError, match=r"`low` must be \[rows, 2, capacity, 24\]"):
        repair_columns(states(4), high, low[:, :1], SLOTS, POSITIONS)
    with pytest.raises(ValueError, match="`low` must be torch.bfloat16 or torch.float32"):
        repair_columns(states(4), high, low.half(), SLOTS, POSITIONS)
    with pytest.raises(ValueError, match="got torch.float64"):
        repair_columns(states(4), high.double(), None, SLOTS, POSITIONS)
    with pytest.raises(ValueError, match=r"must have shape \[4\], got \(3,\)"):
        repair_columns(states(4), high, low, SLOTS[:3], POSITIONS)
