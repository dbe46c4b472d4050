"""Penalties, masks, the draw, log-probabilities: against a slow oracle written from `Backend`'s words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.backend import Penalties, SamplingOptions
from quire.kernels.cpu.backend import CPUBackend
from tests.kernels.scenes import as_lists, normal, pair


def draw(
    backend: object,
    logits: np.ndarray,
    temperature: object = 1.0,
    top_k: object = 0,
    top_p: object = 1.0,
    min_p: object = 0.0,
    uniforms: object = 0.5,
) -> np.ndarray:
    """Call `sample` with scalars spread over the rows."""
    rows = len(logits)
    *options, draws = (
        np.broadcast_to(np.asarray(value, dtype), rows)
        for value, dtype in (
            (temperature, np.float32),
            (top_k, np.int64),
            (top_p, np.float32),
            (min_p, np.float32),
            (uniforms, np.float64),
        )
    )
    return backend.to_numpy(backend.sample(backend.from_numpy(logits.copy()), SamplingOptions(*options), draws))  # type: ignore[attr-defined]


def oracle(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> tuple[int, float]:
    """Return one row's token, and how close the draw came to a border (relative; the token is sure when far)."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = [i for i in order if logits[i] >= logits[order[min(top_k, len(order)) - 1]]]
    border = min(abs(weights[i] - min_p) for i in order)
    order = [i for i in order if weights[i] >= min_p]
    cumulative = np.cumsum(weights[order])
    if top_p < 1:
        goal = top_p * cumulative[-1]
        border = min(border, np.abs(cumulative - goal).min() / cumulative[-1])
        order = order[: int(np.argmax(cumulative >= goal)) + 1]
        cumulative = cumulative[: len(order)]
    goal = uniform * cumulative[-1]
    border = min(border, np.abs(cumulative[:-1] - goal).min(initial=1) / cumulative[-1])
    return order[int(np.argmax(cumulative > goal))], border


@settings(max_examples=70, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1, 2, 15, 16, 17, 100, 1500]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 80.0]),
    distinct=st.sampled_from([2, 5, 10**6]),
    temperature=st.sampled_from([1e-3, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 5000]),
    top_p=st.sampled_from([1e-9, 0.2, 0.77, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.3, 1.0]),
)
def test_the_draw_follows_the_words_of_the_interface(
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
    logits = levels[rng.integers(0, len(levels), (3, size))]  # few levels: many ties
    uniforms = rng.random(3)
    options = [float(np.float32(x)) for x in (temperature, top_p, min_p)]
    answers = [
        oracle(row, options[0], top_k, options[1], options[2], u) for row, u in zip(logits, uniforms, strict=True)
    ]
    for backend in pair():
        got = draw(backend, logits, temperature, top_k, top_p, min_p, uniforms)
        for row, (token, border) in enumerate(answers):
            assert got[row] == token or border < 1e-12


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8)])
def test_frequencies_are_the_probabilities(top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(7)
    logits, temperature, draws = 2 * normal(rng, 12), 0.7, 20000
    probabilities = np.exp(logits.astype(np.float64) / temperature)
    order = np.argsort(-logits)
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        shares = np.cumsum(probabilities[order]) / probabilities.sum()
        kept = order[: int(np.argmax(shares >= top_p)) + 1]
    expected = np.zeros(12)
    expected[kept] = probabilities[kept] / probabilities[kept].sum() * draws
    rows = np.tile(logits, (draws, 1))
    counts = np.bincount(draw(CPUBackend(), rows, temperature, top_k, top_p, 0.0, rng.random(draws)), minlength=12)
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    chi_square = ((counts - expected)[some] ** 2 / expected[some]).sum()
    assert chi_square < some.sum() - 1 + 4 * np.sqrt(2 * some.sum())  # four standard deviations


def test_temperature_zero_takes_the_first_largest() -> None:
    logits = np.array([[1, 3, 3, 2], [-5, -np.inf, -7, -5], [0, 0, 0, 0.5]], np.float32)
    big = np.zeros((1, 40), np.float32)
    big[0, [17, 38]] = 1
    for backend in pair():
        assert draw(backend, logits, temperature=0).tolist() == [1, 0, 3]
        assert draw(backend, big, temperature=0).tolist() == [17]
        assert draw(backend, logits, temperature=[0, 1, 0], top_k=1, uniforms=0.999).tolist() == [1, 3, 3]


def test_the_draw_never_falls_on_a_barred_token() -> None:
    row = np.full((1, 50), -np.inf, np.float32)
    row[0, [7, 20]] = [1.0, 1.0]
    for backend in pair():
        for uniform, token in ((0.0, 7), (0.4999, 7), (0.5, 20), (np.nextafter(1, 0), 20)):
            assert draw(backend, row, uniforms=uniform).tolist() == [token]


def test_top_p_keeps_no_token_more_than_it_needs() -> None:
    row = np.zeros((1, 4), np.float32)
    for backend in pair():
        for top_p, last in ((0.25, 0), (0.5, 1), (0.75, 2), (0.76, 3), (1.0, 3)):
            assert draw(backend, row, top_p=top_p, uniforms=0.9999).tolist() == [last]


def test_rows_without_any_number_still_give_a_token() -> None:
    rows = np.stack([np.full(20, x, np.float32) for x in (np.nan, -np.inf, np.inf)] + [np.arange(20, dtype=np.float32)])
    rows[0, 5] = 3
    for backend in pair():
        for temperature in (0.0, 1.0):
            tokens = draw(backend, rows, temperature, top_k=3, top_p=0.9)
            assert tokens.dtype == np.int64
            assert ((tokens >= 0) & (tokens < 20)).all()
            assert tokens[3] in (17, 18, 19)


def test_a_large_vocabulary_gives_the_same_token_on_both_backends() -> None:
    rng = np.random.default_rng(11)
    logits = 3 * normal(rng, 4, 20000)
    uniforms = rng.random(4)
    uniforms[0] = np.nextafter(1, 0)
    for options in ((1.0, 0, 1.0, 0.0), (2.0, 1000, 0.95, 0.0), (0.8, 0, 0.9, 0.01)):
        got, want = (draw(backend, logits, *options, uniforms) for backend in pair())
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("always_parallel")
def test_threads_do_not_change_a_choice() -> None:
    rng = np.random.default_rng(12)
    logits, uniforms = normal(rng, 9, 300), rng.random(9)
    tokens = [draw(CPUBackend(num_threads=n), logits, 0.9, 50, 0.9, 0.0, uniforms).tolist() for n in (1, None)]
    assert tokens[0] == tokens[1]
    one, many = (CPUBackend(num_threads=n).top_logprobs(logits, np.arange(9), 4) for n in (1, None))
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a, b)


