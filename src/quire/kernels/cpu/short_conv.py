"""Short causal convolutions of single channels, with the last inputs of each sequence kept between steps."""

from __future__ import annotations

import numpy as np

from quire.kernels.backend import AttentionMetadata
from quire.kernels.cpu.activations import activate
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, i32_ptr, i64_ptr
from quire.kernels.cpu.simd import load, load_partial, multiply_add, splat, store, store_partial
from quire.kernels.cpu.threads import Launcher

PIECE = 64  # channels that make one work item
COST = 4  # multiply-adds that take about as long as one input with its load


@jit
def lanes(x, at, count):
    """Return x[at : at + count], count <= 16."""
    if count == 16:
        return load(x, at)
    return load_partial(x, at, count)


@jit
def put_lanes(x, at, value, count):
    """Write the first `count` <= 16 lanes to x[at : at + count]."""
    if count == 16:
        store(x, at, value)
    else:
        store_partial(x, at, value, count)


@jit
def earlier(x, x_at, stride, token, state, state_at, width, taps, fresh, count):
    """Return the input of `token`, counted from the first of this step; those before it lie in the state."""
    if token >= 0:
        return lanes(x, x_at + token * stride, count)
    if fresh:
        return splat(np.float32(0))
    return lanes(state, state_at + (taps - 1 + token) * width, count)


@op
def convolve(args, first, last, scratch):
    """Items are a sequence's pieces of channels. x, elements between its rows, weight, bias or 0, state, out, width,
    taps, pieces, starts of the sequences, their lengths, their rows in the state, activation or -1."""
    x, stride, weight, bias, state, out = (
        f32_ptr(args[0]),
        args[1],
        f32_ptr(args[2]),
        f32_ptr(args[3]),
        f32_ptr(args[4]),
        f32_ptr(args[5]),
    )
    width, taps, pieces = args[6], args[7], args[8]
    starts, lengths, rows, kind = i32_ptr(args[9]), i32_ptr(args[10]), i64_ptr(args[11]), args[12]
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
                shift = lanes(bias, i, count)
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
                        total = multiply_add(lanes(weight, tap * width + i, count), v, total)
                if kind >= 0:
                    total = activate(total, kind)
                put_lanes(out, (start + token) * width + i, total, count)
            for tap in range(taps - 1):  # upwards: what is read is at or behind what is written
                v = earlier(x, x_at, stride, tokens - taps + 1 + tap, state, state_at, width, taps, fresh, count)
                put_lanes(state, state_at + tap * width, v, count)


def causal_conv(
    launcher: Launcher,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    state: np.ndarray,
    metadata: AttentionMetadata,
    activation: int | None,
) -> np.ndarray:
    """See `Backend.causal_conv`; `activation` is a number of `activations.py`."""
    source, stride = as_rows(x)
    (tokens, width), taps = x.shape, weight.shape[0]
    if weight.shape[1] != width or state.shape[1:] != (taps - 1, width):
        raise ValueError(f"causal_conv: x is {x.shape}, weight {weight.shape}, state {state.shape}")
    out = launcher.empty((tokens, width))
    pieces = -(-width // PIECE)
    launcher.emit(
        convolve,
        source,
        stride,
        weight,
        bias,
        state,
        out,
        width,
        taps,
        pieces,
        metadata.cu_query_lens,
        metadata.seq_lens,
        metadata.state_rows,
        -1 if activation is None else activation,
        items=len(metadata.seq_lens) * pieces,
        work=COST * tokens * width * taps,
        grain=max(1, pieces // (4 * launcher.num_threads)),
    )
    return out
