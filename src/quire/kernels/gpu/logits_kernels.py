"""Kernels that change logits by what options ask for, and that look at whole rows: the largest, sums, an order.

All are bound by reading (and writing) what they touch; rows are cut into parts, so that few rows fill the chip as well.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def largest_parts(logits, stride, size, part, tops, tokens, BLOCK: tl.constexpr):
    """Find the largest of each `part` of a row, NaN if there is one, and its first token: [R, parts]."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = piece * part
    top, place = first_largest(logits + row * stride + start, tl.minimum(part, size - start), BLOCK)
    tl.store(tops + row * pieces + piece, top)
    tl.store(tokens + row * pieces + piece, start + place)


@triton.jit
def largest_of_parts(tops, tokens, row, pieces, PIECES: tl.constexpr):
    """Return the largest logit of a row, NaN if there is one, and its first token, 0 for NaN; see `largest_parts`."""
    lanes = tl.arange(0, PIECES)
    top = tl.load(tops + row * pieces + lanes, mask=lanes < pieces, other=float("-inf"))
    token = tl.load(tokens + row * pieces + lanes, mask=lanes < pieces, other=2147483647)
    broken = tl.max((top != top).to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(top != top, float("-inf"), top), axis=0)
    first = tl.min(tl.where(top == best, token, 2147483647), axis=0)
    return tl.where(broken, float("nan"), best), tl.where(broken, 0, first)


@triton.jit(do_not_specialize=["pieces"])
def join_largest(tops, tokens, pieces, out_tokens, out_finite, PIECES: tl.constexpr):
    """Join the parts of a row: out_tokens int64 [R], 0 where there is a NaN; out_finite bool [R] of `rows_finite`."""
    row = tl.program_id(0)
    best, token = largest_of_parts(tops, tokens, row, pieces, PIECES)
    tl.store(out_tokens + row, token.to(tl.int64))
    tl.store(out_finite + row, tl.abs(best) < float("inf"))


