"""Pieces of kernels that look for a place in a row's falling order: an order of floats, exact weights, one pass.

Nothing is sorted. A place is where counts or weights, added up in falling order, first exceed a goal. A pass adds up
what lies above each of four pivots, which leaves one of five intervals of values to look at; see `sampling_draw.py`.
Weights are integers of 1/2^44 of the largest, so that sums are the same in whatever order, place and pass they are
made: e^x in float64, rounded, is off by 3e-14 of the largest weight for a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095041)  # the key of -inf
NO_KEY = tl.constexpr(-2147483648)
SCALE = tl.constexpr(17592186044416.0)  # 2^44
FAINT = tl.constexpr(31.2)  # e^-31.2 < 2^-45, so that weights from there on are 0


@triton.jit
def key_of(x):
    """Return int32 that are ordered as the float32 `x` are, -0 and 0 the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Undo `key_of`."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


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
    return tl.where(z > -FAINT, whole - 0x4338000000000000, 0)


@triton.jit
def key_at(value):
    """Return the least key whose value is not below the float64 `value`."""
    near = value.to(tl.float32)
    return key_of(near) + tl.where(near.to(tl.float64) < value, 1, 0)


@triton.jit
def first_largest(values, size, BLOCK: tl.constexpr):
    """Return the largest of `size` values (NaN if one is), and the first place of it; 0 for NaN."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = lanes
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = tl.load(values + start + lanes, mask=start + lanes < size, other=float("-inf"))
        broken = tl.where(x != x, 1, broken)
        place = tl.where(x > best, start + lanes, place)
        best = tl.where(x > best, x, best)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, place, size), axis=0)
    bad = tl.max(broken, axis=0) > 0
    return tl.where(bad, float("nan"), top), tl.where(bad, 0, token)


@triton.jit
def add_above(values, size, low, high, p0, p1, p2, p3, top, inverse, counting, BLOCK: tl.constexpr):
    """Make a pass over `size` values, of which those with keys in (low, high] matter.

    Returns int64 weights (or counts, if `counting`) of those above each pivot, of all, and their number, and their
    least and largest key. A thread reads 16 bytes at a time, and adds up its four values before it keeps sums.
    """
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
    return (
        tl.sum(a0, axis=0), tl.sum(a1, axis=0), tl.sum(a2, axis=0), tl.sum(a3, axis=0), tl.sum(everything, axis=0),
        tl.sum(count, axis=0), tl.min(least, axis=0), tl.max(most, axis=0),
    )  # fmt: skip


@triton.jit
def pick(p0, p1, p2, p3, m0, m1, m2, m3, low, high, above, upto, goal):
    """Return (low, high, above, upto) of the one interval between pivots in which the goal is exceeded.

    `m0` to `m3` are what lies above the pivots, which rise; `above` and `upto` what lies above high and low.
    """
    if m0 > goal:
        low, upto = p0, m0
    else:
        high, above = p0, m0
    if m1 > goal:
        low, upto = tl.maximum(low, p1), tl.minimum(upto, m1)
    else:
        high, above = tl.minimum(high, p1), tl.maximum(above, m1)
    if m2 > goal:
        low, upto = tl.maximum(low, p2), tl.minimum(upto, m2)
    else:
        high, above = tl.minimum(high, p2), tl.maximum(above, m2)
    if m3 > goal:
        low, upto = tl.maximum(low, p3), tl.minimum(upto, m3)
    else:
        high, above = tl.minimum(high, p3), tl.maximum(above, m3)
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
def nth_equal(values, size, wanted, nth, BLOCK: tl.constexpr):
    """Return the place of the nth (from 0) of the values whose key is `wanted`."""
    lanes = tl.arange(0, BLOCK)
    before, place = 0, 0
    for start in range(0, size, BLOCK):
        here = start + lanes < size
        key = key_of(tl.load(values + start + lanes, mask=here, other=0.0))
        same = (here & (key == wanted)).to(tl.int32)
        found = tl.sum(same, axis=0)
        if (nth >= before) & (nth < before + found):
            hit = (same > 0) & (before + tl.cumsum(same, axis=0) - 1 == nth)
            place = tl.max(tl.where(hit, start + lanes, 0), axis=0)
        before += found
    return place
