"""The thread team, inside compiled code: every thread walks the same program and they meet after each instruction.

A program is int64 [n][ROW], one instruction a row: the address of an `Op`, how many items it has, how to share them,
and its arguments. Each thread takes items from its own share first and then from what others have left, so that a
thread that has lost its core delays the others by one piece of work. The last thread to arrive at the end of an
instruction carries out the small ones that follow, alone, before it lets the others go on: a small instruction costs
its own time and no meeting.

Waiting yields the core. A thread spins for about as long as a wake-up takes (some 20 us) and then sleeps in a futex:
beside other busy processes a sleeper is woken at once, while one that spins uses up its time slice and then waits for
milliseconds. While it spins for a linear layer's turn it prefetches the first weights of its next share into its cache,
which keeps memory busy.

State of a team, int64 in cache lines of its own: see the names below. Only compiled code lives here; threads.py has
the Python side.
"""

from __future__ import annotations

import platform
import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from quire.kernels.cpu.jit import entry, jit
from quire.kernels.cpu.pointers import ANY, INT, NOTHING, i64_ptr, intrinsic
from quire.kernels.cpu.simd import _prefetch
from quire.kernels.cpu.sizes import ROW

# One row of a program, ROW values
OP, ITEMS, ITEMS_AT, GRAIN, ALONE_BELOW, PREFETCH, PREFETCH_BYTES = range(7)  # see `threads.Launcher.emit`
ARGS = 8  # the first argument; those before are the team's

# A team's state; a line of 8 values each
JOB, ARRIVED, MET, SLEEPING, CLAIMS = 0, 8, 16, 24, 32
PROGRAM, COUNT, STOP, NEXT = JOB + 1, JOB + 2, JOB + 3, MET + 1
TIMES = JOB + 4  # address of int64 [count][ranks][2], in which each rank notes when it did an instruction; or 0
LINE = 8

PREFETCH_LIMIT = 1 << 17  # bytes that a waiting thread prefetches: part of a core's second-level cache
LOOK_AHEAD = 8  # instructions among which the next weights are looked for

HAS_FUTEX = sys.platform == "linux" and platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64")
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
SYS_FUTEX, SYS_SCHED_SETAFFINITY = (202, 203) if IS_X86 else (98, 122)
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
SLEEP_MICROSECONDS = 50  # between looks, where there is no futex
CLOCK = 8 if sys.platform == "darwin" else 1  # that of time.perf_counter_ns

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _cell(b, cells, index):
    return b.gep(cells, [index])


def _system_call(b, number, *args):
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(I64, [I64], var_arg=True), "syscall")
    b.call(function, [I64(number), *args])


@intrinsic(INT, ANY, INT, INT)
def atomic_add(b, cells, index, value):
    """cells[index] += value; return what it was before."""
    return b.atomic_rmw("add", _cell(b, cells, index), value, "seq_cst")


@intrinsic(INT, ANY, INT)
def atomic_load(b, cells, index):
    """Return cells[index]; what was written before it was stored can be read after."""
    return b.load_atomic(_cell(b, cells, index), "seq_cst", 8)


@intrinsic(NOTHING, ANY, INT, INT)
def atomic_store(b, cells, index, value):
    """cells[index] = value, after everything written before."""
    b.store_atomic(value, _cell(b, cells, index), "seq_cst", 8)


@intrinsic(NOTHING, INT, types.CPointer(INT), INT, INT, INT)
def call_op(b, address, args, first, last, scratch):
    """Call the op at `address`."""
    kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer(), I64, I64, I64])
    b.call(b.inttoptr(address, kind.as_pointer()), [args, first, last, scratch])


@intrinsic(ANY, ANY, INT)
def offset(b, pointer, count):
    """Return the pointer `count` elements further."""
    return b.gep(pointer, [count])


