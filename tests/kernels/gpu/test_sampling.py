"""Drawing tokens on the GPU: against the reference, over all options, in the interpreter where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.backend import SamplingOptions
from quire.kernels.gpu import sampling, sampling_kernels
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference.sampling import sample_rows
from tests.kernels.gpu.common import DEVICE
from tests.kernels.scenes import normal

BACKEND = GPUBackend("float32", "float32", DEVICE)


def both(logits: np.ndarray, *options: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that the kernel and the reference draw; options in the order of `Backend.sample`."""
    types = np.float32, np.int64, np.float32, np.float32, np.float64
    *full, uniforms = (np.broadcast_to(np.asarray(x, t), len(logits)) for x, t in zip(options, types, strict=True))
    got = BACKEND.to_numpy(BACKEND.sample(BACKEND.from_numpy(logits.copy()), SamplingOptions(*full), uniforms))
    return got, sample_rows(torch.from_numpy(logits), SamplingOptions(*full), uniforms)


def compare(seed: int, rows: int, size: int, scale: float, distinct: int) -> None:
    """Draw with options of all kinds, a row each, and ask for the reference's tokens."""
    rng = np.random.default_rng(seed)
    logits = np.float32(scale) * normal(rng, rows, size)
    if distinct < size:
        logits = logits[0, :distinct][rng.integers(0, distinct, (rows, size))]
    logits[rng.random((rows, size)) < rng.choice([0, 0.3])] = -np.inf
    options = [
        rng.choice(values, rows)
        for values in ([0, 0.01, 0.5, 1, 2], [0, 1, 2, 50, 700], [1e-9, 0.5, 0.9, 1, 1], [0, 0, 0.01, 0.3, 1])
    ]
    got, want = both(logits, *options, rng.random(rows))
    np.testing.assert_array_equal(got, want)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1, 2, 7, 100, 1000]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0, 80.0]),
    distinct=st.sampled_from([2, 5, 10**6]),
)
def test_all_options_give_the_token_of_the_reference(seed: int, size: int, scale: float, distinct: int) -> None:
    compare(seed, 2, size, scale, distinct)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of numpy, in lanes that are masked out
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1, 3, 31, 100, 1000, 4096, 4097, 9000]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0, 80.0, 1e30]),
    distinct=st.sampled_from([2, 5, 100, 10**6]),
)
def test_all_options_give_the_token_of_the_reference_many_times(
    seed: int, size: int, scale: float, distinct: int
) -> None:
    compare(seed, 8, size, scale, distinct)


def compare_pieces(seed: int, rows: int, size: int, scale: float, part: int, rounds: int) -> None:
    """Draw from rows that are cut, with options of all kinds, and ask for the reference's tokens."""
    rng = np.random.default_rng(seed)
    logits = np.float32(scale) * normal(rng, rows, size)
    if seed % 2:
        logits = np.round(logits, 1)  # many are equal
    values = [0.5, 1, 2, 0], [0, 40, 2, 7], [0.9, 1, 0.5, 1e-9], [0, 0, 0.01, 0.3]
    options = [np.array(x)[rng.permutation(4)[:rows]] for x in values]
    uniforms = rng.random(rows)
    given = np.stack([*options[:3], np.log(np.maximum(options[3], 1e-300)), uniforms])
    got = sampling_kernels.draw(BACKEND.from_numpy(logits), BACKEND.from_numpy(given), part, rounds, 4, part // 2, part)
    types = np.float32, np.int64, np.float32, np.float32
    kinds = SamplingOptions(*(np.asarray(x, t) for x, t in zip(options, types, strict=True)))
    np.testing.assert_array_equal(BACKEND.to_numpy(got), sample_rows(torch.from_numpy(logits), kinds, uniforms))


@pytest.mark.parametrize(("rounds", "most"), [(0, 4096), (1, 4096), (3, 32)])
def test_rows_that_are_cut(rounds: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_kernels, "LIST", most)
    compare_pieces(rounds, 2, 300, 2.0, 128, rounds)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1, 100, 129, 500, 1000]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 8.0]),
    rounds=st.integers(0, 6),
    most=st.sampled_from([16, 64, 4096]),
)
def test_rows_that_are_cut_many_times(seed: int, size: int, scale: float, rounds: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_kernels, "LIST", most)
        compare_pieces(seed, 4, size, scale, 128, rounds)


