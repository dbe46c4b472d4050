"""Whole blocks of a KV cache as bytes: what is read and written back is the same, bit for bit, scales included."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.reference.backend import ReferenceBackend

BLOCKS, BLOCK_SIZE, HEADS, SIZE = 6, 4, 2, 8
KV_DTYPES = ("float32", "bfloat16", "float16", "int8")
BACKENDS: list[tuple[type[CPUBackend] | type[ReferenceBackend], str]] = [
    (kind, dtype) for kind in (CPUBackend, ReferenceBackend) for dtype in KV_DTYPES
]


def filled(backend: Backend, seed: int) -> object:
    """Return a cache all of whose slots hold random keys and values."""
    cache = backend.new_kv_cache(BLOCKS, BLOCK_SIZE, HEADS, SIZE)
    rng = np.random.default_rng(seed)
    k, v = (rng.normal(size=(BLOCKS * BLOCK_SIZE, HEADS * SIZE)).astype(np.float32) for _ in range(2))
    slots = np.arange(BLOCKS * BLOCK_SIZE, dtype=np.int64)
    backend.write_kv(backend.from_numpy(k), backend.from_numpy(v), cache, backend.from_numpy(slots))
    return cache


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(("kind", "kv_dtype"), BACKENDS)
def test_blocks_travel_bit_for_bit(kind: type[CPUBackend] | type[ReferenceBackend], kv_dtype: str) -> None:
    backend = kind("bfloat16", kv_dtype, num_threads=1)
    source, target = filled(backend, 1), filled(backend, 2)
    before = backend.read_blocks(target, np.arange(BLOCKS))
    data = backend.read_blocks(source, blocks(4, 1, 2))
    assert data.dtype == np.uint8 and data.shape == (3, backend.block_nbytes(source))
    assert len({row.tobytes() for row in data}) == 3
    read_only = np.frombuffer(data.tobytes(), np.uint8).reshape(data.shape)
    backend.write_blocks(target, blocks(0, 5, 3), read_only)
    after = backend.read_blocks(target, np.arange(BLOCKS))
    np.testing.assert_array_equal(after[[0, 5, 3]], data)
    np.testing.assert_array_equal(after[[1, 2, 4]], before[[1, 2, 4]])


@pytest.mark.parametrize(("kind", "kv_dtype"), BACKENDS)
def test_copied_blocks_have_the_bytes_of_their_sources(
    kind: type[CPUBackend] | type[ReferenceBackend], kv_dtype: str
) -> None:
    backend = kind("bfloat16", kv_dtype, num_threads=1)
    cache = filled(backend, 3)
    before = backend.read_blocks(cache, np.arange(BLOCKS))
    backend.copy_blocks(cache, np.array([[0, 1], [1, 2], [5, 0]], np.int64))
    after = backend.read_blocks(cache, np.arange(BLOCKS))
    np.testing.assert_array_equal(after, before[[5, 0, 1, 3, 4, 5]])


def test_what_was_read_is_a_copy() -> None:
    backend = CPUBackend(num_threads=1)
    cache = filled(backend, 4)
    data = backend.read_blocks(cache, blocks(2))
    kept = data.copy()
    backend.write_blocks(cache, blocks(2), np.zeros_like(data))
    np.testing.assert_array_equal(data, kept)
