"""The Python side of the thread team, and its instructions: run at once, or recorded into a program and run again.

Outside a recording, `emit` runs its one instruction before it returns. Inside one it only records it: the arrays that
ops return then lie in an arena (arrays.py) and hold nothing yet. What a program computes from is found by address, so
arrays it reads must stay where they are; it keeps them alive.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numba
import numpy as np

from quire.errors import ConfigError
from quire.kernels.cpu import team
from quire.kernels.cpu.arrays import Arena, Recorded, Recorder, Slabs, aligned
from quire.kernels.cpu.jit import Op
from quire.kernels.cpu.sizes import SCRATCH_BYTES

# About how many multiply-adds one thread does in the time that sharing an instruction takes.
SMALL_WORK = 32768

SPINS = 600  # looks at a word before sleeping; each takes some 35 ns
PIECES = 8  # a thread's share is taken in about so many pieces

Argument = Any  # an array (its address), an int, a float (its bits), or None (0)


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def float_bits(value: float) -> int:
    """Return the bits of a float64 as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


class Program:
    """Instructions that can be run again, and Python functions to be called between them.

    `keep` holds the arrays they read beside those of the arena.
    """

    def __init__(
        self, steps: list[list[int] | Callable[[], None]], keep: list[Any], runner: Callable[[np.ndarray], None]
    ) -> None:
        self._keep, self._runner = keep, runner
        self._parts: list[np.ndarray | Callable[[], None]] = []
        for is_call, group in groupby(steps, callable):
            part: list[Any] = list(group)
            self._parts += part if is_call else [np.array(part, np.int64)]

    def run(self) -> None:
        """Carry out all instructions."""
        for part in self._parts:
            if isinstance(part, np.ndarray):
                self._runner(part)
            else:
                part()


