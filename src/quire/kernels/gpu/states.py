"""Layers with recurrent states: short convolutions and the gated delta rule.

Sequences that pad a step (seq_len 0) have no state that is read or written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.activations import ACTIVATIONS, activate
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.graphs import splitting_op
from quire.kernels.gpu.kernel_args import power_of_two, rows_of
from quire.kernels.gpu.rows import as_rows

COLUMNS = 32  # of a matrix that one program has: 4 programs a head of 128, or 128 of a sequence with 32 heads
CHUNK = 64
SEQUENCES = 256  # that are looked at at least, so that no kernel is compiled for each number of them


class Sequences(NamedTuple):
    """Of the sequences of a step: first rows int32 [S + 1], lengths int32 [S], rows of their states int64 [S].

    runs: of chunks, or of tokens, see `_chunk_ends` and `token_owners`; None where it is not needed.
    """

    starts: Any
    lengths: Any
    state_rows: Any
    runs: Any


class DeltaInputs(NamedTuple):
    """q, k [T, Hk * DK], v [T, Hv * DV], decay (its logarithm) and beta [T, Hv], each as `Rows`."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any


class Delta(NamedTuple):
    """What the gated delta rule is compiled for.

    single: every sequence has one token. heads: value heads, `shared` of which have one key head. DK, DV: sizes of keys
    and values; KB: the former padded. VB: columns of a program. SB: sequences, padded.
    """

    single: bool
    heads: int
    shared: int
    DK: int
    DV: int
    KB: int
    VB: int
    SB: int = SEQUENCES


def delta_inputs(*tensors: torch.Tensor) -> DeltaInputs:
    """Return q, k, v, decay and beta as kernels take them."""
    return DeltaInputs(*(rows_of(as_rows(x)) for x in tensors))


def sequences_of(metadata: AttentionMetadata, runs: torch.Tensor | None = None) -> Sequences:
    """Return the sequences of a step as kernels take them."""
    return Sequences(metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows, runs)


@triton.jit
def _matrix(state, batch, s, head, column, FORM: tl.constexpr):
    """Return where columns of a head's matrix of a sequence are, [KB, VB], and which of these exist."""
    depth = tl.arange(0, FORM.KB)
    place = state + (tl.load(batch.state_rows + s) * FORM.heads + head) * FORM.DK * FORM.DV
    mask = (depth < FORM.DK)[:, None] & (column < FORM.DV)[None, :]
    return place + depth[:, None] * FORM.DV + column[None, :], mask


# The gated delta rule token by token: for decoding, and where bits must not depend on how a prompt was cut into steps.
# A program has some columns of one head's matrix of one sequence, which are independent of the others, and keeps them
# in registers from the first token to the last. With one token it is bound by memory: the matrices are read and written
# once, 4 MB a sequence and layer with 32 heads of 128 by 128.


@triton.jit
def delta_scan_kernel(x, state, out, batch, FORM: tl.constexpr):
    """Program (block of columns, value head, sequence). x: `DeltaInputs`, state [rows, Hv, DK, DV], out [T, Hv*DV]."""
    column = tl.program_id(0) * FORM.VB + tl.arange(0, FORM.VB)
    head, s = tl.program_id(1), tl.program_id(2)
    keys = tl.load(batch.lengths + s)
    first, count = s, 1
    if not FORM.single:
        first = tl.load(batch.starts + s)
        count = tl.load(batch.starts + s + 1) - first
    if keys <= 0 or count <= 0:
        return
    depth, inside = tl.arange(0, FORM.KB), column < FORM.DV
    deep = depth < FORM.DK
    place, whole = _matrix(state, batch, s, head, column, FORM)
    matrix = tl.load(place, mask=whole & (keys > count), other=0)
    key_at = head // FORM.shared * FORM.DK + depth
    for token in range(count):
        row = (first + token).to(tl.int64)
        key = tl.load(x.k.data + row * x.k.stride + key_at, mask=deep, other=0).to(tl.float32)
        query = tl.load(x.q.data + row * x.q.stride + key_at, mask=deep, other=0).to(tl.float32)
        value_at = x.v.data + row * x.v.stride + head * FORM.DV + column
        value = tl.load(value_at, mask=inside, other=0).to(tl.float32)
        gate = tl.load(x.beta.data + row * x.beta.stride + head).to(tl.float32)
        matrix *= tl.exp(tl.load(x.decay.data + row * x.decay.stride + head).to(tl.float32))
        change = (value - tl.sum(key[:, None] * matrix, 0)) * gate
        matrix += key[:, None] * change[None, :]
        found = tl.sum(query[:, None] * matrix, 0)
        tl.store(out + (row * FORM.heads + head) * FORM.DV + column, found.to(out.dtype.element_ty), mask=inside)
    tl.store(place, matrix, mask=whole)


