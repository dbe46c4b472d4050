"""The paged cache and attention over it: against a dense softmax, with every other slot of the cache poisoned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.cache import KV_STORAGE, CPUKVCache
from quire.kernels.cpu.kv_write import write_kv
from quire.kernels.cpu.simd import HAS_BF16_DOT
from quire.kernels.reference import ReferenceBackend
from quire.kernels.reference.backend import InvariantReferenceBackend
from tests.kernels.both_ways import T_SIZES, new_launcher
from tests.kernels.paged_scenes import (
    HALF,
    KINDS,
    PAIRS,
    SHAPES,
    SINGLES,
    Direct,
    exact,
    layer,
    quantized,
    rounded,
    scene_of,
)
from tests.kernels.scenes import Paged, normal, round_to

Kind = tuple[str, bool]
Chunk = tuple[int, int, int]  # sequence, first position, last + 1
LENGTHS = [70, 1, 33, 300]
# Whole prompts, single tokens and chunks in one step: (sequence, first, stop).
MIXED = [(0, 0, 70), (1, 0, 1), (2, 32, 33), (3, 140, 297)]
SOME_KINDS = [("float32", False), *PAIRS]
BEST = ("bfloat16", HAS_BF16_DOT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_a_softmax_over_the_visible_keys(shape: tuple, kind: Kind) -> None:
    scene, backend = scene_of(shape, LENGTHS), Direct(kind)
    cache = scene.cache(backend)
    got = scene.attend(backend, cache, layer(backend, shape), MIXED)
    tolerance = 2e-2 if cache.paired else 1e-5
    np.testing.assert_allclose(got, exact(scene, shape, kind, MIXED), atol=tolerance)


@pytest.mark.parametrize(("shape", "kind"), zip(SHAPES[:3], ("float32", "bfloat16", "float16"), strict=True))
def test_the_reference_backend_says_the_same(shape: tuple, kind: str) -> None:
    scene, backend = scene_of(shape, LENGTHS), ReferenceBackend("float32", kind)
    got = scene.attend(backend, scene.cache(backend), layer(backend, shape), MIXED)
    np.testing.assert_allclose(got, exact(scene, shape, (kind, False), MIXED), atol=1e-5)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] % 2 == shape[1] % 2 == 0])
def test_pairs_round_queries_and_weights_and_nothing_else(shape: tuple, kind: Kind) -> None:
    scene, backend = scene_of(shape, [300]), Direct(kind)
    got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 300)])
    error = np.abs(got - rounded(scene, shape, kind, 0))
    # A weight that lies between two bfloat16 numbers to within an error of float32 may go either way.
    assert np.quantile(error, 0.9) < 1e-5
    assert error.max() < 2e-3


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_in_chunks_alone_and_in_company(shape: tuple, kind: Kind) -> None:
    scene, backend = scene_of(shape, LENGTHS), Direct(kind)
    cache, params = scene.cache(backend), layer(backend, shape)

    def rows(*chunks: tuple[int, int, int]) -> np.ndarray:
        return scene.attend(backend, cache, params, list(chunks))

    whole = rows((3, 0, 300))
    alone = np.concatenate([rows((3, i, i + 1)) for i in range(0, 300, 7)])
    np.testing.assert_array_equal(alone, whole[::7])
    chunks = [rows((3, a, b)) for a, b in ((0, 9), (9, 64), (64, 200), (200, 300))]
    np.testing.assert_array_equal(np.concatenate(chunks), whole)
    company = rows((0, 0, 70), (3, 113, 278), (1, 0, 1), (2, 5, 30))
    np.testing.assert_array_equal(company[70:235], whole[113:278])


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_do_not_change_a_bit(shape: tuple, kind: Kind) -> None:
    scene = scene_of(shape, [900, 40, 130])
    steps = [
        [(0, 899, 900)],  # one long context, which two threads split
        [(0, 896, 900), (1, 39, 40)],
        [(0, 100, 700), (2, 0, 130)],
        [(0, 500, 501), (1, 0, 40), (2, 129, 130), (0, 700, 701)],
    ]
    results = []
    for threads in (1, 2):
        backend = Direct(kind, threads)
        cache, params = scene.cache(backend), layer(backend, shape)
        results.append([scene.attend(backend, cache, params, step) for step in steps])
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 24, 64])
def test_blocks_may_have_any_size(block_size: int, kind: Kind) -> None:
    shape = (48, block_size, 4, 2, 150, None, False, False)
    scene, backend, chunks = scene_of(shape, [290, 17]), Direct(kind, 2), [(0, 289, 290), (1, 3, 17), (0, 100, 180)]
    cache = scene.cache(backend)
    got = scene.attend(backend, cache, layer(backend, shape), chunks)
    tolerance = 2e-2 if cache.paired else 1e-5
    np.testing.assert_allclose(got, exact(scene, shape, kind, chunks), atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_left_the_window_may_belong_to_someone_else(kind: Kind) -> None:
    shape = (16, 8, 2, 1, 10, None, False, False)
    scene, backend = scene_of(shape, [64]), Direct(kind)
    cache = scene.cache(backend)
    before = scene.attend(backend, cache, layer(backend, shape), [(0, 60, 64)])
    poison = np.full((48, 16), np.nan, np.float32)
    backend.write_kv(poison, poison, cache, scene.slots(0, 0, 48))
    scene.tables[0, :6] = -1
    np.testing.assert_array_equal(scene.attend(backend, cache, layer(backend, shape), [(0, 60, 64)]), before)


@pytest.mark.parametrize("kind", [("float32", False), BEST])
def test_one_visible_key_gives_its_value_back(kind: Kind) -> None:
    shape = (24, 4, 2, 1, 1, None, False, False)
    scene, backend = scene_of(shape, [9]), Direct(kind)
    got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 9)])
    np.testing.assert_array_equal(got, np.repeat(round_to(scene.v, kind[0]), 2, axis=1).reshape(9, -1))


@pytest.mark.parametrize("kind", [SINGLES, BEST, HALF])
def test_halfway_values_are_rounded_to_even(kind: Kind) -> None:
    step = 2.0**-11 if kind[0] == "float16" else 2.0**-8
    shape = (8, 4, 1, 1, 1, None, False, False)
    scene, backend = scene_of(shape, [1]), Direct(kind)
    scene.v[:] = [1 + step, 1 + 3 * step, -1 - step, -1 - 3 * step, 1 + 1.01 * step, 1 + 2.99 * step, 0, 1e-6]
    got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 1)])
    assert got[0, :7].tolist() == [1, 1 + 4 * step, -1, -1 - 4 * step, 1 + 2 * step, 1 + 2 * step, 0]
    assert got[0, 7] == round_to(scene.v[0, 0, 7:], kind[0])[0]


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_huge_scores_do_not_overflow(kind: Kind) -> None:
    shape = (8, 16, 2, 2, None, None, False, False)
    scene, backend = scene_of(shape, [40]), Direct(kind)
    scene.q *= 2.0**13
    got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 40)])
    expected = rounded(scene, shape, kind, 0) if kind[1] else exact(scene, shape, kind, [(0, 0, 40)])
    np.testing.assert_allclose(got, expected, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_copied_blocks_read_like_the_originals(kind: Kind) -> None:
    shape = (16, 4, 2, 1, None, None, False, False)
    scene, backend = scene_of(shape, [12, 12]), Direct(kind)
    cache, params = scene.cache(backend), layer(backend, shape)
    own = scene.attend(backend, cache, params, [(0, 11, 12)])
    backend.copy_blocks(cache, np.stack([scene.tables[0, :3], scene.tables[1, :3]], axis=1).astype(np.int64))
    scene.q[12:] = scene.q[:12]
    np.testing.assert_array_equal(scene.attend(backend, cache, params, [(1, 11, 12)]), own)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_views_of_a_fused_projection_are_taken_as_they_are(kind: Kind) -> None:
    shape = (8, 4, 2, 2, None, None, False, False)
    fused, scene = normal(np.random.default_rng(3), 6, 64), scene_of(shape, [6])
    scene.q, scene.k, scene.v = (fused[:, a:b].reshape(6, 2, 8) for a, b in ((0, 16), (16, 32), (48, 64)))
    backend = Direct(kind)
    expected = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 6)])
    cache = scene.cache(backend)
    backend.write_kv(normal(np.random.default_rng(4), 6, 16), fused[:, :16], cache, scene.slots(0, 0, 6))
    backend.write_kv(fused[:, 16:32], fused[:, 48:64], cache, scene.slots(0, 0, 6))
    views = backend.paged_attention(fused[:, :16], cache, scene.metadata([(0, 0, 6)]), layer(backend, shape))
    np.testing.assert_array_equal(views, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_negative_slots_are_left_out(kind: Kind) -> None:
    shape = (8, 4, 2, 2, None, None, False, False)
    scene, backend = scene_of(shape, [6]), Direct(kind)
    cache = scene.cache(backend)
    expected = scene.attend(backend, cache, layer(backend, shape), [(0, 0, 6)])
    poison = np.full((3, 16), np.nan, np.float32)
    backend.write_kv(poison, poison, cache, np.array([-1, -4, -9]))
    np.testing.assert_array_equal(scene.attend(backend, cache, layer(backend, shape), [(0, 0, 6)]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flaw_in_a_key_or_value_is_seen(kind: Kind) -> None:
    shape = (16, 4, 2, 1, None, None, True, False)
    for flaw in (np.nan, np.inf):
        for side in ("k", "v"):
            scene, backend = scene_of(shape, [150]), Direct(kind)
            getattr(scene, side)[80, 0, 3] = flaw
            got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 149, 150)])
            assert not np.isfinite(got).all()


@pytest.mark.parametrize("kind", [("int8", False), PAIRS[1]])
def test_int8_holds_the_largest_of_a_head_and_rows_of_zeros(kind: Kind) -> None:
    shape = (8, 4, 1, 1, 1, None, False, False)
    scene, backend = scene_of(shape, [3]), Direct(kind)
    scene.v[1] = 0
    scene.v[2] = [[-3e-30, 1e-30, 0, 0, 0, 0, 0, 0]]
    got = scene.attend(backend, scene.cache(backend), layer(backend, shape), [(0, 0, 3)])
    integers, scales = quantized(scene.v[[0, 2]])
    np.testing.assert_allclose(got[[0, 2]], (integers * scales).reshape(2, 8), rtol=1e-2)
    np.testing.assert_array_equal(got[1], 0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_recorded_step_runs_with_other_lengths_and_tables(kind: Kind, threads: int) -> None:
    shape = (32, 16, 6, 2, None, None, False, False)
    backend = Direct(kind, threads)
    params, windowed = layer(backend, shape), layer(backend, (*shape[:4], 20, *shape[5:]))
    scene = scene_of(shape, [700, 12, 40])
    cache = scene.cache(backend)
    steps = [
        [(0, 3, 4), (1, 0, 4), (2, 38, 40)],
        [(1, 0, 5), (0, 699, 700), (2, 0, 1)],
        [(2, 0, 1), (1, 6, 7), (0, 400, 405)],
    ]
    wide = np.full((3, 80), -1, np.int32)
    metadata = scene.metadata(steps[0])
    metadata.block_tables = wide[:, : metadata.block_tables.shape[1]]
    q = np.zeros((7, 6 * 32), np.float32)
    k, v = np.zeros((7, 2 * 32), np.float32), np.zeros((7, 2 * 32), np.float32)
    with backend.launcher.record() as made:
        backend.write_kv(k, v, cache, metadata.slot_mapping)
        results = [backend.paged_attention(q, cache, metadata, p) for p in (params, windowed, params)]
    for step in steps:
        now = scene.metadata(step)
        for name in ("cu_query_lens", "seq_lens", "block_tables", "slot_mapping"):
            getattr(metadata, name)[...] = getattr(now, name)
        rows = scene.rows(step)
        q[...], k[...], v[...] = (x[rows].reshape(7, -1) for x in (scene.q, scene.k, scene.v))
        made[0].run()
        expected = [scene.attend(backend, cache, p, step) for p in (params, windowed, params)]
        for got, want in zip(results, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Round float32 to nearest even in integers; NaN becomes 0x7FC0."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def any_bits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw float32 of any size and sign: subnormal numbers, ties, infinities and NaN among them."""
    bits = rng.integers(0, 1 << 32, shape, np.uint32)
    bits[rng.random(shape) < 0.2] &= 0x807FFFFF
    bits[rng.random(shape) < 0.2] &= 0xFFFF8000
    bits[rng.random(shape) < 0.05] |= 0x7F800000
    bits[rng.random(shape) < 0.02] = 0xFF800000
    return bits.view(np.float32)


