"""Penalties, choosing tokens, and log-probabilities, without sorting the vocabulary.

`sample` needs an order only around two places: where top-k or top-p cut, and where the draw falls. So each row's
probability is first gathered in bins by logit (1/16 of a temperature wide); bins are walked from the top, and only the
bin in question is sorted. Weights and sums are float64, which makes the choice the same on every backend: two ways of
adding up a vocabulary differ by some 1e-13.
"""

from __future__ import annotations

import math

import numpy as np
from numba import literal_unroll, prange

from quire.kernels.cpu.jit import kernel, part, share
from quire.kernels.cpu.simd import (
    add,
    exp,
    float64_bits,
    float64_from_bits,
    lane_max,
    lane_sum,
    load,
    maximum,
    splat,
    sub,
)

BINS = 1024
BINS_PER_UNIT = 16.0


@part
def penalize_rows(logits, rows, prompt_mask, counts, repetition, presence, frequency, size, chunk, chunks):
    """This chunk's rows of `penalize`."""
    first, last = share(rows.shape[0], chunk, chunks)
    for p in range(first, last):
        at = rows[p] * size
        for i in range(size):
            count, value = counts[p, i], logits[at + i]
            if count > 0 or prompt_mask[p, i]:
                value = value / repetition[p] if value > 0 else value * repetition[p]
                if count > 0:
                    value -= frequency[p] * np.float32(count) + presence[p]
                logits[at + i] = value