def scan(
    x: DeltaInputs, state: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor, *, exact: bool = False
) -> None:
    """See `Backend.gated_delta`; `out` [T, Hv*Dv] is contiguous.

    exact: a token's bits are the same after a token of the same step as at the beginning of one. The kernel for single
    tokens adds up in another order; and the assembler unrolls the loop and fuses products with sums here in this way,
    there in another.
    """
    _, heads, depth, width = state.shape
    columns = min(COLUMNS, power_of_two(width))
    shared = heads * depth // x.k.data.shape[1]
    form = Delta(metadata.single and not exact, heads, shared, depth, width, power_of_two(depth), columns)
    grid = -(-width // columns), heads, metadata.seq_lens.shape[0]
    delta_scan_kernel[grid](x, state, out, sequences_of(metadata), FORM=form, enable_fp_fusion=not exact)


# The gated delta rule in chunks of tokens, so that prompts are matrix products (Yang et al. 2024, section 3.3).
#
# With g the running sum of decays in a chunk, S the matrix before it, and row r of K, Q, V and U of its r-th token,
# where k_r u_r^T is what that token adds to the matrix, the definition says
#
#     u_r = beta_r (v_r - e^(g_r) S^T k_r - sum over i < r of e^(g_r - g_i) (k_r . k_i) u_i)
#     o_r = e^(g_r) S^T q_r + sum over i <= r of e^(g_r - g_i) (q_r . k_i) u_i
#
# so U = (I + A)^-1 diag(beta) (V - diag(e^g) K S) with A strictly lower triangular. What does not need S, the inverse
# and the weights of the second line, is computed for all chunks at once; then a program for some columns of a matrix
# goes from chunk to chunk. The inverse is found row by row: products of powers of A would be fewer steps, but where
# keys repeat themselves the powers grow beyond all bounds and cancel.


@triton.jit
def _product(x, y):
    """x @ y with the precision of float32, for y in float32 and x in any type.

    Where x has 16 bits, so has each of two numbers that y is the sum of, but for a part in 2^17 or less.
    """
    if x.dtype == tl.float32:
        return tl.dot(x, y, input_precision="tf32x3")
    high = y.to(x.dtype)
    return tl.dot(x, (y - high.to(tl.float32)).to(x.dtype), tl.dot(x, high))


@triton.jit(do_not_specialize=["num_sequences"])
def prepare_kernel(x, workspace, batch, num_sequences, FORM: tl.constexpr, C: tl.constexpr):
    """Program (chunk, value head): (I + A)^-1 diag(beta) and the weights of outputs, [C, C] each; g and what is left of
    it to the chunk's end, [2, C].

    Sums of decays are long, and differences of them may be short: these would have the rounding of those.
    """
    inverses, weights, sums = workspace
    chunk, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, FORM.SB)
    before = (tl.load(batch.runs + index, mask=index < num_sequences, other=2147483647) <= chunk).to(tl.int32)
    s = tl.sum(before, 0)
    if s >= num_sequences:
        return
    earlier = 0
    if s > 0:
        earlier = tl.load(batch.runs + s - 1)
    place = tl.arange(0, C)
    row = tl.load(batch.starts + s) + (chunk - earlier) * C + place
    valid = row < tl.load(batch.starts + s + 1)
    row = row.to(tl.int64)
    depth = tl.arange(0, FORM.KB)
    mask = valid[:, None] & (depth < FORM.DK)[None, :]
    column = head // FORM.shared * FORM.DK + depth
    keys = tl.load(x.k.data + row[:, None] * x.k.stride + column[None, :], mask=mask, other=0)
    queries = tl.load(x.q.data + row[:, None] * x.q.stride + column[None, :], mask=mask, other=0)
    gate = tl.load(x.beta.data + row * x.beta.stride + head, mask=valid, other=0).to(tl.float32)
    decays = tl.load(x.decay.data + row * x.decay.stride + head, mask=valid, other=0).to(tl.float64)
    exact = tl.cumsum(decays, 0)
    total = exact.to(tl.float32)
    rest = (exact - total.to(tl.float64)).to(tl.float32)
    between = (total[:, None] - total[None, :]) + (rest[:, None] - rest[None, :])
    fade = tl.exp(tl.minimum(between, 0.0))  # above the diagonal it is not used

    lower = place[:, None] > place[None, :]
    step = tl.where(lower, tl.dot(keys, tl.trans(keys), input_precision="tf32x3") * fade * -gate[:, None], 0.0)
    solved = tl.zeros([C, C], tl.float32)  # the inverse without its diagonal of ones
    for i in range(1, C):
        here = place[:, None] == i
        taken = tl.sum(tl.where(here, step, 0.0), 0)
        solved = tl.where(here, (taken + tl.sum(taken[:, None] * solved, 0))[None, :], solved)
    solved += (place[:, None] == place[None, :]).to(tl.float32)

    seen = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * fade
    seen = tl.where(place[:, None] >= place[None, :], seen, 0.0)
    slot = chunk.to(tl.int64) * FORM.heads + head
    square = slot * C * C + place[:, None] * C + place[None, :]
    tl.store(inverses + square, solved * gate[None, :])
    tl.store(weights + square, seen.to(weights.dtype.element_ty))
    tl.store(sums + slot * 2 * C + place, total)
    tl.store(sums + (slot * 2 + 1) * C + place, (tl.sum(decays, 0) - exact).to(tl.float32))


