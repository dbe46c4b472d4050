"""The paged cache and attention over it: against a dense softmax, with every other slot of the cache poisoned."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.backend import AttentionParams
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.reference import ReferenceBackend
from tests.kernels.scenes import DTYPES, Paged, normal, pair, round_to

LENGTHS = [70, 1, 33, 100]
# Whole prompts, single tokens and chunks in one step: (sequence, first, stop).
MIXED = [(0, 0, 70), (1, 0, 1), (2, 32, 33), (3, 40, 97)]

# head size, block size, query heads, KV heads, window, softcap, sinks, alibi
SHAPES = [
    (8, 16, 4, 2, None, None, False, False),
    (24, 1, 3, 1, 5, None, True, False),
    (64, 8, 2, 2, None, 3.0, False, True),
    (128, 16, 6, 2, 40, None, True, True),
    (33, 32, 8, 1, None, 0.5, False, False),
    (16, 5, 3, 3, 1, 2.0, True, True),
    (80, 48, 9, 3, 33, None, False, False),
]


def layer(backend: object, shape: tuple, seed: int = 0) -> AttentionParams:
    """Make the layer's constants, its arrays on the backend (None: numpy)."""
    head_size, _, num_heads, num_kv_heads, window, softcap, sinks, alibi = shape
    rng = np.random.default_rng(seed)
    put = (lambda x: x) if backend is None else backend.from_numpy  # type: ignore[attr-defined]
    extra, slopes = put(normal(rng, num_heads)), put(rng.random(num_heads).astype(np.float32))
    return AttentionParams(
        num_heads,
        num_kv_heads,
        head_size,
        head_size**-0.5,
        window,
        softcap,
        extra if sinks else None,
        slopes if alibi else None,
    )


def dense(scene: Paged, shape: tuple, kv_dtype: str, chunks: list[tuple[int, int, int]]) -> np.ndarray:
    """The same rows by the textbook."""
    whole = [scene.dense(s, layer(None, shape), kv_dtype) for s in range(len(scene.lengths))]
    return np.concatenate([whole[s][first:stop] for s, first, stop in chunks])


def scene_of(shape: tuple, lengths: list[int] = LENGTHS, seed: int = 1) -> Paged:
    head_size, block_size, num_heads, num_kv_heads = shape[:4]
    return Paged.random(seed, lengths, block_size, num_heads, num_kv_heads, head_size)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_a_softmax_over_the_visible_keys(shape: tuple) -> None:
    scene = scene_of(shape)
    expected = dense(scene, shape, "float32", MIXED)
    for backend in pair():
        got = scene.attend(backend, scene.cache(backend), layer(backend, shape), MIXED)
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_keys_and_values_are_rounded_to_the_cache_dtype(shape: tuple, kv_dtype: str) -> None:
    scene = scene_of(shape)
    expected = dense(scene, shape, kv_dtype, MIXED)
    for backend in pair("float32", kv_dtype):
        got = scene.attend(backend, scene.cache(backend), layer(backend, shape), MIXED)
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_in_chunks_alone_and_in_company(shape: tuple) -> None:
    scene, backend = scene_of(shape), CPUBackend()
    cache, params = scene.cache(backend), layer(backend, shape)

    def rows(*chunks: tuple[int, int, int]) -> np.ndarray:
        return scene.attend(backend, cache, params, list(chunks))

    whole = rows((3, 0, 100))
    np.testing.assert_array_equal(np.concatenate([rows((3, i, i + 1)) for i in range(100)]), whole)
    np.testing.assert_array_equal(np.concatenate([rows((3, 0, 9)), rows((3, 9, 64)), rows((3, 64, 100))]), whole)
    company = rows((0, 0, 70), (3, 13, 78), (1, 0, 1), (2, 5, 30))
    np.testing.assert_array_equal(company[70:135], whole[13:78])


@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.usefixtures("always_parallel")
def test_threads_do_not_change_a_bit(shape: tuple) -> None:
    scene = scene_of(shape)
    results = []
    for backend in (CPUBackend(num_threads=1), CPUBackend()):
        results.append(scene.attend(backend, scene.cache(backend), layer(backend, shape), MIXED))
    np.testing.assert_array_equal(*results)


