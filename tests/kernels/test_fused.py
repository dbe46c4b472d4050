"""Ops that stand for several: the gate of a feed-forward layer, norms of pieces, chosen rows."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import ConfigError
from tests.kernels.scenes import host, normal, pair

KINDS = ("relu", "relu2", "silu", "gelu", "gelu_tanh", "quick_gelu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "inner", "depth"), [(1, 48, 32), (3, 33, 17), (9, 7, 64)])
def test_gated_linear_is_the_activated_gate_times_up(kind: str, rows: int, inner: int, depth: int) -> None:
    rng = np.random.default_rng(rows)
    x, parts = normal(rng, rows, depth), [host(normal(rng, inner, depth)) for _ in range(2)]
    biases = [host(normal(rng, inner)) for _ in range(2)]
    for backend in pair():
        gate, up = (backend.linear(backend.from_numpy(x), backend.pack_linear([p], [b])) for p, b in zip(parts, biases))
        expected = backend.to_numpy(backend.activation(gate, kind) * up)
        packed = backend.pack_linear(parts, biases, gated=True)
        got = backend.to_numpy(backend.gated_linear(backend.from_numpy(x), packed, kind))
        assert got.shape == (rows, inner)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(ConfigError, match="'mish'; allowed: relu, silu"):
            backend.gated_linear(backend.from_numpy(x), packed, "mish")


def test_rms_norm_of_pieces_is_the_norm_of_each() -> None:
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 3, 4 * 24), normal(rng, 24)
    pieces = x.reshape(3, 4, 24).astype(np.float64)
    expected = pieces / np.sqrt((pieces**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    for backend in pair():
        wide = backend.from_numpy(np.concatenate([x, x], axis=1))
        for given in (backend.from_numpy(x), wide[:, 96:]):
            got = backend.to_numpy(backend.rms_norm(given, backend.from_numpy(weight), 1e-5))
            np.testing.assert_allclose(got, expected.reshape(3, -1), rtol=1e-5)


def test_take_rows_follows_the_ids() -> None:
    x, ids = normal(np.random.default_rng(0), 7, 20), np.array([6, 0, 6], np.int64)
    for backend in pair():
        got = backend.take_rows(backend.from_numpy(x), backend.from_numpy(ids))
        np.testing.assert_array_equal(backend.to_numpy(got), x[ids])