@triton.jit
def advance_kernel(x, state, out, workspace, batch, FORM: tl.constexpr, C: tl.constexpr):
    """Program (block of columns, value head, sequence): outputs of all its chunks, and the matrix after them."""
    inverses, weights, sums = workspace
    column = tl.program_id(0) * FORM.VB + tl.arange(0, FORM.VB)
    head, s = tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(batch.starts + s), tl.load(batch.starts + s + 1)
    if stop <= first:
        return
    chunk = 0
    if s > 0:
        chunk = tl.load(batch.runs + s - 1)
    depth, place = tl.arange(0, FORM.KB), tl.arange(0, C)
    inside, deep = column < FORM.DV, depth < FORM.DK
    matrix_place, whole = _matrix(state, batch, s, head, column, FORM)
    matrix = tl.load(matrix_place, mask=whole & (tl.load(batch.lengths + s) > stop - first), other=0)
    key_column = head // FORM.shared * FORM.DK + depth
    square = place[:, None] * C + place[None, :]
    for begin in range(first, stop, C):
        row = (begin + place).to(tl.int64)
        valid = row < stop
        mask = valid[:, None] & deep[None, :]
        keys = tl.load(x.k.data + row[:, None] * x.k.stride + key_column[None, :], mask=mask, other=0)
        queries = tl.load(x.q.data + row[:, None] * x.q.stride + key_column[None, :], mask=mask, other=0)
        value_mask = valid[:, None] & inside[None, :]
        value_at = x.v.data + row[:, None] * x.v.stride + (head * FORM.DV + column)[None, :]
        values = tl.load(value_at, mask=value_mask, other=0)
        slot = chunk.to(tl.int64) * FORM.heads + head  # type: ignore[attr-defined]  # a number of Triton
        inverse = tl.load(inverses + slot * C * C + square)
        weight = tl.load(weights + slot * C * C + square)
        total = tl.load(sums + slot * 2 * C + place)
        last = tl.load(sums + slot * 2 * C + C - 1)  # tokens that are not there do not decay
        left = tl.load(sums + (slot * 2 + 1) * C + place)
        grown = tl.exp(total)[:, None]
        missing = values.to(tl.float32) - grown * _product(keys, matrix)
        high = inverse.to(keys.dtype)
        added = _product(high, missing)
        if keys.dtype != tl.float32:
            added += tl.dot((inverse - high.to(tl.float32)).to(keys.dtype), missing.to(keys.dtype))
        found = grown * _product(queries, matrix) + _product(weight, added)
        target = out + (row * FORM.heads + head)[:, None] * FORM.DV + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=value_mask)
        faded = added * tl.exp(left)[:, None]
        matrix = matrix * tl.exp(last) + _product(tl.trans(keys), faded)
        chunk += 1
    tl.store(matrix_place, matrix, mask=whole)


