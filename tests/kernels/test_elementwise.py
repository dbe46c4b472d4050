"""Norms, activations, rotary embedding."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kernels.scenes import host, normal, pair

WIDTHS = (1, 15, 16, 33, 96)


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = 3 * normal(rng, 5, width), normal(rng, width)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    for backend in pair():
        put = backend.from_numpy
        np.testing.assert_allclose(backend.to_numpy(backend.rms_norm(put(x), put(weight), 1e-5)), expected, rtol=2e-6)
        heads = put(np.stack([x, x]))
        np.testing.assert_allclose(backend.to_numpy(backend.rms_norm(heads, put(weight), 1e-5))[1], expected, rtol=2e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_adds_in_place(width: int) -> None:
    rng = np.random.default_rng(width)
    x, residual, weight = normal(rng, 4, width), normal(rng, 4, width), normal(rng, width)
    for backend in pair():
        put = backend.from_numpy
        target = put(residual.copy())
        got = backend.add_rms_norm(put(x), target, put(weight), 1e-6)
        np.testing.assert_array_equal(backend.to_numpy(target), residual + x)
        alone = backend.rms_norm(put(residual + x), put(weight), 1e-6)
        np.testing.assert_array_equal(backend.to_numpy(got), backend.to_numpy(alone))


def test_add_rms_norm_reaches_through_a_view() -> None:
    rng = np.random.default_rng(0)
    whole, x, weight = normal(rng, 3, 40), normal(rng, 3, 20), normal(rng, 20)
    for backend in pair():
        put = backend.from_numpy
        target = put(whole.copy())
        backend.add_rms_norm(put(x), target[:, :20], put(weight), 1e-6)
        np.testing.assert_array_equal(backend.to_numpy(target)[:, :20], whole[:, :20] + x)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int, biased: bool) -> None:
    rng = np.random.default_rng(width)
    x, weight, bias = 5 + normal(rng, 5, width), normal(rng, width), normal(rng, width)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight + bias * biased
    for backend in pair():
        put = backend.from_numpy
        got = backend.layer_norm(put(x), put(weight), put(bias) if biased else None, 1e-5)
        np.testing.assert_allclose(backend.to_numpy(got), expected, atol=2e-6)


def activations(x: np.ndarray) -> dict[str, np.ndarray]:
    """All activations in float64."""
    x = x.astype(np.float64)
    erf = np.vectorize(math.erf)
    with np.errstate(over="ignore"):
        return {
            "relu": np.maximum(x, 0),
            "relu2": np.maximum(x, 0) ** 2,
            "silu": x / (1 + np.exp(-x)),
            "gelu": x / 2 * (1 + erf(x / np.sqrt(2))),
            "gelu_tanh": x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
            "quick_gelu": x / (1 + np.exp(-1.702 * x)),
            "sigmoid": 1 / (1 + np.exp(-x)),
            "softplus": np.logaddexp(0, x),
        }


@pytest.mark.parametrize("kind", ["relu", "relu2", "silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "softplus"])
def test_activations_over_the_whole_range(kind: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 20001), [-1e4, -100, -88, 0, 88, 100, 1e4]]).astype(np.float32)[None]
    for backend in pair():
        got = backend.to_numpy(backend.activation(backend.from_numpy(x), kind))
        np.testing.assert_allclose(got, activations(x)[kind], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_softcap_bends_large_values(width: int) -> None:
    x = 40 * normal(np.random.default_rng(width), 3, width)
    x[0, 0], x[1, 0] = 1e4, -1e4
    for backend in pair():
        given = backend.from_numpy(x.copy())
        backend.softcap(given, 30.0)
        np.testing.assert_allclose(backend.to_numpy(given), 30 * np.tanh(x.astype(np.float64) / 30), atol=1e-5)


@pytest.mark.parametrize(("rows", "inner", "depth"), [(1, 48, 32), (3, 33, 17), (9, 7, 64)])
def test_gated_linear_is_the_activated_gate_times_up(rows: int, inner: int, depth: int) -> None:
    rng = np.random.default_rng(rows)
    x, parts = normal(rng, rows, depth), [host(normal(rng, inner, depth)) for _ in range(2)]
    biases = [host(normal(rng, inner)) for _ in range(2)]
    for backend in pair():
        put = backend.from_numpy
        gate, up = (backend.linear(put(x), backend.pack_linear([p], [b])) for p, b in zip(parts, biases))
        packed = backend.pack_linear(parts, biases, gated=True)
        for kind in ("relu", "relu2", "silu", "gelu", "gelu_tanh", "quick_gelu"):
            expected = backend.to_numpy(backend.activation(gate, kind) * up)
            got = backend.to_numpy(backend.gated_linear(put(x), packed, kind))
            assert got.shape == (rows, inner)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


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


def test_nan_is_not_swallowed() -> None:
    x = np.array([[1.0, np.nan, 3.0]], np.float32)
    for backend in pair():
        put = backend.from_numpy
        for kind in ("relu", "relu2", "silu", "gelu", "gelu_tanh", "quick_gelu"):
            got = backend.to_numpy(backend.activation(put(x), kind))
            np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
        assert np.isnan(backend.to_numpy(backend.rms_norm(put(x), put(np.ones(3, np.float32)), 1e-5))).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "rotary"), [(8, 8), (24, 24), (64, 16), (64, 64), (6, 2)])
def test_rotary_turns_pairs_by_the_angle_of_their_position(head_size: int, rotary: int, interleaved: bool) -> None:
    rng = np.random.default_rng(head_size)
    positions = np.array([0, 7, 3, 3, 49])
    angles = np.arange(50)[:, None] * rng.random(rotary // 2)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    fused = normal(rng, 5, 6 * head_size)  # q and k as a fused projection leaves them: views of one array
    for backend in pair():
        put = backend.from_numpy
        whole = put(fused.copy())
        q, k = whole[:, : 4 * head_size], whole[:, 4 * head_size : 5 * head_size]
        backend.rotary_embedding(put(positions), q, k, put(table), head_size, interleaved)
        got = backend.to_numpy(whole).reshape(5, 6, head_size)
        heads = fused.reshape(5, 6, head_size)
        np.testing.assert_array_equal(got[:, 5], heads[:, 5])
        np.testing.assert_array_equal(got[:, :, rotary:], heads[:, :, rotary:])
        half = rotary // 2
        first = slice(0, rotary, 2) if interleaved else slice(0, half)
        second = slice(1, rotary, 2) if interleaved else slice(half, rotary)
        plane = heads[:, :5, first] + 1j * heads[:, :5, second]
        turned = plane * np.exp(1j * angles[positions])[:, None]
        np.testing.assert_allclose(got[:, :5, first], turned.real, atol=1e-6)
        np.testing.assert_allclose(got[:, :5, second], turned.imag, atol=1e-6)
