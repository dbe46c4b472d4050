"""Paged attention as the backend calls it: cutting a step into work items, and the instructions of one layer.

Compiled code cuts when the step runs, for lengths change between runs. A unit is some consecutive queries of one
sequence; an item is a unit and a KV head. Units take as many queries as fill register tiles, fewer where threads would
be left without work. A unit that costs more than a fair share of the step, and has few rows, is split over its context
(flash-decoding); its partial results are then combined by `merge`. Expensive items come first, so that threads end at
about the same time. None of this changes a bit of any result.

The kernels are in attention_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.attention_kernels import (
    ATTEND,
    ATTEND_LATENT,
    COST,
    COUNT,
    FIRST,
    FIRST_PARTIAL,
    LAST,
    LENGTH,
    NUM_PARTIALS,
    POSITION,
    ROW,
    SEQUENCE,
    TILE,
    attend_latent_pairs,
    attend_pairs,
    end_visible,
    first_visible,
    merge,
)
from quire.kernels.cpu.cache import CPUKVCache
from quire.kernels.cpu.jit import Op, jit, op
from quire.kernels.cpu.pointers import i32_ptr, i64_ptr
from quire.kernels.cpu.sizes import (
    GROUP,
    RECORD,
    SCRATCH_BYTES,
    SEGMENT,
    WORD_COUNT,
    PlanSizes,
    head_groups,
    plan_sizes,
)
from quire.kernels.cpu.threads import Launcher

ROW_COST = 4  # reading a position costs as much as computing it for this many rows
ALONE_COST = 1 << 18  # below this many multiply-adds one thread does everything
BUCKETS = 64  # of the sort by cost

# Arguments of `plan`
STARTS, LENGTHS, SEQUENCES, P_BEHIND, P_AHEAD, P_HEADS, P_GROUP, P_SIZE = range(8)
TARGET_ITEMS, MAX_QUERIES, MIN_QUERIES, P_PARTIAL_ROWS, CAPACITY, STAGED, ITEMS, MERGES, WORDS = range(8, 17)

# Words that `plan` writes: records x KV heads, for one thread and for all
ATTEND_ALONE, ATTEND_SHARED, MERGE_ALONE, MERGE_SHARED = range(WORD_COUNT)


@jit
def count_units(args, queries):
    """Return how many units there are with so many queries each."""
    starts, units = i32_ptr(args[STARTS]), 0
    for s in range(args[SEQUENCES]):
        units += (np.int64(starts[s + 1]) - np.int64(starts[s]) + queries - 1) // queries
    return units


@jit
def choose_queries(args):
    """Return how many queries a unit takes: `MAX_QUERIES`, or fewer, down to `MIN_QUERIES`, for enough items."""
    queries = args[MAX_QUERIES]
    while queries > args[MIN_QUERIES] and count_units(args, queries) * args[P_HEADS] < args[TARGET_ITEMS]:
        queries = max(args[MIN_QUERIES], queries // 2 // args[MIN_QUERIES] * args[MIN_QUERIES])
    return queries


@jit
def stage_units(args, queries):
    """Write the units, unsplit; return how many and what they cost together, for one KV head."""
    starts, lengths, staged = i32_ptr(args[STARTS]), i32_ptr(args[LENGTHS]), i64_ptr(args[STAGED])
    units, cost = 0, 0
    for s in range(args[SEQUENCES]):
        begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
        length = np.int64(lengths[s])
        before = length - (end - begin)
        for row in range(begin, end, queries):
            count, position = min(queries, end - row), before + row - begin
            low, high = (
                first_visible(position, args[P_BEHIND]),
                end_visible(position + count - 1, args[P_AHEAD], length),
            )
            at = units * RECORD
            staged[at + SEQUENCE], staged[at + ROW], staged[at + COUNT] = s, row, count
            staged[at + POSITION], staged[at + FIRST_PARTIAL], staged[at + NUM_PARTIALS] = position, 0, 0
            staged[at + LENGTH] = length
            staged[at + FIRST], staged[at + LAST] = low // SEGMENT, (high + SEGMENT - 1) // SEGMENT
            staged[at + COST] = (high - low) * (count * args[P_GROUP] + ROW_COST)
            cost += staged[at + COST]
            units += 1
    return units, cost


@jit
def split_units(args, units, fair):
    """Split units that cost more than `fair`; return the numbers of units, merges and partial results."""
    staged, merges, heads = i64_ptr(args[STAGED]), i64_ptr(args[MERGES]), args[P_HEADS]
    made, merged, partials = units, 0, 0
    for u in range(units):
        at = u * RECORD
        first, cost = staged[at + FIRST], staged[at + COST]
        segments = staged[at + LAST] - first
        fits = (
            staged[at + COUNT] * args[P_GROUP] <= args[P_PARTIAL_ROWS] and partials + segments * heads <= args[CAPACITY]
        )
        if cost <= fair or segments < 2 or not fits:
            continue
        pieces = min(segments, (cost + fair - 1) // fair)
        per = (segments + pieces - 1) // pieces
        staged[at + FIRST_PARTIAL], staged[at + NUM_PARTIALS] = partials - first, segments
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
        merged, partials = merged + 1, partials + segments * heads
    return made, merged, partials


@jit
def sort_units(args, units, scratch):
    """Copy the units into the list of items, expensive ones first."""
    staged, items, places = i64_ptr(args[STAGED]), i64_ptr(args[ITEMS]), i64_ptr(scratch)
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
    heads, target, words = args[P_HEADS], args[TARGET_ITEMS], i64_ptr(args[WORDS])
    units, cost = stage_units(args, choose_queries(args))
    work, merged, partials = cost * heads * args[P_SIZE] * 2, 0, 0
    alone = target == 0 or work < ALONE_COST
    if not alone:
        units, merged, partials = split_units(args, units, max(1, cost * heads // target))
    sort_units(args, units, scratch)
    together = alone or partials * args[P_PARTIAL_ROWS] * args[P_SIZE] < ALONE_COST
    words[ATTEND_ALONE], words[ATTEND_SHARED] = (units * heads, 0) if alone else (0, units * heads)
    words[MERGE_ALONE], words[MERGE_SHARED] = (merged * heads, 0) if together else (0, merged * heads)


@dataclass(frozen=True, slots=True)
class Plan:
    """Arrays that `plan` fills: int64 records, words [WORD_COUNT], float32 partials; see attention_kernels.py."""

    items: np.ndarray
    merges: np.ndarray
    words: np.ndarray
    partials: np.ndarray
    sizes: PlanSizes


def make_plan(
    launcher: Launcher, tokens: int, metadata: AttentionMetadata, params: AttentionParams, block_size: int
) -> Plan:
    """Emit `plan` for layers with these heads and this window."""
    heads, empty = params.num_kv_heads, launcher.empty
    sizes = plan_sizes(launcher.num_threads, tokens, metadata.block_tables.shape[1] * block_size, params)
    staged, items = empty((sizes.items, RECORD), np.int64), empty((sizes.items, RECORD), np.int64)
    merges, words = empty((sizes.merges, RECORD), np.int64), empty((WORD_COUNT,), np.int64)
    partials = empty((sizes.num_partials, sizes.partial_size), np.float32)
    step = metadata.cu_query_lens, metadata.seq_lens, metadata.seq_lens.shape[0], *params.reach
    shape = heads, params.num_heads // heads, params.out_size
    limits = sizes.target_items, sizes.max_queries, sizes.min_queries, sizes.partial_rows, sizes.num_partials
    launcher.emit(plan, *step, *shape, *limits, staged, items, merges, words, items=1, work=0)
    return Plan(items, merges, words, partials, sizes)


NEVER = 1 << 60  # items that one thread does alone where the plan says so


def attend_op(dtype: np.dtype, paired: bool, latent: bool = False) -> Op:
    """Return the op for caches of this storage dtype."""
    if latent:
        return attend_latent_pairs if paired else ATTEND_LATENT[dtype]
    return attend_pairs if paired else ATTEND[dtype]


def paged_attention(
    launcher: Launcher,
    q: np.ndarray,
    cache: CPUKVCache,
    metadata: AttentionMetadata,
    params: AttentionParams,
    fresh: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Emit attention of q [T, Hq*D], see `Backend.paged_attention` -> [T, Hq * size of a value].

    cu_query_lens, seq_lens and block_tables are int32 and read when the program runs; rows of block_tables may lie
    apart. The first call for a metadata object, and for each window and shape of heads, also emits the plan, which
    later layers use: a metadata object is for one step, or for one recording.
    """
    assert metadata.cu_query_lens.dtype == metadata.seq_lens.dtype == metadata.block_tables.dtype == np.int32
    assert metadata.cu_query_lens.flags.c_contiguous and metadata.seq_lens.flags.c_contiguous
    assert metadata.block_tables.shape[1] <= 1 or metadata.block_tables.strides[1] == 4
    q, stride = as_rows(q)
    tokens = q.shape[0]
    out = launcher.empty((tokens, params.num_heads * params.out_size))
    if params.value_size is not None:
        params = replace(params, num_kv_heads=head_groups(params.num_heads))
    if tokens == 0:
        return out
    key = (*params.reach, params.num_heads, params.num_kv_heads, params.out_size, cache.block_size)
    if key not in metadata.plans:
        metadata.plans[key] = make_plan(launcher, tokens, metadata, params, cache.block_size)
    _emit(launcher, q, stride, out, cache, metadata, params, metadata.plans[key])
    return out