def _chunk_ends(metadata: AttentionMetadata) -> torch.Tensor:
    """Return how many chunks each sequence has together with those before it, int32 [S], worked out once a step."""
    ends = metadata.plans.get("chunks")
    if ends is None:
        lengths = metadata.cu_query_lens.diff()
        ends = lengths.add_(CHUNK - 1).div_(CHUNK, rounding_mode="floor").cumsum(0, dtype=torch.int32)
        metadata.plans["chunks"] = ends
    return ends


def advance(x: DeltaInputs, state: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
    """See `Backend.gated_delta`; `out` [T, Hv*Dv] is contiguous. Products have the precision of float32."""
    _, heads, depth, width = state.shape
    q, device = x.q.data, out.device
    sequences = metadata.seq_lens.shape[0]
    most = -(-q.shape[0] // CHUNK) + sequences
    inverses = torch.empty((most, heads, CHUNK, CHUNK), dtype=torch.float32, device=device)
    weights = torch.empty_like(inverses, dtype=q.dtype)  # these only matter to outputs
    sums = torch.empty((most, heads, 2, CHUNK), dtype=torch.float32, device=device)
    workspace, batch = (inverses, weights, sums), sequences_of(metadata, _chunk_ends(metadata))
    columns = min(COLUMNS, max(16, power_of_two(width)))
    sizes = heads, heads * depth // x.k.data.shape[1], depth, width, max(16, power_of_two(depth)), columns
    form = Delta(False, *sizes, max(SEQUENCES, power_of_two(sequences)))
    prepare_kernel[(most, heads)](x, workspace, batch, sequences, FORM=form, C=CHUNK, num_warps=8)
    grid = -(-width // columns), heads, sequences
    advance_kernel[grid](x, state, out, workspace, batch, FORM=form, C=CHUNK, num_warps=4, num_stages=2)


CHANNELS = 512  # of a program that has one token
TILE = (16, 128)  # tokens and channels of a program that has several


# Short causal convolutions, whose last inputs are kept in states for the next step. Bound by memory: an input is read
# from device memory once and from the caches for the taps after it. A step of single tokens takes one launch, in which
# each program changes the state that it alone reads. Otherwise the tokens are computed first, in any order, and a
# second launch updates the states.


class Conv(NamedTuple):
    """What a convolution is compiled for: `taps`, one less of them padded, tokens and channels of a program."""

    activation_id: int
    taps: int
    padded: int
    rows: int
    block: int


@triton.jit
def conv_single_kernel(x, weight, bias, state, out, batch, channels, FORM: tl.constexpr):
    """Program (sequence, block of channels): convolve its one token, and shift its state."""
    s = tl.program_id(0)
    keys = tl.load(batch.lengths + s)
    if keys <= 0:
        return
    column = tl.program_id(1) * FORM.block + tl.arange(0, FORM.block)
    inside = column < channels
    own = state + tl.load(batch.state_rows + s) * (FORM.taps - 1) * channels + column
    BLOCK: tl.constexpr = FORM.block
    total = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0)
    newest = tl.load(x.data + s.to(tl.int64) * x.stride + column, mask=inside, other=0).to(tl.float32)
    total += tl.load(weight + (FORM.taps - 1) * channels + column, mask=inside, other=0) * newest
    if FORM.taps > 1:
        tap = tl.arange(0, FORM.padded)[:, None]
        older = (tap < FORM.taps - 1) & inside[None, :]
        places = own[None, :] + tap * channels
        values = tl.load(places, mask=older & (keys > 1), other=0)
        factors = tl.load(weight + tap * channels + column[None, :], mask=older, other=0)
        total += tl.sum(values * factors, 0)
        tl.debug_barrier()  # no thread writes before all have read
        tl.store(places - channels, values, mask=older & (tap > 0))
        tl.store(own + (FORM.taps - 2) * channels, newest, mask=inside)
    result = activate(total, FORM.activation_id).to(out.dtype.element_ty)
    tl.store(out + s.to(tl.int64) * channels + column, result, mask=inside)


@triton.jit(do_not_specialize=["tokens", "num_sequences"])
def conv_kernel(x, weight, bias, state, out, batch, tokens, channels, num_sequences, FORM: tl.constexpr):
    """Program (block of tokens, block of channels); the batch's runs are owners of tokens. States stay as they are."""
    row = tl.program_id(0) * FORM.rows + tl.arange(0, FORM.rows)
    column = tl.program_id(1) * FORM.block + tl.arange(0, FORM.block)
    inside = column < channels
    s = tl.load(batch.runs + row, mask=row < tokens, other=num_sequences)
    valid = s < num_sequences
    first = tl.load(batch.starts + s, mask=valid, other=0)
    count = tl.load(batch.starts + s + 1, mask=valid, other=0) - first
    remembers = valid & (tl.load(batch.lengths + s, mask=valid, other=0) > count)
    own = tl.load(batch.state_rows + s, mask=valid, other=0) * (FORM.taps - 1) * channels
    TAPS: tl.constexpr = FORM.taps
    ROWS: tl.constexpr = FORM.rows
    BLOCK: tl.constexpr = FORM.block
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0)[None, :]
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1) + tap  # in the step, or, if before the sequence's first token, in its state
        new = (valid & (source >= first))[:, None] & inside[None, :]
        old = (remembers & (source < first))[:, None] & inside[None, :]
        place = source.to(tl.int64)[:, None] * x.stride + column[None, :]
        value = tl.load(x.data + place, mask=new, other=0).to(tl.float32)
        if tap < TAPS - 1:
            place = (own + (source - first + TAPS - 1) * channels)[:, None] + column[None, :]
            value += tl.load(state + place, mask=old, other=0)
        total += tl.load(weight + tap * channels + column, mask=inside, other=0)[None, :] * value
    result = activate(total, FORM.activation_id).to(out.dtype.element_ty)
    target = out + row.to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(target, result, mask=valid[:, None] & inside[None, :])


