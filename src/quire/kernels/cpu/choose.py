"""Penalties, and choosing tokens without sorting the vocabulary.

An order is needed only around two places: where top-k or top-p cut, and where the draw falls. With a small top-k only
the tokens that can be among the k largest are collected and sorted. Otherwise each row's probability is first gathered
in bins by logit (1/16 of a temperature wide); bins are walked from the top, and only the bin in question is sorted.
Weights and sums are float64, which makes the choice the same on every backend: two ways of adding up a vocabulary
differ by some 1e-13.
"""

from __future__ import annotations

import math

import numpy as np
from numba import literal_unroll

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op, share
from quire.kernels.cpu.pointers import f32_ptr, f64_ptr, float64_from_bits, i32_ptr, i64_ptr, u8_ptr
from quire.kernels.cpu.row_maxima import (
    BINS,
    BINS_PER_UNIT,
    RowMaxima,
    bin_of,
    bin_of_nth,
    collect,
    collect_largest,
    count_bins,
    key_token,
    sort_keys,
)
from quire.kernels.cpu.simd import float64_bits
from quire.kernels.cpu.threads import Launcher

PIECE = 8192  # logits of one work item of `keep_bits`, tokens of one of `penalize`
SHORT_LIST = 1024  # the largest top-k whose tokens are sorted
SHORT_BIN = 64  # the most tokens of a bin that are sorted without looking closer
TILE = 1024  # weights computed at a time

# A thread's scratch, in 8-byte words
MASS, OTHER_MASS, COUNTS, WEIGHTS, PLACES = 0, BINS, 2 * BINS, 3 * BINS, 3 * BINS + TILE


# Penalties


@op
def penalize_pieces(args, first, last, scratch):
    """Items are pieces of the list. logits, elements between rows, tokens, then as `penalize` has them."""
    logits, stride, total, rows = f32_ptr(args[0]), args[1], args[2], i64_ptr(args[3])
    starts, ids, counts = i64_ptr(args[4]), i32_ptr(args[5]), i32_ptr(args[6])
    repetition, presence, frequency = f32_ptr(args[7]), f32_ptr(args[8]), f32_ptr(args[9])
    for item in range(first, last):
        p = 0
        for e in range(item * PIECE, min((item + 1) * PIECE, total)):
            while e >= starts[p + 1]:
                p += 1
            count, at = counts[e], rows[p] * stride + ids[e]
            value = logits[at] / repetition[p] if logits[at] > 0 else logits[at] * repetition[p]
            if count > 0:
                value -= frequency[p] * np.float32(count) + presence[p]
            logits[at] = value


