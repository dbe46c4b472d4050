"""Budgets of reasoning, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine_request import ThinkingData
from quire.sampling.thinking import ThinkingBudget

START, END = [1, 2], [8, 8, 9]


def data(budget: int, *, start: list[int] = START, end: list[int] = END, open: bool = False) -> ThinkingData:
    return ThinkingData(start, end, budget, open)


def follow(budget: ThinkingBudget, tokens: list[int]) -> list[int]:
    """Feed `tokens`, and whatever is forced; return all that was generated."""
    said = []
    for token in tokens:
        while forced := budget.forced_tokens():
            said += forced
            for each in forced:
                budget.accept(each)
        said.append(token)
        budget.accept(token)
    return said


@pytest.mark.parametrize(
    ("given_data", "tokens", "said"),
    [
        (data(2, open=True), [5, 6, 7], [5, 6, *END, 7]),
        (data(0, open=True), [5], [*END, 5]),
        (data(4, open=True), [5, *END, 6, 7, 8, 9, 10], [5, *END, 6, 7, 8, 9, 10]),  # it ended by itself
        (data(3, open=True), [5, 6, 8, 7, 7], [5, 6, 8, 8, 9, 7, 7]),  # of the end, the first part was there
        (data(4, open=True), [5, 6, 8, 8, 5], [5, 6, 8, 8, 9, 5]),
        (data(4, open=True), [8, 8, 8, 8, 5], [8, 8, 8, 8, 9, 5]),  # the end may begin in what looked like its middle
        (data(2), [5, 5, 1, 2, 5, 6, 7], [5, 5, 1, 2, 5, 6, *END, 7]),
        (data(2), [1, 1, 2, 5, 6, 7], [1, 1, 2, 5, 6, *END, 7]),
        (data(1), [5, 6, 7], [5, 6, 7]),  # none was begun
        (data(3), [1, 2, *END, 1, 2, 5, 6, 7], [1, 2, 8, 8, 9, 1, 2, 5, 6, 7]),  # only the first counts
        (data(1, end=[]), [1, 2, 5, 6], [1, 2, 5, 6]),
        (data(1, start=[]), [5, 6], [5, 6]),
        (data(2, start=[8], end=[8]), [8, 5, 6, 7], [8, 5, 6, 8, 7]),
    ],
)
def test_what_is_said_with_a_budget(given_data: ThinkingData, tokens: list[int], said: list[int]) -> None:
    assert follow(ThinkingBudget(given_data), tokens) == said


small = st.integers(1, 4)


@given(
    start=st.lists(small, max_size=2),
    end=st.lists(small, min_size=1, max_size=3),
    budget=st.integers(0, 6),
    opened=st.booleans(),
    tokens=st.lists(small, max_size=20),
    cut=st.integers(0, 20),
)
def test_budgets_hold_and_can_be_rebuilt(
    start: list[int], end: list[int], budget: int, opened: bool, tokens: list[int], cut: int
) -> None:
    given_data = ThinkingData(start, end, budget, opened)
    whole = ThinkingBudget(given_data)
    twins = []
    said = follow(whole, tokens)
    for at in (cut, len(said)):
        rebuilt, followed = ThinkingBudget(given_data, said[:at]), ThinkingBudget(given_data)
        for token in said[:at]:
            followed.accept(token)
        fork = followed.fork()
        assert rebuilt.forced_tokens() == followed.forced_tokens() == fork.forced_tokens()
        assert rebuilt.over == followed.over == fork.over
        twins.append(fork)
    opening = (
        0 if opened else next((i for i in range(len(said)) if start and said[: i + 1][-len(start) :] == start), None)
    )
    if not opened and opening is not None:
        opening += 1
    if opening is not None and len(said) > opening + budget:
        thoughts = said[opening : opening + budget + len(end)]
        ends = [at for at in range(len(thoughts) + 1) if at >= len(end) and thoughts[at - len(end) : at] == end]
        assert ends or len(said) < opening + budget + len(end)