@intrinsic(NOTHING, ANY, INT, INT)
def system_wait(b, cells, index, value):
    """Sleep until woken, unless the low half of cells[index] is no longer that of `value`."""
    if HAS_FUTEX:
        seen = b.and_(value, I64(0xFFFFFFFF))
        _system_call(b, SYS_FUTEX, b.ptrtoint(_cell(b, cells, index), I64), I64(FUTEX_WAIT_PRIVATE), seen, I64(0))
    else:
        kind = ir.FunctionType(I32, [I32])
        b.call(cgutils.get_or_insert_function(b.module, kind, "usleep"), [I32(SLEEP_MICROSECONDS)])


@intrinsic(NOTHING, ANY, INT)
def system_wake(b, cells, index):
    """Wake all threads that sleep on cells[index]."""
    if HAS_FUTEX:
        _system_call(b, SYS_FUTEX, b.ptrtoint(_cell(b, cells, index), I64), I64(FUTEX_WAKE_PRIVATE), I64(1 << 30))


@intrinsic(NOTHING, INT, INT)
def run_on(b, mask, size):
    """Keep the calling thread on the cores whose bits are set in the `size` bytes at address `mask`, if it can be."""
    if HAS_FUTEX:
        _system_call(b, SYS_SCHED_SETAFFINITY, I64(0), size, mask)


@intrinsic(NOTHING)
def pause(b):
    """Tell the core that this is a waiting loop, where there is an instruction for it."""
    kind = ir.FunctionType(ir.VoidType(), [])
    if IS_X86:
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])


@intrinsic(INT)
def now(b):
    """Return the nanoseconds of the clock of time.perf_counter_ns."""
    time = cgutils.alloca_once(b, I64, size=2)
    kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
    b.call(cgutils.get_or_insert_function(b.module, kind, "clock_gettime"), [I32(CLOCK), time])
    seconds = b.load(time)
    return b.add(b.mul(seconds, I64(1_000_000_000)), b.load(b.gep(time, [I64(1)])))


@intrinsic(NOTHING, INT)
def prefetch(b, address):
    """Start loading the cache line at this address into the second-level cache."""
    _prefetch(b, b.inttoptr(address, I8.as_pointer()))


# Sharing the items of one instruction


@jit
def item_count(row):
    """Return the number of items of an instruction: recorded with it, or computed by one before it."""
    if row[ITEMS_AT] != 0:
        return i64_ptr(row[ITEMS_AT])[0]
    return row[ITEMS]