def penalize(
    launcher: Launcher,
    logits: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    ids: np.ndarray,
    counts: np.ndarray,
    repetition: np.ndarray,
    presence: np.ndarray,
    frequency: np.ndarray,
) -> None:
    """Penalize logits [R, V] in place, see `Backend.apply_penalties`.

    The others are contiguous: rows int64 [P], starts int64 [P + 1], ids and counts int32, the rest float32 [P].
    """
    total = len(ids)
    if not total:
        return
    target, stride = as_rows(logits)
    options = rows, starts, ids, counts, repetition, presence, frequency
    launcher.emit(penalize_pieces, target, stride, total, *options, items=-(-total // PIECE), work=16 * total)
    if target is not logits:
        logits[...] = target


# Masks of bits


@op
def keep_bits_pieces(args, first, last, scratch):
    """Items are pieces of rows. logits, elements between rows, V, pieces of a row, rows, words, words of a row."""
    logits, stride, size, pieces, rows = f32_ptr(args[0]), args[1], args[2], args[3], i64_ptr(args[4])
    words, width = i32_ptr(args[5]), args[6]
    for item in range(first, last):
        p, begin = item // pieces, item % pieces * PIECE
        at = rows[p] * stride
        for start in range(begin, min(begin + PIECE, size), 32):
            word, stop = words[p * width + start // 32], min(start + 32, size)
            if word == 0:  # as most are
                for i in range(at + start, at + stop):
                    logits[i] = -np.inf
            elif word != -1:
                for i in range(stop - start):
                    if (word >> i) & 1 == 0:
                        logits[at + start + i] = -np.inf


def keep_bits(launcher: Launcher, logits: np.ndarray, rows: np.ndarray, bitmask: np.ndarray) -> None:
    """Bar tokens of logits [R, V] in place, see `Backend.apply_bitmask`; rows int64 [P], bitmask int32 [P, words]."""
    target, stride = as_rows(logits)
    size = logits.shape[1]
    assert bitmask.shape[1] * 32 >= size, "a bit for each token"
    pieces = -(-size // PIECE)
    options = target, stride, size, pieces, rows, bitmask, bitmask.shape[1]
    launcher.emit(keep_bits_pieces, *options, items=len(rows) * pieces, work=len(rows) * size)
    if target is not logits:
        logits[...] = target


# Weights

ROUNDER = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), 1.9082149292705877e-10
TAYLOR = tuple(1 / math.factorial(n) for n in range(13, -1, -1))


@jit
def exp_minus(x):
    """e^-x for x >= 0 in float64, 0 beyond 700: plain arithmetic, so that a loop of it becomes vector code.

    -x = n ln 2 + r with |r| <= ln(2)/2, and e^r by its Taylor series to degree 13 (remainder 4e-18).
    """
    shifted = ROUNDER - x * 1.4426950408889634
    n = shifted - ROUNDER
    r = (-x - n * LN2_HIGH) - n * LN2_LOW
    series = 0.0
    for factor in literal_unroll(TAYLOR):
        series = series * r + factor
    power = float64_from_bits((float64_bits(shifted) + 1023) << 52)
    return series * power if x < 700 else 0.0


@jit
def weight_of(logit, top, inverse, threshold, min_p):
    """Return e^((logit - top) / temperature), 0 for logits below the threshold and weights below min_p."""
    weight = exp_minus((np.float64(top) - np.float64(logit)) * inverse)
    return weight if logit >= threshold and weight >= min_p else 0.0


# The draw from a short list


@jit
def draw_listed(logits, at, keys, count, top, options):
    """Choose among the tokens of keys[:count], in order, of which top-k takes the first; the very first weighs 1."""
    inverse, top_k, top_p, min_p, uniform = options
    lowest = logits[at + key_token(keys[top_k - 1])]
    number, goal = count, np.inf
    # Three walks: one adds up what top-k and min_p leave, one finds where top-p cuts, one where the draw falls.
    for walk in range(3):
        kept, i = 0.0, 0
        while i < number:
            weight = weight_of(logits[at + key_token(keys[i])], top, inverse, lowest, min_p)
            if weight == 0:
                break
            kept += weight
            i += 1
            if kept > goal or (walk == 1 and kept == goal):
                break
        number = i
        if walk > 0:
            goal = goal_of(uniform, kept)
        elif top_p < 1:
            goal = top_p * kept
    return key_token(keys[number - 1])


@jit
def goal_of(uniform, kept):
    """Return where in the kept mass the draw falls; rounding must not push it past the last token."""
    return min(uniform * kept, kept * (1 - 2.0**-53))


# The draw from bins


@jit
def fill_bins(logits, at, size, top, inverse, threshold, min_p, work):
    """Set the weight of each bin."""
    mass, weights, places = f64_ptr(work), f64_ptr(work + 8 * WEIGHTS), i64_ptr(work + 8 * PLACES)
    for b in range(2 * BINS):
        mass[b] = 0.0
    for start in range(0, size, TILE):
        count = min(TILE, size - start)
        for i in range(count):
            logit = logits[at + start + i]
            weights[i] = weight_of(logit, top, inverse, threshold, min_p)
            places[i] = bin_of((np.float64(top) - np.float64(logit)) * inverse)
        # Two sums a bin, in turns: neighbours often meet in a bin, and one addition would wait for the other.
        for i in range(count):
            mass[(i & 1) * BINS + places[i]] += weights[i]
    for b in range(BINS):
        mass[b] += mass[OTHER_MASS + b]


@jit
def slice_of(logit, top, inverse, b):
    """Return which of BINS slices of bin b a logit falls into."""
    within = (np.float64(top) - np.float64(logit)) * inverse * BINS_PER_UNIT - b
    return min(np.int64(within * BINS), BINS - 1) if within < 1 else np.int64(BINS - 1)


@jit
def narrow(logits, at, top, threshold, options, b, before, goal, inclusive, work, keys, count):
    """Keep only the keys of that slice of bin b in which the walk ends; return how many, and the weight before them."""
    inverse, _, _, min_p, _ = options
    mass, last = f64_ptr(work + 8 * WEIGHTS), 0
    for s in range(BINS):
        mass[s] = 0.0
    for i in range(count):
        logit = logits[at + key_token(keys[i])]
        weight, s = weight_of(logit, top, inverse, threshold, min_p), slice_of(logit, top, inverse, b)
        mass[s] += weight
        if weight > 0:
            last = max(last, s)
    s = 0
    while s < last and not (before + mass[s] > goal or (inclusive and before + mass[s] == goal)):
        before += mass[s]
        s += 1
    kept = 0
    for i in range(count):
        if slice_of(logits[at + key_token(keys[i])], top, inverse, b) == s:
            keys[kept] = keys[i]
            kept += 1
    return kept, before


@jit
def draw_binned(bits, logits, at, size, maxima, groups_at, chunks, top, threshold, options, work, keys):
    """Choose among all tokens with logits of at least the threshold."""
    inverse, _, top_p, min_p, uniform = options
    mass = f64_ptr(work)
    fill_bins(logits, at, size, top, inverse, threshold, min_p, work)
    kept, lowest, token = 0.0, 0, np.int64(0)
    for b in range(BINS):
        kept += mass[b]
        if mass[b] > 0:
            lowest = b
    # Twice the same walk in falling order: for top-p until the sum reaches the goal, for the draw until it exceeds it.
    for drawing in range(0 if top_p < 1 else 1, 2):
        goal = goal_of(uniform, kept) if drawing == 1 else top_p * kept
        b, before = 0, 0.0
        while b < lowest and not (before + mass[b] > goal or (drawing == 0 and before + mass[b] == goal)):
            before += mass[b]
            b += 1
        count = collect(bits, logits, at, size, maxima, groups_at, chunks, top, inverse, b, b, keys)
        if count > SHORT_BIN:
            count, before = narrow(
                logits, at, top, threshold, options, b, before, goal, drawing == 0, work, keys, count
            )
        sort_keys(keys, count)
        for i in range(count):
            candidate = key_token(keys[i])
            weight = weight_of(logits[at + candidate], top, inverse, threshold, min_p)
            if weight > 0:
                token = candidate
                before += weight
                if before > goal or (drawing == 0 and before == goal):
                    break
        kept = before
    return token


@jit
def draw(bits, logits, at, size, maxima, groups_at, chunks, top, options, work, keys):
    """Choose a token of one row with temperature > 0, see `Backend.sample`."""
    top_k = options[1]
    counts = i64_ptr(work + 8 * COUNTS)
    if 0 < top_k <= SHORT_LIST and top_k < size:
        count = collect_largest(bits, logits, at, size, maxima, groups_at, chunks, top, top_k, counts, keys)
        return draw_listed(logits, at, keys, count, top, options)
    threshold = np.float32(-np.inf)
    if 0 < top_k < size:
        count_bins(logits, at, size, top, counts)
        b, before = bin_of_nth(counts, top_k)
        sort_keys(keys, collect(bits, logits, at, size, maxima, groups_at, chunks, top, 1.0, b, b, keys))
        threshold = logits[at + key_token(keys[top_k - 1 - before])]
    return draw_binned(bits, logits, at, size, maxima, groups_at, chunks, top, threshold, options, work, keys)


@op
def draw_rows(args, first, last, scratch):
    """Items are shares of the rows, each with room for V keys.

    logits, elements between rows, V; maxima, chunks, tops, tokens, finite, as `RowMaxima` has them; temperature, top_k,
    top_p, min_p, uniforms; chosen tokens; keys; the number of rows and of shares.
    """
    bits, logits, stride, size = i32_ptr(args[0]), f32_ptr(args[0]), args[1], args[2]
    maxima, chunks, tops, largest, finite = (
        f32_ptr(args[3]),
        args[4],
        f32_ptr(args[5]),
        i64_ptr(args[6]),
        u8_ptr(args[7]),
    )
    temperature, top_k, top_p, min_p, uniforms = (
        f64_ptr(args[8]),
        i64_ptr(args[9]),
        f64_ptr(args[10]),
        f64_ptr(args[11]),
        f64_ptr(args[12]),
    )
    tokens = i64_ptr(args[13])
    for item in range(first, last):
        begin, end = share(args[15], item, args[16])
        keys = i64_ptr(args[14] + 8 * item * size)
        for r in range(begin, end):
            tokens[r] = largest[r]
            if temperature[r] > 0 and finite[r] != 0:
                options = (1.0 / temperature[r], top_k[r], top_p[r], min_p[r], uniforms[r])
                at, groups_at = r * stride, 16 * r * chunks
                tokens[r] = draw(bits, logits, at, size, maxima, groups_at, chunks, tops[r], options, scratch, keys)


def sample(
    launcher: Launcher,
    known: RowMaxima,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniforms: np.ndarray,
) -> np.ndarray:
    """Choose one token per row -> int64 [R], see `Backend.sample`. Rows that are not finite get `known.tokens`.

    Options are contiguous: top_k int64, the others float64. Where all temperatures are zero, `known.tokens` is the
    answer already.
    """
    rows, size = known.logits.shape
    tokens = launcher.empty((rows,), np.int64)
    shares = min(rows, 2 * launcher.num_threads)
    keys = launcher.empty((shares, size), np.int64)
    launcher.emit(
        draw_rows,
        known.logits,
        known.stride,
        size,
        known.maxima,
        known.chunks,
        known.tops,
        known.tokens,
        known.finite,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        tokens,
        keys,
        rows,
        shares,
        items=shares,
        work=64 * rows * size,
        grain=1,
    )
    return tokens
