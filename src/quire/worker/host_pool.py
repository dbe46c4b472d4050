"""`HostPool`: blocks of the KV cache kept in the host's memory. Which block lies where is the scheduler's business."""

from __future__ import annotations

import numpy as np


class HostPool:
    """A fixed number of blocks, each one all layers' bytes of a device block, side by side.

    The system hands out the memory when a block is first written.

    Raises:
        MemoryError: the system does not promise so much memory.
    """

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        self._data = np.zeros((num_blocks, block_nbytes), np.uint8)

    def read(self, block_ids: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return a copy of bytes `start` to `stop` of blocks int64 [n]: uint8 [n, stop - start]."""
        return self._data[block_ids, start:stop]

    def write(self, block_ids: np.ndarray, start: int, stop: int, data: np.ndarray) -> None:
        """Store uint8 [n, stop - start] as bytes `start` to `stop` of blocks int64 [n]."""
        self._data[block_ids, start:stop] = data
