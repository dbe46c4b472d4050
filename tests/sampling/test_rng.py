"""Draws depend on (seed, position) alone and look uniform and independent."""

from __future__ import annotations

import numpy as np

from quire.sampling.rng import uniforms


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    seeds = np.array([5, 5, -1, 2**63 - 1, 0], dtype=np.int64)
    positions = np.array([0, 1, 7, 100_000, 3])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(len(seeds))]
    assert together.tolist() == alone


def test_draws_are_in_the_unit_interval_and_uniform_along_positions_and_seeds() -> None:
    count = 100_000
    for draws in (
        uniforms(np.full(count, 42), np.arange(count)),
        uniforms(np.arange(count), np.full(count, 17)),
    ):
        assert draws.min() >= 0.0 and draws.max() < 1.0
        observed = np.bincount((draws * 100).astype(int), minlength=100)
        chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum()
        assert chi_square < 160  # 99 degrees of freedom: p = 1e-4


def test_neighbouring_positions_and_seeds_are_uncorrelated() -> None:
    count = 100_000
    along_positions = uniforms(np.full(count, 1), np.arange(count))
    along_seeds = uniforms(np.arange(count), np.full(count, 1))
    for draws in (along_positions, along_seeds):
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(along_positions, along_seeds)[0, 1]) < 0.015