def some_slots(rng: np.random.Generator, count: int, limit: int) -> np.ndarray:
    """Draw distinct slots, in runs of all lengths from 1 on, which begin and end anywhere; some are negative."""
    cuts = np.cumsum(rng.integers(1, rng.choice([2, 6, 40]), limit))
    runs = np.split(np.arange(limit), cuts[cuts < limit])
    slots = np.concatenate([runs[i] for i in rng.permutation(len(runs))])[:count]
    slots[rng.random(count) < 0.1] = -3
    return slots.astype(np.int64)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("size", "block_size"), [(8, 2), (14, 6), (16, 4), (18, 16), (32, 14), (48, 16), (80, 40), (128, 16), (130, 64)]
)
def test_every_bit_of_bfloat16_lands_in_its_place(size: int, block_size: int, paired: bool) -> None:
    rng, heads, blocks = np.random.default_rng(size), 3, 400 // block_size
    launchers = [new_launcher(1), new_launcher(2)]
    for count in T_SIZES:
        k, v = np.zeros((2, count, heads * size), np.float32)
        slots = np.zeros(count, np.int64)
        caches, programs = [], []
        for launcher in launchers:
            cache = CPUKVCache.allocate(blocks, block_size, heads, size, KV_STORAGE["bfloat16"], paired)
            with launcher.record() as made:
                write_kv(launcher, k, v, cache, slots)
            caches.append(cache)
            programs.append(made[0])
        keys = np.zeros((blocks, heads, block_size, size), np.uint16)
        values = np.zeros_like(keys)
        for run in range(3):
            k[...], v[...] = any_bits(rng, *k.shape), any_bits(rng, *v.shape)
            slots[...] = some_slots(rng, count, blocks * block_size) if run else np.arange(run + 1, run + 1 + count)
            kept = slots >= 0
            at = slots[kept] // block_size, slice(None), slots[kept] % block_size
            keys[at], values[at] = (bfloat16_bits(x[kept]).reshape(-1, heads, size) for x in (k, v))
            for program, cache in zip(programs, caches, strict=True):
                program.run()
                keys_in_rows = np.moveaxis(cache.keys, 3, 2).reshape(keys.shape)
                values_in_rows = np.moveaxis(cache.values, 4, 3) if paired else cache.values
                np.testing.assert_array_equal(keys_in_rows, keys)
                np.testing.assert_array_equal(values_in_rows.reshape(values.shape), values)


