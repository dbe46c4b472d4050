"""`draw`: top-k, min-p, top-p and the choice of a token, as Triton kernels. Nothing is sorted.

A row is searched, in falling order, for the k-th token (by counts), for the last token that top-p keeps (by weights),
and for the token that is drawn (by weights), one after the other: for the place where counts or weights, added up in
falling order, first exceed a goal. A pass over the logits adds up what is above each of four pivots, which leaves one
of five intervals of values. Once an interval holds few tokens they are copied to a list, and the passes after are over
that; with a small top-k that is everything after three or four passes. Weights are integers of 1/2^44 of the largest,
so that sums are the same in whatever order, place and pass they are made, and results depend neither on the batch nor
on how a row is cut: e^x in float64, rounded, is off by 3e-14 of the largest weight for a token.

Where there are more multiprocessors than rows, rows are cut into pieces, and the first passes are a launch each: each
program works out the state from what all pieces of its row found in the pass before, and makes the next pass over its
own. A last program for each row goes on from there, mostly in the list. A piece is a few thousand logits, so that such
a launch takes some 3 us, where a pass over a row of 128k by one program would take 50. With more rows that is done for
the first pass only, which every row needs.

A pass over the vocabulary computes e^x in float64 for each token, some 80 instructions, which bounds it: about 90 us on
an H200 for 256 rows of 128k. Looking for the maximum, for the k-th token, and making lists is bound by reading
(134 MB, 28 us). Most rows take one or two passes with weights and three without. These times are calculated.

Gumbel-max would need one pass where nothing is truncated, but other tokens for the same uniforms than other backends.

The state of a search is a tuple, kept in memory between kernels as lines of int64 [R]:

    stage, turn: what is searched for, and how many passes there were; few: no more tokens than that are inside
    low, high: keys; the answer's is in (low, high]
    kept: a key that the drawn token's is above
    goal: what sums are to exceed; above: the sum beyond high, at most the goal; upto: that beyond low, more than it,
        UNKNOWN before the first pass with weights

It ends in the stage FIND: the drawn token is the one with key `high` that has `goal` others before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.kernel_args import power_of_two
from quire.kernels.gpu.logits_kernels import key_of, largest_of_parts, largest_parts, value_of

LOWEST = tl.constexpr(-2139095041)  # the key of -inf
NO_KEY = tl.constexpr(-2147483648)
SCALE = tl.constexpr(17592186044416.0)  # 2^44
NEGLIGIBLE = tl.constexpr(31.2)  # e^-31.2 < 2^-45, so that weights from there on are 0


@triton.jit
def weight_of(x, top, inverse):
    """Return int64 e^((x - top) / temperature) in units of 1 / `SCALE`; top and the inverse temperature are float64.

    -z = n ln 2 + r with |r| <= ln(2) / 2, e^r by its Taylor series to degree 10 (remainder 3e-13), and the product with
    the power of two is rounded by adding 1.5 * 2^52, which leaves the integer in the low bits.
    """
    z = tl.maximum((x.to(tl.float64) - top) * inverse, -40.0)
    shifted = z * 1.4426950408889634 + 6755399441055744.0
    n = shifted - 6755399441055744.0
    r = z - n * 0.6931471805599453
    series = r * 2.755731922398589e-07 + 2.7557319223985893e-06
    series = series * r + 2.48015873015873e-05
    series = series * r + 0.0001984126984126984
    series = series * r + 0.001388888888888889
    series = series * r + 0.008333333333333333
    series = series * r + 0.041666666666666664
    series = series * r + 0.16666666666666666
    series = series * r + 0.5
    series = series * r + 1.0
    series = series * r + 1.0
    power = ((n.to(tl.int32) + 1067).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 2^(n + 44)
    whole = (series * power + 6755399441055744.0).to(tl.int64, bitcast=True)
    return tl.where(z > -NEGLIGIBLE, whole - 0x4338000000000000, 0)


@triton.jit
def key_at(value):
    """Return the least key whose value is not below the float64 `value`."""
    near = value.to(tl.float32)
    return key_of(near) + tl.where(near.to(tl.float64) < value, 1, 0)


@triton.jit
def add_above(values, size, low, high, pivots, top, inverse, counting, BLOCK: tl.constexpr):
    """Make a pass over `size` values, of which those with keys in (low, high] matter.

    Returns int64 weights (or counts, if `counting`) of those above each of the four pivots, of all, their number, and
    their least and largest key. A thread reads 16 bytes at a time, and adds up its four values before it keeps sums.
    """
    p0, p1, p2, p3 = pivots
    LINES: tl.constexpr = BLOCK // 4
    lanes = tl.arange(0, LINES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    nothing = tl.zeros([LINES], tl.int64)
    a0, a1, a2, a3, everything = nothing, nothing, nothing, nothing, nothing
    count = tl.zeros([LINES], tl.int32)
    least = tl.full([LINES], 2147483647, tl.int32)
    most = tl.full([LINES], NO_KEY, tl.int32)
    for start in range(0, size, BLOCK):
        here = start + lanes < size
        x = tl.load(values + start + lanes, mask=here, other=0.0)
        key = key_of(x)
        inside = here & (key > low) & (key <= high)
        if counting:
            weight = inside.to(tl.int64)
        else:
            weight = tl.where(inside, weight_of(x, top, inverse), 0)
        everything += tl.sum(weight, axis=1)
        a0 += tl.sum(tl.where(key > p0, weight, 0), axis=1)
        a1 += tl.sum(tl.where(key > p1, weight, 0), axis=1)
        a2 += tl.sum(tl.where(key > p2, weight, 0), axis=1)
        a3 += tl.sum(tl.where(key > p3, weight, 0), axis=1)
        count += tl.sum(inside.to(tl.int32), axis=1)
        least = tl.minimum(least, tl.min(tl.where(inside, key, 2147483647), axis=1))
        most = tl.maximum(most, tl.max(tl.where(inside, key, NO_KEY), axis=1))
    above = (tl.sum(a0, axis=0), tl.sum(a1, axis=0), tl.sum(a2, axis=0), tl.sum(a3, axis=0))
    return above, tl.sum(everything, axis=0), tl.sum(count, axis=0), tl.min(least, axis=0), tl.max(most, axis=0)


@triton.jit
def pick(pivots, sums, low, high, above, upto, goal):
    """Return (low, high, above, upto) of the one interval between pivots in which the goal is exceeded.

    sums: what lies above each of the pivots, which rise; `above` and `upto`: what lies above high and low.
    """
    for i in tl.static_range(4):
        if sums[i] > goal:
            low, upto = tl.maximum(low, pivots[i]), tl.minimum(upto, sums[i])
        else:
            high, above = tl.minimum(high, pivots[i]), tl.maximum(above, sums[i])
    return low, high, above, upto


@triton.jit
def within(value, low, high):
    """Return the key of a float64 value, kept in [low, high]."""
    return tl.minimum(tl.maximum(key_of(value.to(tl.float32)), low), high)


@triton.jit
def pivots(turn, low, high, above, upto, goal, spread):
    """Choose four pivots in [low, high].

    The first time they lie at distances from the top that suit logits. Then around where the goal would be if weights
    were spread evenly over values. Every third time they divide the interval's keys evenly, which bounds the passes.
    """
    top = value_of(high).to(tl.float64)
    bottom = tl.maximum(value_of(tl.maximum(low, LOWEST)), -3.0e38).to(tl.float64)
    width = top - bottom
    guess = top - width * ((goal - above).to(tl.float64) / tl.maximum(upto - above, 1).to(tl.float64))
    if turn == 0:
        p0 = within(top - 8.0 * spread, low, high)
        p1 = within(top - 4.0 * spread, low, high)
        p2 = within(top - 2.0 * spread, low, high)
        p3 = within(top - 0.75 * spread, low, high)
    elif turn % 3 == 0:
        keys = high.to(tl.int64) - low
        p0 = (low + keys // 5).to(tl.int32)
        p1 = (low + keys * 2 // 5).to(tl.int32)
        p2 = (low + keys * 3 // 5).to(tl.int32)
        p3 = (low + keys * 4 // 5).to(tl.int32)
    else:
        p0 = within(guess - width * 0.15, low, high)
        p1 = within(guess - width * 0.03, low, high)
        p2 = within(guess + width * 0.03, low, high)
        p3 = within(guess + width * 0.15, low, high)
    return p0, p1, p2, p3


@triton.jit
def gather(values, size, low, high, out_values, out_ids, BLOCK: tl.constexpr):
    """Copy values with keys in (low, high] and their places, in order; return how many."""
    lanes = tl.arange(0, BLOCK)
    done = 0
    for start in range(0, size, BLOCK):
        here = start + lanes < size
        x = tl.load(values + start + lanes, mask=here, other=0.0)
        key = key_of(x)
        inside = (here & (key > low) & (key <= high)).to(tl.int32)
        found = tl.sum(inside, axis=0)
        if found > 0:
            place = done + tl.cumsum(inside, axis=0) - 1
            tl.store(out_values + place, x, mask=inside > 0)
            tl.store(out_ids + place, start + lanes, mask=inside > 0)
        done += found
    tl.debug_barrier()  # threads read what others have written
    return done


@triton.jit
def nth_equal(values, size, target, nth, BLOCK: tl.constexpr):
    """Return the place of the nth (from 0) of the values whose key is `target`."""
    lanes = tl.arange(0, BLOCK)
    before, place = 0, 0
    for start in range(0, size, BLOCK):
        here = start + lanes < size
        key = key_of(tl.load(values + start + lanes, mask=here, other=0.0))
        same = (here & (key == target)).to(tl.int32)
        found = tl.sum(same, axis=0)
        if (nth >= before) & (nth < before + found):
            hit = (same > 0) & (before + tl.cumsum(same, axis=0) - 1 == nth)
            place = tl.max(tl.where(hit, start + lanes, 0), axis=0)
        before += found
    return place


UNKNOWN = tl.constexpr(1 << 62)
STATE, FOUND = tl.constexpr(9), tl.constexpr(8)  # numbers of a state, and of what a pass finds
TOP_K, TOP_P, DRAW, FIND = (tl.constexpr(n) for n in range(4))


@triton.jit
def load_options(options, rows, row):
    """Return temperature, top_k, top_p, log of min_p, uniform of a row; float64 [5, rows]."""
    at = options + row
    first, second = tl.load(at), tl.load(at + rows)
    return first, second, tl.load(at + 2 * rows), tl.load(at + 3 * rows), tl.load(at + 4 * rows)


@triton.jit
def initial_state(size, largest, options):
    """Return the first state of a row of `size` logits, whose largest is a number."""
    temperature, top_k, _, log_min_p, _ = options
    top, top_key = largest.to(tl.float64), key_of(largest)
    zero, unknown = tl.full((), 0, tl.int64), tl.full((), UNKNOWN, tl.int64)
    place, whole = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + size
    kept = tl.maximum(key_at(top - NEGLIGIBLE * temperature), key_at(top + temperature * log_min_p)) - 1
    kept = tl.minimum(kept, top_key - 1)
    cut = (top_k > 0) & (top_k < whole)
    stage, low = tl.where(cut, TOP_K, DRAW), tl.where(cut, LOWEST - 1, kept)
    goal, upto = tl.where(cut, top_k.to(tl.int64) - 1, zero), tl.where(cut, whole.to(tl.int64), unknown)
    return stage, place, whole, low, top_key, kept, goal, zero, upto


@triton.jit
def choose_pivots(state, options):
    """Return the four pivots of the next pass."""
    stage, turn, _, low, high, _, goal, above, upto = state
    spread = tl.where(stage == TOP_K, 1.0, options[0])
    return pivots(turn, low, high, above, upto, goal, spread)


@triton.jit
def update_state(state, found, largest, options):
    """Return the state after a pass with the pivots of `choose_pivots`, which found what `add_above` returns."""
    stage, turn, few, low, high, kept, goal, above, upto = state
    chosen = choose_pivots(state, options)
    sums, everything, count, least, most = found
    top_p, uniform, inverse = options[2], options[4], 1.0 / options[0]
    top, top_key, zero = largest.to(tl.float64), key_of(largest), tl.full((), 0, tl.int64)
    if upto == UNKNOWN:
        stage = tl.where(top_p < 1.0, TOP_P, DRAW)
        goal = tl.where(top_p < 1.0, _top_p_goal(top_p, everything), _goal(uniform, everything))
    sums = (above + sums[0], above + sums[1], above + sums[2], above + sums[3])
    upto = above + everything
    weight = everything // count.to(tl.int64)  # of each, if all are the same
    nth = (goal - above) // tl.maximum(weight, 1)
    turn += 1
    if least < most:
        low, high, above, upto = pick(chosen, sums, low, high, above, upto, goal)
        low, high = tl.maximum(low, least - 1), tl.minimum(high, most)
        few = most_inside(stage == TOP_K, low, above, upto, top, inverse)
        few = tl.where(stage == TOP_K, few, tl.minimum(count, few))
    elif stage == TOP_K:
        few = upto.to(tl.int32)  # the k-th and those equal to it are kept, and all above
        kept = tl.maximum(kept, most - 1)
        low, high, goal, above, upto = kept, top_key, zero, zero, zero + UNKNOWN
        stage, turn = stage * 0 + DRAW, turn * 0
    elif stage == TOP_P:
        goal = _goal(uniform, above + (nth + 1) * weight)
        low, high, above = most - 1, top_key, zero  # what is drawn does not lie below what top-p keeps
        few = most_inside(False, low, above, upto, top, inverse)
        stage, turn = stage * 0 + DRAW, turn * 0 + 1
    else:
        stage, goal, low, high = stage * 0 + FIND, nth, most - 1, most
    return stage, turn, few, low, high, kept, goal, above, upto


@triton.jit
def most_inside(counting, low, above, upto, top, inverse):
    """Return how many tokens can be inside an interval: as many as the lightest weight that is possible allows, int32.

    While counting, how many are beyond low.
    """
    lightest = weight_of(value_of(low + 1), top, inverse)
    bound = tl.where(counting, upto, (upto - above) // tl.maximum(lightest, 1))
    return tl.minimum(bound, 2147483647).to(tl.int32)


@triton.jit
def list_ends(state, largest, options, LIST: tl.constexpr):
    """Return the interval (low, high] that a list of at most LIST tokens is to hold: up to the top where that fits.

    Then what follows (the weights of the k largest, the draw after top-p) finds its tokens in the same list.
    """
    stage, low, high, upto = state[0], state[3], state[4], state[8]
    top, inverse = largest.to(tl.float64), 1.0 / options[0]
    beyond = most_inside(stage == TOP_K, low, tl.full((), 0, tl.int64), upto, top, inverse)
    return low, tl.where((stage == TOP_K) | (beyond <= LIST), key_of(largest), high)


@triton.jit
def _goal(share, mass):
    """Return the int64 goal of a draw: what share * mass exceeds by less than 1, and less than mass in any case."""
    return tl.minimum((share * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def _top_p_goal(top_p, mass):
    """Return the goal of top-p, which is reached where the sum is at least top_p * mass: one less than its ceiling."""
    target = top_p * mass.to(tl.float64)
    floor = target.to(tl.int64)
    goal = tl.where(floor.to(tl.float64) < target, floor, floor - 1)
    return tl.minimum(tl.maximum(goal, 0), mass - 1)


@triton.jit
def save_state(at, rows, state, span):
    """Write int64 [STATE + 3, rows], of which `at` is the row's place in the first line; span: 1 if there is a list,
    or 0, and its interval.
    """
    for i in tl.static_range(9):
        tl.store(at + i * rows, state[i].to(tl.int64))
    for i in tl.static_range(3):
        tl.store(at + (9 + i) * rows, span[i].to(tl.int64))


@triton.jit
def load_state(at, rows):
    """Return what `save_state` has written: the state, and the span of the list."""
    state = ()
    for i in tl.static_range(6):
        state += (tl.load(at + i * rows).to(tl.int32),)  # type: ignore[assignment]
    for i in tl.static_range(6, 9):
        state += (tl.load(at + i * rows),)  # type: ignore[assignment]
    span = ()
    for i in tl.static_range(9, 12):
        span += (tl.load(at + i * rows).to(tl.int32),)  # type: ignore[assignment]
    return state, span


@triton.jit
def join_found(parts, pieces, PIECES: tl.constexpr):
    """Join what a pass has found in the pieces of a row, int64 [FOUND, pieces]: sums are the same in any order."""
    lanes = tl.arange(0, PIECES)
    here = lanes < pieces
    sums = ()
    for i in tl.static_range(6):
        sums += (tl.sum(tl.load(parts + i * pieces + lanes, mask=here, other=0), axis=0),)  # type: ignore[assignment]
    least = tl.min(tl.load(parts + 6 * pieces + lanes, mask=here, other=2147483647), axis=0).to(tl.int32)
    most = tl.max(tl.load(parts + 7 * pieces + lanes, mask=here, other=-2147483648), axis=0).to(tl.int32)
    return sums[:4], sums[4], sums[5].to(tl.int32), least, most  # type: ignore[misc]


LIST = 4096  # tokens of a list


class Logits(NamedTuple):
    """Rows of logits float32 [R, V] and what is known of each: largest values of their pieces and where, [R, pieces].

    options: float64 [5, R]. part: logits of a piece.
    """

    data: Any
    stride: Any
    size: Any
    part: Any
    tops: Any
    tokens: Any
    options: Any


class Shares(NamedTuple):
    """Shares of lists of tokens, made piece by piece: logits and ids [R, pieces, LIST], lengths int32 [R, pieces]."""

    logits: Any
    ids: Any
    lengths: Any


class Draw(NamedTuple):
    """What kernels are compiled for: pieces padded, logits weighted at a time, looked at at a time, and of a list.

    first: whether a launch is the first of the search.
    """

    first: bool
    pieces: int
    weigh: int
    read: int
    list: int


@triton.jit(do_not_specialize=["rows"])
def search_pieces_kernel(logits, rows, last_states, last_parts, states, parts, shares, FORM: tl.constexpr):
    """Make one pass over a piece of a row, or copy its share of the list. Grid: rows, pieces.

    states int64 [STATE + 3, rows] (a state, and the span of the list) and parts int64 [rows, FOUND, pieces] are
    written; `last_states` and `last_parts` are those of the launch before. logits: `Logits`; shares: `Shares`.
    """
    row, piece, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    options = load_options(logits.options, rows, row)
    largest, _ = largest_of_parts(logits.tops, logits.tokens, row, pieces, FORM.pieces)
    parts, last_parts = parts + row * FOUND * pieces, last_parts + row * FOUND * pieces
    if (options[0] > 0) & (tl.abs(largest) < float("inf")):
        if FORM.first:
            state = initial_state(logits.size, largest, options)
            listed = state[2] * 0
            list_low, list_high = state[4], state[4]
        else:
            state, span = resume(last_states + row, rows, last_parts, pieces, largest, options, FORM)
            listed, list_low, list_high = span
        values = logits.data + row.to(tl.int64) * logits.stride + piece * logits.part
        items = tl.minimum(logits.part, logits.size - piece * logits.part)
        if (listed == 0) & (state[0] != FIND):
            if state[2] <= FORM.list:
                list_low, list_high = list_ends(state, largest, options, FORM.list)
                share = row * pieces + piece
                at = share.to(tl.int64) * FORM.list
                found = gather(values, items, list_low, list_high, shares.logits + at, shares.ids + at, FORM.read)
                tl.store(shares.lengths + share, found)
                listed += 1
            else:
                sums, everything, count, least, most = search_pass(values, items, state, largest, options, FORM)
                for i in tl.static_range(4):
                    tl.store(parts + i * pieces + piece, sums[i])
                tl.store(parts + 4 * pieces + piece, everything)
                tl.store(parts + 5 * pieces + piece, count.to(tl.int64))
                tl.store(parts + 6 * pieces + piece, least.to(tl.int64))
                tl.store(parts + 7 * pieces + piece, most.to(tl.int64))
        if piece == 0:
            save_state(states + row, rows, state, (listed, list_low, list_high))


@triton.jit
def search_pass(values, items, state, largest, options, FORM: tl.constexpr):
    """Make the next pass of a search over `items` values; return what `add_above` does."""
    top, inverse = largest.to(tl.float64), 1.0 / options[0]
    chosen = choose_pivots(state, options)
    return add_above(values, items, state[3], state[4], chosen, top, inverse, state[0] == TOP_K, FORM.weigh)


@triton.jit
def resume(states, rows, parts, pieces, largest, options, FORM: tl.constexpr):
    """Return the state after the launch before, and the span of the list."""
    state, span = load_state(states, rows)
    if (span[0] == 0) & (state[0] != FIND):
        state = update_state(state, join_found(parts, pieces, FORM.pieces), largest, options)
    return state, span


@triton.jit
def join_shares(shares, row, pieces, part, list_values, list_ids, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Copy the shares of a row's list, one after the other, and return its length; ids are the row's from here on."""
    which, lanes = tl.arange(0, FORM.pieces), tl.arange(0, WIDTH)
    first_share = row.to(tl.int64) * pieces * FORM.list
    length = tl.load(shares.lengths + row * pieces + which, mask=which < pieces, other=0)
    first = tl.cumsum(length, axis=0) - length
    for start in range(0, tl.max(length, axis=0), WIDTH):
        column = start + lanes
        here = column[None, :] < length[:, None]
        source = first_share + which[:, None] * FORM.list + column[None, :]
        target = first[:, None] + column[None, :]
        tl.store(list_values + target, tl.load(shares.logits + source, mask=here, other=0.0), mask=here)
        ids = tl.load(shares.ids + source, mask=here, other=0) + which[:, None] * part
        tl.store(list_ids + target, ids, mask=here)
    tl.debug_barrier()  # threads read what others have written
    return tl.sum(length, axis=0)


