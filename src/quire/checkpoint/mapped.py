"""Weight files in memory: mapped, so that a tensor is read on access, or read as a whole at the start.

Mapped pages count as resident memory of this process once they are accessed. So the pages of all tensors but the last
few are released to the system, and large tensors release theirs while they are packed (`release`). A view of released
pages stays valid; they are read from the file again on access.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

import numpy as np

from quire.checkpoint.files import regular_file_size, unreadable
from quire.errors import ModelError

RESIDENT_BYTES = 32 * 2**20  # of the tensors read last that stay resident
AHEAD_BYTES = 64 * 2**20  # read-ahead behind a tensor
PIECE_BYTES = 16 * 2**20  # that are read from a file at a time
POPULATE_READ = 22  # Linux 5.14's MADV_POPULATE_READ, which Python's mmap does not name
STRATEGIES = ("lazy", "eager", "prefetch")


class MappedFile:
    """The bytes of one file; `view` gives some of them."""

    def __init__(self, path: Path, least: int, *, eager: bool = False, writable: bool = False) -> None:
        """Map the file.

        Args:
            least: bytes that it must have, at least 1.
            eager: read it into memory at once.
            writable: arrays may be written to, which does not change the file.

        Raises:
            ModelError: it is missing, too small, or cannot be read.
        """
        self.path, self.size = path, regular_file_size(path)
        if self.size < least:
            raise ModelError(f"{path}: file is truncated (expected at least {least} bytes, got {self.size})")
        self._map: mmap.mmap | None = None
        self._resident: deque[tuple[int, int]] = deque()
        try:
            if eager:
                self.bytes = np.fromfile(path, np.uint8)
                return
            with path.open("rb") as file:
                access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
                self._map = mmap.mmap(file.fileno(), 0, access=access)
        except OSError as error:
            raise unreadable(path, error) from None
        self.bytes = np.frombuffer(self._map, np.uint8)

    def view(self, start: int, stop: int) -> np.ndarray:
        """Return uint8 [stop - start], a view; the pages of earlier views are released."""
        if self._map is not None and sys.platform == "linux":  # elsewhere the same advice may mean something else
            self._resident.append((start, stop))
            while len(self._resident) > 1 and sum(end - begin for begin, end in self._resident) > RESIDENT_BYTES:
                self._advise(mmap.MADV_DONTNEED, *self._resident.popleft())
            if stop - start <= RESIDENT_BYTES:
                self._advise(POPULATE_READ, start, stop)
            else:
                self._advise(mmap.MADV_WILLNEED, start, start + AHEAD_BYTES)
            self._advise(mmap.MADV_WILLNEED, stop, stop + AHEAD_BYTES)
        return self.bytes[start:stop]

    def _advise(self, advice: int, start: int, stop: int) -> None:
        assert self._map is not None
        first, stop = start - start % mmap.PAGESIZE, min(stop, self.size)
        if stop > first:
            with contextlib.suppress(OSError):  # an older system; only advice
                self._map.madvise(advice, first, stop - first)


def release(array: np.ndarray) -> None:
    """Release the pages of a view of a mapped file; other arrays stay as they are."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    if not isinstance(owner, mmap.mmap) or array.size == 0 or sys.platform != "linux":
        return
    origin = np.frombuffer(owner, np.uint8).__array_interface__["data"][0]
    low, high = np.lib.array_utils.byte_bounds(array)
    first = (low - origin) // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):
        owner.madvise(mmap.MADV_DONTNEED, first, high - origin - first)


def read_ahead(paths: Iterable[Path]) -> Thread:
    """Begin to read whole files, one after the other, so that the system has them in memory when they are mapped."""

    def work() -> None:
        for path in paths:
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                buffer = bytearray(min(PIECE_BYTES, os.fstat(file.fileno()).st_size))
                while buffer and file.readinto(buffer):
                    pass

    thread = Thread(target=work, name="quire-read-ahead", daemon=True)
    thread.start()
    return thread
