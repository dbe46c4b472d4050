"""Attention over a latent cache (MLA), of prompts, chunks and single tokens (DeepSeek-V2, section 2.1, absorbed form).

A *tile* is up to BM consecutive rows of a sequence, a row being one head of one token: all heads share the keys, so
that one load of them serves the whole tile, be it many heads of one token (decode) or few heads of many (prompts). A
*piece* is a tile and a range of the keys; pieces are what programs compute, in no order, and about as many as the chip
runs at once, however long the sequences are. Where a tile has several pieces each writes a partial result, normalized,
with the logarithm of its sum, and a second kernel combines them (Dao et al. 2023, Flash-Decoding).

Which caches are attended here is decided in `attention.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.attention_kernels import batch_of
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.kernel_args import power_of_two, rows_of
from quire.kernels.gpu.tuned_configs import KernelConfig

NEG_INF = tl.constexpr(float("-inf"))
JOINED_AT_ONCE = tl.constexpr(8)  # pieces that the joining kernel loads together


class Latent(NamedTuple):
    """What kernels are compiled for.

    single: every sequence has one token. value_size, rope_size: elements of a vector that are keys and values, and
    those behind, which are keys only; `padded` and `rope_padded` to powers of two. block_size: of the cache.
    BM, BN: rows of a tile and keys of a block. SB: sequences, padded. stages: of the loop over keys.
    """

    single: bool
    value_size: int
    rope_size: int
    padded: int
    rope_padded: int
    block_size: int
    BM: int
    BN: int
    SB: int
    stages: int


@triton.jit(do_not_specialize=["num_sequences", "target"])
def plan_kernel(batch, plan, num_sequences, heads, target, least, SPLIT: tl.constexpr, FORM: tl.constexpr):
    """Share the keys out: one program for all sequences.

    plan int32 [3 * SB + 1]: of every sequence, and those before it, the pieces, the tiles that have several pieces, and
    the pieces of such tiles; then the number of blocks of BN keys of a piece, so that there are about `target` pieces.
    """
    at = tl.arange(0, FORM.SB)
    valid = at < num_sequences
    keys = tl.load(batch.seq_lens + at, mask=valid, other=0)
    if FORM.single:
        tokens = valid.to(tl.int32)
    else:
        tokens = tl.load(batch.cu + at + 1, mask=valid, other=0) - tl.load(batch.cu + at, mask=valid, other=0)
    tiles = tl.where(keys > 0, (tokens * heads + FORM.BM - 1) // FORM.BM, 0)
    blocks = (keys + FORM.BN - 1) // FORM.BN
    share = 1 << 30
    if SPLIT:
        work = tl.sum(tiles.to(tl.int64) * blocks, 0)
        share = tl.maximum((work + target - 1) // target, least).to(tl.int32)
    parts = (blocks + share - 1) // share
    several = parts > 1
    tl.store(plan + at, tl.cumsum(tiles * parts, 0))
    tl.store(plan + FORM.SB + at, tl.cumsum(tl.where(several, tiles, 0), 0))
    tl.store(plan + 2 * FORM.SB + at, tl.cumsum(tl.where(several, tiles * parts, 0), 0))
    tl.store(plan + 3 * FORM.SB, share)


@triton.jit
def owner_of(ends, number, FORM: tl.constexpr):
    """Return the sequence that has item `number`, and how many the sequences before have; `ends` are running sums."""
    all_ends = tl.load(ends + tl.arange(0, FORM.SB))
    before = all_ends <= number
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, all_ends, 0), 0)


@triton.jit
def rows_of_sequence(batch, s, FORM: tl.constexpr):
    """Return the first row of a sequence, and its tokens."""
    first_row, tokens = s, 1
    if not FORM.single:
        first_row = tl.load(batch.cu + s)
        tokens = tl.load(batch.cu + s + 1) - first_row
    return first_row, tokens


@triton.jit
def slots_before(plan, s, FORM: tl.constexpr):
    """Return how many pieces of tiles with several the sequences before have."""
    slots = 0
    if s > 0:
        slots = tl.load(plan + 2 * FORM.SB + s - 1)
    return slots


@triton.jit
def attend(q_value, q_rest, cache, table, block_stride, low, high, sees, scale_log2, FORM: tl.constexpr):
    """Attend to the keys low : high of the sequence of this block table, of which each row sees the first `sees`.

    Return values [BM, padded], normalized, and of each row the largest logit, to base 2, and the sum relative to it.
    """
    data, scales = cache
    BM: tl.constexpr = FORM.BM
    PADDED: tl.constexpr = FORM.padded
    columns, more = tl.arange(0, FORM.padded), tl.arange(0, FORM.rope_padded)
    most = tl.full([BM], NEG_INF, tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, PADDED], tl.float32)
    for begin in tl.range(low, high, FORM.BN, num_stages=FORM.stages):
        at = begin + tl.arange(0, FORM.BN)
        live = at < high
        blocks = tl.load(table + at // FORM.block_size, mask=live, other=0).to(tl.int64)
        places = (data + blocks * block_stride + (at % FORM.block_size) * (FORM.value_size + FORM.rope_size))[:, None]
        value = tl.load(places + columns[None, :], mask=live[:, None] & (columns < FORM.value_size)[None, :], other=0.0)
        value = value.to(q_value.dtype)
        logits = tl.dot(q_value, tl.trans(value), input_precision="ieee")
        if FORM.rope_size > 0:
            key_mask = live[:, None] & (more < FORM.rope_size)[None, :]
            key = tl.load(places + (FORM.value_size + more)[None, :], mask=key_mask, other=0.0)
            logits = tl.dot(q_rest, tl.trans(key.to(q_value.dtype)), logits, input_precision="ieee")
        if scales is not None:
            factors = tl.load(scales + blocks * FORM.block_size + at % FORM.block_size, mask=live, other=0)
            logits *= factors[None, :]
        logits = tl.where(at[None, :] < tl.minimum(sees, high)[:, None], logits * scale_log2, NEG_INF)
        larger = tl.maximum(most, tl.max(logits, 1))
        shift = tl.where(larger == NEG_INF, 0.0, larger)
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(most - shift)
        total = total * decay + tl.sum(weights, 1)
        if scales is not None:
            weights *= factors[None, :]
        sums = tl.dot(weights.to(q_value.dtype), value, sums * decay[:, None], input_precision="ieee")
        most = larger
    return sums / tl.where(total > 0, total, 1.0)[:, None], most, total


@triton.jit(do_not_specialize=["num_sequences"])
def latent_attention_kernel(
    q, cache, out, workspace, batch, plan, strides, num_sequences, heads, scale_log2, FORM: tl.constexpr
):
    """Compute one piece. q: `Rows` [T, heads * (value_size + rope_size)], out [T, heads * value_size].

    cache: data [B, bs, value_size + rope_size], scales or None. workspace: partial results [slots, BM, value_size] and
    their logarithms [slots, BM], or None where no tile has several pieces. strides: of block tables, and of blocks.
    """
    SPLIT: tl.constexpr = workspace is not None
    table_stride, block_stride = strides
    piece = tl.program_id(0)
    s, before = owner_of(plan, piece, FORM)
    if s >= num_sequences:
        return
    keys = tl.load(batch.seq_lens + s)
    first_row, tokens = rows_of_sequence(batch, s, FORM)
    tiles = (tokens * heads + FORM.BM - 1) // FORM.BM
    tile, part = (piece - before) % tiles, (piece - before) // tiles  # neighbours read the same keys
    rows = tile * FORM.BM + tl.arange(0, FORM.BM)
    valid = (rows < tokens * heads)[:, None]
    token, head = rows // heads, rows % heads
    sees = keys - tokens + token + 1  # how many keys a row sees
    low, high = 0, keys - tokens + tl.minimum((tile * FORM.BM + FORM.BM - 1) // heads, tokens - 1) + 1
    if SPLIT:
        share = tl.load(plan + 3 * FORM.SB) * FORM.BN
        low, high = part * share, tl.minimum(high, (part + 1) * share)

    columns, more = tl.arange(0, FORM.padded), tl.arange(0, FORM.rope_padded)
    inside = (columns < FORM.value_size)[None, :]
    q_rows = q.data + ((first_row + token).to(tl.int64) * q.stride + head * (FORM.value_size + FORM.rope_size))[:, None]
    q_value = tl.load(q_rows + columns[None, :], mask=valid & inside, other=0)
    q_rest = q_value
    if FORM.rope_size > 0:
        q_rest = tl.load(
            q_rows + (FORM.value_size + more)[None, :], mask=valid & (more < FORM.rope_size)[None, :], other=0
        )
    table = batch.tables + s.to(tl.int64) * table_stride
    sums, most, total = attend(q_value, q_rest, cache, table, block_stride, low, high, sees, scale_log2, FORM)

    if SPLIT:  # noqa: SIM102, known when compiled, unlike the next
        if (keys + FORM.BN - 1) // FORM.BN > tl.load(plan + 3 * FORM.SB):
            # Its tile has several pieces: all of those before in the same tile, in other tiles and sequences count.
            slot = slots_before(plan, s, FORM) + (piece - before)
            lines = slot.to(tl.int64) * FORM.BM + tl.arange(0, FORM.BM)
            tl.store(workspace[0] + lines[:, None] * FORM.value_size + columns[None, :], sums, mask=inside)
            tl.store(workspace[1] + lines, most + tl.log2(tl.where(total > 0, total, 1.0)))
            return
    out_rows = out + (first_row + token).to(tl.int64) * heads * FORM.value_size + head * FORM.value_size
    tl.store(out_rows[:, None] + columns[None, :], sums.to(out.dtype.element_ty), mask=valid & inside)


@triton.jit(do_not_specialize=["num_sequences"])
def join_kernel(out, workspace, batch, plan, num_sequences, heads, FORM: tl.constexpr):
    """Join the parts of one row of a tile that has several pieces: program (tile, row)."""
    parts, logs = workspace
    number, line = tl.program_id(0), tl.program_id(1)
    s, before = owner_of(plan + FORM.SB, number, FORM)
    if s >= num_sequences:
        return
    first_row, tokens = rows_of_sequence(batch, s, FORM)
    tiles = (tokens * heads + FORM.BM - 1) // FORM.BM
    row = (number - before) * FORM.BM + line
    if row >= tokens * heads:
        return
    share = tl.load(plan + 3 * FORM.SB)
    count = ((tl.load(batch.seq_lens + s) + FORM.BN - 1) // FORM.BN + share - 1) // share
    slots = slots_before(plan, s, FORM)
    PADDED: tl.constexpr = FORM.padded
    columns = tl.arange(0, FORM.padded)
    most = tl.full([1], NEG_INF, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([PADDED], tl.float32)
    for begin in range(0, count, JOINED_AT_ONCE):
        part = begin + tl.arange(0, JOINED_AT_ONCE)
        lines = (slots + part * tiles + number - before).to(tl.int64) * FORM.BM + line
        log = tl.load(logs + lines, mask=part < count, other=NEG_INF)
        larger = tl.maximum(most, tl.max(log, 0))
        shift = tl.where(larger == NEG_INF, 0.0, larger)
        weights, decay = tl.exp2(log - shift), tl.exp2(most - shift)
        inside = (part < count)[:, None] & (columns < FORM.value_size)[None, :]
        values = tl.load(parts + lines[:, None] * FORM.value_size + columns[None, :], mask=inside, other=0)
        sums = sums * decay + tl.sum(values * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        most = larger
    target = out + ((first_row + row // heads).to(tl.int64) * heads + row % heads) * FORM.value_size + columns
    tl.store(target, (sums / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty), mask=columns < FORM.value_size)


SEQUENCES = 256  # that a plan has room for at least, so that no kernel is compiled for each number of them


class _Plan(NamedTuple):
    """How the rows and keys of a step are shared out, see `plan_kernel`.

    shares: int32 on the device. pieces, tiles, slots: the most there can be of pieces, of tiles that have several
    pieces, and of pieces of such.
    """

    shares: torch.Tensor
    pieces: int
    tiles: int
    slots: int


def _choice(backend: ArrayOps, params: AttentionParams, single: bool, scaled: bool) -> KernelConfig:
    """Return rows of a tile, keys of a block, and how a piece is computed.

    Tiles of 64 rows are what Hopper multiplies at least; with fewer heads a token alone fills no more than 16 or 32,
    and decoding is bound by memory anyway. A program has its multiprocessor for itself: its sums alone are 128 kB of
    registers at 64 rows, so that enough keys must be on their way at a time. Two of five stages are spent on the block
    table, without which keys are not found.
    """
    rows = 64
    if single and not backend.batch_invariant:
        rows = 16 if params.num_heads <= 16 else 32 if params.num_heads <= 32 else 64
    default = {"rows": rows, "keys": 32 if rows == 64 else 64, "num_stages": 5, "num_warps": 8, "waves": 1, "least": 2}
    if scaled:  # keys of 8 bits take registers on their way to 16
        rows = min(rows, 32)
        default = {**default, "rows": rows, "keys": 64}
    if backend.act == torch.float32:
        return {**default, "rows": 16, "keys": 16, "num_stages": 1}
    if backend.capability < (9, 0):
        default = {**default, "rows": min(rows, 32), "keys": 32}
    if backend.batch_invariant:
        return default
    key = f"{'decode' if single else 'mixed'} {params.num_heads}{' fp8' if scaled else ''}"
    return backend.tuned_configs.get("latent_attention", key, default)


def _plan(
    backend: ArrayOps, tokens: int, heads: int, metadata: AttentionMetadata, choice: KernelConfig, form: Latent
) -> _Plan:
    """Return the plan of a step for layers of this kind; it is computed once, on the device."""
    key = "latent", heads, form.BM, form.BN
    found = metadata.plans.get(key)
    if found is not None:
        return found
    sequences, rows = metadata.seq_lens.shape[0], form.BM
    most_tiles = sequences * -(-heads // rows) if form.single else -(-tokens * heads // rows) + sequences
    target = backend.num_sms * choice["waves"]
    # With as many tiles as programs there is nothing to gain, and with `batch_invariant` shares must not change.
    split = not backend.batch_invariant and most_tiles < 4 * target
    shares = torch.empty(3 * form.SB + 1, dtype=torch.int32, device=metadata.seq_lens.device)
    plan_kernel[(1,)](batch_of(metadata), shares, sequences, heads, target, choice["least"], SPLIT=split, FORM=form)
    # A tile with several pieces has at least one whole share of the keys, so that these are at most twice the target.
    plan = _Plan(shares, most_tiles + target, target, 2 * target) if split else _Plan(shares, most_tiles, 0, 0)
    metadata.plans[key] = plan
    return plan


def latent_attention(
    backend: ArrayOps, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, params: AttentionParams
) -> torch.Tensor:
    """See `Backend.paged_attention`, where `params.value_size` is given: q [T, Hq * D] -> [T, Hq * value_size].

    A token's D elements are read once for all heads of a tile. Decoding with few heads is bound by that; with 128 heads
    it computes 240 operations for each byte, which is near the balance of an H200, and prompts are bound by computing.
    """
    assert params.value_size is not None, "this is for latent caches"
    assert params.causal and params.sliding_window is None and params.softcap is None, "plain causal attention only"
    assert params.sinks is None and params.alibi_slopes is None, "plain causal attention only"
    tokens, heads, value, size = q.shape[0], params.num_heads, params.value_size, params.head_size
    out = torch.empty((tokens, heads * value), dtype=backend.act, device=q.device)
    if tokens == 0:
        return out
    if q.dtype != backend.act or q.stride(1) != 1:
        q = q.to(backend.act).contiguous()
    choice = _choice(backend, params, metadata.single, cache.scales is not None)
    sequences, rest = metadata.seq_lens.shape[0], size - value
    padded, padded_rest = max(16, power_of_two(value)), max(16, power_of_two(rest))
    sizes = value, rest, padded, padded_rest, cache.block_size, choice["rows"], choice["keys"]
    form = Latent(metadata.single, *sizes, max(SEQUENCES, power_of_two(sequences)), choice["num_stages"])
    plan = _plan(backend, tokens, heads, metadata, choice, form)
    workspace = None
    if plan.slots:
        parts = torch.empty((plan.slots, form.BM, value), dtype=torch.float32, device=q.device)
        workspace = parts, torch.empty((plan.slots, form.BM), dtype=torch.float32, device=q.device)
    step = workspace, batch_of(metadata), plan.shares
    strides, scale = (metadata.block_tables.stride(0), cache.data.stride(0)), params.scale * math.log2(math.e)
    source, num_warps = (cache.data, cache.scales), choice["num_warps"]
    latent_attention_kernel[(plan.pieces,)](
        rows_of(q), source, out, *step, strides, sequences, heads, scale, FORM=form, num_warps=num_warps
    )
    if workspace is not None:
        join_kernel[(plan.tiles, form.BM)](out, *step, sequences, heads, FORM=form)
    return out
