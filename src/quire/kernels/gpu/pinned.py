"""`PinnedPool`: host memory for blocks, pinned piece by piece in a thread, so that nobody waits for gigabytes of it.

A copy engine reads and writes pinned memory by itself. Until a piece is pinned, and where the system refuses to pin it,
copies to and from it are right as well, but the driver carries them out in the calling thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.host_blocks import new_pool

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 * 2**20  # pinning one takes some 50 ms

Register = Callable[[int, int], int]  # address, bytes -> 0 or the number of an error


class PinnedPool:
    """Blocks [num_blocks, block_nbytes], in pieces of whole blocks; no copy may cross from one to the next.

    Args:
        register, unregister: pin memory and let it go; None where there is no device.

    Raises:
        ConfigError: the system does not promise so much memory.
    """

    def __init__(
        self, num_blocks: int, block_nbytes: int, register: Register | None, unregister: Callable[[int], int] | None
    ) -> None:
        self.rows = max(1, PIECE_BYTES // max(1, block_nbytes))  # of a piece
        sizes = [min(self.rows, num_blocks - first) for first in range(0, num_blocks, self.rows)]
        # Each has pages of its own, for a page cannot be pinned twice.
        self._pieces = [new_pool(size, block_nbytes) for size in sizes]
        self.pieces = [torch.from_numpy(piece) for piece in self._pieces]
        self._register, self._unregister = register, unregister
        self._pinned: list[np.ndarray] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pin, name="quire-pinning", daemon=True)
        if register is not None and self._pieces:
            self._thread.start()

    def _pin(self) -> None:
        assert self._register is not None
        for piece in self._pieces:
            if self._closing.is_set():
                return
            error = self._register(piece.ctypes.data, piece.nbytes)
            if error:
                logger.warning(
                    "the host's pool could not be pinned (CUDA error %d, after %d of %d pieces): copies to and from it "
                    "are slower; `ulimit -l` and --swap-space say how much there may be",
                    error, len(self._pinned), len(self._pieces),
                )  # fmt: skip
                return
            self._pinned.append(piece)

    @property
    def num_pinned(self) -> int:
        """Pieces that are pinned by now."""
        return len(self._pinned)

    def wait(self) -> None:
        """Return when as much is pinned as can be."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Let go of the memory, which nothing copies any more. Once more is no error."""
        self._closing.set()
        self.wait()
        for piece in self._pinned:
            if self._unregister is not None:
                self._unregister(piece.ctypes.data)
        self._pinned, self._pieces, self.pieces = [], [], []


def cuda_register(device: torch.device) -> tuple[Register, Callable[[int], int]]:
    """Return what pins memory and lets it go for a device."""
    runtime = torch.cuda.cudart()

    def register(address: int, nbytes: int) -> int:
        with torch.cuda.device(device):  # a thread begins with the first device
            return int(runtime.cudaHostRegister(address, nbytes, 0))

    def unregister(address: int) -> int:
        return int(runtime.cudaHostUnregister(address))

    return register, unregister
