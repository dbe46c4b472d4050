"""Mirostat keeps the surprise of a text near its target, learns as its papers say, and forgets nothing in a fork."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from quire.sampling.truncation import Mirostat, Truncation, mirostat_top_k, truncate
from quire.sampling_params import SamplingParams

ZIPF = np.log(1.0 / np.arange(1, 2001) ** 1.1).astype(np.float32)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [2.0, 3.5, 5.0])
def test_the_surprise_of_a_text_is_near_the_target(version: int, tau: float) -> None:
    options = Truncation.of(SamplingParams(mirostat=version, mirostat_tau=tau))
    assert options is not None and options.state == 2 * tau
    rng = np.random.default_rng(0)
    raw = np.exp(ZIPF.astype(np.float64))
    raw /= raw.sum()
    surprises = []
    for _ in range(600):
        logits, _, [update] = truncate(ZIPF[None].copy(), [options], np.ones(1), np.zeros(1, np.int64), np.zeros(1))
        probs = np.exp(logits[0].astype(np.float64))
        probs /= probs.sum()
        token = int(rng.choice(len(probs), p=probs))
        update.apply(token)
        surprises.append(-math.log2(probs[token]))
    assert abs(np.mean(surprises[100:]) - tau) < 0.15


def test_one_update() -> None:
    mirostat = Mirostat(2, tau=3.0, eta=0.25)
    assert mirostat.mu == 6.0
    mirostat.update(5.0)
    assert mirostat.mu == 5.5
    twin = copy.copy(mirostat)
    twin.update(3.0)
    assert (mirostat.mu, twin.mu) == (5.5, 5.5)
    twin.update(1.0)
    assert (mirostat.mu, twin.mu) == (5.5, 6.0)
    mirostat.update(math.nan)
    assert mirostat.mu == 5.5


def test_the_number_of_tokens_follows_the_target() -> None:
    ranked = np.exp(ZIPF[:100].astype(np.float64))
    numbers = [mirostat_top_k(ranked, 2000, mu) for mu in (0.0, 1.0, 3.0, 6.0, 9.0, 60.0)]
    assert numbers[0] == 1 and numbers[-1] == 2000 and numbers == sorted(numbers)
    assert mirostat_top_k(np.full(100, 0.001), 1000, 3.0) == 1000  # no order among them
    assert mirostat_top_k(np.array([1.0]), 1000, 3.0) == 1
    exact = 1.0 / np.arange(1, 101)  # Zipf's exponent is 1, where the formula divides by zero
    near = 1.0 / np.arange(1, 101) ** 1.000001
    assert abs(mirostat_top_k(exact, 1000, 8.0) - mirostat_top_k(near, 1000, 8.0)) <= 1


@pytest.mark.parametrize("version", [1, 2])
def test_any_state_keeps_the_likeliest_token_and_no_impossible_one(version: int) -> None:
    probs = np.array([0.0, 0.2, 0.5, 0.3, 0.0])
    for mu in (-1e6, -1.0, 0.0, 0.5, 1.5, 3.0, 1e6):
        kept = Mirostat(version, 3.0, 0.1, mu).keep(probs)
        assert kept[2] and not kept[[0, 4]].any()
