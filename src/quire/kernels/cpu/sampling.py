"""Penalties and masks, sampling without sorting the vocabulary, and log-probabilities.

A row of logits is cut into chunks of 64 vectors. Of each chunk the sixteen lanes' maxima are kept, so a row of V logits
becomes V / 64 maxima, each of a group of 64 logits sixteen apart. A group whose maximum is too small is not looked at
again: the k largest logits are found among about k groups.

An order is needed only around two places: where top-k or top-p cut, and where the draw falls. With a small top-k only
the tokens that can be among the k largest are collected and sorted. Otherwise each row's probability is first gathered
in bins by logit (1/16 of a temperature wide); bins are walked from the top, and only the bin in question is sorted.
Weights and sums are float64, which makes the choice the same on every backend: two ways of adding up a vocabulary
differ by some 1e-13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import literal_unroll

from quire.kernels.backend import Penalties, SamplingOptions, TopLogprobs
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op, share
from quire.kernels.cpu.pointers import f32_ptr, f64_ptr, float64_from_bits, i32_ptr, i64_ptr, u8_ptr
from quire.kernels.cpu.simd import (
    add,
    exp,
    float64_bits,
    load,
    load_partial,
    maximum,
    multiply_add,
    reduce_max,
    reduce_sum,
    select_lanes,
    splat,
    store,
    sub,
)
from quire.kernels.cpu.sizes import CHUNK
from quire.kernels.cpu.threads import Launcher

PIECE_CHUNKS = 16  # chunks of one work item
LOWEST = float(np.finfo(np.float32).min)

BINS = 1024
BINS_PER_UNIT = 16.0


# Looking at every logit


@jit
def chunk_maxima(logits, start, stop, maxima, at):
    """Write the maxima of logits[start:stop]'s groups to maxima[at : at + 16]; return 0, or NaN for NaN or +inf."""
    lowest, none = splat(np.float32(LOWEST)), splat(np.float32(0))
    best, other = splat(np.float32(-np.inf)), splat(np.float32(-np.inf))
    flaw, other_flaw = none, none
    whole = start + (stop - start) // 32 * 32
    for i in range(start, whole, 32):
        v, w = load(logits, i), load(logits, i + 16)
        best, other = maximum(best, v), maximum(other, w)
        # Zero times a finite number is zero, times infinity or NaN it is NaN.
        flaw = multiply_add(maximum(v, lowest), none, flaw)
        other_flaw = multiply_add(maximum(w, lowest), none, other_flaw)
    for i in range(whole, stop, 16):
        rest = min(16, stop - i)
        v = select_lanes(load_partial(logits, i, rest), 0, rest, np.float32(-np.inf))
        best = maximum(best, v)
        flaw = multiply_add(maximum(v, lowest), none, flaw)
    store(maxima, at, maximum(best, other))
    return reduce_sum(add(flaw, other_flaw))


@op
def piece_maxima(args, first, last, scratch):
    """Items are pieces of rows. logits, elements between rows, V, maxima, flaws; chunks and pieces of a row."""
    logits, stride, size, maxima, flaws = f32_ptr(args[0]), args[1], args[2], f32_ptr(args[3]), f32_ptr(args[4])
    chunks, pieces = args[5], args[6]
    for item in range(first, last):
        row, begin = item // pieces, item % pieces * PIECE_CHUNKS
        for chunk in range(begin, min(begin + PIECE_CHUNKS, chunks)):
            start, stop = row * stride + chunk * CHUNK, row * stride + min((chunk + 1) * CHUNK, size)
            number = row * chunks + chunk
            flaws[number] = chunk_maxima(logits, start, stop, maxima, 16 * number)


@jit
def first_equal(logits, at, size, maxima, groups_at, chunks, value):
    """Return the lowest token with this logit, the largest of the row; 0 if there is none."""
    for chunk in range(chunks):
        if reduce_max(load(maxima, groups_at + 16 * chunk)) == value:
            for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size)):
                if logits[at + i] == value:
                    return i
    return 0


@op
def reduce_rows(args, first, last, scratch):
    """Items are rows. logits, elements between rows, V, maxima, flaws, chunks; then out: tops, tokens, finite."""
    logits, stride, size = f32_ptr(args[0]), args[1], args[2]
    maxima, flaws, chunks = f32_ptr(args[3]), f32_ptr(args[4]), args[5]
    tops, tokens, finite = f32_ptr(args[6]), i64_ptr(args[7]), u8_ptr(args[8])
    for row in range(first, last):
        best, flaw = splat(np.float32(-np.inf)), np.float32(0)
        for chunk in range(row * chunks, (row + 1) * chunks):
            best = maximum(best, load(maxima, 16 * chunk))
            flaw += flaws[chunk]
        top = reduce_max(best)
        tops[row] = top
        tokens[row] = first_equal(logits, row * stride, size, maxima, 16 * row * chunks, chunks, top)
        finite[row] = 1 if flaw == 0 and top > -np.inf else 0


