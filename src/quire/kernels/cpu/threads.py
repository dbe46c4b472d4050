"""The Python side of the thread team, and its instructions: run at once, or recorded into a program and run again.

Outside a recording, `emit` runs its one instruction before it returns. Inside one it only records it: the arrays that
ops return then lie in an arena (arrays.py) and hold nothing yet. What a program computes from is found by address, so
arrays it reads must stay where they are; it keeps them alive.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numba
import numpy as np

from quire.errors import ConfigError
from quire.kernels.backend import Trace
from quire.kernels.cpu import team
from quire.kernels.cpu.arrays import Arena, Recorded, Recorder, Slabs, aligned
from quire.kernels.cpu.jit import OP_NAMES, Op
from quire.kernels.cpu.read import PIECE_FLOATS, read_memory
from quire.kernels.cpu.sizes import SCRATCH_BYTES

# About how many multiply-adds one thread does in the time that sharing an instruction takes.
SMALL_WORK = 32768

SPINS = 600  # looks at a word before sleeping; each takes some 35 ns
PIECES = 8  # a thread's share is taken in about so many pieces
FIRST_THREAD = 1  # in traces; 0 is the engine's own
READ_BYTES = 1 << 28  # from memory, to measure its bandwidth: more than caches hold

Argument = Any  # an array (its address), an int, a float (its bits), or None (0)
NumBytes = int | Callable[[], int]  # that an instruction reads and writes; for some it depends on the step
Step = tuple[list[int], NumBytes] | Callable[[], None]  # an instruction or a Python function


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
        self, steps: list[Step], keep: list[Any], runner: Callable[[np.ndarray, Sequence[NumBytes]], None]
    ) -> None:
        self._keep, self._runner = keep, runner
        self._parts: list[tuple[np.ndarray, list[NumBytes]] | Callable[[], None]] = []
        for is_call, group in groupby(steps, callable):
            part: list[Any] = list(group)
            self._parts += part if is_call else [(np.array([row for row, _ in part], np.int64), [n for _, n in part])]

    def run(self) -> None:
        """Carry out all instructions."""
        for part in self._parts:
            if isinstance(part, tuple):
                self._runner(*part)
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
        self._trace: Trace | None = None
        self._bandwidth = 0.0  # of memory [bytes/s], for the trace
        self._spins = spins
        self._state = aligned(8 * (team.CLAIMS + team.LINE * self.num_threads), np.zeros).view(np.int64)
        self._scratch = aligned(SCRATCH_BYTES * self.num_threads, np.zeros)
        self._masks = _core_masks(self.num_threads)
        self._lock = threading.Lock()
        self._started = False
        self._recording: tuple[list[Step], list[Any]] | None = None

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
        num_bytes: NumBytes | None = None,
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
            num_bytes: that it reads and writes, for profiles; by default what it prefetches and arrays of the arena.
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
        if num_bytes is None:
            num_bytes = items * prefetch_bytes + sum([arg.nbytes for arg in args if isinstance(arg, Recorded)])
        if self._recording is None:
            self._run(np.array([row], np.int64), [num_bytes])
        else:
            self._recording[0].append((row, num_bytes))
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
        steps: list[Step] = []
        keep: list[Any] = []
        self._recording = (steps, keep)
        made: list[Program] = []
        self.arena.restart()
        try:
            yield made
            made.append(Program(steps, keep, self._run))
        finally:
            self._recording = None

    def start_trace(self, trace: Trace) -> None:
        """Add every instruction that is run from now on to `trace`, for each thread that does a part of it."""
        self._bandwidth = self._bandwidth or measure_bandwidth(self)
        for rank in range(self.num_threads):
            trace.name_thread(FIRST_THREAD + rank, f"CPU thread {rank}")
        self._trace = trace

    def stop_trace(self) -> None:
        """End what `start_trace` began."""
        self._trace = None

    def _run(self, rows: np.ndarray, num_bytes: Sequence[NumBytes]) -> None:
        if (trace := self._trace) is not None:
            self._run_traced(rows, num_bytes, trace)
            return
        with self._lock:
            self._walk(rows)

    def _run_traced(self, rows: np.ndarray, num_bytes: Sequence[NumBytes], trace: Trace) -> None:
        times = np.zeros((len(rows), self.num_threads, 2), np.int64)
        with self._lock:
            self._state[team.TIMES] = address_of(times)
            try:
                self._walk(rows)
            finally:
                self._state[team.TIMES] = 0
        for row, size, spans in zip(rows, num_bytes, times, strict=True):
            ran = [(rank, int(begin), int(end)) for rank, (begin, end) in enumerate(spans) if begin]
            if not ran:
                continue
            size = size() if callable(size) else size
            seconds = (max(end for _, _, end in ran) - min(begin for _, begin, _ in ran)) / 1e9
            share = round(size / (seconds * self._bandwidth), 3) if seconds else 0.0
            name = OP_NAMES.get(int(row[team.OP]), "op")
            for rank, begin, end in ran:
                trace.add(name, begin, end, thread=FIRST_THREAD + rank, bytes=size, share_of_bandwidth=share)

    def _walk(self, rows: np.ndarray) -> None:
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


def measure_bandwidth(launcher: Launcher) -> float:
    """Return the bytes per second that all threads read from memory, the best of some tries."""
    memory, out = np.ones(READ_BYTES // 4, np.float32), np.zeros(1 << 17, np.float32)
    pieces, seconds = memory.size // PIECE_FLOATS, []
    for _ in range(5):
        began = time.perf_counter()
        launcher.emit(read_memory, memory, out, items=pieces, work=memory.size, grain=16)
        seconds.append(time.perf_counter() - began)
    return float(memory.nbytes / min(seconds))


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
