"""Instructions carried out for each of several groups of rows with other arguments: the rows of each expert.

Which expert computes which rows is known only when a program runs. So `group` notes an op that sorts pairs of a token
and an expert by expert, and writes down for each expert that has any where its rows begin and how many they are.
`emit_grouped` notes an op that carries out another one for every such expert, with that expert's rows and weights for
arguments. The inner ops are those of any product (linear.py, linear_int.py) and know nothing of this.

Rows of an expert lie together, and as many more are kept as the tiles of products have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.cpu import team, threads
from quire.kernels.cpu.interleave import DOT_ROWS, ROW_GROUP, tile_height
from quire.kernels.cpu.jit import Op, jit, op
from quire.kernels.cpu.pointers import i64_ptr
from quire.kernels.cpu.simd import TILE_ROWS
from quire.kernels.cpu.team import call_op, offset
from quire.kernels.cpu.threads import SCRATCH_BYTES, Launcher, address_of, float_bits

# A record of an expert that has rows: its number, its first row, how many rows, and, counted from the first expert on,
# rows, tiles of DOT_ROWS, whole tiles of TILE_ROWS, and groups of ROW_GROUP before it. The last record ends the counts.
RECORD = 8
EXPERT, FIRST, COUNT, ROWS, TILES, WHOLE, BLOCKS = range(7)
ROWS_IN = {ROWS: 1, TILES: DOT_ROWS, WHOLE: TILE_ROWS, BLOCKS: ROW_GROUP}
INNER_ARGS = team.ROW - team.ARGS
ADVANCE, LOOK_UP, PUT_COUNT = range(3)  # what becomes of an argument
PATCH = 3  # int64 of one: which argument, what becomes of it, with what


class ExpertRows(NamedTuple):
    """An argument: where an expert's rows begin in `array`, with `step` bytes from a row to the next."""

    array: np.ndarray
    step: int


class ExpertArray(NamedTuple):
    """An argument: the expert's own of int64 [E]."""

    table: np.ndarray


class ExpertRowCount:
    """An argument: the number of rows of an expert."""


class Unit(NamedTuple):
    """What the items of a grouped instruction are: `factor` for each of the `kind`, one of ROWS to BLOCKS."""

    kind: int
    factor: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a token and an expert, by expert.

    Attributes:
        records: int64, see above. words: how many there are, then how many items there are of each unit.
        places: int64 [pairs], the row of each pair.
        units: those that instructions may have. pairs, capacity: how many there are, and rows to keep for them.
    """

    records: np.ndarray
    words: np.ndarray
    places: np.ndarray
    units: tuple[Unit, ...]
    pairs: int
    capacity: int


@op
def group_pairs(args, first, last, scratch):
    """ids, pairs, experts, records, words, places, number of units, then the kind and the factor of each unit."""
    ids, pairs, experts = i64_ptr(args[0]), args[1], args[2]
    records, words, places = i64_ptr(args[3]), i64_ptr(args[4]), i64_ptr(args[5])
    counts = i64_ptr(scratch)
    for e in range(experts):
        counts[e] = 0
    for p in range(pairs):
        counts[ids[p]] += 1
    at, row, rows, tiles, whole, blocks = 0, 0, 0, 0, 0, 0
    for e in range(experts + 1):
        count = counts[e] if e < experts else 0
        if count > 0 or e == experts:
            records[at + EXPERT], records[at + FIRST], records[at + COUNT] = e, row, count
            records[at + ROWS], records[at + TILES] = rows, tiles
            records[at + WHOLE], records[at + BLOCKS] = whole, blocks
            at += RECORD
        if count > 0:
            counts[e] = row
            rest = count % DOT_ROWS
            row += count - rest + (tile_height(rest) if rest > 0 else 0)
            rows += count
            tiles += (count + DOT_ROWS - 1) // DOT_ROWS
            whole += count // TILE_ROWS
            blocks += (count + ROW_GROUP - 1) // ROW_GROUP
    words[0] = at // RECORD - 1
    for u in range(args[6]):
        words[1 + u] = records[at - RECORD + args[7 + 2 * u]] * args[8 + 2 * u]
    for p in range(pairs):
        places[p] = counts[ids[p]]
        counts[ids[p]] += 1


@intrinsic
def own_arguments(ty):
    """Return memory for the arguments of one op, on the stack."""

    def code(ctx, b, sig, a):
        return cgutils.alloca_once(b, ir.IntType(64), size=INNER_ARGS)

    return types.CPointer(types.int64)(), code


@jit
def record_of(records, count, kind, before):
    """Return the record of the unit of a `kind` that has `before` others before it."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if records[middle * RECORD + kind] <= before:
            low = middle
        else:
            high = middle
    return low


