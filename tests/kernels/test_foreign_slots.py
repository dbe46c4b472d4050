"""What other sequences left in the cache never shows: neither NaN nor infinity, not even beside a sequence's own slots.

Foreign are all slots but those of positions that a query of the step sees: blocks of others, those that left a window,
the part of a block before a window, the rest of a last block.
"""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.cpu.cache import CPUKVCache
from quire.kernels.reference import ReferenceBackend
from tests.kernels.paged_scenes import KINDS, Direct, layer, scene_of
from tests.kernels.scenes import Paged

Chunk = tuple[int, int, int]  # sequence, first position, last + 1

# block size, window: windows that begin anywhere in a block, a tile of 32 and a segment of 128
CUTS = [(16, None), (16, 1), (16, 37), (16, 130), (32, 45), (64, 200), (8, 11), (6, 33), (1, 5), (48, 129), (5, 140)]
STEPS: dict[str, list[Chunk]] = {
    "decode": [(0, 299, 300), (1, 40, 41), (2, 0, 1)],
    "prefill": [(0, 150, 291), (1, 0, 41)],
    "mixed": [(0, 297, 300), (2, 0, 1), (1, 37, 39)],
    "long": [(3, 1100, 1101)],
}
LENGTHS = [300, 41, 1, 1101]
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


def check(backend: object, shape: tuple, chunks: list[Chunk]) -> None:
    """Attention with spoilt foreign slots equals that with clean ones, bit for bit."""
    window = shape[4]
    scene, params = scene_of(shape, LENGTHS), layer(backend, shape)
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


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block_size", "window"), CUTS)
def test_kernels_never_read_what_is_not_theirs(block_size: int, window: int | None, kind: tuple, step: str) -> None:
    check(Direct(kind), (16, block_size, 4, 2, window, None, False, False), STEPS[step])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_size", "block_size"), ODD)
def test_nor_with_softcap_sinks_and_slopes_in_any_layout(head_size: int, block_size: int, kind: tuple) -> None:
    for window in (None, 34):
        check(Direct(kind, 2), (head_size, block_size, 3, 1, window, 2.0, True, True), STEPS["mixed"] + STEPS["long"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_nor_where_a_context_is_split(kind: tuple, threads: int) -> None:
    for window in (None, 1000):
        check(Direct(kind, threads), (64, 16, 8, 2, window, None, False, False), STEPS["long"])


@pytest.mark.parametrize(
    ("block_size", "window", "dtype"), [(16, None, "float32"), (16, 37, "bfloat16"), (6, 33, "int8")]
)
def test_nor_does_the_reference(block_size: int, window: int | None, dtype: str) -> None:
    for step in ("decode", "prefill"):
        check(ReferenceBackend("float32", dtype), (16, block_size, 4, 2, window, None, False, False), STEPS[step])
