"""What a draw knows of a row between two passes over its logits, and what it makes of a pass; no pass is here.

The state of a search is a tuple, kept in memory between kernels as lines of int64 [R]:

    stage, turn: what is looked for, and how many passes there were; few: no more tokens than that are inside
    low, high: keys; the answer's is in (low, high]
    kept: a key that the drawn token's is above
    goal: what sums are to exceed; above: the sum beyond high, at most the goal; upto: that beyond low, more than it,
        UNKNOWN before the first pass with weights

It ends in the stage FIND: the drawn token is the one with key `high` that has `goal` others before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.sampling_search import (
    FAINT,
    LOWEST,
    key_at,
    key_of,
    pick,
    pivots,
    value_of,
    weight_of,
)

UNKNOWN = tl.constexpr(1 << 62)
STATE, FOUND = tl.constexpr(9), tl.constexpr(8)  # numbers of a state, and of what a pass finds
TOP_K, TOP_P, DRAW, FIND = (tl.constexpr(n) for n in range(4))


@triton.jit
def load_options(options, rows, row):
    """Return temperature, top_k, top_p, log of min_p, uniform of a row; float64 [5, rows]."""
    at = options + row
    return (
        tl.load(at), tl.load(at + rows), tl.load(at + 2 * rows), tl.load(at + 3 * rows), tl.load(at + 4 * rows),
    )  # fmt: skip


@triton.jit
def begin(size, largest, options):
    """Return the first state of a row of `size` logits, whose largest is a number."""
    temperature, top_k, _, log_min_p, _ = options
    top, top_key = largest.to(tl.float64), key_of(largest)
    zero, unknown = tl.full((), 0, tl.int64), tl.full((), UNKNOWN, tl.int64)
    place, whole = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + size
    kept = tl.maximum(key_at(top - FAINT * temperature), key_at(top + temperature * log_min_p)) - 1
    kept = tl.minimum(kept, top_key - 1)
    cut = (top_k > 0) & (top_k < whole)
    stage, low = tl.where(cut, TOP_K, DRAW), tl.where(cut, LOWEST - 1, kept)
    goal, upto = tl.where(cut, top_k.to(tl.int64) - 1, zero), tl.where(cut, whole.to(tl.int64), unknown)
    return stage, place, whole, low, top_key, kept, goal, zero, upto


@triton.jit
def ask(state, options):
    """Return the four pivots of the next pass."""
    stage, turn, _, low, high, _, goal, above, upto = state
    spread = tl.where(stage == TOP_K, 1.0, options[0])
    return pivots(turn, low, high, above, upto, goal, spread)


@triton.jit
def learn(state, found, largest, options):
    """Return the state after a pass with the pivots of `ask`, which found what `add_above` returns."""
    stage, turn, few, low, high, kept, goal, above, upto = state
    p0, p1, p2, p3 = ask(state, options)
    m0, m1, m2, m3, everything, count, least, most = found
    top_p, uniform, inverse = options[2], options[4], 1.0 / options[0]
    top, top_key, zero = largest.to(tl.float64), key_of(largest), tl.full((), 0, tl.int64)
    if upto == UNKNOWN:
        stage = tl.where(top_p < 1.0, TOP_P, DRAW)
        goal = tl.where(top_p < 1.0, _top_p_goal(top_p, everything), _goal(uniform, everything))
    m0, m1, m2, m3, upto = above + m0, above + m1, above + m2, above + m3, above + everything
    weight = everything // count.to(tl.int64)  # of each, if all are the same
    nth = (goal - above) // tl.maximum(weight, 1)
    turn += 1
    if least < most:
        low, high, above, upto = pick(p0, p1, p2, p3, m0, m1, m2, m3, low, high, above, upto, goal)
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
    wanted = top_p * mass.to(tl.float64)
    floor = wanted.to(tl.int64)
    goal = tl.where(floor.to(tl.float64) < wanted, floor, floor - 1)
    return tl.minimum(tl.maximum(goal, 0), mass - 1)


@triton.jit
def save_state(at, rows, state, listed, list_low, list_high):
    """Write int64 [STATE + 3, rows], of which `at` is the row's place in the first line."""
    for i in tl.static_range(9):
        tl.store(at + i * rows, state[i].to(tl.int64))
    tl.store(at + 9 * rows, listed.to(tl.int64))
    tl.store(at + 10 * rows, list_low.to(tl.int64))
    tl.store(at + 11 * rows, list_high.to(tl.int64))


@triton.jit
def load_state(at, rows):
    """Return what `save_state` has written: the state, whether there is a list, and its interval."""
    state = (
        _small(at, rows, 0), _small(at, rows, 1), _small(at, rows, 2), _small(at, rows, 3), _small(at, rows, 4),
        _small(at, rows, 5), tl.load(at + 6 * rows), tl.load(at + 7 * rows), tl.load(at + 8 * rows),
    )  # fmt: skip
    return state, _small(at, rows, 9), _small(at, rows, 10), _small(at, rows, 11)


@triton.jit
def _small(at, rows, line):
    return tl.load(at + line * rows).to(tl.int32)


@triton.jit
def join_found(parts, pieces, PIECES: tl.constexpr):
    """Add up what a pass has found in the pieces of a row: int64 [FOUND, pieces]; in any order the same."""
    lanes = tl.arange(0, PIECES)
    here = lanes < pieces
    return (
        _total(parts, pieces, 0, PIECES), _total(parts, pieces, 1, PIECES), _total(parts, pieces, 2, PIECES),
        _total(parts, pieces, 3, PIECES), _total(parts, pieces, 4, PIECES),
        _total(parts, pieces, 5, PIECES).to(tl.int32),
        tl.min(tl.load(parts + 6 * pieces + lanes, mask=here, other=2147483647), axis=0).to(tl.int32),
        tl.max(tl.load(parts + 7 * pieces + lanes, mask=here, other=-2147483648), axis=0).to(tl.int32),
    )  # fmt: skip


@triton.jit
def _total(parts, pieces, line, PIECES: tl.constexpr):
    lanes = tl.arange(0, PIECES)
    return tl.sum(tl.load(parts + line * pieces + lanes, mask=lanes < pieces, other=0), axis=0)