@op
def each_group(args, first, last, scratch):
    """records, words, kind and factor of the unit, inner op, its arguments, number of patches, patches."""
    records, kind, factor = i64_ptr(args[0]), args[2], args[3]
    arguments, patches = i64_ptr(args[5]), i64_ptr(args[7])
    own = own_arguments()
    place = record_of(records, i64_ptr(args[1])[0], kind, first // factor)
    while first < last:
        record = offset(records, place * RECORD)
        begin, end = record[kind] * factor, record[RECORD + kind] * factor
        for i in range(INNER_ARGS):
            own[i] = arguments[i]
        for p in range(args[6]):
            which, what, value = patches[p * PATCH], patches[p * PATCH + 1], patches[p * PATCH + 2]
            if what == ADVANCE:
                own[which] += record[FIRST] * value
            elif what == LOOK_UP:
                own[which] = i64_ptr(value)[record[EXPERT]]
            else:
                own[which] = record[COUNT]
        stop = min(last, end)
        if stop > first:
            call_op(args[4], own, first - begin, stop - begin, scratch)
            first = stop
        place += 1


def row_capacity(pairs: int, experts: int) -> int:
    """Return how many rows are kept for so many pairs, however they fall to experts."""
    return pairs + min(pairs, 3 * experts)  # a tile of 2 rows has 2 more, one of 5 has 3


def group(launcher: Launcher, ids: np.ndarray, experts: int, units: tuple[Unit, ...]) -> Groups:
    """Note the sorting of pairs by their experts, ids int64 [T, k] of `route`; `units` are those of what follows."""
    assert ids.dtype == np.int64 and ids.flags.c_contiguous
    assert 8 * experts <= SCRATCH_BYTES, "counts fit an op's scratch"
    pairs = ids.size
    active = min(pairs, experts)
    records = launcher.empty(((active + 1) * RECORD,), np.int64)
    words, places = launcher.empty((1 + len(units),), np.int64), launcher.empty((pairs,), np.int64)
    settings = [number for unit in units for number in unit]
    args = ids, pairs, experts, records, words, places, len(units), *settings
    launcher.emit(group_pairs, *args, items=1, work=4 * (pairs + experts), alone_below=2)
    return Groups(records, words, places, units, pairs, row_capacity(pairs, experts))


def emit_grouped(
    launcher: Launcher, groups: Groups, inner: Op, *args: Any, unit: Unit, work: int, holds: object = None
) -> None:
    """Run or note `inner` for the rows of every expert.

    Args:
        args: as for `Launcher.emit`, or `ExpertRows`, `ExpertArray`, `ExpertRowCount()`.
        unit: what its items are, one of `groups.units`. work: multiply-adds of all rows together.
        holds: what owns the memory at the addresses in tables.
    """
    assert len(args) <= INNER_ARGS, f"{inner.name} has too many arguments"
    words, patches = np.zeros(INNER_ARGS, np.int64), []
    for place, arg in enumerate(args):
        if isinstance(arg, ExpertRows):
            words[place] = address_of(arg.array)
            patches += [place, ADVANCE, arg.step]
        elif isinstance(arg, ExpertArray):
            patches += [place, LOOK_UP, address_of(arg.table)]
        elif isinstance(arg, ExpertRowCount):
            patches += [place, PUT_COUNT, 0]
        elif arg is not None:
            words[place] = float_bits(arg) if isinstance(arg, float) else int(arg)
    at = 1 + groups.units.index(unit)
    # All pairs may have the same expert, or as many as there are.
    most = unit.factor * groups.pairs
    fewest = unit.factor * -(-groups.pairs // ROWS_IN[unit.kind])
    patched = inner.address, words, len(patches) // PATCH, np.array(patches, np.int64)
    launcher.emit(
        each_group,
        *(groups.records, groups.words, unit.kind, unit.factor, *patched),
        items=most,
        work=work,
        items_at=groups.words[at : at + 1],
        alone_below=1 + threads.SMALL_WORK * most // max(1, work),
        grain=max(1, fewest // (launcher.num_threads * threads.PIECES)),
        holds=holds,
    )