def test_logprobs_sum_to_one_and_are_ranked() -> None:
    rng = np.random.default_rng(13)
    logits = 4 * normal(rng, 5, 1100)
    logits[0, 100:120] = logits[0].max()
    chosen = np.array([110, 3, 7, int(logits[3].argmax()), int(logits[4].argmin())])
    wide = logits.astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    for backend in pair():
        untouched = backend.from_numpy(logits.copy())
        top = backend.top_logprobs(untouched, backend.from_numpy(chosen), 1100).fetch(backend)()
        np.testing.assert_array_equal(backend.to_numpy(untouched), logits)
        np.testing.assert_array_equal(top.token_ids[:, 0], chosen)
        np.testing.assert_allclose(np.exp(top.logprobs[:, 1:].astype(np.float64)).sum(axis=1), 1, atol=1e-5)
        for r in range(5):
            order = np.lexsort((np.arange(1100), -logits[r]))
            np.testing.assert_array_equal(top.token_ids[r, 1:], order)
            np.testing.assert_allclose(top.logprobs[r], exact[r][top.token_ids[r]], rtol=1e-5, atol=1e-5)
        assert top.ranks.tolist() == [1 + int((logits[r] > logits[r, c]).sum()) for r, c in enumerate(chosen)]


@pytest.mark.parametrize("k", [0, 1, 5])
def test_as_many_alternatives_as_asked(k: int) -> None:
    logits = np.array([[1.0, 4.0, -np.inf, 4.0, 2.0, -0.0, 0.0]], np.float32)
    for backend in pair():
        top = backend.top_logprobs(backend.from_numpy(logits), backend.from_numpy(np.array([6])), k).fetch(backend)()
        assert top.token_ids.tolist() == [[6, 1, 3, 4, 0, 5][: k + 1]]
        assert top.logprobs.shape == (1, k + 1)
        assert top.ranks.tolist() == [5]


def test_penalties() -> None:
    rng = np.random.default_rng(14)
    logits, rows = normal(rng, 6, 90), np.array([4, 1, 2])
    prompt, counts = rng.random((3, 90)) < 0.2, rng.integers(0, 3, (3, 90)).astype(np.int32)
    repetition, presence, frequency = (
        np.array(x, np.float32) for x in ([1.3, 1.0, 0.8], [0.0, 0.5, -0.2], [0.1, 0.0, 1.5])
    )
    expected = logits.astype(np.float64)
    for p, row in enumerate(rows):
        for i in range(90):
            value = float(logits[row, i])
            if prompt[p, i] or counts[p, i]:
                value = value / repetition[p] if value > 0 else value * repetition[p]
            expected[row, i] = value - frequency[p] * counts[p, i] - presence[p] * (counts[p, i] > 0)
    for backend in pair():
        target = backend.from_numpy(logits.copy())
        backend.apply_penalties(target, Penalties(rows, *as_lists(prompt, counts), repetition, presence, frequency))
        np.testing.assert_allclose(backend.to_numpy(target), expected, atol=1e-6)
        np.testing.assert_array_equal(backend.to_numpy(target)[[0, 3, 5]], logits[[0, 3, 5]])


