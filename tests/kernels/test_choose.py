"""Choosing tokens as instructions: rows of several chunks, any rows of a wider array, recorded or not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.backend import Penalties, SamplingOptions
from quire.kernels.cpu import sampling
from quire.kernels.cpu.sampling import logprobs_of, row_maxima
from quire.kernels.cpu.threads import Launcher
from tests.kernels.both_ways import ROWS, Results, both_ways, new_launcher
from tests.kernels.scenes import normal
from tests.kernels.test_sampling import oracle

pytestmark = pytest.mark.usefixtures("always_parallel")
SIZES = (1, 15, 16, 33, 1023, 1024, 1025, 1057, 20000)  # vocabularies: around a vector, around a chunk, several pieces
ONE_THREAD = new_launcher(1)


@pytest.fixture(scope="module")
def launchers() -> list[Launcher]:
    """One thread, and two."""
    return [new_launcher(1), new_launcher(2)]


def sample(launcher: Launcher, logits: np.ndarray, *options: object) -> np.ndarray:
    """Call `sample` with temperature, top_k, top_p, min_p and uniforms spread over the rows."""
    dtypes = (np.float64, np.int64, np.float64, np.float64, np.float64)
    *spread, uniforms = (np.full(len(logits), option, dtype) for option, dtype in zip(options, dtypes, strict=True))
    return sampling.sample(launcher, row_maxima(launcher, logits), SamplingOptions(*spread), uniforms)


@pytest.mark.parametrize("size", SIZES)
def test_row_maxima_are_the_first_largest(launchers: list[Launcher], size: int) -> None:
    for count in (1, 5, 17):

        def draw(seed: int, count: int = count) -> Results:
            logits = np.round(3 * normal(np.random.default_rng(seed), count, size + 5))  # many ties
            logits[0, 2 : 2 + size // 2] = -np.inf
            return (logits,)

        def compute(launcher: Launcher, logits: np.ndarray) -> Results:
            known = row_maxima(launcher, logits[:, 2:-3])
            return known.tops, known.tokens, known.finite

        def expect(logits: np.ndarray) -> Results:
            own = logits[:, 2:-3]
            return own.max(axis=1), own.argmax(axis=1), np.ones(len(own), np.bool_)

        both_ways(launchers, compute, draw, expect)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_with_a_flaw_anywhere_is_not_finite(launchers: list[Launcher], size: int) -> None:
    rng = np.random.default_rng(size)
    for value in (np.nan, np.inf):
        logits = normal(rng, 8, size)
        places = [0, size - 1, size // 2, *rng.integers(0, size, 4)]
        logits[np.arange(7), places] = value
        assert row_maxima(launchers[1], logits).finite.tolist() == [False] * 7 + [True]
    logits = np.full((3, size), -np.inf, np.float32)
    logits[1, -1], logits[2, 0] = -3e38, 3e38
    known = row_maxima(launchers[1], logits)
    assert known.finite.tolist() == [False, True, True]
    assert known.tokens.tolist() == [0, size - 1, 0]


def test_a_nan_is_never_drawn_nor_a_reason_to_leave_memory(launchers: list[Launcher]) -> None:
    logits = np.full((3, 1500), np.nan, np.float32)
    logits[1, 700], logits[2, :1200] = 3.0, np.inf
    assert sample(launchers[0], logits, 1.0, [0, 5, 1200], 0.9, 0.0, 0.5).tolist() == [0, 700, 0]
    ids, logprobs, _ = logprobs_of(launchers[0], row_maxima(launchers[0], logits), np.array([4, 5, 6]), 1500)
    assert ((ids >= 0) & (ids < 1500)).all()
    assert np.isnan(logprobs[0]).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1030, 2048, 5000]),
    spread=st.sampled_from([0.01, 1.0, 5.0, 80.0]),
    distinct=st.sampled_from([2, 50, 10**6]),
    temperature=st.sampled_from([1e-3, 0.5, 1.0, 30.0]),
    top_k=st.sampled_from([0, 1, 31, 32, 33, 80, 81, 1024, 1025, 4000, 4999]),
    top_p=st.sampled_from([1e-9, 0.2, 0.77, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_the_draw_from_many_tokens(
    seed: int,
    size: int,
    spread: float,
    distinct: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    rng = np.random.default_rng(seed)
    levels = np.float32(spread) * normal(rng, min(distinct, size))
    row = levels[rng.integers(0, len(levels), size)]
    row[rng.integers(0, size, size // 3)] = -np.inf
    uniforms = rng.random(2)
    got = sample(ONE_THREAD, np.stack([row, row]), temperature, top_k, top_p, min_p, uniforms)
    for token, uniform in zip(got.tolist(), uniforms, strict=True):
        wanted, border = oracle(row, temperature, top_k, top_p, min_p, uniform)
        assert token == wanted or border < 1e-12


@pytest.mark.parametrize("count", ROWS)
def test_the_draw_reads_its_options_late(launchers: list[Launcher], count: int) -> None:
    size = 1100

    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        logits = 3 * normal(rng, count, size + 4)
        temperature = rng.choice([0.0, 0.5, 1.0], count)
        top_k = rng.choice([0, 1, 40, 1050], count)
        top_p, min_p = rng.choice([0.9, 1.0], count), rng.choice([0.0, 0.01], count)
        return logits, temperature, top_k, top_p, min_p, rng.random(count)

    def compute(launcher: Launcher, logits: np.ndarray, *options: np.ndarray) -> Results:
        maxima = row_maxima(launcher, logits[:, 1:-3])
        return (sampling.sample(launcher, maxima, SamplingOptions(*options[:-1]), options[-1]),)

    def expect(logits: np.ndarray, *options: np.ndarray) -> Results:
        tokens = []
        for row, *own in zip(logits[:, 1:-3], *options, strict=True):
            tokens.append(int(row.argmax()) if own[0] == 0 else oracle(row, *own)[0])
        return (np.array(tokens),)

    both_ways(launchers, compute, draw, expect)


def test_a_row_chooses_the_same_in_any_company(launchers: list[Launcher]) -> None:
    rng = np.random.default_rng(3)
    logits, uniforms = normal(rng, 33, 3000), rng.random(33)
    for options in ((1.0, 0, 0.9, 0.0), (1.0, 50, 0.9, 0.0), (1.0, 2000, 1.0, 0.01)):
        together = sample(launchers[1], logits, *options, uniforms)
        alone = [int(sample(launchers[0], logits[r : r + 1], *options, uniforms[r])[0]) for r in range(33)]
        assert together.tolist() == alone


@pytest.mark.parametrize(("count", "size", "k"), [(1, 5, 5), (3, 1023, 7), (17, 1100, 20), (5, 3000, 3000), (2, 9, 0)])
def test_logprobs(launchers: list[Launcher], count: int, size: int, k: int) -> None:
    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        return 3 * normal(rng, count, size + 4), rng.integers(0, size, count)

    def compute(launcher: Launcher, logits: np.ndarray, chosen: np.ndarray) -> Results:
        return logprobs_of(launcher, row_maxima(launcher, logits[:, 1:-3]), chosen, k)

    def expect(logits: np.ndarray, chosen: np.ndarray) -> Results:
        wide = logits[:, 1:-3].astype(np.float64)
        exact = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        best = np.argsort(-wide, axis=1, kind="stable")[:, :k]
        ids = np.concatenate([chosen[:, None], best], axis=1)
        own = np.take_along_axis(wide, chosen[:, None], axis=1)
        return ids, np.take_along_axis(exact, ids, axis=1), 1 + (wide > own).sum(axis=1)

    both_ways(launchers, compute, draw, expect, lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("count", [1, 2, 9])
def test_penalties_reach_through_a_view(launchers: list[Launcher], count: int) -> None:
    size = 9000

    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        seen = [rng.permutation(size)[: size // 3].astype(np.int32) for _ in range(count)]
        starts = np.cumsum([0, *map(len, seen)])
        counts = rng.integers(0, 3, starts[-1]).astype(np.int32)
        options = [rng.random(count).astype(np.float32) + 0.5 for _ in range(3)]
        return normal(rng, 12, size + 3), rng.permutation(12)[:count], starts, np.concatenate(seen), counts, *options

    def compute(launcher: Launcher, logits: np.ndarray, *rest: np.ndarray) -> Results:
        sampling.penalize(launcher, logits[:, 1:-2], Penalties(*rest))
        return (logits,)

    def expect(
        logits: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
        *three: np.ndarray,
    ) -> Results:
        place = np.repeat(np.arange(count), np.diff(starts))
        repetition, presence, frequency = (option[place] for option in three)
        own = logits[rows[place], 1 + ids]
        touched = np.where(own > 0, own / repetition, own * repetition)
        touched -= (counts > 0) * (frequency * counts.astype(np.float32) + presence)
        logits[rows[place], 1 + ids] = touched
        return (logits,)

    both_ways(launchers, compute, draw, expect)


def test_no_rows_at_all(launchers: list[Launcher]) -> None:
    assert sample(launchers[1], np.empty((0, 50), np.float32), 1.0, 0, 1.0, 0.0, 0.5).shape == (0,)
