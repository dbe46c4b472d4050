"""How prompts share a step: the shortest first, a part for the oldest, and those that do not end in it wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.scheduler.unified import share_tokens


@pytest.mark.parametrize(
    ("wanted", "shares"),
    [
        ([40, 30, 20], [40, 30, 20]),  # enough for all
        ([1000, 20, 10], [10, 20, 10]),  # the long one gets a third of what ends in this step
        ([1000, 3], [6, 3]),  # but a sixteenth of the budget at least
        ([1000], [25]),  # alone and long: a part of the budget, so that others need not wait for the step
        ([100], [100]),
        ([1000, 900, 800], [7, 0, 18]),  # several: a fourth of it for the oldest
        ([90, 1000], [90, 10]),
        ([1000, 60, 50], [16, 0, 50]),  # 60 and 50 do not fit beside a fourth for the oldest
        ([100, 99, 98], [25, 0, 75]),  # nobody can end: the whole budget is used
        ([100, 70, 1000], [23, 70, 0]),
    ],
)
def test_shares(wanted, shares):
    assert share_tokens(100, wanted, 100, 25) == shares


def test_a_threshold_bounds_everybody():
    assert share_tokens(100, [1000, 20, 50], 30, 30) == [6, 20, 0]
    assert share_tokens(100, [1000], 30, 30) == [30]


@given(st.integers(1, 300), st.lists(st.integers(1, 500), min_size=1, max_size=12), st.integers(1, 300))
def test_nobody_gets_more_than_there_is_and_the_oldest_always_something(budget, wanted, most):
    shares = share_tokens(budget, wanted, most, max(budget // 4, 1))
    assert sum(shares) <= budget
    assert all(0 <= share <= min(want, most) for share, want in zip(shares, wanted, strict=True))
    assert shares[0] > 0
    ending = sum(share for share, want in zip(shares, wanted, strict=True) if share == want)
    if ending == 0 and min(wanted) <= budget <= most:
        assert sum(shares) == min(budget, sum(wanted))
