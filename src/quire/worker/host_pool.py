"""`HostPool`: blocks of the KV cache kept in the host's memory. Which block lies where is the scheduler's business."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from quire.errors import ConfigError


class HostPool:
    """A fixed number of blocks, each one all layers' bytes of a device block, side by side.

    The system hands out the memory when a block is first written.

    Raises:
        ConfigError: the system does not promise so much memory.
    """

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        try:
            self._data = _lazy_zeros(num_blocks * block_nbytes).reshape(num_blocks, block_nbytes)
        except (MemoryError, OSError, OverflowError) as error:
            raise ConfigError(
                f"swap_space: {num_blocks} blocks of {block_nbytes} bytes could not be allocated; ask for less",
                param="swap_space",
            ) from error

    def read(self, block_ids: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return a copy of bytes `start` to `stop` of blocks int64 [n]: uint8 [n, stop - start]."""
        return self._data[block_ids, start:stop]

    def write(self, block_ids: np.ndarray, start: int, stop: int, data: np.ndarray) -> None:
        """Store uint8 [n, stop - start] as bytes `start` to `stop` of blocks int64 [n]."""
        self._data[block_ids, start:stop] = data


def _lazy_zeros(nbytes: int) -> np.ndarray:
    """Return uint8 [nbytes] that the system hands out piece by piece, in large pages where it can.

    In small ones, the first write to a block takes several times as long as the copy itself.
    """
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