@dataclass(frozen=True, slots=True)
class RowMaxima:
    """Maxima of logits [R, V], valid for as long as these do not change.

    Attributes:
        logits: rows that may lie apart. stride: elements between them.
        maxima: float32 [R, chunks * 16]; see the top of this file.
        tops: float32 [R], the largest logit that is not NaN. tokens: int64 [R], the first that has it.
        finite: bool [R]: whether the row holds no NaN and no +inf, and not only -inf.
    """

    logits: np.ndarray
    stride: int
    maxima: np.ndarray
    tops: np.ndarray
    tokens: np.ndarray
    finite: np.ndarray

    def readable(self) -> RowMaxima:
        """Return the same of arrays that can be read, after a recording has ended."""
        arrays = (self.logits, self.maxima, self.tops, self.tokens, self.finite)
        logits, maxima, tops, tokens, finite = (np.asarray(array) for array in arrays)
        return RowMaxima(logits, self.stride, maxima, tops, tokens, finite)

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.maxima.shape[1] // 16


def row_maxima(launcher: Launcher, logits: np.ndarray) -> RowMaxima:
    """Emit the computation of the maxima of logits [R, V], in one pass over them."""
    source, stride = as_rows(logits)
    rows, size = source.shape
    chunks = -(-size // CHUNK)
    pieces = -(-chunks // PIECE_CHUNKS)
    maxima, flaws = launcher.empty((rows, 16 * chunks)), launcher.empty((rows, chunks))
    tops, tokens, finite = (launcher.empty((rows,), dtype) for dtype in (np.float32, np.int64, np.bool_))
    launcher.emit(
        piece_maxima, source, stride, size, maxima, flaws, chunks, pieces, items=rows * pieces, work=rows * size
    )
    # looks at 16 maxima a chunk, and at one chunk once more
    work = rows * (32 * chunks + min(size, CHUNK))
    launcher.emit(reduce_rows, source, stride, size, maxima, flaws, chunks, tops, tokens, finite, items=rows, work=work)
    return RowMaxima(source, stride, maxima, tops, tokens, finite)


# Order among tokens


@jit
def order_key(bits, logits, at, token):
    """Return an int64 that is smaller for a larger logit, and among equal logits for a lower token."""
    word = np.int64(bits[at + token])
    if logits[at + token] == 0:
        word = np.int64(0)  # -0.0 equals 0.0
    if word < 0:
        word ^= np.int64(0x7FFFFFFF)
    return ((-1 - word) << 32) | token


@jit
def key_token(key):
    """Return the token of an `order_key`."""
    return key & 0xFFFFFFFF


@jit
def sift(keys, root, count):
    """Restore the heap below `root`."""
    key = keys[root]
    while 2 * root + 1 < count:
        child = 2 * root + 1
        if child + 1 < count and keys[child] < keys[child + 1]:
            child += 1
        if key >= keys[child]:
            break
        keys[root] = keys[child]
        root = child
    keys[root] = key


@jit
def sort_keys(keys, count):
    """Sort keys[:count], rising (heapsort: in place, n log n for any input, and quick to compile)."""
    for root in range(count // 2 - 1, -1, -1):
        sift(keys, root, count)
    for last in range(count - 1, 0, -1):
        keys[0], keys[last] = keys[last], keys[0]
        sift(keys, np.int64(0), last)  # a literal would be a type of its own, and another function to compile


# Bins of falling logits


@jit
def bin_of(distance):
    """Return the bin of a token whose logit is `distance` units below the largest; the last bin for NaN."""
    scaled = distance * BINS_PER_UNIT
    return np.int64(scaled if scaled < BINS - 1 else BINS - 1.0)


@jit
def floor_of(top, b, inverse):
    """Return a float64 that no logit of the bins 0 .. b is below; units are 1 / inverse."""
    return np.float64(top) - (b + 2) / (BINS_PER_UNIT * inverse) if b < BINS - 1 else -np.inf


@jit
def count_bins(values, at, size, top, counts):
    """Count how many of values[at : at + size] each bin has; units are 1."""
    for b in range(BINS):
        counts[b] = 0
    for i in range(at, at + size):
        counts[bin_of(np.float64(top) - np.float64(values[i]))] += 1


@jit
def bin_of_nth(counts, n):
    """Return the bin of the n-th largest, n >= 1, and how many are in the bins before."""
    b, before = 0, 0
    while b < BINS - 1 and before + counts[b] < n:
        before += counts[b]
        b += 1
    return b, before


@jit
def collect(bits, logits, at, size, maxima, groups_at, chunks, top, inverse, first, last, keys):
    """Put the tokens of bins first .. last into keys, in any order; return how many. Units are 1 / inverse."""
    count, floor = 0, floor_of(top, last, inverse)
    for chunk in range(chunks):
        if reduce_max(load(maxima, groups_at + 16 * chunk)) >= floor:
            stop = min((chunk + 1) * CHUNK, size)
            for lane in range(16):
                if maxima[groups_at + 16 * chunk + lane] >= floor:
                    for i in range(chunk * CHUNK + lane, stop, 16):
                        logit = logits[at + i]
                        b = bin_of((np.float64(top) - np.float64(logit)) * inverse)
                        keys[count] = i  # and no branch: it could not be predicted
                        count += np.int64(logit >= floor) & np.int64(first <= b) & np.int64(b <= last)
    for j in range(count):
        keys[j] = order_key(bits, logits, at, keys[j])
    return count


@jit
def collect_largest(bits, logits, at, size, maxima, groups_at, chunks, top, n, counts, keys):
    """Put at least the n largest tokens, and all that equal the n-th, into keys, in order; return how many."""
    if n <= 16 * chunks:  # so many groups have a maximum as large as the n-th of the maxima, or larger
        count_bins(maxima, groups_at, 16 * chunks, top, counts)
    else:
        count_bins(logits, at, size, top, counts)
    b, _ = bin_of_nth(counts, n)
    count = collect(bits, logits, at, size, maxima, groups_at, chunks, top, 1.0, np.int64(0), b, keys)
    sort_keys(keys, count)
    return count


PIECE = 8192  # logits of one work item of `apply_bitmask`, tokens of one of `penalize`
SHORT_LIST = 1024  # the largest top-k whose tokens are sorted
SHORT_BIN = 64  # the most tokens of a bin that are sorted without looking closer
TILE = 1024  # weights computed at a time

# A thread's scratch, in 8-byte words
MASS, OTHER_MASS, COUNTS, WEIGHTS, PLACES = 0, BINS, 2 * BINS, 3 * BINS, 3 * BINS + TILE


# Penalties


@op
def penalize_pieces(args, first, last, scratch):
    """Items are pieces of the list. logits, elements between rows, tokens, then the fields of `Penalties`."""
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


def penalize(launcher: Launcher, logits: np.ndarray, penalties: Penalties) -> None:
    """Penalize logits [R, V] in place, see `Backend.apply_penalties`; the arrays of `penalties` are contiguous."""
    total = len(penalties.ids)
    if not total:
        return
    target, stride = as_rows(logits)
    launcher.emit(penalize_pieces, target, stride, total, *penalties, items=-(-total // PIECE), work=16 * total)
    if target is not logits:
        logits[...] = target


# Bitmasks


@op
def bitmask_pieces(args, first, last, scratch):
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


def apply_bitmask(launcher: Launcher, logits: np.ndarray, rows: np.ndarray, bitmask: np.ndarray) -> None:
    """Bar tokens of logits [R, V] in place, see `Backend.apply_bitmask`; rows int64 [P], bitmask int32 [P, words]."""
    target, stride = as_rows(logits)
    size = logits.shape[1]
    assert bitmask.shape[1] * 32 >= size, "a bit for each token"
    pieces = -(-size // PIECE)
    options = target, stride, size, pieces, rows, bitmask, bitmask.shape[1]
    launcher.emit(bitmask_pieces, *options, items=len(rows) * pieces, work=len(rows) * size)
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
    """Return the weight at which the draw ends, of the `kept` weight; rounding must not push it past the last token."""
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
    """Return the number of the slice, of BINS slices of bin b, in which a logit lies."""
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
    maxima, chunks, tops = f32_ptr(args[3]), args[4], f32_ptr(args[5])
    largest, finite, tokens = i64_ptr(args[6]), u8_ptr(args[7]), i64_ptr(args[13])
    temperature, top_k, top_p = f64_ptr(args[8]), i64_ptr(args[9]), f64_ptr(args[10])
    min_p, uniforms = f64_ptr(args[11]), f64_ptr(args[12])
    for item in range(first, last):
        begin, end = share(args[15], item, args[16])
        keys = i64_ptr(args[14] + 8 * item * size)
        for r in range(begin, end):
            tokens[r] = largest[r]
            if temperature[r] > 0 and finite[r] != 0:
                options = (1.0 / temperature[r], top_k[r], top_p[r], min_p[r], uniforms[r])
                at, groups_at = r * stride, 16 * r * chunks
                tokens[r] = draw(bits, logits, at, size, maxima, groups_at, chunks, tops[r], options, scratch, keys)


def sample(launcher: Launcher, known: RowMaxima, options: SamplingOptions, uniforms: np.ndarray) -> np.ndarray:
    """Choose one token per row -> int64 [R], see `Backend.sample`. Rows that are not finite get `known.tokens`.

    Where all temperatures are zero, `known.tokens` is the answer already.
    """
    rows, size = known.logits.shape
    tokens = launcher.empty((rows,), np.int64)
    shares = min(rows, 2 * launcher.num_threads)
    keys = launcher.empty((shares, size), np.int64)
    source = known.logits, known.stride, size
    found = known.maxima, known.chunks, known.tops, known.tokens, known.finite
    dtypes = np.float64, np.int64, np.float64, np.float64, np.float64
    columns = map(np.ascontiguousarray, (*options, uniforms), dtypes)
    args = *source, *found, *columns, tokens, keys, rows, shares
    launcher.emit(draw_rows, *args, items=shares, work=64 * rows * size, grain=1)
    return tokens


@jit
def log_sum_exp(logits, at, size, top):
    """log(sum(exp(logits))): exponentials in float32, a thousand at a time added up in float64."""
    total, shift = 0.0, splat(top)
    for start in range(0, size, 1024):
        some = splat(np.float32(0))
        stop = min(start + 1024, size)
        for i in range(start, stop - 15, 16):
            some = add(some, exp(sub(load(logits, at + i), shift)))
        total += reduce_sum(some)
        for i in range(start + (stop - start) // 16 * 16, stop):
            total += math.exp(np.float64(logits[at + i]) - np.float64(top))
    return np.float64(top) + math.log(total)


@jit
def count_larger(logits, at, size, value):
    """Return how many logits are larger."""
    count = 0
    for i in range(at, at + size):
        count += 1 if logits[i] > value else 0
    return count


@op
def logprob_rows(args, first, last, scratch):
    """Items are shares of the rows, each with room for V keys.

    logits, elements between rows, V; maxima, chunks, tops; chosen, ids, logprobs, ranks, k; keys; the number of rows
    and of shares.
    """
    bits, logits, stride, size = i32_ptr(args[0]), f32_ptr(args[0]), args[1], args[2]
    maxima, chunks, tops, chosen = f32_ptr(args[3]), args[4], f32_ptr(args[5]), i64_ptr(args[6])
    ids, logprobs, ranks, k = i64_ptr(args[7]), f32_ptr(args[8]), i64_ptr(args[9]), args[10]
    for item in range(first, last):
        begin, end = share(args[12], item, args[13])
        keys = i64_ptr(args[11] + 8 * item * size)
        for r in range(begin, end):
            at, groups_at, out, token = r * stride, 16 * r * chunks, r * (1 + k), chosen[r]
            norm = log_sum_exp(logits, at, size, tops[r])
            own, found = logits[at + token], 0
            ranks[r] = 1 + count_larger(logits, at, size, own)
            if k > 0:
                found = collect_largest(
                    bits, logits, at, size, maxima, groups_at, chunks, tops[r], k, i64_ptr(scratch), keys
                )
            for j in range(k + 1):
                if 0 < j <= found:  # NaN is in no order: a row of it has fewer than k
                    token = key_token(keys[j - 1])
                ids[out + j], logprobs[out + j] = token, np.float32(np.float64(logits[at + token]) - norm)


def logprobs_of(launcher: Launcher, known: RowMaxima, chosen: np.ndarray, k: int) -> TopLogprobs:
    """Return the log-probabilities of the chosen tokens, contiguous int64 [R], and the k <= V most likely."""
    rows, size = known.logits.shape
    assert 0 <= k <= size, "k is at most the vocabulary"
    ids, logprobs = launcher.empty((rows, 1 + k), np.int64), launcher.empty((rows, 1 + k))
    ranks = launcher.empty((rows,), np.int64)
    shares = min(rows, 2 * launcher.num_threads)
    keys = launcher.empty((shares, size if k else 0), np.int64)
    source = known.logits, known.stride, size, known.maxima, known.chunks, known.tops
    args = *source, chosen, ids, logprobs, ranks, k, keys, rows, shares
    launcher.emit(logprob_rows, *args, items=shares, work=8 * rows * size, grain=1)
    return TopLogprobs(ids, logprobs, ranks)
