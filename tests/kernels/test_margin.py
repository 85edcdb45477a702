"""top2 in Triton's interpreter: values, ties, NaN, odd sizes, dtypes."""

import math

import pytest
import torch

from margingate_kernels import top2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 3, 1023, 1024, 1025, 5000])
def test_equals_a_sort(dtype: torch.dtype, vocabulary: int) -> None:
    logits = (torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    found = top2(logits)
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.tokens, ids[:, 0]) and torch.equal(found.runners_up, ids[:, 1])
    assert torch.equal(found.values, values[:, :2])
    assert torch.equal(found.margins, values[:, 0] - values[:, 1])


@pytest.mark.parametrize("ids", [(0, 1), (7, 1031), (1024, 2048), (2999, 3), (5, 1029, 2053), (1500, 1501)])
def test_ties_go_to_the_lowest_ids(ids: tuple[int, ...]) -> None:
    logits = torch.zeros(1, 3000)
    logits[0, list(ids)] = 2.5
    found = top2(logits)
    assert (found.tokens.item(), found.runners_up.item()) == tuple(sorted(ids)[:2])
    assert found.margins.item() == 0


def test_rows_of_minus_infinity_name_their_lowest_ids() -> None:
    found = top2(torch.full((2, 2050), -math.inf))
    assert found.tokens.tolist() == [0, 0] and found.runners_up.tolist() == [1, 1]
    assert found.margins.isnan().all()


def test_one_finite_score() -> None:
    logits = torch.full((1, 2050), -math.inf)
    logits[0, 1999] = -3.0
    found = top2(logits)
    assert found.tokens.item() == 1999 and found.runners_up.item() == 0
    assert found.margins.item() == math.inf


def test_nan_wins_and_is_seen_by_its_own_row_alone() -> None:
    logits = torch.randn(3, 2050, generator=torch.Generator().manual_seed(1))
    clean = top2(logits)
    logits[1, 1500] = math.nan
    found = top2(logits)
    assert found.tokens[1].item() == 1500
    assert found.margins[1].isnan()
    for row in (0, 2):
        assert found.tokens[row] == clean.tokens[row] and found.margins[row] == clean.margins[row]


def test_one_token() -> None:
    found = top2(torch.tensor([[4.0]]))
    assert found.tokens.item() == 0 and found.runners_up.item() == -1 and found.margins.item() == math.inf


def test_strided_rows_and_no_rows() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2))
    assert torch.equal(top2(logits[::2, :500]).tokens, logits[::2, :500].argmax(-1))
    assert top2(logits[:0]).tokens.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "text"),
    [
        (torch.zeros(3), r"shape \[rows, vocabulary\], got \(3,\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "got torch.float64"),
        (torch.zeros(3, 2).t(), "contiguous"),
    ],
)
def test_bad_input(logits: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        top2(logits)
