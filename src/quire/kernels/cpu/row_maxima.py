"""Maxima of rows of logits, whether rows are finite, and how the next largest are found without sorting.

A row is cut into chunks of 64 vectors. Of each chunk the sixteen lanes' maxima are kept, so a row of V logits becomes
V / 64 maxima, each of a group of 64 logits sixteen apart. A group whose maximum is too small is not looked at again:
the k largest logits are found among about k groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, i64_ptr, u8_ptr
from quire.kernels.cpu.simd import (
    add,
    load,
    load_partial,
    maximum,
    multiply_add,
    reduce_max,
    reduce_sum,
    select_lanes,
    splat,
    store,
)
from quire.kernels.cpu.threads import Launcher

CHUNK = 1024  # logits of sixteen groups
PIECE = 16  # chunks of one work item
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
        row, begin = item // pieces, item % pieces * PIECE
        for chunk in range(begin, min(begin + PIECE, chunks)):
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
    logits, stride, size, maxima, flaws, chunks = (
        f32_ptr(args[0]),
        args[1],
        args[2],
        f32_ptr(args[3]),
        f32_ptr(args[4]),
        args[5],
    )
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
    """Compute those of logits [R, V] in one pass."""
    source, stride = as_rows(logits)
    rows, size = source.shape
    chunks = -(-size // CHUNK)
    pieces = -(-chunks // PIECE)
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
                        keys[count] = i  # and no branch: which tokens are meant cannot be foretold
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