@triton.jit
def conv_state_kernel(x, state, batch, channels, FORM: tl.constexpr):
    """Program (sequence, block of channels): keep its last taps - 1 inputs."""
    s = tl.program_id(0)
    first = tl.load(batch.starts + s)
    count = tl.load(batch.starts + s + 1) - first
    if (count <= 0) | (tl.load(batch.lengths + s) <= 0):
        return
    column = tl.program_id(1) * FORM.block + tl.arange(0, FORM.block)
    inside = column < channels
    slot = tl.arange(0, FORM.padded)[:, None]
    exists = (slot < FORM.taps - 1) & inside[None, :]
    own = state + tl.load(batch.state_rows + s) * (FORM.taps - 1) * channels + column[None, :]
    source = count - (FORM.taps - 1) + slot  # among the step's tokens; below 0 they are in the state, further on
    old = exists & (source < 0) & (tl.load(batch.lengths + s) > count)
    values = tl.load(own + (slot + count) * channels, mask=old, other=0)
    place = (first + source).to(tl.int64) * x.stride + column[None, :]
    values += tl.load(x.data + place, mask=exists & (source >= 0), other=0).to(tl.float32)
    tl.debug_barrier()  # no thread writes before all have read
    tl.store(own + slot * channels, values, mask=exists)