def test_few_rows_are_cut_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def note(logits: torch.Tensor, options: torch.Tensor, part: int, rounds: int, *_: int) -> torch.Tensor:
        called.append((part < logits.shape[1], rounds > 1))
        return logits[:, 0].long()

    monkeypatch.setattr(sampling, "draw", note)
    few = BACKEND.num_sms // 2
    for rows, size in ((few, 5000), (few + 1, 5000), (few, 2048)):
        both(np.zeros((rows, size), np.float32), 1.0, 0, 1.0, 0.0, 0.5)
    assert called == [(True, True), (False, False), (False, False)]


def test_lists_that_overflow_and_lists_that_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_kernels, "LIST", 16)
    rng = np.random.default_rng(5)
    logits = 2 * normal(rng, 2, 300)
    options = [1, 0.7], [0, 40], [0.9, 0.95], 0.0, rng.random(2)
    got, want = both(logits, *options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("size", [128256, 151936])
def test_real_vocabularies(size: int) -> None:
    rng = np.random.default_rng(size)
    rows = 6 if DEVICE == "cpu" else 400  # the reference takes a tenth of a second for two
    logits = np.concatenate([normal(rng, rows // 2, size), 4 * normal(rng, rows - rows // 2, size)])
    top_k, top_p = rng.choice([0, 20, 5000], rows), rng.choice([0.9, 0.999, 1.0], rows)
    got, want = both(logits, 1.0, top_k, top_p, 0.0, rng.random(rows))
    assert (got != want).sum() <= 1


def test_values_at_the_ends_of_what_floats_are() -> None:
    tiny, huge = np.float32(1e-45), np.float32(3e38)
    logits = np.array(
        [
            [0.0, -0.0, tiny, -tiny, 0.0, -0.0],
            [huge, -huge, 0.0, huge, 1.0, -1.0],
            [-np.inf, -np.inf, -np.inf, -5.0, -np.inf, -np.inf],
            [-np.inf] * 6,
            [1.0, np.inf, 0.0, np.inf, 0.0, 0.0],
            [1.0, np.nan, 9.0, 0.0, 0.0, 0.0],
        ],
        np.float32,
    )
    uniform = np.array([0.0, 0.4, np.nextafter(1.0, 0.0)])[np.arange(6) % 3]
    got, want = both(logits, 1.0, [2, 0, 0, 2, 2, 2], [1, 0.5, 1, 1, 1, 0.5], 0.0, uniform)
    np.testing.assert_array_equal(got, want)


def test_rows_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(9)
    logits, uniforms = normal(rng, 2, 300), rng.random(2)
    whole, _ = both(logits, 0.9, 50, 0.9, 0.0, uniforms)
    alone, _ = both(logits[1:], 0.9, 50, 0.9, 0.0, uniforms[1:])
    assert whole[1] == alone[0]


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8)])
def test_frequencies_are_the_probabilities(top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(7)
    logits, draws = 2 * normal(rng, 12), 120 if DEVICE == "cpu" else 100000
    weights = np.exp(logits.astype(np.float64) / 0.7)
    kept = np.argsort(-logits)[: top_k or None]
    if top_p < 1:
        kept = kept[: 1 + int(np.argmax(np.cumsum(weights[kept]) / weights.sum() >= top_p))]
    uniforms = (np.arange(draws) + rng.random(draws)) / draws  # stratified, so that few draws say much
    got, _ = both(np.tile(logits, (draws, 1)), 0.7, top_k, top_p, 0.0, uniforms)
    expected = np.zeros(12)
    expected[kept] = weights[kept] / weights[kept].sum() * draws
    assert np.abs(np.bincount(got, minlength=12) - expected).max() < 2