def test_every_float16_lands_in_its_place() -> None:
    rng, (blocks, block_size, heads, size) = np.random.default_rng(0), (7, 6, 3, 18)
    cache = CPUKVCache.allocate(blocks, block_size, heads, size, KV_STORAGE["float16"])
    # From sizes that become 0, through subnormal numbers, to those that become infinity; and anything else there is.
    sizes = np.float32(2) ** rng.integers(-27, 17, (2, 40, heads * size)).astype(np.float32)
    k, v = normal(rng, *sizes.shape) * sizes
    k[::3] = any_bits(rng, *k[::3].shape)
    slots = some_slots(rng, 40, blocks * block_size)
    write_kv(new_launcher(2), k, v, cache, slots)
    kept = slots >= 0
    at = slots[kept] // block_size, slice(None), slots[kept] % block_size
    for x, found in ((k, np.moveaxis(cache.keys, 3, 2)), (v, cache.values)):
        expected = np.zeros((blocks, heads, block_size, size), np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            expected[at] = x[kept].astype(np.float16).reshape(-1, heads, size)
        np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.float16), expected)


# Foreign slots are all but those of positions that a query of the step sees: blocks of others, those that left a
# window, the part of a block before a window, the rest of a last block. What other sequences left there never shows:
# neither NaN nor infinity.

