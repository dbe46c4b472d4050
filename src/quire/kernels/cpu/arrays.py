"""Arrays of a recording: numpy arrays in an arena whose arithmetic is recorded instead of done.

While a program is recorded its arrays hold nothing yet. So whatever would read them must become an instruction:
`Recorded` hands + - * to its recorder and refuses everything else that numpy would compute at once. Slicing and
reshaping are only other views of the same memory and need no instruction.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

SLAB_BYTES = 1 << 26
SLAB_BITS = 44  # of the addresses within a slab of a `MetaArena`
ALIGNMENT = 64
ARITHMETIC = {np.add: 0, np.subtract: 1, np.multiply: 2}


class Recorder(Protocol):
    """The object that records the arithmetic of recorded arrays."""

    def combine(self, kind: int, x: Any, y: Any, out: np.ndarray | None) -> np.ndarray:
        """Record x + y, x - y or x * y for kinds 0, 1 and 2, into `out` if given."""

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        """Return x, or record a copy of it whose rows follow one another."""


class Recorded(np.ndarray):
    """An array in a program's arena."""

    recorder: Recorder

    def __array_finalize__(self, source: Any) -> None:
        """Give views the recorder of the array that they are views of."""
        self.recorder = getattr(source, "recorder", None)  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Record additions, subtractions and products; refuse all else."""
        if method != "__call__" or ufunc not in ARITHMETIC or options:
            raise TypeError(f"a recorded array knows + - * only, not {ufunc.__name__}")
        x, y = inputs
        return self.recorder.combine(ARITHMETIC[ufunc], x, y, None if out is None else out[0])

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Any:
        """Refuse: numpy would compute with memory that holds nothing yet."""
        raise TypeError(f"numpy.{function.__name__} cannot be recorded; use an op of the backend")

    def __getitem__(self, index: Any) -> Any:
        """Slice; an index array or an element would read the values now."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice | int) for part in parts):
            raise TypeError("a recorded array can be sliced, not indexed; use take_rows")
        view = super().__getitem__(index)
        if not isinstance(view, Recorded):
            raise TypeError("a recorded array has no elements to read yet")
        return view

    def __setitem__(self, index: Any, value: Any) -> None:
        """Accept only what `x[a:b] += y` ends with: the view itself, whose change is recorded already."""
        view = self[index]
        if not isinstance(value, Recorded) or view.__array_interface__ != value.__array_interface__:
            raise TypeError("a recorded array cannot be assigned to; use an op of the backend")

    def astype(self, *args: Any, **options: Any) -> Any:
        """Refuse: a copy would be of memory that holds nothing yet."""
        raise TypeError("a recorded array cannot be copied or converted; use an op of the backend")

    copy = flatten = astype  # type: ignore[assignment]

    def reshape(self, *shape: Any, **options: Any) -> Any:
        """Return another view, of a recorded copy where the memory does not allow one."""
        try:
            return super().reshape(*shape, copy=False)
        except ValueError:
            return self.recorder.contiguous(self).reshape(*shape)


