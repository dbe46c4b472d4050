"""Norms, activations, rotary embedding and rows by number as instructions: views or not, recorded or not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.cpu import activations, norms, rows
from quire.kernels.cpu.formats import pack
from quire.kernels.cpu.rotary import rotary
from quire.kernels.cpu.threads import Launcher
from quire.kernels.create import create_backend
from quire.kernels.gpu.backend import GPUBackend
from tests.kernels.both_ways import ROWS, Results, both_ways, new_launcher
from tests.kernels.scenes import DTYPES, host, normal, round_to

pytestmark = pytest.mark.usefixtures("always_parallel")


@pytest.fixture(scope="module")
def launchers() -> list[Launcher]:
    """One thread, and two."""
    return [new_launcher(1), new_launcher(2)]


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Assert that the difference is below 1e-6 of the largest value."""
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(1.0, float(np.abs(want).max())))


def widths(count: int) -> list[tuple[int, int, int]]:
    """Return rows, width of a piece and pieces: every number of rows, with some width."""
    rng = np.random.default_rng(count)
    pieces = [(t, int(rng.integers(1, 200)), int(rng.integers(1, 4))) for t in ROWS]
    return [*pieces, (2, 16, 1), (2, 128, 5), (1, 4099, 1)]


@pytest.mark.parametrize(("count", "width", "pieces"), widths(0))
def test_rms_norm_of_pieces(launchers: list[Launcher], count: int, width: int, pieces: int) -> None:
    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        return normal(rng, count, width * pieces + 7), normal(rng, count, width * pieces + 3), normal(rng, width)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        wide = x.astype(np.float64).reshape(count, pieces, width)
        return (wide / np.sqrt((wide**2).mean(axis=2, keepdims=True) + 1e-6) * weight).reshape(count, -1)

    def compute(launcher: Launcher, x: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> Results:
        alone = norms.rms_norm(launcher, x[:, 4:-3], weight, 1e-6)
        return alone, norms.add_rms_norm(launcher, x[:, 4:-3], residual[:, 1:-2], weight, 1e-6), residual

    def expect(x: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> Results:
        residual[:, 1:-2] += x[:, 4:-3]
        return norm(x[:, 4:-3], weight), norm(residual[:, 1:-2], weight), residual

    both_ways(launchers, compute, draw, expect, close)


@pytest.mark.parametrize(("count", "width", "pieces"), widths(1))
def test_layer_norm_of_pieces(launchers: list[Launcher], count: int, width: int, pieces: int) -> None:
    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        x = 30 + 3 * normal(rng, count, width * pieces + 7)  # far from zero: the mean must be precise
        return x, normal(rng, width), normal(rng, width)

    def compute(launcher: Launcher, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Results:
        rows = x[:, 4:-3]
        return (
            norms.layer_norm(launcher, rows, weight, bias, 1e-5),
            norms.layer_norm(launcher, rows, weight, None, 1e-5),
        )

    def expect(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Results:
        wide = x[:, 4:-3].astype(np.float64).reshape(count, pieces, width)
        wide = wide - wide.mean(axis=2, keepdims=True)
        wide = wide / np.sqrt((wide**2).mean(axis=2, keepdims=True) + 1e-5) * weight
        return (wide + bias).reshape(count, -1), wide.reshape(count, -1)

    both_ways(launchers, compute, draw, expect, close)


def test_a_norm_names_rows_that_do_not_fit_its_weight() -> None:
    with pytest.raises(ValueError, match=r"10 elements.*pieces of 4"):
        norms.rms_norm(new_launcher(1), np.ones((1, 10), np.float32), np.ones(4, np.float32), 1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", ROWS)
def test_activation(launchers: list[Launcher], count: int, gated: bool) -> None:
    width = 1 + 37 * count % 300 if count > 2 else 2500  # several items to a row

    def draw(seed: int) -> Results:
        return (3 * normal(np.random.default_rng(seed), count, 2 * width + 5),)

    def compute(launcher: Launcher, x: np.ndarray) -> Results:
        apply = activations.gated_activation if gated else activations.activation
        return tuple(apply(launcher, x[:, 2:-3], kind) for kind in ("silu", "gelu"))

    def expect(x: np.ndarray) -> Results:
        wide = x[:, 2:-3].astype(np.float64)
        own, factor = (wide[:, :width], wide[:, width:]) if gated else (wide, 1.0)
        erf = np.vectorize(math.erf)
        return own / (1 + np.exp(-own)) * factor, own / 2 * (1 + erf(own / math.sqrt(2))) * factor

    both_ways(launchers, compute, draw, expect, close)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (24, 10), (6, 2)])
def test_rotary(launchers: list[Launcher], head_size: int, rotated: int, interleaved: bool) -> None:
    half = rotated // 2
    angles = np.arange(50)[:, None] * np.random.default_rng(1).random(half)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    first = slice(0, rotated, 2) if interleaved else slice(0, half)
    second = slice(1, rotated, 2) if interleaved else slice(half, rotated)
    for count in (1, 33):

        def draw(seed: int, count: int = count) -> Results:
            rng = np.random.default_rng(seed)
            return rng.integers(0, 50, count), normal(rng, count, 6 * head_size)

        def compute(launcher: Launcher, positions: np.ndarray, fused: np.ndarray) -> Results:
            q, k = fused[:, : 4 * head_size], fused[:, 4 * head_size : 5 * head_size]
            rotary(launcher, positions, q, k, table, head_size, interleaved)
            return (fused,)

        def expect(positions: np.ndarray, fused: np.ndarray, count: int = count) -> Results:
            heads = fused.astype(np.float64).reshape(count, 6, head_size)
            plane = heads[:, :5, first] + 1j * heads[:, :5, second]
            turned = plane * np.exp(1j * angles[positions])[:, None]
            heads[:, :5, first], heads[:, :5, second] = turned.real, turned.imag
            return (heads.reshape(count, -1),)

        both_ways(launchers, compute, draw, expect, close)


@pytest.mark.parametrize("count", ROWS)
def test_rows_are_taken_by_numbers_read_late(launchers: list[Launcher], count: int) -> None:
    width = 3 + 11 * count % 40

    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        return normal(rng, 40, width + 3), rng.integers(0, 40, count)

    both_ways(
        launchers,
        lambda launcher, x, ids: (rows.take_rows(launcher, x[:, 1:-2], ids),),
        draw,
        lambda x, ids: (x[:, 1:-2][ids],),
    )


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 37])
def test_embedding_reads_packed_tables(launchers: list[Launcher], width: int, dtype: str, paired: bool) -> None:
    if paired and dtype == "float32":
        return
    table = normal(np.random.default_rng(width), 100, width)
    packed = pack([host(table)], None, dtype, launchers[0], paired)

    def compute(launcher: Launcher, ids: np.ndarray) -> Results:
        return (rows.embedding(launcher, ids, packed.data, packed.inputs, packed.depth, packed.paired),)

    for count in ROWS:
        both_ways(
            launchers,
            compute,
            lambda seed, count=count: (np.random.default_rng(seed).integers(0, 100, count),),
            lambda ids: (round_to(table, dtype)[ids],),
        )


@pytest.mark.parametrize("device", ["cpu", "reference", "cuda"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_embedding_with_a_rank_s_part_of_the_table(device: str, quantization: str | None) -> None:
    """Ids of other ranks give zeros, so that the sum over ranks is the whole lookup. Recorded as well as at once."""
    if device == "cuda":
        backend: Any = GPUBackend("float32", "float32", "cuda" if torch.cuda.is_available() else "cpu")
    else:
        backend = create_backend(device, "float32", "float32", 1, quantization)
    table = normal(np.random.default_rng(1), 24, 19)
    packed = [backend.pack_linear([host(table[start : start + 8])], table=True) for start in (0, 8, 16)]
    ids = backend.zeros((6,), "int64")
    run = backend.graph(lambda: tuple(backend.embedding(ids, part, 8 * n) for n, part in enumerate(packed)))
    whole = [backend.to_numpy(backend.embedding(backend.from_numpy(np.arange(8)), part)) for part in packed]
    for numbers in ([0, 7, 8, 15, 16, 23], [20, 1, 9, 20, 3, 8]):
        backend.assign(ids, np.array(numbers))
        parts = [np.array(backend.to_numpy(part)) for part in run()]
        for n, part in enumerate(parts):
            expected = [whole[n][i - 8 * n] if 8 * n <= i < 8 * n + 8 else np.zeros(19) for i in numbers]
            np.testing.assert_array_equal(part, np.array(expected, np.float32))


def test_numbers_of_another_type_are_taken_at_once_only() -> None:
    launcher, x = new_launcher(1), normal(np.random.default_rng(0), 5, 4)
    ids = np.array([4, 0], np.int32)
    np.testing.assert_array_equal(rows.take_rows(launcher, x, ids), x[ids])
    with launcher.record(), pytest.raises(TypeError, match="int32"):
        rows.take_rows(launcher, x, ids)


def test_no_rows_at_all() -> None:
    launcher, none = new_launcher(2), np.empty((0, 32), np.float32)
    ones, no_ids = np.ones(32, np.float32), np.empty(0, np.int64)
    assert norms.rms_norm(launcher, none, ones, 1e-5).shape == (0, 32)
    assert norms.layer_norm(launcher, none, ones, None, 1e-5).shape == (0, 32)
    assert activations.gated_activation(launcher, none, "silu").shape == (0, 16)
    assert rows.take_rows(launcher, np.ones((3, 2), np.float32), no_ids).shape == (0, 2)
