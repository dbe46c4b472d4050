"""The memory of recordings: which arrays share it, and how little of it there is."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from types import FrameType
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cpu import arrays
from quire.kernels.cpu.arrays import ALIGNMENT, Arena, Recorder
from quire.kernels.cpu.threads import address_of

NO_RECORDER = cast(Recorder, None)


def lines(arena: Arena, count: int) -> np.ndarray:
    """Return an array of so many cache lines."""
    return arena.empty((count * ALIGNMENT,), np.uint8, NO_RECORDER)


@given(st.lists(st.integers(0, 12) | st.none(), max_size=60), st.randoms())
def test_arrays_in_use_never_overlap_and_freed_memory_becomes_one_piece(sizes: list[int | None], random: Any) -> None:
    arena = Arena()
    live: list[np.ndarray] = []
    most = 0
    for size in sizes:
        if size is not None:
            live.append(lines(arena, size))
        elif live:
            live.pop(random.randrange(len(live)))
        places = sorted((address_of(array), max(array.nbytes, ALIGNMENT)) for array in live)
        assert all(start + nbytes <= following for (start, nbytes), (following, _) in pairwise(places))
        assert all(start % ALIGNMENT == 0 for start, _ in places)
        most = max(most, sum(nbytes for _, nbytes in places))
    assert most <= arena.touched
    live.clear()
    before = arena.touched
    whole = lines(arena, before // ALIGNMENT)
    assert whole.nbytes == before
    assert arena.touched == max(before, ALIGNMENT)  # an empty array takes a line


def test_arrays_freed_while_another_is_made_leave_the_others_alone() -> None:
    """The garbage collector may free arrays between any two lines of the arena's own code."""
    arena, rng = Arena(), random.Random(0)
    live: list[np.ndarray] = []

    def free_at_any_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and len(live) > 4 and rng.random() < 0.05:
            live.pop(rng.randrange(len(live)))
        return free_at_any_line if frame.f_code.co_filename == arrays.__file__ else None

    before = sys.gettrace()
    for _ in range(300):
        sys.settrace(free_at_any_line)
        try:
            array = lines(arena, rng.randrange(1, 5))
        finally:
            sys.settrace(before)
        live.append(array)
        places = sorted((address_of(array), array.nbytes) for array in live)
        assert all(start + nbytes <= following for (start, nbytes), (following, _) in pairwise(places))


def test_smaller_arrays_share_a_freed_larger_one() -> None:
    arena = Arena()
    first, kept = lines(arena, 10), lines(arena, 1)
    del first
    inside = [lines(arena, size) for size in (3, 4, 3)]
    assert arena.touched == 11 * ALIGNMENT
    del inside[1]
    smallest_fitting = lines(arena, 2)
    assert address_of(smallest_fitting) == address_of(inside[0]) + 3 * ALIGNMENT
    assert kept.nbytes == ALIGNMENT


def test_arrays_of_an_earlier_recording_free_nothing() -> None:
    arena = Arena()
    earlier = lines(arena, 4)
    arena.restart()
    current = lines(arena, 4)
    del earlier
    assert address_of(lines(arena, 4)) != address_of(current)


def test_an_array_larger_than_a_slab_gets_one_of_its_own() -> None:
    arena = Arena()
    small, large = lines(arena, 1), arena.empty(((1 << 26) + 1,), np.uint8, NO_RECORDER)
    assert large.nbytes > 1 << 26
    assert arena.size > 1 << 27
    assert arena.touched == small.nbytes + (1 << 26) + ALIGNMENT