def as_rows(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Return x [T, W] as float32 rows whose elements lie side by side, and how many elements lie between two rows.

    Views of wider arrays pass as they are. Others are copied, except recorded ones, which are never otherwise.
    """
    if x.dtype != np.float32 or (x.shape[1] > 1 and x.strides[1] != 4) or x.strides[0] % 4 or not x.flags.aligned:
        assert not isinstance(x, Recorded), "a recorded array with scattered elements"
        x = np.require(x, np.float32, ["C", "A"])
    return x, x.strides[0] // 4


def row_step(x: np.ndarray) -> int:
    """Return how many elements lie between rows of x [T, W] that an op changes in place."""
    rows, step = as_rows(x)
    assert rows is x, "rows to be changed in place"
    return step


class Slabs:
    """Memory for packed weights, in pieces large enough that numpy asks the system for huge pages.

    Most matrices of a small model are too small for that by themselves; reading them from huge pages is a tenth
    faster, for the processor's own fetching ahead stops at the end of a page.
    """

    def __init__(self) -> None:
        self._slab, self._used = np.empty(0, np.uint8), 0

    def empty(self, count: int, dtype: Any) -> np.ndarray:
        """Return a flat array that starts at a cache line."""
        size = count * np.dtype(dtype).itemsize
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if room > SLAB_BYTES // 2:
            return aligned(room)[:size].view(dtype)
        if self._used + room > self._slab.nbytes:
            self._slab, self._used = aligned(SLAB_BYTES), 0
        start, self._used = self._used, self._used + room
        return self._slab[start : start + size].view(dtype)


def aligned(size: int, make: Callable[[int, Any], np.ndarray] = np.empty) -> np.ndarray:
    """Return `size` bytes that start at a cache line, of memory that `make` allocates."""
    room = make(size + ALIGNMENT, np.uint8)
    skip = -room.__array_interface__["data"][0] % ALIGNMENT
    return room[skip : skip + size]


class Arena:
    """Memory for the arrays of recordings. Freed pieces are used again within the same recording.

    A program carries out its instructions in the order they were recorded, so memory that is free when an instruction
    is recorded is free when it runs. Recordings use the same memory one after another; it grows and never moves.

    An array takes the smallest free piece that it fits into and leaves the rest of it free; free neighbours are joined.
    """

    def __init__(self) -> None:
        self._slabs: list[Any] = []
        self._ends: list[int] = []  # of what was ever taken from each slab
        self._generation = 0
        # What finalizers append and `_take` joins: the garbage collector may call them while `_take` edits `_free`.
        self._released: list[tuple[int, int, int, int]] = []  # recording, slab, first byte, last byte + 1
        self.restart()

    def restart(self) -> None:
        """Begin a new recording."""
        self._generation += 1
        self._free = [[(0, slab.nbytes)] for slab in self._slabs]  # of each slab, by address: first byte, last byte + 1

    @property
    def size(self) -> int:
        """Bytes taken from the system, touched or not."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def touched(self) -> int:
        """Bytes that were part of an array in some recording, or lie before one in its slab."""
        return sum(self._ends)

    def empty(self, shape: tuple[int, ...], dtype: Any, recorder: Recorder) -> Recorded:
        """Return an array of this shape."""
        count = math.prod(shape)
        size = max(1, -(-count * np.dtype(dtype).itemsize // ALIGNMENT)) * ALIGNMENT
        slab, start = self._take(size)
        # numpy arrays point past other arrays to the owner of the memory, so this object lives as long as any view.
        owner = self._piece(slab, start, size)
        released = self._generation, slab, start, start + size
        weakref.finalize(owner, self._released.append, released).atexit = False
        array = np.frombuffer(owner, dtype, count).view(Recorded).reshape(shape)
        array.recorder = recorder
        return array

    def _take(self, size: int) -> tuple[int, int]:
        while self._released:
            generation, *piece = self._released.pop()
            if generation == self._generation:
                self._join(*piece)
        fitting = [
            (stop - start, slab, start)
            for slab, pieces in enumerate(self._free)
            for start, stop in pieces
            if stop - start >= size
        ]
        if not fitting:
            self._slabs.append(self._allocate(max(size, SLAB_BYTES)))
            self._ends.append(0)
            self._free.append([(0, self._slabs[-1].nbytes)])
            fitting = [(self._slabs[-1].nbytes, len(self._slabs) - 1, 0)]
        room, slab, start = min(fitting)
        place = bisect_left(self._free[slab], (start,))
        self._free[slab][place : place + 1] = [(start + size, start + room)] if room > size else []
        self._ends[slab] = max(self._ends[slab], start + size)
        return slab, start

    def _allocate(self, size: int) -> Any:
        return aligned(size)

    def _piece(self, slab: int, start: int, size: int) -> Any:
        return _piece_type(size).from_buffer(self._slabs[slab].data, start)

    def _join(self, slab: int, start: int, stop: int) -> None:
        pieces = self._free[slab]
        place = last = bisect_left(pieces, (start,))
        if place > 0 and pieces[place - 1][1] == start:
            place, start = place - 1, pieces[place - 1][0]
        if last < len(pieces) and pieces[last][0] == stop:
            last, stop = last + 1, pieces[last][1]
        pieces[place:last] = [(start, stop)]


class _Addresses(NamedTuple):
    """A slab without memory."""

    nbytes: int


class MetaArena(Arena):
    """An arena that hands out addresses instead of memory, for arrays that nothing reads or writes."""

    def _allocate(self, size: int) -> Any:
        return _Addresses(size)

    def _piece(self, slab: int, start: int, size: int) -> Any:
        return _piece_type(size).from_address(((slab + 1) << SLAB_BITS) + start)


@cache
def _piece_type(size: int) -> Any:
    return ctypes.c_char * size
