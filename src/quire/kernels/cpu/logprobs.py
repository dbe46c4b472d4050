"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

import math

import numpy as np

from quire.kernels.cpu.jit import jit, op, share
from quire.kernels.cpu.pointers import f32_ptr, i32_ptr, i64_ptr
from quire.kernels.cpu.row_maxima import RowMaxima, collect_largest, key_token
from quire.kernels.cpu.simd import add, exp, load, reduce_sum, splat, sub
from quire.kernels.cpu.threads import Launcher


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


def logprobs_of(
    launcher: Launcher, known: RowMaxima, chosen: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids int64 [R, 1 + k], their logprobs float32 [R, 1 + k], and ranks int64 [R] of the chosen.

    See `TopLogprobs`; chosen is contiguous int64 [R], k at most V.
    """
    rows, size = known.logits.shape
    assert 0 <= k <= size, "k is at most the vocabulary"
    ids, logprobs = launcher.empty((rows, 1 + k), np.int64), launcher.empty((rows, 1 + k))
    ranks = launcher.empty((rows,), np.int64)
    shares = min(rows, 2 * launcher.num_threads)
    keys = launcher.empty((shares, size if k else 0), np.int64)
    source = known.logits, known.stride, size, known.maxima, known.chunks, known.tops
    launcher.emit(
        logprob_rows,
        *source,
        chosen,
        ids,
        logprobs,
        ranks,
        k,
        keys,
        rows,
        shares,
        items=shares,
        work=8 * rows * size,
        grain=1,
    )
    return ids, logprobs, ranks