@kernel
def penalize(logits, rows, prompt_mask, counts, repetition, presence, frequency, size, chunks):
    """See `Backend.apply_penalties`; logits flat, `size` = V."""
    if chunks == 1:
        penalize_rows(logits, rows, prompt_mask, counts, repetition, presence, frequency, size, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            penalize_rows(logits, rows, prompt_mask, counts, repetition, presence, frequency, size, np.int64(c), chunks)


# One row: its largest logit, an order for its tokens, bins


@part
def row_max(logits, at, size):
    """Return the largest logit."""
    if size < 16:
        top = logits[at]
        for i in range(1, size):
            top = max(top, logits[at + i])
        return top
    best = load(logits, at)
    for i in range(16, size - 15, 16):
        best = maximum(best, load(logits, at + i))
    return lane_max(maximum(best, load(logits, at + size - 16)))


@part
def first_equal(logits, at, size, value):
    """Return the lowest token with this logit, or 0."""
    for i in range(size):
        if logits[at + i] == value:
            return i
    return 0


@part
def order_key(logits, bits, at, token):
    """Return a uint64 that is smaller for a larger logit, and among equal logits for a lower token."""
    word = bits[at + token]
    if logits[at + token] == 0:
        word = np.uint32(0)  # -0.0 equals 0.0
    if word >> np.uint32(31) == 0:
        word = np.uint32(0x7FFFFFFF) - word
    return (np.uint64(word) << np.uint64(32)) | np.uint64(token)


@part
def key_token(key):
    """Return the token of an `order_key`."""
    return np.int64(key & np.uint64(0xFFFFFFFF))


@part
def sift(keys, root, count):
    """Restore the heap below `root`."""
    while 2 * root + 1 < count:
        child = 2 * root + 1
        if child + 1 < count and keys[child] < keys[child + 1]:
            child += 1
        if keys[root] >= keys[child]:
            return
        keys[root], keys[child] = keys[child], keys[root]
        root = child


@part
def sort_keys(keys, count):
    """Sort keys[:count], rising (heapsort: in place, n log n for any input, and quick to compile)."""
    for root in range(count // 2 - 1, -1, -1):
        sift(keys, root, count)
    for last in range(count - 1, 0, -1):
        keys[0], keys[last] = keys[last], keys[0]
        sift(keys, 0, last)


@part
def bin_of(distance):
    """Return the bin of a token whose logit is `distance` temperatures below the largest; any bin for NaN."""
    scaled = distance * BINS_PER_UNIT
    return np.int64(scaled) if 0 <= scaled < BINS - 1 else (0 if scaled < 0 else BINS - 1)


@part
def collect(logits, bits, at, size, top, inverse, first, last, keys):
    """Put the tokens of bins first..last into keys, in order; return how many."""
    count = 0
    for i in range(size):
        b = bin_of((np.float64(top) - np.float64(logits[at + i])) * inverse)
        if first <= b < last:
            keys[count] = order_key(logits, bits, at, i)
            count += 1
    sort_keys(keys, count)
    return count


@part
def nth_logit(logits, bits, at, size, top, inverse, counts, n, keys):
    """Return the n-th largest logit, n >= 1; counts [BINS] says how many tokens each bin has."""
    b, before = 0, 0
    while before + counts[b] < n:
        before += counts[b]
        b += 1
    collect(logits, bits, at, size, top, inverse, b, b + 1, keys)
    return logits[at + key_token(keys[n - 1 - before])]


# Drawing

ROUNDER = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), 1.9082149292705877e-10
TAYLOR = tuple(1 / math.factorial(n) for n in range(13, -1, -1))


@part
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


@part
def weigh(logits, at, size, top, inverse, threshold, min_p, weights):
    """Set weights [V] to e^((logit - top) / temperature), 0 for tokens below the logit threshold or below min_p."""
    for i in range(size):
        weight = exp_minus((np.float64(top) - np.float64(logits[at + i])) * inverse)
        kept = logits[at + i] >= threshold and weight >= min_p
        weights[i] = weight if kept else 0.0


@part
def fill_bins(logits, at, size, top, inverse, threshold, min_p, weights, mass, counts):
    """Weigh all tokens, and set the weight and the number of tokens of each bin."""
    weigh(logits, at, size, top, inverse, threshold, min_p, weights)
    mass[:] = 0.0
    counts[:] = 0
    for i in range(size):
        b = bin_of((np.float64(top) - np.float64(logits[at + i])) * inverse)
        mass[b] += weights[i]
        counts[b] += 1


@part
def walk(logits, bits, at, size, top, inverse, weights, mass, goal, inclusive, keys):
    """Walk tokens in falling order until the sum of weights exceeds the goal (or equals it, if `inclusive`).

    Returns that token and the sum with it; the last token with a weight where the goal is beyond all.
    """
    b, before, last = 0, 0.0, 0
    for i in range(BINS):
        if mass[i] > 0:
            last = i
    while b < last and not (before + mass[b] > goal or (inclusive and before + mass[b] == goal)):
        before += mass[b]
        b += 1
    count = collect(logits, bits, at, size, top, inverse, b, b + 1, keys)
    token = 0
    for i in range(count):
        candidate = key_token(keys[i])
        if weights[candidate] > 0:
            token = candidate
            before += weights[token]
            if before > goal or (inclusive and before == goal):
                break
    return token, before


@part
def draw(logits, bits, at, size, top, options, weights, mass, counts, keys):
    """Choose a token of one row with temperature > 0, see `Backend.sample`."""
    temperature, top_k, top_p, min_p, uniform = options
    inverse = 1.0 / temperature
    fill_bins(logits, at, size, top, inverse, -np.inf, min_p, weights, mass, counts)
    if 0 < top_k < size:
        threshold = nth_logit(logits, bits, at, size, top, inverse, counts, top_k, keys)
        fill_bins(logits, at, size, top, inverse, threshold, min_p, weights, mass, counts)
    kept = 0.0
    for b in range(BINS):
        kept += mass[b]
    if top_p < 1:
        _, kept = walk(logits, bits, at, size, top, inverse, weights, mass, top_p * kept, True, keys)
    goal = min(uniform * kept, kept * (1 - 2.0**-53))  # rounding must not push the goal past the last token
    token, _ = walk(logits, bits, at, size, top, inverse, weights, mass, goal, False, keys)
    return token


@part
def sample_rows(logits, bits, temperature, top_k, top_p, min_p, uniforms, tokens, size, chunk, chunks):
    """This chunk's rows of `sample`."""
    first, last = share(tokens.shape[0], chunk, chunks)
    scratch = 0
    for r in range(first, last):
        if temperature[r] > 0:
            scratch = size
    weights, keys = np.empty(scratch, np.float64), np.empty(scratch, np.uint64)
    mass, counts = np.empty(BINS, np.float64), np.empty(BINS, np.int64)
    for r in range(first, last):
        at = r * size
        top = row_max(logits, at, size)
        if temperature[r] > 0 and math.isfinite(top):
            options = (temperature[r], top_k[r], top_p[r], min_p[r], uniforms[r])
            tokens[r] = draw(logits, bits, at, size, top, options, weights, mass, counts, keys)
        else:
            tokens[r] = first_equal(logits, at, size, top)


@kernel
def sample(logits, bits, temperature, top_k, top_p, min_p, uniforms, tokens, size, chunks):
    """tokens int64 [R]; logits flat, `bits` the same as uint32; options float64 and int64 [R]."""
    if chunks == 1:
        sample_rows(logits, bits, temperature, top_k, top_p, min_p, uniforms, tokens, size, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            sample_rows(logits, bits, temperature, top_k, top_p, min_p, uniforms, tokens, size, np.int64(c), chunks)


# Log-probabilities


@part
def log_sum_exp(logits, at, size, top):
    """log(sum(exp(logits))): exponentials in float32, a thousand at a time added up in float64."""
    total, shift = 0.0, splat(top)
    for start in range(0, size, 1024):
        some = splat(np.float32(0))
        stop = min(start + 1024, size)
        for i in range(start, stop - 15, 16):
            some = add(some, exp(sub(load(logits, at + i), shift)))
        total += lane_sum(some)
        for i in range(start + (stop - start) // 16 * 16, stop):
            total += math.exp(np.float64(logits[at + i]) - np.float64(top))
    return np.float64(top) + math.log(total)


@part
def best_tokens(logits, bits, at, size, top, k, counts, keys):
    """Put the k tokens with the largest logits first into keys, in order."""
    counts[:] = 0
    for i in range(size):
        counts[bin_of(np.float64(top) - np.float64(logits[at + i]))] += 1
    last, found = 0, 0
    while found < k:
        found += counts[last]
        last += 1
    collect(logits, bits, at, size, top, 1.0, np.int64(0), last, keys)


@part
def logprob_rows(logits, bits, chosen, ids, logprobs, ranks, size, k, chunk, chunks):
    """This chunk's rows of `logprobs_of`."""
    first, last = share(chosen.shape[0], chunk, chunks)
    keys, counts = np.empty(size if k > 0 else 0, np.uint64), np.empty(BINS, np.int64)
    for r in range(first, last):
        at, token = r * size, chosen[r]
        top = row_max(logits, at, size)
        norm = log_sum_exp(logits, at, size, top)
        rank, own = 1, logits[at + token]
        for i in range(size):
            if logits[at + i] > own:
                rank += 1
        ranks[r], ids[r, 0], logprobs[r, 0] = rank, token, np.float64(own) - norm
        if k > 0:
            best_tokens(logits, bits, at, size, top, k, counts, keys)
        for j in range(k):
            token = key_token(keys[j])
            ids[r, j + 1], logprobs[r, j + 1] = token, np.float64(logits[at + token]) - norm


@kernel
def logprobs_of(logits, bits, chosen, ids, logprobs, ranks, size, k, chunks):
    """See `Backend.top_logprobs`; ids int64 and logprobs float32 [R, 1+k], ranks int64 [R]."""
    if chunks == 1:
        logprob_rows(logits, bits, chosen, ids, logprobs, ranks, size, k, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            logprob_rows(logits, bits, chosen, ids, logprobs, ranks, size, k, np.int64(c), chunks)
