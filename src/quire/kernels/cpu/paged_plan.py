"""How attention of a step is cut into items: decided by compiled code when the step runs, for lengths change.

A unit is some consecutive queries of one sequence; an item is a unit and a KV head. Units take as many queries as fill
register tiles, fewer where that would leave threads without work. A unit that costs more than a fair piece of the step,
and has few rows, is split over its context; its parts are then folded by `merge`. Expensive items come first, so that
threads end at about the same time. None of this changes a bit of any result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.jit import op, part
from quire.kernels.cpu.paged_softmax import (
    COST,
    COUNT,
    FIRST,
    LAST,
    LENGTH,
    POSITION,
    RECORD,
    ROW,
    SEQUENCE,
    SLOT,
    SLOTS,
    end_seen,
    first_seen,
)
from quire.kernels.cpu.paged_tiles import GROUP, SEGMENT
from quire.kernels.cpu.pointers import ints, longs
from quire.kernels.cpu.threads import Launcher

UNIT_ROWS = 64  # an item aims for: keys and values that another core's cache gave up are read once for them
SPLIT_ROWS = 16  # units with more rows are not split
PIECES = 4  # items there should be for each thread
PARTIAL_BYTES = 1 << 26  # at most for the parts of split units
ROW_COST = 4  # reading a position costs as much as this many rows do
ALONE_COST = 1 << 18  # below this many multiply-adds one thread does everything
BUCKETS = 64  # of the sort by cost

# Arguments of `plan`
STARTS, LENGTHS, SEQUENCES, P_BEHIND, P_AHEAD, P_HEADS, P_GROUP, P_SIZE = range(8)
WANTED, MOST, LEAST, P_SLOT_ROWS, CAPACITY, STAGED, ITEMS, MERGES, WORDS = range(8, 17)

# Words that `plan` writes: records x KV heads, for one thread and for all
ATTEND_ALONE, ATTEND_SHARED, MERGE_ALONE, MERGE_SHARED, WORD_COUNT = range(5)


@part
def count_units(args, queries):
    """Return how many units there are with so many queries each."""
    starts, units = ints(args[STARTS]), 0
    for s in range(args[SEQUENCES]):
        units += (np.int64(starts[s + 1]) - np.int64(starts[s]) + queries - 1) // queries
    return units


@part
def choose_queries(args):
    """Return how many queries a unit takes: `MOST`, or fewer, down to `LEAST`, for enough items."""
    queries = args[MOST]
    while queries > args[LEAST] and count_units(args, queries) * args[P_HEADS] < args[WANTED]:
        queries = max(args[LEAST], queries // 2 // args[LEAST] * args[LEAST])
    return queries


@part
def stage_units(args, queries):
    """Write the units, unsplit; return how many and what they cost together, for one KV head."""
    starts, lengths, staged = ints(args[STARTS]), ints(args[LENGTHS]), longs(args[STAGED])
    units, cost = 0, 0
    for s in range(args[SEQUENCES]):
        begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
        length = np.int64(lengths[s])
        before = length - (end - begin)
        for row in range(begin, end, queries):
            count, position = min(queries, end - row), before + row - begin
            low, high = first_seen(position, args[P_BEHIND]), end_seen(position + count - 1, args[P_AHEAD], length)
            at = units * RECORD
            staged[at + SEQUENCE], staged[at + ROW], staged[at + COUNT] = s, row, count
            staged[at + POSITION], staged[at + SLOT], staged[at + SLOTS] = position, 0, 0
            staged[at + LENGTH] = length
            staged[at + FIRST], staged[at + LAST] = low // SEGMENT, (high + SEGMENT - 1) // SEGMENT
            staged[at + COST] = (high - low) * (count * args[P_GROUP] + ROW_COST)
            cost += staged[at + COST]
            units += 1
    return units, cost


@part
def split_units(args, units, fair):
    """Split units that cost more than `fair`; return the numbers of units, merges and parts."""
    staged, merges, heads = longs(args[STAGED]), longs(args[MERGES]), args[P_HEADS]
    made, merged, slots = units, 0, 0
    for u in range(units):
        at = u * RECORD
        first, cost = staged[at + FIRST], staged[at + COST]
        segments = staged[at + LAST] - first
        fits = staged[at + COUNT] * args[P_GROUP] <= args[P_SLOT_ROWS] and slots + segments * heads <= args[CAPACITY]
        if cost <= fair or segments < 2 or not fits:
            continue
        pieces = min(segments, (cost + fair - 1) // fair)
        per = (segments + pieces - 1) // pieces
        staged[at + SLOT], staged[at + SLOTS] = slots - first, segments
        for i in range(RECORD):
            merges[merged * RECORD + i] = staged[at + i]
        staged[at + LAST], staged[at + COST] = first + per, cost * per // segments
        for begin in range(first + per, first + segments, per):
            for i in range(RECORD):
                staged[made * RECORD + i] = staged[at + i]
            end = min(begin + per, first + segments)
            staged[made * RECORD + FIRST], staged[made * RECORD + LAST] = begin, end
            staged[made * RECORD + COST] = cost * (end - begin) // segments
            made += 1
        merged, slots = merged + 1, slots + segments * heads
    return made, merged, slots


@part
def sort_units(args, units, scratch):
    """Copy the units into the list of items, expensive ones first."""
    staged, items, places = longs(args[STAGED]), longs(args[ITEMS]), longs(scratch)
    largest = 1
    for u in range(units):
        largest = max(largest, staged[u * RECORD + COST])
    for bucket in range(BUCKETS + 1):
        places[bucket] = 0
    for u in range(units):
        places[BUCKETS - staged[u * RECORD + COST] * (BUCKETS - 1) // largest] += 1
    for bucket in range(BUCKETS):
        places[bucket + 1] += places[bucket]
    for u in range(units):
        bucket = BUCKETS - 1 - staged[u * RECORD + COST] * (BUCKETS - 1) // largest
        to = places[bucket] * RECORD
        places[bucket] += 1
        for i in range(RECORD):
            items[to + i] = staged[u * RECORD + i]


@op
def plan(args, first, last, scratch):
    """Write the items of a step, the rows to merge, and how many there are of both. One item."""
    heads, wanted, words = args[P_HEADS], args[WANTED], longs(args[WORDS])
    units, cost = stage_units(args, choose_queries(args))
    work, merged, slots = cost * heads * args[P_SIZE] * 2, 0, 0
    alone = wanted == 0 or work < ALONE_COST
    if not alone:
        units, merged, slots = split_units(args, units, max(1, cost * heads // wanted))
    sort_units(args, units, scratch)
    together = alone or slots * args[P_SLOT_ROWS] * args[P_SIZE] < ALONE_COST
    words[ATTEND_ALONE], words[ATTEND_SHARED] = (units * heads, 0) if alone else (0, units * heads)
    words[MERGE_ALONE], words[MERGE_SHARED] = (merged * heads, 0) if together else (0, merged * heads)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where `plan` writes.

    Attributes:
        items, merges: int64 records, see paged_softmax.py. words: int64 [WORD_COUNT]. partials: float32 slots.
        slot_rows, room_rows: rows that a slot, and an item, have room for.
        item_limit, merge_limit: records there may be.
    """

    items: np.ndarray
    merges: np.ndarray
    words: np.ndarray
    partials: np.ndarray
    slot_rows: int
    room_rows: int
    item_limit: int
    merge_limit: int


