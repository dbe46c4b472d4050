"""Short convolutions along sequences, whose last inputs wait in states for the next step.

Bound by memory: an input is read from device memory once and from the caches for the taps after it. A step of single
tokens takes one launch, in which each program changes the state that it alone reads. Otherwise the tokens are computed
first, in any order, and then a second launch brings the states up to date.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.activations import activate

CHANNELS = 512  # of a program that has one token
TILE = (16, 128)  # tokens and channels of a program that has several


@triton.jit
def conv_single_kernel(
    x, weight, bias, state, out, seq_lens, state_rows, x_stride, channels,
    BIASED: tl.constexpr, KIND: tl.constexpr, TAPS: tl.constexpr, TB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block of channels): convolve its one token, and shift its state."""
    s = tl.program_id(0)
    keys = tl.load(seq_lens + s)
    if keys <= 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    own = state + tl.load(state_rows + s) * (TAPS - 1) * channels + column
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0)
    newest = tl.load(x + s.to(tl.int64) * x_stride + column, mask=inside, other=0).to(tl.float32)
    total += tl.load(weight + (TAPS - 1) * channels + column, mask=inside, other=0) * newest
    if TAPS > 1:
        tap = tl.arange(0, TB)[:, None]
        older = (tap < TAPS - 1) & inside[None, :]
        places = own[None, :] + tap * channels
        values = tl.load(places, mask=older & (keys > 1), other=0)
        factors = tl.load(weight + tap * channels + column[None, :], mask=older, other=0)
        total += tl.sum(values * factors, 0)
        tl.debug_barrier()  # nobody writes before all have read
        tl.store(places - channels, values, mask=older & (tap > 0))
        tl.store(own + (TAPS - 2) * channels, newest, mask=inside)
    made = activate(total, KIND).to(out.dtype.element_ty)
    tl.store(out + s.to(tl.int64) * channels + column, made, mask=inside)


@triton.jit(do_not_specialize=["tokens", "num_sequences"])
def conv_kernel(
    x, weight, bias, state, out, starts, seq_lens, state_rows, owners, x_stride, tokens, channels, num_sequences,
    BIASED: tl.constexpr, KIND: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, block of channels); `owners` [T] are the tokens' sequences. States stay as they are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    s = tl.load(owners + row, mask=row < tokens, other=num_sequences)
    valid = s < num_sequences
    first = tl.load(starts + s, mask=valid, other=0)
    count = tl.load(starts + s + 1, mask=valid, other=0) - first
    remembers = valid & (tl.load(seq_lens + s, mask=valid, other=0) > count)
    own = tl.load(state_rows + s, mask=valid, other=0) * (TAPS - 1) * channels
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0)[None, :]
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1) + tap  # in the step, or, if before the sequence's first token, in its state
        new = (valid & (source >= first))[:, None] & inside[None, :]
        old = (remembers & (source < first))[:, None] & inside[None, :]
        place = source.to(tl.int64)[:, None] * x_stride + column[None, :]
        value = tl.load(x + place, mask=new, other=0).to(tl.float32)
        if tap < TAPS - 1:
            place = (own + (source - first + TAPS - 1) * channels)[:, None] + column[None, :]
            value += tl.load(state + place, mask=old, other=0)
        total += tl.load(weight + tap * channels + column, mask=inside, other=0)[None, :] * value
    made = activate(total, KIND).to(out.dtype.element_ty)
    target = out + row.to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(target, made, mask=valid[:, None] & inside[None, :])


@triton.jit
def conv_state_kernel(
    x, state, starts, seq_lens, state_rows, x_stride, channels,
    TAPS: tl.constexpr, TB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block of channels): keep its last TAPS - 1 inputs."""
    s = tl.program_id(0)
    first = tl.load(starts + s)
    count = tl.load(starts + s + 1) - first
    if count <= 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    slot = tl.arange(0, TB)[:, None]
    wanted = (slot < TAPS - 1) & inside[None, :]
    own = state + tl.load(state_rows + s) * (TAPS - 1) * channels + column[None, :]
    source = count - (TAPS - 1) + slot  # among the step's tokens; below 0 they are in the state, further on
    old = wanted & (source < 0) & (tl.load(seq_lens + s) > count)
    values = tl.load(own + (slot + count) * channels, mask=old, other=0)
    place = (first + source).to(tl.int64) * x_stride + column[None, :]
    values += tl.load(x + place, mask=wanted & (source >= 0), other=0).to(tl.float32)
    tl.debug_barrier()  # nobody writes before all have read
    tl.store(own + slot * channels, values, mask=wanted)


def token_owners(tokens: int, metadata: AttentionMetadata) -> torch.Tensor:
    """Return each token's sequence, int32 [T], or how many there are if it has none; worked out once a step."""
    key = "token owners", tokens
    owners = metadata.plans.get(key)
    if owners is None:
        places = torch.arange(tokens, dtype=torch.int32, device=metadata.cu_query_lens.device)
        owners = torch.searchsorted(metadata.cu_query_lens[1:], places, right=True, out_int32=True)
        metadata.plans[key] = owners
    return owners


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    metadata: AttentionMetadata,
    kind: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `Backend.causal_conv`; `kind` is a number of `activations.py`, the result is of `dtype`."""
    tokens, channels = x.shape
    taps, sequences = weight.shape[0], metadata.seq_lens.shape[0]
    out = torch.empty((tokens, channels), dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    padded = triton.next_power_of_2(max(taps - 1, 1))
    biases = weight if bias is None else bias
    if metadata.single:
        conv_single_kernel[(sequences, triton.cdiv(channels, CHANNELS))](
            x, weight, biases, state, out, metadata.seq_lens, metadata.state_rows, x.stride(0), channels,
            BIASED=bias is not None, KIND=kind, TAPS=taps, TB=padded, BLOCK=CHANNELS,
        )  # fmt: skip
        return out
    rows, block = TILE
    conv_kernel[(triton.cdiv(tokens, rows), triton.cdiv(channels, block))](
        x, weight, biases, state, out, metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows,
        token_owners(tokens, metadata), x.stride(0), tokens, channels, sequences,
        BIASED=bias is not None, KIND=kind, TAPS=taps, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    if taps > 1:
        conv_state_kernel[(sequences, triton.cdiv(channels, CHANNELS))](
            x, state, metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows, x.stride(0), channels,
            TAPS=taps, TB=padded, BLOCK=CHANNELS,
        )  # fmt: skip
    return out
