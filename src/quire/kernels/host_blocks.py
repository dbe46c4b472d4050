"""Host memory of backends whose device is the host: `PlainHostBlocks`, where a copy is done when its call returns.

A GPU has its own (`gpu/host_blocks.py`). Which block lies where is the scheduler's business.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from quire.errors import ConfigError
from quire.kernels import memory
from quire.kernels.backend import Backend, HostBlocks, KVCache, LayerwiseOffload
from quire.kernels.memory import DeviceMemory


class PlainHostBlocks:
    """See `HostBlocks`. The system hands out the memory when a block is first written.

    Args:
        caches: of layers, none twice.

    Raises:
        ConfigError: the system does not promise so much memory.
    """

    def __init__(self, backend: Backend, caches: Sequence[KVCache], num_blocks: int) -> None:
        self._backend = backend
        self._spans: list[tuple[KVCache, int, int]] = []  # which bytes of a block are whose
        start = 0
        for cache in caches:
            stop = start + backend.block_nbytes(cache)
            self._spans.append((cache, start, stop))
            start = stop
        self.block_nbytes = start
        self._data = new_pool(num_blocks, start)

    def copy_out(self, block_ids: np.ndarray, host_block_ids: np.ndarray) -> None:
        for cache, start, stop in self._spans:
            self._data[host_block_ids, start:stop] = self._backend.read_blocks(cache, block_ids)

    def copy_in(self, host_block_ids: np.ndarray, block_ids: np.ndarray) -> None:
        for cache, start, stop in self._spans:
            self._backend.write_blocks(cache, block_ids, self._data[host_block_ids, start:stop])

    def read(self, block_ids: np.ndarray) -> Callable[[], np.ndarray]:
        data = np.empty((len(block_ids), self.block_nbytes), np.uint8)
        for cache, start, stop in self._spans:
            data[:, start:stop] = self._backend.read_blocks(cache, block_ids)
        return lambda: data

    def write(self, block_ids: np.ndarray, data: np.ndarray) -> None:
        for cache, start, stop in self._spans:
            self._backend.write_blocks(cache, block_ids, data[:, start:stop])

    def close(self) -> None:
        self._data = np.zeros((0, self.block_nbytes), np.uint8)


class HostMemory:
    """The part of a backend whose device is the host: its memory, and pools of blocks in it."""

    def available_memory(self) -> int:
        return memory.available_memory()

    def used_memory(self) -> int:
        return memory.resident_memory()

    def release_memory(self) -> None:
        memory.release_memory()

    def measure(self, work: Callable[[], object]) -> DeviceMemory | None:
        return None

    def host_blocks(self, caches: Sequence[KVCache], num_blocks: int) -> HostBlocks:
        backend: Backend = self  # type: ignore[assignment]  # the part of a whole
        return PlainHostBlocks(backend, caches, num_blocks)

    def layerwise_offload(self, *sizes: int, latent: bool = False) -> LayerwiseOffload:
        raise ConfigError(
            "kv_resident_layers: the device must be cuda; on a CPU the KV cache is in host memory anyway",
            param="kv_resident_layers",
        )


def new_pool(num_blocks: int, block_nbytes: int) -> np.ndarray:
    """Return zeroed uint8 [num_blocks, block_nbytes] that the system hands out piece by piece.

    In large pages where it can: in small ones, the first write to a block takes several times as long as the copy.

    Raises:
        ConfigError: the system does not promise so much memory.
    """
    nbytes = num_blocks * block_nbytes
    if nbytes == 0:
        return np.zeros((num_blocks, block_nbytes), np.uint8)
    try:
        pages = mmap.mmap(-1, nbytes)
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"swap_space: {num_blocks} blocks of {block_nbytes} bytes could not be allocated; ask for less",
            param="swap_space",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8).reshape(num_blocks, block_nbytes)