# block size, window: windows that begin anywhere in a block, a tile of 32 and a segment of 128
CUTS = [(16, None), (16, 1), (16, 37), (16, 130), (32, 45), (64, 200), (8, 11), (6, 33), (1, 5), (48, 129), (5, 140)]
STEPS: dict[str, list[Chunk]] = {
    "decode": [(0, 299, 300), (1, 40, 41), (2, 0, 1)],
    "prefill": [(0, 150, 291), (1, 0, 41)],
    "mixed": [(0, 297, 300), (2, 0, 1), (1, 37, 39)],
    "long": [(3, 1100, 1101)],
}
FOREIGN_LENGTHS = [300, 41, 1, 1101]
ODD = [(24, 5), (33, 3), (16, 2)]  # head size, block size: layouts that are not paired, or hardly


def foreign_slots(scene: Paged, chunks: list[Chunk], window: int | None) -> np.ndarray:
    """Return the slots of all positions but those that the chunks see."""
    seen = [scene.slots(s, 0 if window is None else max(0, first - window + 1), stop) for s, first, stop in chunks]
    return np.setdiff1d(np.arange(scene.num_blocks * scene.block_size), np.concatenate(seen))


def misdirect(scene: Paged, chunks: list[Chunk], window: int | None) -> None:
    """Let the entries of blocks that no query sees name any other block."""
    rng = np.random.default_rng(0)
    for s, first, stop in chunks:
        start = 0 if window is None else max(0, first - window + 1) // scene.block_size
        end = -(-stop // scene.block_size)
        table = scene.tables[s]
        table[:start] = rng.integers(0, scene.num_blocks, start)
        table[end:] = rng.integers(0, scene.num_blocks, len(table) - end)


def spoil(backend: object, cache: object, slots: np.ndarray, value: float, width: int) -> None:
    """Write a value that is not finite into slots, as another sequence would; of int8 the scales are spoilt."""
    flaw = backend.from_numpy(np.full((len(slots), width), value, np.float32))  # type: ignore[attr-defined]
    backend.write_kv(flaw, flaw, cache, backend.from_numpy(slots))  # type: ignore[attr-defined]
    if isinstance(cache, CPUKVCache) and cache.key_scales is not None:
        for scales in (cache.key_scales, cache.value_scales):
            assert scales is not None
            by_slot = np.moveaxis(scales, 1, 2)  # [B, bs, H]
            by_slot[slots // by_slot.shape[1], slots % by_slot.shape[1]] = value


def check_foreign_slots(backend: object, shape: tuple, chunks: list[Chunk]) -> None:
    """Check that attention with spoilt foreign slots equals that with clean ones, bit for bit."""
    window = shape[4]
    scene, params = scene_of(shape, FOREIGN_LENGTHS), layer(backend, shape)
    clean = backend.new_kv_cache(scene.num_blocks, scene.block_size, shape[3], shape[0])  # type: ignore[attr-defined]
    put = backend.from_numpy  # type: ignore[attr-defined]
    slots = np.concatenate([scene.slots(s, 0, n) for s, n in enumerate(scene.lengths)])
    k, v = (put(x.reshape(len(slots), -1)) for x in (scene.k, scene.v))
    backend.write_kv(k, v, clean, put(slots))  # type: ignore[attr-defined]
    expected = np.array(scene.attend(backend, clean, params, chunks))
    assert np.isfinite(expected).all()
    foreign = foreign_slots(scene, chunks, window)
    misdirect(scene, chunks, window)
    for value in (np.nan, np.inf, -np.inf):
        spoil(backend, clean, foreign, value, shape[3] * shape[0])
        np.testing.assert_array_equal(scene.attend(backend, clean, params, chunks), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block_size", "window"), CUTS)
def test_kernels_never_read_foreign_slots(block_size: int, window: int | None, kind: Kind) -> None:
    for step in STEPS.values():
        check_foreign_slots(Direct(kind), (16, block_size, 4, 2, window, None, False, False), step)


@pytest.mark.parametrize("kind", KINDS)
def test_nor_with_softcap_sinks_and_slopes_in_any_layout_or_where_a_context_is_split(kind: Kind) -> None:
    for window, (head_size, block_size) in itertools.product((None, 34), ODD):
        shape = (head_size, block_size, 3, 1, window, 2.0, True, True)
        check_foreign_slots(Direct(kind, 2), shape, STEPS["mixed"] + STEPS["long"])
    for window, threads in itertools.product((None, 1000), (1, 2)):
        check_foreign_slots(Direct(kind, threads), (64, 16, 8, 2, window, None, False, False), STEPS["long"])


@pytest.mark.parametrize(("block_size", "window", "dtype"), [(16, None, "float32"), (6, 33, "int8")])
def test_nor_does_the_reference(block_size: int, window: int | None, dtype: str) -> None:
    for step in ("decode", "prefill"):
        shape = (16, block_size, 4, 2, window, None, False, False)
        check_foreign_slots(ReferenceBackend("float32", dtype), shape, STEPS[step])


# Encoders: every token sees all of its text, or what is near it to either side.

WHOLE = [(s, 0, length) for s, length in enumerate(LENGTHS)]
ENCODER_SHAPES = [
    (8, 16, 4, 2, None, None, False, False),
    (24, 1, 3, 1, 5, None, True, False),
    (64, 32, 2, 2, 65, None, False, False),
    (33, 5, 8, 1, 40, 0.5, False, False),
    (18, 6, 5, 1, 1, None, True, False),
]


def encoder(backend: object, shape: tuple) -> AttentionParams:
    """Make the layer's constants."""
    return replace(layer(backend, shape), causal=False)


def by_torch(scene: Paged, shape: tuple) -> np.ndarray:
    """All rows by torch's attention, without sinks and softcap."""
    params, parts = encoder(None, shape), []
    for s in range(len(scene.lengths)):
        own = slice(scene.starts[s], scene.starts[s + 1])
        q, k, v = (torch.from_numpy(x[own]).double().transpose(0, 1) for x in (scene.q, scene.k, scene.v))
        at = torch.arange(q.shape[1])
        near = (at[:, None] - at[None, :]).abs() < (params.sliding_window or 10**6)
        out = F.scaled_dot_product_attention(q, k, v, near, scale=params.scale, enable_gqa=True)
        parts.append(out.transpose(0, 1).reshape(len(at), -1).numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize("backend_class", [ReferenceBackend, InvariantReferenceBackend])
@pytest.mark.parametrize("shape", [ENCODER_SHAPES[0], ENCODER_SHAPES[2]])
def test_encoders_of_the_reference_backends_do_what_torch_does(
    shape: tuple, backend_class: type[ReferenceBackend]
) -> None:
    scene, backend = scene_of(shape, LENGTHS[:3]), backend_class("float32", "float32")
    got = scene.attend(backend, scene.cache(backend), encoder(backend, shape), WHOLE[:3])
    np.testing.assert_allclose(got, by_torch(scene, shape), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ENCODER_SHAPES)
def test_rows_of_encoders_see_what_is_before_and_after_them(shape: tuple, kind: Kind) -> None:
    scene, backend = scene_of(shape, LENGTHS), Direct(kind)
    cache = scene.cache(backend)
    got = scene.attend(backend, cache, encoder(backend, shape), WHOLE)
    expected = exact(scene, shape, kind, WHOLE, causal=False)
    np.testing.assert_allclose(got, expected, atol=2e-2 if cache.paired else 1e-5)


@pytest.mark.parametrize("kind", [("float32", False), PAIRS[0]])
def test_company_and_threads_do_not_change_a_bit_of_encoders(kind: Kind) -> None:
    for shape in (ENCODER_SHAPES[0], ENCODER_SHAPES[3]):
        scene = scene_of(shape, LENGTHS)
        one, two = Direct(kind), Direct(kind, num_threads=2)
        cache, params = scene.cache(one), encoder(None, shape)
        together = scene.attend(one, cache, params, WHOLE)
        np.testing.assert_array_equal(scene.attend(two, cache, params, WHOLE), together)
        alone = np.concatenate([scene.attend(one, cache, params, [chunk]) for chunk in WHOLE])
        np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recorded_step_of_an_encoder_runs_with_other_lengths(threads: int) -> None:
    shape, rng = ENCODER_SHAPES[3], np.random.default_rng(5)
    scene, backend = scene_of(shape, LENGTHS), Direct(("float32", False), threads)
    launcher = backend.launcher = new_launcher(threads)
    cache, params = scene.cache(backend), encoder(None, shape)
    full = scene.metadata([(3, 0, 300)])
    held = AttentionMetadata(
        full.cu_query_lens.copy(), full.seq_lens.copy(), full.block_tables.copy(), full.slot_mapping.copy()
    )
    q = rng.standard_normal((300, scene.q[0].size)).astype(np.float32)
    with launcher.record() as made:
        out = backend.paged_attention(q, cache, held, params)
    for length in (300, 130, 33):
        rows = scene.rows([(3, 0, length)])
        q[:length] = scene.q[rows].reshape(length, -1)
        held.cu_query_lens[1] = held.seq_lens[0] = length
        made[0].run()
        got = np.array(out.view(np.ndarray))[:length]
        expected = scene.attend(Direct(("float32", False)), cache, params, [(3, 0, length)])
        np.testing.assert_array_equal(got, expected)