def test_penalties_of_more_tokens_than_a_work_item_has() -> None:
    rng = np.random.default_rng(16)
    logits, size = normal(rng, 4, 9000), 9000
    prompt, counts = np.zeros((4, size), bool), np.zeros((4, size), np.int32)
    prompt[0], counts[2], counts[3, -1] = True, 2, 1  # the second row has none
    options = [np.array(x, np.float32) for x in ([1.3, 2, 0.8, 1], [0, 1, -0.2, 0.5], [0.1, 1, 1.5, 0.25])]
    expected = np.where(prompt | (counts > 0), logits * np.where(logits > 0, 1 / options[0][:, None], 1), logits)
    expected = np.where((prompt | (counts > 0)) & (logits <= 0), logits * options[0][:, None], expected)
    expected -= options[2][:, None] * counts + options[1][:, None] * (counts > 0)
    for backend in pair():
        target = backend.from_numpy(logits.copy())
        backend.apply_penalties(target, Penalties(np.arange(4), *as_lists(prompt, counts), *options))
        np.testing.assert_allclose(backend.to_numpy(target), expected, atol=1e-6)


def test_bias_adds_up_and_bars() -> None:
    logits = np.zeros((3, 8), np.float32)
    rows, tokens = np.array([0, 0, 2, 2]), np.array([1, 1, 3, 4])
    values = np.array([2.0, 0.5, -np.inf, -1.0], np.float32)
    for backend in pair():
        target = backend.from_numpy(logits.copy())
        backend.add_bias(target, rows, tokens, values)
        got = backend.to_numpy(target)
        assert (got[0, 1], got[2, 3], got[2, 4]) == (2.5, -np.inf, -1.0)
        assert np.count_nonzero(got) == 3


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 8191, 8192, 8225, 20001])
@pytest.mark.parametrize("density", [0.02, 0.5, 0.98])
def test_a_bitmask_bars_the_tokens_whose_bits_are_clear(vocab: int, density: float) -> None:
    rng = np.random.default_rng(vocab)
    logits, mask = normal(rng, 5, vocab), rng.random((3, vocab)) < density
    mask[1], mask[2, : vocab // 2] = True, False
    expected = logits.copy()
    rows = np.array([4, 0, 2])
    expected[rows] = np.where(mask, expected[rows], -np.inf)
    padded = np.ones((3, -(-vocab // 32) * 32), bool)  # bits beyond the vocabulary mean nothing
    padded[:, :vocab] = mask
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    for backend in pair():
        target = backend.from_numpy(logits.copy())
        backend.apply_bitmask(target, rows, bits)
        np.testing.assert_array_equal(backend.to_numpy(target), expected)
        slanted = backend.from_numpy(np.concatenate([logits, logits], axis=1))[:, 1 : vocab + 1]
        backend.apply_bitmask(slanted, rows, bits)
        barred = np.zeros((5, vocab), bool)
        barred[rows] = ~mask
        np.testing.assert_array_equal(backend.to_numpy(slanted) == -np.inf, barred)


def test_no_way_of_sampling_takes_a_token_that_is_barred() -> None:
    rng = np.random.default_rng(3)
    vocab, count = 3001, 200
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (50, 1.0, 0.0), (2000, 0.99, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.2)]:
        logits, mask = normal(rng, count, vocab) * 5, rng.random((count, vocab)) < 0.01
        mask[np.arange(count), rng.integers(0, vocab, count)] = True
        logits[~mask] += 30  # what is barred would be likely
        bits = np.packbits(np.pad(mask, ((0, 0), (0, -vocab % 32))), axis=1, bitorder="little").view(np.int32)
        uniforms = rng.random(count)
        uniforms[:20] = np.nextafter(1.0, 0.0)
        drawn = []
        for backend in pair():
            target = backend.from_numpy(logits.copy())
            backend.apply_bitmask(target, np.arange(count), bits)
            options = np.full(count, 2.0), np.full(count, top_k), np.full(count, top_p), np.full(count, min_p)
            drawn.append(backend.to_numpy(backend.sample(target, SamplingOptions(*options), uniforms)))
            assert mask[np.arange(count), drawn[-1]].all()
        np.testing.assert_array_equal(drawn[0][20:], drawn[1][20:])  # the others' draws are at the very end


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = normal(np.random.default_rng(16), 5, 20001)
    logits[1, [7, 300, 20000]] = 9.0
    logits[2] = -3.0
    logits[3, 5:] = -np.inf
    for backend in pair():
        found = backend.fetch(backend.greedy(backend.from_numpy(logits)))()
        assert found.dtype == np.int64
        assert found.tolist() == logits.argmax(axis=1).tolist()


def test_rows_finite() -> None:
    logits = np.zeros((6, 20), np.float32)
    logits[1, 3], logits[2, 19], logits[3], logits[4, :19] = np.nan, np.inf, -np.inf, -np.inf
    logits[5, 7] = -np.inf
    for backend in pair():
        finite = backend.rows_finite(backend.from_numpy(logits))
        assert finite.tolist() == [True, False, False, False, True, True]
