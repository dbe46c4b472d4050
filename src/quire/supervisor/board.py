"""`Board`: shared memory with a row of numbers for each front and one for the supervisor, which all read.

A row has one writer. Its numbers are a front's heartbeat and its shares of limits that hold for all fronts together.
Nobody waits for anybody: a front that is frozen or dead holds no lock.
"""

from __future__ import annotations

import mmap
import os
import time

from quire.engine.launch import anonymous_file

_BEAT, _ALIVE, _RECEIVING = range(3)
_CROWDED = 0  # of the supervisor's row, which is the last one
_COLUMNS = 8  # a cache line
_NUMBER_BYTES = 8


class Board:
    """The shared memory, made by `create_board`.

    Args:
        fd: of the file; it may be closed afterwards. num_rows: one for each front.
    """

    def __init__(self, fd: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self._memory = mmap.mmap(fd, (num_rows + 1) * _COLUMNS * _NUMBER_BYTES)
        self._numbers = memoryview(self._memory).cast("q")  # aligned, so that each number is written in one go

    def beat(self, row: int, *, alive: bool = True) -> None:
        """Record that the front of this row runs now, and whether it holds the server to be alive (`/livez`)."""
        self._numbers[row * _COLUMNS + _ALIVE] = int(alive)
        self._numbers[row * _COLUMNS + _BEAT] = time.monotonic_ns()

    def last_beat(self, row: int) -> float:
        """Return when the front of this row ran last [monotonic seconds]; 0.0 if it has not run yet."""
        return self._numbers[row * _COLUMNS + _BEAT] / 1e9

    def is_alive(self, row: int) -> bool:
        """Whether the front of this row holds the server to be alive."""
        return bool(self._numbers[row * _COLUMNS + _ALIVE])

    def set_receiving_bytes(self, row: int, size: int) -> None:
        """Record the bytes of request bodies that a front has in memory."""
        self._numbers[row * _COLUMNS + _RECEIVING] = size

    def receiving_bytes(self) -> int:
        """Return the bytes of request bodies that all fronts have in memory."""
        return sum(self._numbers[_RECEIVING : self.num_rows * _COLUMNS : _COLUMNS])

    @property
    def is_crowded(self) -> bool:
        """Whether connections get scarce, as the supervisor has found."""
        return bool(self._numbers[self.num_rows * _COLUMNS + _CROWDED])

    def set_crowded(self, crowded: bool) -> None:
        """Record whether connections get scarce."""
        self._numbers[self.num_rows * _COLUMNS + _CROWDED] = int(crowded)

    def clear(self, row: int) -> None:
        """Forget a front that has ended."""
        for column in range(_COLUMNS):
            self._numbers[row * _COLUMNS + column] = 0


def create_board(num_rows: int) -> tuple[int, Board]:
    """Return a descriptor by which fronts map a new board, and the board."""
    fd = anonymous_file("quire-fronts")
    os.ftruncate(fd, (num_rows + 1) * _COLUMNS * _NUMBER_BYTES)
    return fd, Board(fd, num_rows)