def make_plan(
    launcher: Launcher, tokens: int, metadata: AttentionMetadata, params: AttentionParams, block_size: int
) -> Plan:
    """Emit `plan` for layers with these heads and this window; sizes follow from shapes alone."""
    heads, size = params.num_kv_heads, params.out_size
    group = params.num_heads // heads
    wanted = PIECES * launcher.num_threads if launcher.num_threads > 1 else 0
    least = GROUP // gcd(GROUP, group)
    most = max(1, UNIT_ROWS // group // least * least or UNIT_ROWS // group)
    slot_rows = -(-max(group, SPLIT_ROWS) // 16) * 16
    segments = -(-metadata.block_tables.shape[1] * block_size // SEGMENT)
    slot = 2 * (slot_rows + 16) + slot_rows * (-(-size // 32) * 32)  # elements, as `slot_floats` says
    capacity = min(wanted * segments, PARTIAL_BYTES // (4 * slot))
    item_limit, merge_limit = tokens + 2 * wanted + 1, wanted + 1
    empty = launcher.empty
    staged, items = empty((item_limit, RECORD), np.int64), empty((item_limit, RECORD), np.int64)
    merges, words = empty((merge_limit, RECORD), np.int64), empty((WORD_COUNT,), np.int64)
    partials = empty((capacity, slot), np.float32)
    args: tuple[Any, ...] = (
        metadata.cu_query_lens, metadata.seq_lens, metadata.seq_lens.shape[0], *params.reach, heads, group,
        size, wanted, most, min(least, most), slot_rows, capacity, staged, items, merges, words,
    )  # fmt: skip
    launcher.emit(plan, *args, items=1, work=0)
    return Plan(items, merges, words, partials, slot_rows, max(most, 1) * group, item_limit, merge_limit)
