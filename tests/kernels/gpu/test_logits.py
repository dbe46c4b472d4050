"""What options do to logits, and log-probabilities, on the GPU: against the reference, over odd shapes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from benchmarks.gpu import kernels_sampling

from quire.kernels.backend import Penalties
from quire.kernels.gpu import sampling
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference.backend import ReferenceBackend
from tests.kernels.gpu.common import DEVICE, mostly_slow
from tests.kernels.scenes import as_lists, normal

BACKEND = GPUBackend("float32", "float32", DEVICE)
REFERENCE = ReferenceBackend("float32", "float32")
PAIR = BACKEND, REFERENCE


@pytest.mark.parametrize(
    "shape", mostly_slow(product([1, 3, 8], [1, 31, 4097, 20001]), (1, 1), (8, 31), (3, 4097), (1, 20001))
)
def test_the_first_of_the_largest_however_a_row_is_cut(shape: tuple[int, int]) -> None:
    rows, size = shape
    rng = np.random.default_rng(size + rows)
    logits = np.round(normal(rng, rows, size), 1)  # many are equal
    logits[-1] = [-np.inf, np.nan][rows % 2]
    if rows > 1:
        logits[0, size // 2] = np.nan
    if rows > 3:
        logits[1, size // 2 :], logits[2] = np.inf, -np.inf
    got, want = ([b.to_numpy(op(b.from_numpy(logits))) for op in (b.greedy, b.rows_finite)] for b in PAIR)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("size", "k"), [(1, 1), (7, 3), (300, 0), (5000, 20), (20001, 5), (400, 400)])
def test_log_probabilities(size: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_ORDERED", 2 * size)  # the last row is ordered by itself
    rng = np.random.default_rng(size)
    logits = np.round(4 * normal(rng, 3, size), 1)
    logits[0, 1::2] = -np.inf
    chosen = rng.integers(0, size, 3)
    got, want = (b.top_logprobs(b.from_numpy(logits), b.from_numpy(chosen), k).fetch(b)() for b in PAIR)
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.ranks, want.ranks)
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


def test_log_probabilities_do_not_depend_on_the_batch() -> None:
    logits = BACKEND.from_numpy(normal(np.random.default_rng(3), 5, 700))
    chosen = BACKEND.from_numpy(np.arange(5))
    whole = BACKEND.top_logprobs(logits, chosen, 4).logprobs
    alone = [BACKEND.top_logprobs(logits[r : r + 1], chosen[r : r + 1], 4).logprobs for r in range(5)]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize("size", [1, 33, 5000])
def test_what_options_do_to_logits(size: int) -> None:
    rng = np.random.default_rng(size)
    logits, rows = normal(rng, 6, 2 * size), np.array([4, 1, 2])
    prompt, counts = rng.random((3, size)) < 0.2, rng.integers(0, 3, (3, size)).astype(np.int32)
    penalties = [np.array(x, np.float32) for x in ([1.3, 1.0, 0.8], [0.0, 0.5, -0.2], [0.1, 0.0, 1.5])]
    places, tokens = np.array([0, 5, 0, 2, 0]), np.array([0, size - 1, 0, size // 2, size // 3])
    values = np.array([2.0, -1.0, 0.5, -np.inf, 3.0], np.float32)
    bits = rng.integers(-(2**31), 2**31, (2, -(-size // 32))).astype(np.int32)
    results = []
    for backend in PAIR:
        target = backend.from_numpy(logits.copy())[:, size // 2 : size // 2 + size]  # rows that are no neighbours
        backend.apply_penalties(target, Penalties(rows, *as_lists(prompt, counts), *penalties))
        backend.add_bias(target, places, tokens, values)
        backend.put_rows(target, np.array([5]), np.full((1, size), 7, np.float32))
        backend.apply_bitmask(target, np.array([2, 1]), bits)
        results.append(backend.to_numpy(target))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_nothing_to_change() -> None:
    target = BACKEND.zeros((2, 9))
    nothing = np.zeros(0, np.int64)
    BACKEND.add_bias(target, nothing, nothing, np.zeros(0, np.float32))
    one = np.ones(1, np.float32)
    nothing = np.zeros(0, np.int32)
    BACKEND.apply_penalties(target, Penalties(np.array([1]), np.zeros(2, np.int64), nothing, nothing, one, one, one))
    assert not BACKEND.to_numpy(target).any()


@pytest.mark.slow
def test_benchmark_cases_run() -> None:
    built = list(kernels_sampling.cases(GPUBackend("float32", "float32", DEVICE), 4096))
    assert len({case.name for case in built}) == len(built)
    for case in built[::11]:  # each kind once or so
        case.run(0)