@triton.jit(do_not_specialize=["rows", "pieces"])
def sample_rows_kernel(logits, rows, pieces, states, parts, shares, list_values, list_ids, out, FORM: tl.constexpr):
    """Choose the token of one row, after some launches of `search_pieces_kernel` unless this is the first.

    Lists are [rows, LIST], out int64 [rows].
    """
    row = tl.program_id(0)
    own = row.to(tl.int64) * FORM.list
    list_values, list_ids = list_values + own, list_ids + own
    options = load_options(logits.options, rows, row)
    largest, token = largest_of_parts(logits.tops, logits.tokens, row, pieces, FORM.pieces)
    if (options[0] > 0) & (tl.abs(largest) < float("inf")):
        if FORM.first:
            state = initial_state(logits.size, largest, options)
            length, list_low, list_high = state[1], state[4], state[4]
        else:
            parts += row * FOUND * pieces
            state, span = resume(states + row, rows, parts, pieces, largest, options, FORM)
            listed, list_low, list_high = span
            length = listed * 0
            if listed > 0:
                length = join_shares(shares, row, pieces, logits.part, list_values, list_ids, FORM, 16)
        values, found = logits.data + row.to(tl.int64) * logits.stride, (list_values, list_ids, length)
        token = _search(values, logits.size, found, state, list_low, list_high, largest, options, FORM)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _search(values, size, found, state, list_low, list_high, largest, options, FORM: tl.constexpr):
    """Go on from a state to the token of one row, int32.

    found: values and ids of a list, which holds (list_low, list_high], and its length, 0 if there is none.
    """
    list_values, list_ids, length = found
    whole = tl.full((), 0, tl.int32) + size
    while state[0] != FIND:
        use_list = (length > 0) & (state[3] >= list_low) & (state[4] <= list_high)
        if (state[2] <= FORM.list) & (use_list == 0):
            list_low, list_high = list_ends(state, largest, options, FORM.list)
            length = gather(values, size, list_low, list_high, list_values, list_ids, FORM.read)
            use_list = length > 0
        if use_list:
            source, items = list_values, length
        else:
            source, items = values, whole
        state = update_state(state, search_pass(source, items, state, largest, options, FORM), largest, options)
    if (length > 0) & (state[3] >= list_low) & (state[4] <= list_high):
        place = tl.load(list_ids + nth_equal(list_values, length, state[4], state[6], FORM.read))
    else:
        place = nth_equal(values, size, state[4], state[6], FORM.read)
    return place


