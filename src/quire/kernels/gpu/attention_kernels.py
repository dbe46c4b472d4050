"""Triton kernels of paged attention: one for prompts, chunks and single tokens alike, and one that joins its parts.

A *tile* is BM rows: BQ queries of a sequence times the query heads of one KV head, which share its keys and values. A
program goes through the keys that its tile sees, BN at a time, with the softmax kept up to date as it goes (Dao 2023,
FlashAttention-2, algorithm 1). Where there are few tiles their keys are split among programs, each of which computes
its own share from the sequence's length; what they find is joined by a second kernel (Dao et al. 2023, Flash-Decoding).
So nothing here depends on lengths that the host would have to know, and a launch can be captured and replayed.

Logits are kept times log2(e), for exp2. Keys outside of what a tile sees are not loaded at all: they may be anything.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.pdl import launch_dependents, wait_for_dependencies

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SEARCH: tl.constexpr = tl.constexpr(256)  # sequences that are looked at at once
JOINED_AT_ONCE: tl.constexpr = tl.constexpr(8)  # shares of keys that are joined at once


class Batch(NamedTuple):
    """Of the sequences of a step: first rows int32 [S + 1], lengths int32 [S], block tables int32 [S, blocks]."""

    cu: Any
    seq_lens: Any
    tables: Any


def batch_of(metadata: AttentionMetadata) -> Batch:
    """Return the sequences of a step as kernels take them."""
    return Batch(metadata.cu_query_lens, metadata.seq_lens, metadata.block_tables)


# Arguments that differ from step to step, so that no kernel is compiled once more for some of their values.
COUNTS = ["table_step", "sequences", "splits", "parts", "fresh_from"]


class Layer(NamedTuple):
    """What is constant for a layer, and compiled into its kernels: see `AttentionParams` and `KVCache`."""

    heads: int
    kv_heads: int
    size: int
    padded: int  # to a power of two
    block_size: int
    causal: bool
    window: bool
    behind: int  # keys before its own that a query sees, with a window


class Tiling(NamedTuple):
    """The tiles of a launch, which its kernel is compiled for.

    rows: of a tile: `queries` times `tile_heads` of them are used. head_tiles: tiles of the heads of one KV head.
    keys: that a tile goes through at a time.
    one_tile: each sequence is one tile, and those with more queries than it has are left out. short: sequences of so
        many queries are left out where it is not. single: every sequence has one query.
    least: keys of the smallest share. chunk: keys of a share if that is fixed, or 0.
    """

    rows: int
    queries: int
    tile_heads: int
    head_tiles: int
    keys: int
    least: int
    single: bool
    short: int = 0
    one_tile: bool = False
    chunk: int = 0


class Form(NamedTuple):
    """What kernels are compiled for. pdl: see `pdl.py`."""

    layer: Layer
    tiling: Tiling
    pdl: bool


@triton.jit
def find_tile(batch, tile, sequences, TILING: tl.constexpr):
    """Return the sequence of a tile, the first row of that, its queries, its length, and the tile's first query.

    With `one_tile` every sequence has one. Otherwise sequence s has those from cu[s] // queries + s on, so that each
    has enough and the next sequence's are found without a sum over those before. A tile that does not exist, or is of a
    sequence of up to `short` queries, begins behind the last query.
    """
    BQ: tl.constexpr = TILING.queries
    if TILING.one_tile:
        s, first = tile, 0
    else:
        s = -1
        for base in range(0, sequences, SEARCH):
            at = base + tl.arange(0, SEARCH)
            begins = tl.load(batch.cu + at, mask=at < sequences, other=0) // BQ + at
            s += tl.sum(((at < sequences) & (begins <= tile)).to(tl.int32), 0)
        first = (tile - tl.load(batch.cu + s) // BQ - s) * BQ
    if TILING.single:
        start, queries = s, 1
    else:
        start = tl.load(batch.cu + s)
        queries = tl.load(batch.cu + s + 1) - start
        if TILING.one_tile:
            first = tl.where(queries <= BQ, 0, queries)
        else:
            first = tl.where(queries > TILING.short, first, queries)
    return s, start, queries, tl.load(batch.seq_lens + s), first


@triton.jit
def seen_keys(length, queries, first, LAYER: tl.constexpr, TILING: tl.constexpr):
    """Return the range of keys that any query of a tile sees."""
    context = length - queries
    last = tl.minimum(first + TILING.queries, queries) - 1
    low, high = 0, length
    if LAYER.causal:
        high = tl.minimum(high, context + last + 1)
    if LAYER.window:
        low = tl.maximum(0, context + first - LAYER.behind)
        if not LAYER.causal:
            high = tl.minimum(high, context + last + LAYER.behind + 1)
    return low, high


@triton.jit
def shares(low, high, splits, TILING: tl.constexpr):
    """Return where the first share of a tile's keys begins, how long each is, and how many there are.

    Shares are of `chunk` keys, counted from the sequence's first, or, where that is 0, as long as it takes to have no
    more than `splits`, and at least `least`.
    """
    BN: tl.constexpr = TILING.keys
    if TILING.chunk > 0:
        begin, length = low // TILING.chunk * TILING.chunk, TILING.chunk
    else:
        begin = low // BN * BN
        length = tl.maximum((high - begin + splits - 1) // splits, TILING.least)
        length = (length + BN - 1) // BN * BN
    return begin, length, tl.maximum((high - begin + length - 1) // length, 0)


@triton.jit
def joined(m, total, acc, other_m, other_total, other_acc):
    """Return the softmax over two sets of keys; rounding is the same in every kernel that calls this."""
    most = tl.maximum(m, other_m)
    safe = tl.where(most == float("-inf"), 0.0, most)
    own, other = tl.exp2(m - safe), tl.exp2(other_m - safe)
    total = tl.fma(other_total, other, total * own)
    if len(acc.shape) == 2:
        own, other = tl.broadcast_to(own[:, None], acc.shape), tl.broadcast_to(other[:, None], acc.shape)
    else:
        own, other = tl.broadcast_to(own, acc.shape), tl.broadcast_to(other, acc.shape)
    return most, total, tl.fma(other_acc, other, acc * own)


@triton.jit
def with_sink(m, total, acc, sink):
    """Return a softmax with an attention sink: one more logit, without a value."""
    most = tl.maximum(m, sink)
    safe = tl.where(most == float("-inf"), 0.0, most)
    own = tl.exp2(m - safe)
    return total * own + tl.exp2(sink - safe), acc * (own[:, None] if len(acc.shape) == 2 else own)


@triton.jit
def load_vectors(at, live, LAYER: tl.constexpr, MASKED: tl.constexpr):
    """Load the vectors [keys, padded] at these addresses; zeros in place of those that are not live, if MASKED."""
    if LAYER.padded != LAYER.size:
        inside = (tl.arange(0, LAYER.padded) < LAYER.size)[None, :]
        if MASKED:
            inside = inside & live[:, None]
        return tl.load(at, mask=inside, other=0.0)
    elif MASKED:
        return tl.load(at, mask=live[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def logits_of(s, keys, live, tile, scaled, constants, LAYER: tl.constexpr, MASKED: tl.constexpr):
    """Make logits of products [rows, keys], -inf where a query does not see a key; not scaled where nothing else is.

    scaled: whether keys had scales of their own. tile, constants: see `attend`.
    """
    _, _, _, _, positions, slopes = tile
    scale, cap = constants
    if cap is not None or slopes is not None or scaled:
        s = s * scale
    if cap is not None:
        decayed = tl.exp2(-2 * LOG2E * tl.abs(s))  # s is divided by the cap already
        s = tl.where(s < 0, -cap, cap) * ((1 - decayed) / (1 + decayed))
    if slopes is not None:
        s = s + slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    if MASKED:
        seen = live[None, :]
        if LAYER.causal:
            seen = seen & (keys[None, :] <= positions[:, None])
        if LAYER.window:
            seen = seen & (keys[None, :] >= positions[:, None] - LAYER.behind)
            if not LAYER.causal:
                seen = seen & (keys[None, :] <= positions[:, None] + LAYER.behind)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def attend(state, begin, end, tile, source, constants, LAYER: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """Continue a softmax over keys begin .. end. Without MASKED every query sees all of them.

    state: the largest logit of each row, the sum of their exponentials, and the weighted sum of values.
    tile: queries [rows, padded], the range of keys that may be loaded, the position of the first query and of each
        row's, and ALiBi slopes of rows or None.
    source: data and scales (or None) of the cache, block table of the sequence, KV head.
    constants: scale, and softcap or None.
    """
    m, total, acc = state
    q, low, high, _, _, slopes = tile
    data, scales, table, head = source
    scale, cap = constants
    PLAIN: tl.constexpr = cap is None and slopes is None and scales is None
    SIDE: tl.constexpr = LAYER.kv_heads * LAYER.block_size
    within = tl.arange(0, LAYER.padded)
    keys = begin + tl.arange(0, BN)
    next_block = tl.load(table + keys // LAYER.block_size, mask=keys < high, other=0)
    for at in range(begin, end, BN):
        keys = at + tl.arange(0, BN)
        live = (keys >= low) & (keys < high)
        # Blocks are looked up one turn ahead, so that loads of vectors need not wait and can be far ahead themselves.
        block = next_block
        next_block = tl.load(table + (keys + BN) // LAYER.block_size, mask=keys + BN < high, other=0)
        vector = block.to(tl.int64) * (2 * SIDE) + head * LAYER.block_size + keys % LAYER.block_size
        k_at = data + vector[:, None] * LAYER.size + within[None, :]
        k = load_vectors(k_at, live, LAYER, MASKED)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if scales is not None:
            s = s * tl.load(scales + vector, mask=live, other=0.0)[None, :]
        s = logits_of(s, keys, live, tile, scales is not None, constants, LAYER, MASKED)
        most = tl.max(s, 1)
        most = tl.maximum(m, most * scale if PLAIN else most)
        safe = tl.where(most == float("-inf"), 0.0, most) if MASKED else most
        p = tl.exp2((s * scale if PLAIN else s) - safe[:, None])
        decay = tl.exp2(m - safe)
        total = total * decay + tl.sum(p, 1)
        if scales is not None:
            p = p * tl.load(scales + vector + SIDE, mask=live, other=0.0)[None, :]
        v = load_vectors(k_at + SIDE * LAYER.size, live, LAYER, MASKED)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        m = most
    return m, total, acc


@triton.jit
def nothing(ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Return the softmax over no keys."""
    total = tl.zeros([ROWS], tl.float32)
    return total - float("inf"), total, tl.zeros([ROWS, PADDED], tl.float32)


