"""How a step of attention is cut into items: everything once, enough for all threads, dear ones first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.attention import (
    ATTEND_ALONE,
    ATTEND_SHARED,
    MERGE_ALONE,
    MERGE_SHARED,
    Plan,
    make_plan,
)
from quire.kernels.cpu.attention_kernels import (
    COST,
    COUNT,
    FIRST,
    FIRST_PARTIAL,
    LAST,
    NUM_PARTIALS,
    POSITION,
    ROW,
    SEQUENCE,
)
from quire.kernels.cpu.sizes import ITEMS_PER_THREAD, SPLIT_ROWS
from quire.kernels.cpu.threads import Launcher

SEGMENT, BLOCK = 128, 16


class Pretender:
    """One thread that plans for more than this machine may have."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads, self._launcher = num_threads, Launcher(1)
        self.emit, self.empty = self._launcher.emit, self._launcher.empty


def plan_of(
    steps: list[tuple[int, int]], threads: int, heads: int = 2, group: int = 3, window: int | None = None
) -> tuple[Plan, np.ndarray, np.ndarray]:
    """Plan a step of (queries, context length) -> the plan, its items and its merges, one record a row."""
    counts, lengths = np.array(steps).T
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables = np.zeros((len(steps), -(-int(lengths.max()) // BLOCK)), np.int32)
    tokens = int(counts.sum())
    metadata = AttentionMetadata(starts, lengths.astype(np.int32), tables, np.zeros(tokens, np.int64))
    params = AttentionParams(heads * group, heads, 64, 0.125, window)
    launcher: Any = Pretender(threads)
    plan = make_plan(launcher, tokens, metadata, params, BLOCK)
    words = plan.words
    items, merges = words[ATTEND_ALONE] + words[ATTEND_SHARED], words[MERGE_ALONE] + words[MERGE_SHARED]
    return plan, plan.items[: items // heads], plan.merges[: merges // heads]


STEPS = [
    [(1, 1)],
    [(1, 5000)],
    [(1, 5000), (1, 30), (1, 700)],
    [(1, 100)] * 40,
    [(300, 300)],
    [(5, 4000), (1, 129), (64, 64), (130, 1000)],
    [(4, 2000), (0, 9), (2, 128), (1, 256)],
    [(1000, 3000), (1, 20000)],
]


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
@pytest.mark.parametrize("window", [None, 1, 200])
@pytest.mark.parametrize("steps", STEPS)
def test_every_query_sees_every_segment_once(steps: list[tuple[int, int]], window: int | None, threads: int) -> None:
    plan, items, merges = plan_of(steps, threads, window=window)
    seen: dict[tuple[int, int, int], int] = {}
    for item in items:
        for query in range(item[COUNT]):
            for segment in range(item[FIRST], item[LAST]):
                key = (int(item[SEQUENCE]), int(item[ROW]) + query, segment)
                seen[key] = seen.get(key, 0) + 1
    assert set(seen.values()) <= {1}
    row = 0
    for s, (count, length) in enumerate(steps):
        for position in range(length - count, length):
            low = 0 if window is None else max(0, position - window + 1)
            assert all((s, row, segment) in seen for segment in range(low // SEGMENT, position // SEGMENT + 1))
            row += 1
    assert {int(item[POSITION]) for item in items} <= {p for c, n in steps for p in range(n - c, n)}
    partials = [
        int(m[FIRST_PARTIAL]) + head * int(m[NUM_PARTIALS]) + g
        for m in merges
        for head in (0, 1)
        for g in range(m[FIRST], m[LAST])
    ]
    assert sorted(partials) == list(range(len(partials)))
    assert len(partials) <= len(plan.partials)
    assert sum(int(item[NUM_PARTIALS]) > 0 for item in items) >= 2 * len(merges)


@pytest.mark.parametrize("threads", [2, 5, 16])
def test_one_long_context_occupies_all_threads(threads: int) -> None:
    _, items, merges = plan_of([(1, 100_000)], threads)
    assert len(merges) == 1
    assert 2 * len(items) >= ITEMS_PER_THREAD * threads
    assert items[:, COST].max() <= 2 * items[:, COST].mean()


def test_rows_of_a_split_unit_fit_a_partial_result() -> None:
    _, _, merges = plan_of([(5, 40_000), (9, 40_000), (1, 40_000)], 8)
    assert 0 < merges[:, COUNT].max() <= SPLIT_ROWS // 3


def test_one_thread_splits_nothing_and_shares_nothing() -> None:
    plan, items, merges = plan_of([(1, 100_000), (70, 70)], 1)
    assert (plan.words[ATTEND_SHARED], len(merges)) == (0, 0)
    assert (items[:, NUM_PARTIALS] == 0).all()


def test_little_work_is_left_to_one_thread() -> None:
    plan, _, merges = plan_of([(1, 60)], 8)
    assert (plan.words[ATTEND_ALONE], plan.words[ATTEND_SHARED], len(merges)) == (2, 0, 0)


def test_dear_items_come_first() -> None:
    _, items, _ = plan_of([(1, 10 + 37 * s % 900) for s in range(50)] + [(400, 2000)], 4)
    cost = items[:, COST]
    assert (np.diff(cost) <= cost.max() / 63 + 1).all()
    assert cost[0] > 10 * cost[-1]