def _emit(
    launcher: Launcher,
    q: np.ndarray,
    stride: int,
    out: np.ndarray,
    cache: CPUKVCache,
    metadata: AttentionMetadata,
    params: AttentionParams,
    plan: Plan,
) -> None:
    """Emit attention for the items and, after it, the merging of partial results of split ones."""
    heads, size = params.num_kv_heads, params.head_size
    tables = metadata.block_tables
    scores = float(params.scale), float(params.softcap or 0.0), _floats(params.sinks), _floats(params.alibi_slopes)
    storage = cache.keys, cache.values, cache.key_scales, cache.value_scales
    before = q, stride, out, *storage, tables, tables.strides[0] // 4
    sizes = params.num_heads, heads, size, params.out_size, cache.block_size
    after = plan.partials, *sizes, *params.reach, *scores, plan.sizes.partial_rows, plan.sizes.item_rows
    assert _scratch_needed(plan.sizes, size, cache.paired) <= SCRATCH_BYTES, (
        f"{plan.sizes.item_rows} rows of {size} elements"
    )
    attend = attend_op(cache.keys.dtype, cache.paired, cache.latent)
    shared = launcher.num_threads > 1
    for instruction, records, limit, alone, together in (
        (attend, plan.items, plan.sizes.items, ATTEND_ALONE, ATTEND_SHARED),
        (merge, plan.merges, plan.sizes.merges, MERGE_ALONE, MERGE_SHARED),
    ):
        if instruction is merge and not shared:
            continue
        for word, alone_below in ((alone, NEVER), (together, 0))[: 1 + shared]:
            at = plan.words[word : word + 1]
            args = (*before, records, *after)
            launcher.emit(
                instruction,
                *args,
                items=limit * heads,
                work=0,
                items_at=at,
                alone_below=alone_below,
                grain=1,
                num_bytes=partial(_kv_bytes, cache, metadata.seq_lens, params) if instruction is attend else 0,
            )


def _kv_bytes(cache: CPUKVCache, seq_lens: np.ndarray, params: AttentionParams) -> int:
    """Return the bytes of keys and values that the sequences of a step see, each once."""
    arrays = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    of_block = sum([array.nbytes // array.shape[0] for array in arrays if array is not None])
    seen = np.minimum(seq_lens, params.sliding_window or seq_lens)
    return int(seen.sum()) * of_block // cache.block_size


def _floats(values: np.ndarray | None) -> np.ndarray | None:
    """Return sinks or slopes as kernels want them."""
    return None if values is None else np.require(values, np.float32, ["C", "A"])


def _scratch_needed(sizes: PlanSizes, size: int, paired: bool) -> int:
    """Return an upper bound of the scratch an item takes, see `row_state` and every `item_buffers`."""
    rows, padded = max(sizes.item_rows, sizes.partial_rows), -(-size // 32) * 32
    state = rows * (4 * padded + 36) + 16384
    if paired:
        pairs = 2 * (-(-size // 32) * 32)  # bytes of a row
        return state + 4 * GROUP * (padded + SEGMENT) + (rows + 2 * SEGMENT) * pairs + 64 * padded
    return state + 4 * rows * (padded + SEGMENT + size) + 8 * TILE * padded