def token_owners(tokens: int, metadata: AttentionMetadata) -> torch.Tensor:
    """Return each token's sequence, int32 [T], or how many there are if it has none; worked out once a step."""
    key = "token owners", tokens
    owners = metadata.plans.get(key)
    if owners is None:
        places = torch.arange(tokens, dtype=torch.int32, device=metadata.cu_query_lens.device)
        owners = torch.searchsorted(metadata.cu_query_lens[1:], places, right=True, out_int32=True)
        metadata.plans[key] = owners
    return owners


FEW_TOKENS = 32  # one after the other they are done before chunks of them would be prepared


class StateOps(ArrayOps):
    """Layers with states."""

    @splitting_op(lambda self, x, *args, **kwargs: tuple(x.shape))
    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> torch.Tensor:
        activation_id = ACTIVATIONS[activation or "none"]
        x = as_rows(x)
        (tokens, channels), taps, sequences = x.shape, weight.shape[0], metadata.seq_lens.shape[0]
        out = torch.empty((tokens, channels), dtype=self.act, device=x.device)
        if tokens == 0:
            return out
        single = Conv(activation_id, taps, power_of_two(max(taps - 1, 1)), 1, CHANNELS)
        grid, rows, batch = (sequences, -(-channels // CHANNELS)), rows_of(x), sequences_of(metadata)
        if metadata.single and not self.batch_invariant:  # it adds up in another order
            conv_single_kernel[grid](rows, weight, bias, state, out, batch, channels, FORM=single)
            return out
        form = single._replace(rows=TILE[0], block=TILE[1])
        owners = batch._replace(runs=token_owners(tokens, metadata))
        conv_kernel[(-(-tokens // form.rows), -(-channels // form.block))](
            rows, weight, bias, state, out, owners, tokens, channels, sequences, FORM=form
        )
        if taps > 1:
            conv_state_kernel[grid](rows, state, batch, channels, FORM=single)
        return out

    @splitting_op(lambda self, q, k, v, *args: tuple(v.shape))
    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Piecewise CUDA graphs pass the array to write as `out`.

        How a prompt is cut into steps shows in the last bits, unless results must not depend on the batch.
        """
        out = torch.empty(v.shape, dtype=self.act, device=v.device) if out is None else out
        if v.shape[0] == 0:
            return out
        inputs = delta_inputs(q, k, v, decay, beta)
        if metadata.single or self.batch_invariant or v.shape[0] <= FEW_TOKENS:
            scan(inputs, state, metadata, out, exact=self.batch_invariant)
        else:
            advance(inputs, state, metadata, out)
        return out

    def copy_states(self, state: torch.Tensor, pairs: np.ndarray) -> None:
        """All copies are one gather: chains of copies are resolved to their first source."""
        origins: dict[int, int] = {}
        for source, destination in pairs.tolist():
            origins[destination] = origins.get(source, source)
        if origins:
            rows = self.from_numpy(np.array([list(origins), list(origins.values())], np.int64))
            state.index_copy_(0, rows[0], state.index_select(0, rows[1]))
