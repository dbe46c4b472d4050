"""`Board`: shared memory with a row of numbers for each front and one for the supervisor, which all read.

A row has one writer. Its numbers are a front's heartbeat and its shares of limits that hold for all fronts together.
Nobody waits for anybody: a front that is frozen or dead holds no lock. So two fronts that look at the same moment may
both take the last place.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence

from quire.engine.launch import anonymous_file

_BEAT, _ALIVE, _RECEIVING, _QUEUES = range(4)  # the last one is the first column of the queues
_CROWDED, _CONNECTIONS = range(2)  # of the supervisor's row, which is the last one
_LINE = 8  # columns in a cache line
QUEUE_COLUMNS = 3
_NUMBER_BYTES = 8


class Board:
    """The shared memory, made by `create_board`.

    Args:
        fd: of the file; it may be closed afterwards. num_rows: one for each front. num_queues: of each front.
    """

    def __init__(self, fd: int, num_rows: int, num_queues: int = 1) -> None:
        self.num_rows = num_rows
        self.num_queues = num_queues
        self._columns = _num_columns(num_queues)
        self._memory = mmap.mmap(fd, (num_rows + 1) * self._columns * _NUMBER_BYTES)
        self._numbers = memoryview(self._memory).cast("q")  # aligned, so that each number is written in one go

    def beat(self, row: int, *, alive: bool = True) -> None:
        """Record that the front of this row runs now, and whether it holds the server to be alive (`/livez`)."""
        self._numbers[row * self._columns + _ALIVE] = int(alive)
        self._numbers[row * self._columns + _BEAT] = time.monotonic_ns()

    def last_beat(self, row: int) -> float:
        """Return when the front of this row ran last [monotonic seconds]; 0.0 if it has not run yet."""
        return self._numbers[row * self._columns + _BEAT] / 1e9

    def is_alive(self, row: int) -> bool:
        """Whether the front of this row holds the server to be alive."""
        return bool(self._numbers[row * self._columns + _ALIVE])

    def set_receiving_bytes(self, row: int, size: int) -> None:
        """Record the bytes of request bodies that a front has in memory."""
        self._numbers[row * self._columns + _RECEIVING] = size

    def receiving_bytes(self) -> int:
        """Return the bytes of request bodies that all fronts have in memory."""
        return sum(self._numbers[_RECEIVING : self.num_rows * self._columns : self._columns])

    @property
    def is_crowded(self) -> bool:
        """Whether connections get scarce, as the supervisor has found."""
        return bool(self._numbers[self.num_rows * self._columns + _CROWDED])

    @property
    def num_connections(self) -> int:
        """How many connections there are, those that wait for a front included."""
        return self._numbers[self.num_rows * self._columns + _CONNECTIONS]

    def set_connections(self, count: int, *, crowded: bool) -> None:
        """Record how many connections there are, and whether they get scarce."""
        self._numbers[self.num_rows * self._columns + _CROWDED] = int(crowded)
        self._numbers[self.num_rows * self._columns + _CONNECTIONS] = count

    def set_queue(self, row: int, queue: int, numbers: Sequence[int]) -> None:
        """Record the `QUEUE_COLUMNS` numbers that say how long a queue of this front is."""
        for column, number in enumerate(numbers, row * self._columns + _QUEUES + queue * QUEUE_COLUMNS):
            self._numbers[column] = number

    def queue_of_others(self, row: int, queue: int) -> list[int]:
        """Return the sums of the numbers of this queue, those of the front of this row left out."""
        own = row * self._columns + _QUEUES + queue * QUEUE_COLUMNS
        end = self.num_rows * self._columns
        return [
            sum(self._numbers[column % self._columns : end : self._columns]) - self._numbers[column]
            for column in range(own, own + QUEUE_COLUMNS)
        ]

    def clear(self, row: int) -> None:
        """Forget a front that has ended."""
        for column in range(self._columns):
            self._numbers[row * self._columns + column] = 0


def create_board(num_rows: int, num_queues: int = 1) -> tuple[int, Board]:
    """Return a descriptor by which fronts map a new board, and the board."""
    fd = anonymous_file("quire-fronts")
    os.ftruncate(fd, (num_rows + 1) * _num_columns(num_queues) * _NUMBER_BYTES)
    return fd, Board(fd, num_rows, num_queues)


def _num_columns(num_queues: int) -> int:
    """Return the columns of a row: whole cache lines."""
    return -(-(_QUEUES + num_queues * QUEUE_COLUMNS) // _LINE) * _LINE
