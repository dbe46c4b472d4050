"""Layers with recurrent states: short causal convolutions of single channels, and the gated delta rule.

The last inputs of a convolution, and the matrix of each head of a delta rule, are kept for each sequence between steps.

Columns of a head's matrix are independent of each other, so an item takes some columns of one head through all tokens
of a sequence. They stay in the first-level cache, and if there are several tokens they are brought together first: at
their distance in the matrix they would share few of its sets. A token reads them twice: what the key finds there, then
the update and what the query finds. The first pass reads them as they were before the decay, which is a factor of the
sum.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.backend import AttentionMetadata
from quire.kernels.cpu.activations import ACTIVATIONS, NO_ACTIVATION, activate
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, i32_ptr, i64_ptr
from quire.kernels.cpu.simd import exp, load, load_lanes, mul, multiply_add, splat, store, store_lanes, sub
from quire.kernels.cpu.sizes import SCRATCH_BYTES
from quire.kernels.cpu.threads import Launcher

# Short convolutions


PIECE = 64  # channels that make one work item
COST = 4  # multiply-adds that take about as long as one input with its load


@jit
def earlier(x, x_at, stride, token, state, state_at, width, taps, fresh, count):
    """Return the input of `token`, counted from the first of this step; negative ones are read from the state."""
    if token >= 0:
        return load_lanes(x, x_at + token * stride, count)
    if fresh:
        return splat(np.float32(0))
    return load_lanes(state, state_at + (taps - 1 + token) * width, count)


@op
def convolve(args, first, last, scratch):
    """Items are a sequence's pieces of channels. x, elements between its rows, weight, bias or 0, state, out, width,
    taps, pieces, starts of the sequences, their lengths, their rows in the state, activation's id or NO_ACTIVATION."""
    x, stride, weight, bias = f32_ptr(args[0]), args[1], f32_ptr(args[2]), f32_ptr(args[3])
    state, out = f32_ptr(args[4]), f32_ptr(args[5])
    width, taps, pieces = args[6], args[7], args[8]
    starts, lengths, rows, activation_id = i32_ptr(args[9]), i32_ptr(args[10]), i64_ptr(args[11]), args[12]
    for item in range(first, last):
        sequence, begin = item // pieces, item % pieces * PIECE
        start = np.int64(starts[sequence])
        tokens = np.int64(starts[sequence + 1]) - start
        fresh = np.int64(lengths[sequence]) == tokens
        for i in range(begin, min(begin + PIECE, width), 16):
            count = min(16, width - i)
            x_at, state_at = start * stride + i, rows[sequence] * (taps - 1) * width + i
            shift = splat(np.float32(0))
            if args[3] != 0:
                shift = load_lanes(bias, i, count)
            for token in range(tokens):
                total = shift
                if token >= taps - 1 and count == 16:
                    place = x_at + (token - taps + 1) * stride
                    for tap in range(taps):
                        total = multiply_add(load(weight, tap * width + i), load(x, place + tap * stride), total)
                else:
                    for tap in range(taps):
                        at = token - taps + 1 + tap
                        v = earlier(x, x_at, stride, at, state, state_at, width, taps, fresh, count)
                        total = multiply_add(load_lanes(weight, tap * width + i, count), v, total)
                if activation_id >= 0:
                    total = activate(total, activation_id)
                store_lanes(out, (start + token) * width + i, total, count)
            for tap in range(taps - 1):  # upwards: what is read is at or behind what is written
                v = earlier(x, x_at, stride, tokens - taps + 1 + tap, state, state_at, width, taps, fresh, count)
                store_lanes(state, state_at + tap * width, v, count)