@triton.jit
def attend_share(begin, end, tile, source, constants, LAYER: tl.constexpr, TILING: tl.constexpr):
    """Return the softmax of a tile over keys begin .. end, see `attend`.

    `begin` is a multiple of the keys that are gone through at a time. Tiles of many queries mask only those that some
    query may not see. For tiles of few memory is the bound and masks cost nothing, and one loop keeps loads in flight;
    so do those of a fixed chunk, which are the same whoever computes them.
    """
    BN: tl.constexpr = TILING.keys
    _, _, high, position, _, _ = tile
    state = nothing(TILING.rows, LAYER.padded)
    if (not TILING.one_tile) and TILING.chunk == 0:
        free_from, free_to = begin, tl.minimum(end, high) // BN * BN
        if LAYER.window:  # the last query of the tile sees the fewest of the first keys
            last = tl.maximum(position + TILING.queries - 1 - LAYER.behind, 0)
            free_from = tl.minimum(tl.maximum(begin, (last + BN - 1) // BN * BN), end)
        if LAYER.causal:  # the first query of the tile sees the fewest of the last keys
            free_to = tl.minimum(free_to, (position + 1) // BN * BN)
        elif LAYER.window:
            free_to = tl.minimum(free_to, (position + LAYER.behind + 1) // BN * BN)
        free_to = tl.maximum(free_to, free_from)
        if LAYER.window:
            state = attend(state, begin, free_from, tile, source, constants, LAYER, BN, True)
        state = attend(state, free_from, free_to, tile, source, constants, LAYER, BN, False)
        begin = free_to
    return attend(state, begin, end, tile, source, constants, LAYER, BN, True)


@triton.jit
def attend_in_chunks(begin, count, tile, source, constants, LAYER: tl.constexpr, TILING: tl.constexpr):
    """Return the softmax of a tile over all of its keys, `count` chunks of them each by itself, joined in order."""
    m, total, acc = nothing(TILING.rows, LAYER.padded)
    for index in range(count):
        at = begin + index * TILING.chunk
        end = tl.minimum(at + TILING.chunk, tile[2])
        other_m, other_total, other_acc = attend_share(at, end, tile, source, constants, LAYER, TILING)
        m, total, acc = joined(m, total, acc, other_m, other_total, other_acc)
    return m, total, acc


@triton.jit
def store_share(
    workspace, at, begin, share, valid, mask, tile, source, constants, LAYER: tl.constexpr, TILING: tl.constexpr
):
    """Store the softmax of a tile over `share` keys from `begin` on, for each row at number `at` of the workspace."""
    sums, parts = workspace
    m, total, acc = attend_share(begin, tl.minimum(begin + share, tile[2]), tile, source, constants, LAYER, TILING)
    tl.store(sums + at * 2, m, mask=valid)
    tl.store(sums + at * 2 + 1, total, mask=valid)
    tl.store(parts + (at * LAYER.size)[:, None] + tl.arange(0, LAYER.padded)[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def attention_kernel(
    q, cache, extras, out, workspace, batch, table_step, sequences, splits, parts, fresh_from, FORM: tl.constexpr
):
    """Attention of one tile. Grid: tiles; KV heads times tiles of their query heads; splits.

    With a workspace the results of a share of keys go to its sums [rows, parts, 2] (largest logit, sum) and values
    [rows, parts, size], where a tile's rows are those from tile * queries * heads on; otherwise a tile's go to out
    [T, heads * size].

    Args:
        q: `Rows`. cache: data and scales (or None) of a `KVCache`. batch: `Batch`.
        table_step: elements from table to table. splits, parts: programs that share the keys of a tile, and how many
            shares there may be. fresh_from: sequences that begin in this step and have so many tokens are left out.
        extras: sinks and ALiBi slopes float32 [heads], or None; the scale of logits to base 2, and their cap or None.
    """
    LAYER: tl.constexpr = FORM.layer
    TILING: tl.constexpr = FORM.tiling
    launch_dependents(FORM.pdl)
    wait_for_dependencies(FORM.pdl)
    sinks, slopes, scale, cap = extras
    HEAD_TILES: tl.constexpr = TILING.head_tiles
    GROUP: tl.constexpr = LAYER.heads // LAYER.kv_heads
    SPLIT: tl.constexpr = workspace is not None
    number, head, split = tl.program_id(0), tl.program_id(1) // HEAD_TILES, tl.program_id(2)
    if not TILING.one_tile:
        number = tl.num_programs(0) - 1 - number  # those that see the most keys first
    s, start, queries, length, first = find_tile(batch, number, sequences, TILING)
    low, high = seen_keys(length, queries, first, LAYER, TILING)
    begin, share, count = shares(low, high, splits, TILING)
    if (first >= queries) | ((queries >= fresh_from) & (queries == length)) | (SPLIT & (split >= count)):
        return
    row = tl.arange(0, TILING.rows)
    own = row // TILING.tile_heads
    in_group = tl.program_id(1) % HEAD_TILES * TILING.tile_heads + row % TILING.tile_heads
    q_head = head * GROUP + in_group
    valid = (own < TILING.queries) & (first + own < queries) & (in_group < GROUP)
    token, within = (start + first + own).to(tl.int64), tl.arange(0, LAYER.padded)
    mask = valid[:, None] & (within < LAYER.size)[None, :]
    q_at = q.data + (token * q.stride + q_head * LAYER.size)[:, None] + within[None, :]
    values = tl.load(q_at, mask=mask, other=0.0).to(out.dtype.element_ty)
    source = (cache[0], cache[1], batch.tables + tl.cast(s, tl.int64) * table_step, head)
    constants, position = (scale, cap), length - queries + first
    if slopes is not None:
        slope = tl.load(slopes + q_head, mask=valid, other=0.0) * LOG2E
        tile = (values, low, high, position, position + own, slope)
    else:
        tile = (values, low, high, position, position + own, slopes)

    if SPLIT:
        at = ((number * TILING.queries + own).to(tl.int64) * LAYER.heads + q_head) * parts
        if TILING.chunk > 0:
            for index in range(split, count, splits):
                start = begin + index * share
                store_share(workspace, at + index, start, share, valid, mask, tile, source, constants, LAYER, TILING)
        else:
            start = begin + split * share
            store_share(workspace, at + split, start, share, valid, mask, tile, source, constants, LAYER, TILING)
    else:
        if TILING.chunk > 0:
            m, total, acc = attend_in_chunks(begin, count, tile, source, constants, LAYER, TILING)
        else:
            m, total, acc = attend_share(begin, high, tile, source, constants, LAYER, TILING)
        if sinks is not None:
            total, acc = with_sink(m, total, acc, tl.load(sinks + q_head, mask=valid, other=0.0) * LOG2E)
        result = acc / tl.where(total == 0, 1.0, total)[:, None]  # zeros for rows that see nothing
        into = out + (token * (LAYER.heads * LAYER.size) + q_head * LAYER.size)[:, None] + within[None, :]
        tl.store(into, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def joined_shares(sums, parts, at, count, LAYER: tl.constexpr):
    """Return one row's softmax over `count` shares of its keys, numbered from `at`, some at a time."""
    within = tl.arange(0, LAYER.padded)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros_like(within).to(tl.float32)
    for index in range(0, count, JOINED_AT_ONCE):
        some = index + tl.arange(0, JOINED_AT_ONCE)
        there = some < count
        mask = there[:, None] & (within < LAYER.size)[None, :]
        their_m = tl.load(sums + (at + some) * 2, mask=there, other=float("-inf"))
        their_total = tl.load(sums + (at + some) * 2 + 1, mask=there, other=0.0)
        their_acc = tl.load(parts + ((at + some) * LAYER.size)[:, None] + within[None, :], mask=mask, other=0.0)
        most = tl.maximum(m, tl.max(their_m, 0))
        safe = tl.where(most == float("-inf"), 0.0, most)
        weight, decay = tl.exp2(their_m - safe), tl.exp2(m - safe)
        total = total * decay + tl.sum(their_total * weight, 0)
        acc = acc * decay + tl.sum(their_acc * weight[:, None], 0)
        m = most
    return m, total, acc


@triton.jit
def joined_chunks(sums, parts, at, count, LAYER: tl.constexpr):
    """Return one row's softmax over `count` chunks of its keys, joined in order, as `attend_in_chunks` does it."""
    within = tl.arange(0, LAYER.padded)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros_like(within).to(tl.float32)
    for index in range(count):
        pair = sums + (at + index) * 2 + tl.zeros([1], tl.int32)
        part = tl.load(parts + (at + index) * LAYER.size + within, mask=within < LAYER.size, other=0.0)
        m, total, acc = joined(m, total, acc, tl.load(pair), tl.load(pair + 1), part)
    return m, total, acc


@triton.jit(do_not_specialize=COUNTS[1:])
def join_kernel(sinks, out, workspace, batch, sequences, splits, parts, fresh_from, FORM: tl.constexpr):
    """Join what `attention_kernel` found of one row in shares of the keys. Grid: tiles times `queries`; heads."""
    LAYER: tl.constexpr = FORM.layer
    TILING: tl.constexpr = FORM.tiling
    launch_dependents(FORM.pdl)
    wait_for_dependencies(FORM.pdl)
    tile, own, head = tl.program_id(0) // TILING.queries, tl.program_id(0) % TILING.queries, tl.program_id(1)
    _, start, queries, length, first = find_tile(batch, tile, sequences, TILING)
    if (first + own >= queries) | ((queries >= fresh_from) & (queries == length)):
        return
    low, high = seen_keys(length, queries, first, LAYER, TILING)
    _, _, count = shares(low, high, splits, TILING)
    within = tl.arange(0, LAYER.padded)
    sums, values = workspace
    at = (tl.program_id(0).to(tl.int64) * LAYER.heads + head) * parts
    if TILING.chunk > 0:
        m, total, acc = joined_chunks(sums, values, at, count, LAYER)
    else:
        m, total, acc = joined_shares(sums, values, at, count, LAYER)
    if sinks is not None:
        total, acc = with_sink(m, total, acc, tl.load(sinks + head) * LOG2E)
    result = acc / tl.where(total == 0, 1.0, total)
    into = out + tl.cast(start + first + own, tl.int64) * (LAYER.heads * LAYER.size) + head * LAYER.size
    tl.store(into + within, result.to(out.dtype.element_ty), mask=within < LAYER.size)