@jit
def deal(team, ranks, items):
    """Divide the items among the ranks."""
    for rank in range(ranks):
        cell = CLAIMS + LINE * rank
        team[cell + 1] = items * (rank + 1) // ranks
        atomic_store(team, cell, items * rank // ranks)


@jit
def note(times, place, begin):
    """Note that a rank did items of an instruction from `begin` until now, unless nobody wants to know."""
    if times != 0:
        cell = i64_ptr(times + 16 * place)
        cell[0], cell[1] = begin, now()


@jit
def do_items(team, row, rank, ranks, scratch):
    """Do items of one instruction until all are taken."""
    grain = row[GRAIN]
    for step in range(ranks):
        cell = CLAIMS + LINE * ((rank + step) % ranks)
        end = team[cell + 1]
        while atomic_load(team, cell) < end:
            first = atomic_add(team, cell, grain)
            if first < end:
                call_op(row[OP], offset(row, ARGS), first, min(first + grain, end), scratch)


@jit
def do_alone(team, program, index, count, rank, ranks, scratch):
    """Carry out small instructions from `index` on; return where the first of the others is, its items dealt out."""
    times = team[TIMES]
    while index < count:
        row = i64_ptr(program + 8 * ROW * index)
        items = item_count(row)
        if items > 0:
            if ranks > 1 and items >= row[ALONE_BELOW]:
                deal(team, ranks, items)
                return index
            begin = now() if times != 0 else 0
            call_op(row[OP], offset(row, ARGS), 0, items, scratch)
            note(times, index * ranks + rank, begin)
        index += 1
    return index


# Meeting


@jit
def next_weights(program, index, count, rank, ranks):
    """Return where the weights of this rank's next share begin, and how many bytes to prefetch."""
    for candidate in range(index, min(index + LOOK_AHEAD, count)):
        row = i64_ptr(program + 8 * ROW * candidate)
        if row[PREFETCH] != 0:
            first, last = row[ITEMS] * rank // ranks, row[ITEMS] * (rank + 1) // ranks
            return row[PREFETCH] + first * row[PREFETCH_BYTES], min(
                (last - first) * row[PREFETCH_BYTES], PREFETCH_LIMIT
            )
    return np.int64(0), np.int64(0)


@jit
def prefetch_weights(start, size, team, met):
    """Prefetch memory until the other threads are there."""
    for at in range(0, size, 1024):
        if atomic_load(team, MET) != met:
            return
        for line in range(at, min(at + 1024, size), 64):
            prefetch(start + line)


@jit
def wait(team, word, seen, spins):
    """Wait until team[word] is no longer `seen`."""
    for _ in range(spins):
        if atomic_load(team, word) != seen:
            return
        pause()
    atomic_add(team, SLEEPING, 1)
    while atomic_load(team, word) == seen:
        system_wait(team, word, seen)
    atomic_add(team, SLEEPING, -1)


@jit
def release(team, word):
    """Change team[word], and wake the threads that wait for it to change."""
    atomic_add(team, word, 1)
    if atomic_load(team, SLEEPING) > 0:
        system_wake(team, word)


@jit
def walk(team, program, index, count, rank, ranks, spins, scratch, job):
    """Do this rank's part of the program from the large instruction `index` on.

    Whoever has slept through the end of job number `job` reads its NEXT when the following one may have begun, hence
    two of them in turn.
    """
    following, times = NEXT + job % 2, team[TIMES]
    while index < count:
        begin = now() if times != 0 else 0
        do_items(team, i64_ptr(program + 8 * ROW * index), rank, ranks, scratch)
        note(times, index * ranks + rank, begin)
        # The program may be gone once the others need not wait for this rank any more.
        start, size = next_weights(program, index + 1, count, rank, ranks)
        met = atomic_load(team, MET)
        if atomic_add(team, ARRIVED, 1) == ranks - 1:
            atomic_store(team, ARRIVED, 0)
            index = do_alone(team, program, index + 1, count, rank, ranks, scratch)
            team[following] = index
            release(team, MET)
        else:
            prefetch_weights(start, size, team, met)
            wait(team, MET, met, spins)
            index = team[following]


@entry
def run(state, program, count, ranks, spins, scratch, masks, mask_size):
    """Run a program as rank 0, with the other ranks if it has large instructions. Addresses and numbers, all int64.

    `masks`, if not 0: two sets of cores, where rank 0 runs meanwhile and where this thread runs otherwise.
    """
    team = i64_ptr(state)
    index = do_alone(team, program, 0, count, 0, ranks, scratch)
    if index == count:
        return
    if masks != 0:
        run_on(masks, mask_size)
    job = atomic_load(team, JOB) + 1
    team[PROGRAM], team[COUNT], team[NEXT + job % 2] = program, count, index
    release(team, JOB)
    walk(team, program, index, count, 0, ranks, spins, scratch, job)
    if masks != 0:
        run_on(masks + mask_size, mask_size)


@entry
def serve(state, rank, ranks, spins, scratch):
    """Run as one of the other ranks: do a share of every program until `stop`."""
    team, seen = i64_ptr(state), 0
    while True:
        wait(team, JOB, seen, spins)
        seen += 1
        if team[STOP] != 0:
            return
        walk(team, team[PROGRAM], team[NEXT + seen % 2], team[COUNT], rank, ranks, spins, scratch, seen)


@entry
def stop(state):
    """End the other ranks' `serve`."""
    team = i64_ptr(state)
    team[STOP] = 1
    release(team, JOB)