@triton.jit
def sum_parts(logits, stride, chosen, size, tops, sums, larger, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Sum e^(logit - the part's largest) over a part of a row, and count logits above the chosen one's: [R, parts]."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lanes = tl.arange(0, BLOCK)
    values = logits + row * stride
    own = tl.load(values + tl.load(chosen + row))
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(piece * PART, (piece + 1) * PART, BLOCK):
        x = tl.load(values + start + lanes, mask=start + lanes < size, other=float("-inf"))
        new = tl.maximum(most, x)
        known = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf is no number
        total = total * tl.exp(most - known) + tl.exp(x - known)
        most = new
        count += (x > own).to(tl.int32)
    top = tl.max(most, axis=0)
    total *= tl.exp(most - tl.where(top == float("-inf"), 0.0, top))
    tl.store(tops + row * pieces + piece, top)
    tl.store(sums + row * pieces + piece, tl.sum(total, axis=0))
    tl.store(larger + row * pieces + piece, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["k"])
def join_sums(logits, stride, chosen, keys, k, found, pieces, out, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Join the parts of a row; write what `TopLogprobs` has, of the chosen token and those of `keys` int64 [R, k].

    found: what `sum_parts` wrote. out: the three arrays of `TopLogprobs`.
    """
    tops, sums, larger = found
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    top = tl.load(tops + row * pieces + lanes, mask=lanes < pieces, other=float("-inf"))
    total = tl.load(sums + row * pieces + lanes, mask=lanes < pieces, other=0.0)
    count = tl.load(larger + row * pieces + lanes, mask=lanes < pieces, other=0)
    most = tl.max(top, axis=0)
    total *= tl.exp(top - tl.where(most == float("-inf"), 0.0, most))
    log = most + tl.log(tl.sum(total, axis=0))
    ids, logprobs, ranks = out
    tl.store(ranks + row, (1 + tl.sum(count, axis=0)).to(tl.int64))
    token, values, first = tl.load(chosen + row), logits + row * stride, row * (k + 1)
    tl.store(ids + first, token)
    tl.store(logprobs + first, tl.load(values + token) - log)
    for start in range(0, k, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys + row * k + place, mask=place < k, other=0)
        best = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        logprob = tl.load(values + best, mask=place < k, other=0.0) - log
        tl.store(ids + first + 1 + place, best, mask=place < k)
        tl.store(logprobs + first + 1 + place, logprob, mask=place < k)


@triton.jit
def order_keys(logits, stride, size, out, BLOCK: tl.constexpr):
    """Write int64 keys [R, V] whose order is that of logits, and among equals the lower id is the larger."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < size, other=0.0)
    key = (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    tl.store(out + row * size + ids, key, mask=ids < size)


@triton.jit
def keep_bits(logits, stride, size, rows, bits, words, BLOCK: tl.constexpr):
    """Write -inf where a bit is clear: rows int64 [P], bits int32 [P, words]; nothing is read of the logits."""
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + place * words + ids // 32, mask=ids < size, other=-1)
    masked = ((word >> (ids % 32)) & 1) == 0
    row = tl.load(rows + place)
    tl.store(logits + row * stride + ids, float("-inf"), mask=masked & (ids < size))


@triton.jit(do_not_specialize=["count"])
def add_values(logits, stride, entries, count, BLOCK: tl.constexpr):
    """Add to logits: entries int32 [3, count] are rows, tokens and the bits of values; no pair twice."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = e < count
    row = tl.load(entries + e, mask=here, other=0).to(tl.int64)
    token = tl.load(entries + count + e, mask=here, other=0)
    value = tl.load(entries + 2 * count + e, mask=here, other=0).to(tl.float32, bitcast=True)
    at = logits + row * stride + token
    tl.store(at, tl.load(at, mask=here, other=0.0) + value, mask=here)


@triton.jit(do_not_specialize=["count", "places"])
def penalize(logits, stride, entries, count, places, device_tokens, BLOCK: tl.constexpr):
    """See `Backend.apply_penalties`: entries int32 are [3, count], then [7, places].

    The former are places among the rows, tokens (none of a row twice), and how often each was generated; the latter,
    rows, the bits of their penalties, the index of their last token in `device_tokens` int64 (-1: none), their first
    entry and the one after their last. Programs beyond those of entries are for a place each, whose device token they
    take if it is no entry; one that is counts once more there.
    """
    lanes = tl.arange(0, BLOCK)
    e = tl.program_id(0) * BLOCK + lanes
    beyond = tl.program_id(0) - tl.cdiv(count, BLOCK)
    here = (e < count) | ((beyond >= 0) & (lanes == 0))
    place = tl.load(entries + e, mask=e < count, other=tl.maximum(beyond, 0))
    options = entries + 3 * count + place
    source = tl.load(options + 4 * places, mask=here, other=-1)
    last = tl.load(device_tokens + source, mask=source >= 0, other=-1).to(tl.int32)
    token = tl.load(entries + count + e, mask=e < count, other=0)
    times = tl.load(entries + 2 * count + e, mask=e < count, other=0)
    if beyond >= 0:
        known = tl.sum(tl.where(lanes == 0, last, 0), axis=0)  # a scalar; -1 is no entry's token
        own = entries + 3 * count + beyond
        found = tl.zeros([BLOCK], tl.int32)
        for start in range(tl.load(own + 5 * places), tl.load(own + 6 * places), BLOCK):
            rest = start + lanes < tl.load(own + 6 * places)
            found |= (tl.load(entries + count + start + lanes, mask=rest, other=-1) == known).to(tl.int32)
        here &= (known >= 0) & (tl.sum(found, axis=0) == 0)
        token = tl.where(here, last, 0)
    times = (times + ((source >= 0) & (token == last)).to(tl.int32)).to(tl.float32)
    row = tl.load(options, mask=here, other=0).to(tl.int64)
    repetition = tl.load(options + places, mask=here, other=0x3F800000).to(tl.float32, bitcast=True)  # 1.0
    presence = tl.load(options + 2 * places, mask=here, other=0).to(tl.float32, bitcast=True)
    frequency = tl.load(options + 3 * places, mask=here, other=0).to(tl.float32, bitcast=True)
    at = logits + row * stride + token
    x = tl.load(at, mask=here, other=0.0)
    x = tl.where(x > 0, x / repetition, x * repetition)
    tl.store(at, x - (frequency * times + tl.where(times > 0, presence, 0.0)), mask=here)


@triton.jit(do_not_specialize=["stride", "count"])
def ban_where(logits, stride, entries, count, device_tokens, BLOCK: tl.constexpr):
    """See `Backend.ban_after`: entries int32 [4, count] are rows, tokens to ban, indices into `device_tokens`
    int64, and the token there that each ban follows.
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = e < count
    row = tl.load(entries + e, mask=here, other=0).to(tl.int64)
    token = tl.load(entries + count + e, mask=here, other=0)
    last = tl.load(device_tokens + tl.load(entries + 2 * count + e, mask=here, other=0), mask=here, other=0)
    hit = here & (last == tl.load(entries + 3 * count + e, mask=here, other=-1))
    tl.store(logits + row * stride + token, float("-inf"), mask=hit)