def test_blocks_that_left_the_window_may_belong_to_someone_else() -> None:
    shape = (16, 8, 2, 1, 10, None, False, False)
    scene = scene_of(shape, [64])
    expected = dense(scene, shape, "float32", [(0, 60, 64)])
    for backend in pair():
        cache = scene.cache(backend)
        poison = backend.from_numpy(np.full((48, 16), np.nan, np.float32))
        backend.write_kv(poison, poison, cache, backend.from_numpy(scene.slots(0, 0, 48)))
        scene_tables, scene.tables = scene.tables, scene.tables.copy()
        scene.tables[0, :6] = -1
        got = scene.attend(backend, cache, layer(backend, shape), [(0, 60, 64)])
        scene.tables = scene_tables
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_one_visible_key_gives_its_value_back() -> None:
    shape = (24, 4, 2, 1, 1, None, False, False)
    scene = scene_of(shape, [9])
    for backend in pair("float32", "bfloat16"):
        got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 9)])
        values = np.repeat(round_to(scene.v, "bfloat16"), 2, axis=1).reshape(9, -1)
        np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize(("kv_dtype", "step"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_halfway_values_are_rounded_to_even(kv_dtype: str, step: float) -> None:
    shape = (8, 4, 1, 1, 1, None, False, False)
    scene = scene_of(shape, [1])
    scene.v[:] = [1 + step, 1 + 3 * step, -1 - step, -1 - 3 * step, 1 + 1.01 * step, 1 + 2.99 * step, 0, 1e-6]
    even = [1, 1 + 4 * step, -1, -1 - 4 * step, 1 + 2 * step, 1 + 2 * step, 0]
    for backend in pair("float32", kv_dtype):
        got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 1)])
        assert got[0, :7].tolist() == even
        assert got[0, 7] == round_to(scene.v[0, 0, 7:], kv_dtype)[0]


def test_huge_scores_do_not_overflow() -> None:
    shape = (8, 16, 2, 2, None, None, False, False)
    scene = scene_of(shape, [40])
    scene.q *= 1e4
    expected = dense(scene, shape, "float32", [(0, 0, 40)])
    for backend in pair():
        got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 40)])
        np.testing.assert_allclose(got, expected, atol=2e-2)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_copied_blocks_read_like_the_originals(kv_dtype: str) -> None:
    shape = (16, 4, 2, 1, None, None, False, False)
    scene = scene_of(shape, [12, 12])
    for backend in (CPUBackend(kv_dtype=kv_dtype), ReferenceBackend(kv_dtype=kv_dtype)):
        cache, params = scene.cache(backend), layer(backend, shape)
        own = scene.attend(backend, cache, params, [(0, 11, 12)])
        pairs = np.stack([scene.tables[0, :3], scene.tables[1, :3]], axis=1).astype(np.int64)
        backend.copy_blocks(cache, pairs)
        queries, scene.q = scene.q, np.concatenate([scene.q[:12], scene.q[:12]])
        np.testing.assert_array_equal(scene.attend(backend, cache, params, [(1, 11, 12)]), own)
        scene.q = queries


def test_views_of_a_fused_projection_are_stored() -> None:
    shape = (8, 4, 2, 2, None, None, False, False)
    rng = np.random.default_rng(3)
    fused, scene = normal(rng, 6, 64), scene_of(shape, [6])
    scene.q, scene.k, scene.v = (fused[:, a:b].reshape(6, 2, 8) for a, b in ((0, 16), (16, 32), (48, 64)))
    expected = dense(scene, shape, "float32", [(0, 0, 6)])
    for backend in pair():
        cache = scene.cache(backend)
        views, slots = backend.from_numpy(fused), backend.from_numpy(scene.slots(0, 0, 6))
        backend.write_kv(views[:, 16:32], views[:, 48:64], cache, slots)
        np.testing.assert_allclose(
            scene.attend(backend, cache, layer(backend, shape), [(0, 0, 6)]), expected, atol=1e-5
        )