def draw(
    logits: torch.Tensor, options: torch.Tensor, part: int, rounds: int, num_warps: int, weigh: int, read: int
) -> torch.Tensor:
    """Choose a token of each row, see `Backend.sample`: logits float32 [R, V], options float64 [5, R] -> int64 [R].

    Options are temperature, top_k, top_p, the logarithm of min_p, and the uniform number. There are `rounds` + 2
    launches: one that finds the largest of each `part` logits of a row, as many passes over these parts as there are
    rounds (0 or more; the tokens are the same), and the rest. `weigh` logits are weighted at a time, which registers
    bound, and `read` are looked at where they are not weighted. A thread should have four of each, or more, so that it
    reads 16 bytes at a time.
    """
    (rows, size), device = logits.shape, logits.device
    pieces = -(-size // part)
    width = power_of_two(-(-size // min(part, weigh)))  # of few rows and fewer: no kernel for each number
    tops = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    # Each by itself, for Triton has other kernels where memory does not begin at a multiple of 16.
    tokens, lengths = (torch.empty((rows, pieces), dtype=torch.int32, device=device) for _ in range(2))
    states = torch.empty((rounds, STATE + 3, rows), dtype=torch.int64, device=device)
    parts = torch.empty((rounds, rows, FOUND, pieces), dtype=torch.int64, device=device)
    values, ids = _lists(logits, rows)
    listing = rounds > 1 or (rounds == 1 and size <= LIST)  # whether lists can be made in pieces
    shares = Shares(*(_lists(logits, rows * pieces) if listing else (values, ids)), lengths)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    largest_parts[(rows, pieces)](logits, logits.stride(0), size, part, tops, tokens, read)
    given, form = (
        Logits(logits, logits.stride(0), size, part, tops, tokens, options),
        Draw(True, width, weigh, read, LIST),
    )
    for turn in range(rounds):
        last, form = max(0, turn - 1), form._replace(first=turn == 0)
        search_pieces_kernel[(rows, pieces)](
            given, rows, states[last], parts[last], states[turn], parts[turn], shares, FORM=form, num_warps=num_warps
        )
    form = form._replace(first=rounds == 0)
    sample_rows_kernel[(rows,)](
        given, rows, pieces, states[-1:], parts[-1:], shares, values, ids, out, FORM=form, num_warps=num_warps
    )
    return out


def _lists(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for `count` lists: their values, and the tokens that have them."""
    return (
        torch.empty((count, LIST), dtype=torch.float32, device=logits.device),
        torch.empty((count, LIST), dtype=torch.int32, device=logits.device),
    )
