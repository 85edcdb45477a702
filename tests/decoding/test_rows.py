"""compare(): the longest agreeing prefix and one canonical token more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from margingate_hf import MarginGateConfig
from margingate_hf.decoding.accept import Decision, compare
from margingate_hf.decoding.schedule import Pending, should_verify

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def test_examples() -> None:
    assert compare([4, 5, 6], [4, 5, 6, 7].__getitem__) == Decision((4, 5, 6, 7), False, 0)
    assert compare([4, 5, 6], [4, 9, 6, 7].__getitem__) == Decision((4, 9), True, 1)
    assert compare([], [3].__getitem__) == Decision((3,), False, 0)


@given(TOKENS, st.data())
def test_commits_a_canonical_prefix(drafts: list[int], data: st.DataObject) -> None:
    canonical = data.draw(st.lists(st.integers(0, 2), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    asked: list[int] = []

    def token(index: int) -> int:
        assert canonical[:index] == drafts[:index], "asked for a token whose prefix does not agree"
        asked.append(index)
        return canonical[index]

    decision = compare(drafts, token)
    kept = len(decision.committed)
    assert kept >= 1
    assert list(decision.committed) == canonical[:kept]
    assert decision.flipped == (kept <= len(drafts) and drafts[kept - 1] != canonical[kept - 1])
    assert decision.wasted == (len(drafts) - kept if decision.flipped else 0)
    assert asked == list(range(kept))


def test_schedule() -> None:
    config = MarginGateConfig(schedule="margin", num_draft_tokens=3, low_margin_limit=2)
    assert not should_verify([Pending(2, 1, False), Pending(0, 0, False)], config)
    assert should_verify([Pending(0, 0, False), Pending(3, 0, False)], config)
    assert should_verify([Pending(1, 0, True)], config)
    assert should_verify([Pending(2, 2, False)], config)
    assert not should_verify([Pending(2, 2, False)], config.update(schedule="fixed"))
    assert should_verify([Pending(0, 0, False)], config.update(num_draft_tokens=0))