def causal_conv(
    launcher: Launcher,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    state: np.ndarray,
    metadata: AttentionMetadata,
    activation: str | None = None,
) -> np.ndarray:
    """See `Backend.causal_conv`."""
    source, stride = as_rows(x)
    (tokens, width), taps = x.shape, weight.shape[0]
    if weight.shape[1] != width or state.shape[1:] != (taps - 1, width):
        raise ValueError(f"causal_conv: x is {x.shape}, weight {weight.shape}, state {state.shape}")
    out = launcher.empty((tokens, width))
    pieces = -(-width // PIECE)
    arrays = source, stride, weight, bias, state, out
    step = metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows
    activation_id = NO_ACTIVATION if activation is None else ACTIVATIONS[activation]
    items, work = len(metadata.seq_lens) * pieces, COST * tokens * width * taps
    grain = max(1, pieces // (4 * launcher.num_threads))
    launcher.emit(convolve, *arrays, width, taps, pieces, *step, activation_id, items=items, work=work, grain=grain)
    return out


# The gated delta rule


DELTA_COLUMNS = 64  # that make one work item
DEPTH = SCRATCH_BYTES // (4 * DELTA_COLUMNS)  # rows of them that a thread's own memory holds
DELTA_COST = 4  # multiply-adds of a token for each element of the matrix


@jit
def advance(state, at, step, rows, q, k, decay, v, beta, count):
    """Update up to 16 columns at state[at + row * step] by a token, and return the products of its query with them."""
    found = splat(np.float32(0))
    for row in range(rows):
        found = multiply_add(load_lanes(state, at + row * step, count), splat(k[row]), found)
    delta = mul(sub(v, mul(decay, found)), beta)
    result = splat(np.float32(0))
    for row in range(rows):
        place = at + row * step
        kept = multiply_add(splat(k[row]), delta, mul(load_lanes(state, place, count), decay))
        store_lanes(state, place, kept, count)
        result = multiply_add(kept, splat(q[row]), result)
    return result


@jit
def advance_four(state, at, step, rows, q, k, decay, v, v_at, beta, out, out_at):
    """Do as `advance` for 64 columns, in four independent sums of sixteen each, and write the result to out[out_at]."""
    a = b = c = d = splat(np.float32(0))
    for row in range(rows):
        place, factor = at + row * step, splat(k[row])
        a = multiply_add(load(state, place), factor, a)
        b = multiply_add(load(state, place + 16), factor, b)
        c = multiply_add(load(state, place + 32), factor, c)
        d = multiply_add(load(state, place + 48), factor, d)
    a = mul(sub(load(v, v_at), mul(decay, a)), beta)
    b = mul(sub(load(v, v_at + 16), mul(decay, b)), beta)
    c = mul(sub(load(v, v_at + 32), mul(decay, c)), beta)
    d = mul(sub(load(v, v_at + 48), mul(decay, d)), beta)
    e = f = g = h = splat(np.float32(0))
    for row in range(rows):
        place, key, query = at + row * step, splat(k[row]), splat(q[row])
        kept = multiply_add(key, a, mul(load(state, place), decay))
        store(state, place, kept)
        e = multiply_add(kept, query, e)
        kept = multiply_add(key, b, mul(load(state, place + 16), decay))
        store(state, place + 16, kept)
        f = multiply_add(kept, query, f)
        kept = multiply_add(key, c, mul(load(state, place + 32), decay))
        store(state, place + 32, kept)
        g = multiply_add(kept, query, g)
        kept = multiply_add(key, d, mul(load(state, place + 48), decay))
        store(state, place + 48, kept)
        h = multiply_add(kept, query, h)
    store(out, out_at, e)
    store(out, out_at + 16, f)
    store(out, out_at + 32, g)
    store(out, out_at + 48, h)


@jit
def move_columns(source, at, step, target, target_at, target_step, rows, columns, fresh):
    """Copy `columns` neighbours of each row, or zeros if `fresh`."""
    for row in range(rows):
        place, to = at + row * step, target_at + row * target_step
        for i in range(0, columns, 16):
            count = min(16, columns - i)
            store_lanes(target, to + i, splat(np.float32(0)) if fresh else load_lanes(source, place + i, count), count)


@op
def delta_rule(args, first, last, scratch):
    """Items are pieces of columns of a sequence's heads. q, k, v, decay, beta: address and elements between rows of
    each; state, out; value heads, heads of a key, rows and columns of a matrix, pieces; starts of the sequences, their
    lengths, their rows in the state."""
    v, decay, beta = f32_ptr(args[4]), f32_ptr(args[6]), f32_ptr(args[8])
    state, out, heads, shared = f32_ptr(args[10]), f32_ptr(args[11]), args[12], args[13]
    depth, width, pieces = args[14], args[15], args[16]
    starts, lengths, rows = i32_ptr(args[17]), i32_ptr(args[18]), i64_ptr(args[19])
    for item in range(first, last):
        sequence, head, begin = item // (heads * pieces), item // pieces % heads, item % pieces * DELTA_COLUMNS
        columns = min(DELTA_COLUMNS, width - begin)
        start, stop = np.int64(starts[sequence]), np.int64(starts[sequence + 1])
        at = (rows[sequence] * heads + head) * depth * width + begin
        fresh = np.int64(lengths[sequence]) == stop - start
        apart = stop - start > 1 and depth <= DEPTH
        matrix, matrix_at, step = state, at, width
        if apart:
            matrix, matrix_at, step = f32_ptr(scratch), 0, DELTA_COLUMNS
        if fresh or apart:
            move_columns(state, at, width, matrix, matrix_at, step, depth, columns, fresh)
        for token in range(start, stop):
            query = f32_ptr(args[0] + 4 * (token * args[1] + head // shared * depth))
            key = f32_ptr(args[2] + 4 * (token * args[3] + head // shared * depth))
            factor = exp(splat(decay[token * args[7] + head]))
            rate = splat(beta[token * args[9] + head])
            v_at, out_at = token * args[5] + head * width + begin, (token * heads + head) * width + begin
            if columns == DELTA_COLUMNS:
                advance_four(matrix, matrix_at, step, depth, query, key, factor, v, v_at, rate, out, out_at)
            else:
                for i in range(0, columns, 16):
                    count = min(16, columns - i)
                    values = load_lanes(v, v_at + i, count)
                    result = advance(matrix, matrix_at + i, step, depth, query, key, factor, values, rate, count)
                    store_lanes(out, out_at + i, result, count)
        if apart:
            move_columns(matrix, matrix_at, step, state, at, width, depth, columns, False)


def gated_delta(
    launcher: Launcher,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    metadata: AttentionMetadata,
) -> np.ndarray:
    """See `Backend.gated_delta`."""
    tokens, (_, heads, depth, width) = q.shape[0], state.shape
    key_heads = k.shape[1] // depth
    if q.shape != k.shape or key_heads * depth != k.shape[1] or v.shape[1] != heads * width or heads % key_heads:
        raise ValueError(f"gated_delta: q is {q.shape}, k {k.shape}, v {v.shape}, state {state.shape}")
    out = launcher.empty((tokens, heads * width))
    pieces = -(-width // DELTA_COLUMNS)
    operands: list[np.ndarray | int] = []
    for array in (q, k, v, decay, beta):
        operands += as_rows(array)
    sizes = heads, heads // key_heads, depth, width, pieces
    step = metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows
    items, work = len(metadata.seq_lens) * heads * pieces, DELTA_COST * tokens * heads * depth * width
    grain = max(1, heads * pieces // (4 * launcher.num_threads))
    launcher.emit(delta_rule, *operands, state, out, *sizes, *step, items=items, work=work, grain=grain)
    return out