class Launcher:
    """Shares the work of ops among the backend's threads; may be called from any Python thread, one at a time."""

    def __init__(self, num_threads: int | None, spins: int = SPINS) -> None:
        """Use `num_threads`, or all cores of this process for None. Raises ConfigError above the number of cores."""
        limit = numba.config.NUMBA_NUM_THREADS
        if num_threads is not None and not 1 <= num_threads <= limit:
            raise ConfigError(f"num_threads is {num_threads}; allowed: 1 to {limit}", param="num_threads")
        self.num_threads: int = num_threads or limit
        self.arena = Arena()
        self.weights = Slabs()
        self.recorder: Recorder | None = None  # records the arithmetic of recorded arrays
        self._spins = spins
        self._state = aligned(8 * (team.CLAIMS + team.LINE * self.num_threads), np.zeros).view(np.int64)
        self._scratch = aligned(SCRATCH_BYTES * self.num_threads, np.zeros)
        self._masks = _core_masks(self.num_threads)
        self._lock = threading.Lock()
        self._started = False
        self._recording: tuple[list[list[int] | Callable[[], None]], list[Any]] | None = None

    @property
    def recording(self) -> bool:
        """Whether instructions are being recorded rather than run."""
        return self._recording is not None

    def emit(
        self,
        op: Op,
        *args: Argument,
        items: int,
        work: int,
        items_at: np.ndarray | None = None,
        alone_below: int | None = None,
        grain: int | None = None,
        prefetch: np.ndarray | None = None,
        prefetch_bytes: int = 0,
        holds: object = None,
    ) -> None:
        """Run or record one instruction.

        Args:
            args: at most 24, see `Argument`.
            items: how many there are. work: about how many multiply-adds all of them take; little is done by one
                thread.
            items_at: int64 array whose first value is the number of items, read when the instruction runs; with fewer
                than `alone_below` items one thread does all.
            grain: items taken at a time.
            prefetch, prefetch_bytes: memory that item i reads from byte i * prefetch_bytes on, to be prefetched.
            holds: the owner of memory that the op finds by addresses in its arguments; kept alive as long as they are.
        """
        if alone_below is None:
            alone_below = items + 1 if work < SMALL_WORK else 0
        if grain is None:
            grain = max(1, items // (self.num_threads * PIECES))
        keep: list[Any] = [] if holds is None else [holds]
        row = [0] * team.ROW
        row[team.OP], row[team.ITEMS], row[team.GRAIN], row[team.ALONE_BELOW] = op.address, items, grain, alone_below
        if items_at is not None:
            row[team.ITEMS_AT] = self._word(items_at, keep)
        if prefetch is not None:
            row[team.PREFETCH], row[team.PREFETCH_BYTES] = self._word(prefetch, keep), prefetch_bytes
        assert len(args) <= team.ROW - team.ARGS, f"{op.name} has too many arguments"
        for place, arg in enumerate(args, team.ARGS):
            row[place] = arg if type(arg) is int else self._word(arg, keep)
        if self._recording is None:
            self._run(np.array([row], np.int64))
        else:
            self._recording[0].append(row)
            self._recording[1].extend(keep)

    def call(self, function: Callable[[], None]) -> None:
        """Call a Python function, or note the call: for collectives, which wait for other ranks."""
        if self._recording is None:
            function()
        else:
            self._recording[0].append(function)

    @staticmethod
    def _word(arg: Argument, keep: list[Any]) -> int:
        if isinstance(arg, np.ndarray):
            if not isinstance(arg, Recorded):
                keep.append(arg)
            return address_of(arg)
        if isinstance(arg, float | np.floating):
            return float_bits(float(arg))
        return 0 if arg is None else int(arg)

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return an array for an op to fill: in the arena while recording, else one of numpy's."""
        if self._recording is None:
            return np.empty(shape, dtype)
        assert self.recorder is not None
        return self.arena.empty(shape, dtype, self.recorder)

    @contextmanager
    def record(self) -> Iterator[list[Program]]:
        """Record what is emitted inside; the list holds the program afterwards.

        Arrays made inside lie in the arena. They hold what the program computed until the next recording begins or
        another program runs.
        """
        assert self._recording is None, "recordings do not nest"
        steps: list[list[int] | Callable[[], None]] = []
        keep: list[Any] = []
        self._recording = (steps, keep)
        made: list[Program] = []
        self.arena.restart()
        try:
            yield made
            made.append(Program(steps, keep, self._run))
        finally:
            self._recording = None

    def _run(self, rows: np.ndarray) -> None:
        with self._lock:
            if not self._started:
                self._start()
            state, scratch, ranks = address_of(self._state), address_of(self._scratch), self.num_threads
            masks = self._masks
            team.run(
                state,
                address_of(rows),
                len(rows),
                ranks,
                self._spins,
                scratch,
                address_of(masks) if masks.size else 0,
                masks.shape[1],
            )

    def _start(self) -> None:
        """Start the other threads; they end with this object."""
        state, scratch = address_of(self._state), address_of(self._scratch)
        kept = (self._state, self._scratch)
        for rank in range(1, self.num_threads):
            core = _own_cores()[rank] if self._masks.size else None
            args = (kept, core, state, rank, self.num_threads, self._spins, scratch + rank * SCRATCH_BYTES)
            threading.Thread(target=_serve, args=args, name=f"quire-cpu-{rank}", daemon=True).start()
        self._started = True
        weakref.finalize(self, _stop, kept, state)


def _core_masks(num_threads: int) -> np.ndarray:
    """Return the sets of cores of `team.run`, bit by bit, uint8 [2, bytes]; empty where threads should not be bound.

    A team as large as the machine binds each thread to a core of its own: the system likes to wake a thread on the
    core of the one that woke it, where it then waits for that one to fall asleep.
    """
    cores = _own_cores()
    if num_threads == 1 or num_threads != len(cores):
        return np.zeros((0, 0), np.uint8)
    bits = np.zeros((2, (max(cores) // 64 + 1) * 64), np.uint8)
    bits[0, cores[0]], bits[1, cores] = 1, 1
    return np.packbits(bits, axis=1, bitorder="little")


def _own_cores() -> list[int]:
    """Return the cores this process may use, none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _serve(kept: object, core: int | None, *args: int) -> None:
    """Run as one of the team's threads, on `core` if given; `kept` keeps the memory it works in alive."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    team.serve(*args)


def _stop(kept: object, state: int) -> None:
    team.stop(state)
