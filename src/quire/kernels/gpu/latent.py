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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.tuned_configs import KernelConfig

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["num_sequences", "target"])
def plan_kernel(
    starts, seq_lens, plan, num_sequences, heads, target, least,
    SINGLE: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SB: tl.constexpr,
):  # fmt: skip
    """Share the keys out: one program for all sequences.

    plan int32 [3 * SB + 1]: of every sequence, and those before it, the pieces, the tiles that have several pieces, and
    the pieces of such tiles; then the number of blocks of BN keys of a piece, so that there are about `target` pieces.
    """
    at = tl.arange(0, SB)
    valid = at < num_sequences
    keys = tl.load(seq_lens + at, mask=valid, other=0)
    if SINGLE:
        tokens = valid.to(tl.int32)
    else:
        tokens = tl.load(starts + at + 1, mask=valid, other=0) - tl.load(starts + at, mask=valid, other=0)
    tiles = tl.where(keys > 0, (tokens * heads + BM - 1) // BM, 0)
    blocks = (keys + BN - 1) // BN
    share = 1 << 30
    if SPLIT:
        work = tl.sum(tiles.to(tl.int64) * blocks, 0)
        share = tl.maximum((work + target - 1) // target, least).to(tl.int32)
    parts = (blocks + share - 1) // share
    several = parts > 1
    tl.store(plan + at, tl.cumsum(tiles * parts, 0))
    tl.store(plan + SB + at, tl.cumsum(tl.where(several, tiles, 0), 0))
    tl.store(plan + 2 * SB + at, tl.cumsum(tl.where(several, tiles * parts, 0), 0))
    tl.store(plan + 3 * SB, share)


@triton.jit
def owner_of(ends, number, SB: tl.constexpr):
    """Return whose the thing of this number is, and how many the sequences before have; `ends` are running sums."""
    all_ends = tl.load(ends + tl.arange(0, SB))
    before = all_ends <= number
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, all_ends, 0), 0)


@triton.jit
def attend(
    q_value, q_more, data, scales, table, block_stride, low, high, sees, scale_log2,
    SCALED: tl.constexpr, R: tl.constexpr, P: tl.constexpr, RB: tl.constexpr, PB: tl.constexpr, BS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the keys low : high of the sequence of this block table, of which each row sees the first `sees`.

    Return values [BM, RB], normalized, and of each row the largest logit, to base 2, and the sum relative to it.
    """
    columns, more = tl.arange(0, RB), tl.arange(0, PB)
    most = tl.full([BM], NEG_INF, tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, RB], tl.float32)
    for begin in tl.range(low, high, BN, num_stages=STAGES):
        at = begin + tl.arange(0, BN)
        there = at < high
        blocks = tl.load(table + at // BS, mask=there, other=0).to(tl.int64)
        places = data + blocks * block_stride + (at % BS) * (R + P)
        value = tl.load(places[:, None] + columns[None, :], mask=there[:, None] & (columns < R)[None, :], other=0.0)
        value = value.to(q_value.dtype)
        logits = tl.dot(q_value, tl.trans(value), input_precision=PRECISION)
        if P > 0:
            key = tl.load(places[:, None] + (R + more)[None, :], mask=there[:, None] & (more < P)[None, :], other=0.0)
            logits = tl.dot(q_more, tl.trans(key.to(q_value.dtype)), logits, input_precision=PRECISION)
        if SCALED:
            factors = tl.load(scales + blocks * BS + at % BS, mask=there, other=0)
            logits *= factors[None, :]
        logits = tl.where(at[None, :] < tl.minimum(sees, high)[:, None], logits * scale_log2, NEG_INF)
        larger = tl.maximum(most, tl.max(logits, 1))
        shift = tl.where(larger == NEG_INF, 0.0, larger)
        weights = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(most - shift)
        total = total * fade + tl.sum(weights, 1)
        if SCALED:
            weights *= factors[None, :]
        sums = tl.dot(weights.to(q_value.dtype), value, sums * fade[:, None], input_precision=PRECISION)
        most = larger
    return sums / tl.where(total > 0, total, 1.0)[:, None], most, total


@triton.jit(do_not_specialize=["num_sequences"])
def latent_attention_kernel(
    q, data, scales, out, parts, logs, tables, starts, seq_lens, plan,
    q_stride, table_stride, block_stride, num_sequences, heads, scale_log2,
    SINGLE: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    RB: tl.constexpr, PB: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SB: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one piece. q [T, heads * (R + P)], data [B, BS, R + P], out [T, heads * R]; RB, PB are R, P padded."""
    piece = tl.program_id(0)
    s, before = owner_of(plan, piece, SB)
    if s >= num_sequences:
        return
    keys = tl.load(seq_lens + s)
    first_row, tokens = s, 1
    if not SINGLE:
        first_row = tl.load(starts + s)
        tokens = tl.load(starts + s + 1) - first_row
    tiles = (tokens * heads + BM - 1) // BM
    tile, part = (piece - before) % tiles, (piece - before) // tiles  # neighbours read the same keys
    rows = tile * BM + tl.arange(0, BM)
    valid = rows < tokens * heads
    token, head = rows // heads, rows % heads
    sees = keys - tokens + token + 1  # how many keys a row sees
    low, high = 0, keys - tokens + tl.minimum((tile * BM + BM - 1) // heads, tokens - 1) + 1
    if SPLIT:
        share = tl.load(plan + 3 * SB) * BN
        low, high = part * share, tl.minimum(high, (part + 1) * share)

    columns, more = tl.arange(0, RB), tl.arange(0, PB)
    q_rows = q + (first_row + token).to(tl.int64) * q_stride + head * (R + P)
    q_value = tl.load(q_rows[:, None] + columns[None, :], mask=valid[:, None] & (columns < R)[None, :], other=0)
    q_more = q_value
    if P > 0:
        q_more = tl.load(q_rows[:, None] + (R + more)[None, :], mask=valid[:, None] & (more < P)[None, :], other=0)
    table = tables + s.to(tl.int64) * table_stride
    sums, most, total = attend(
        q_value, q_more, data, scales, table, block_stride, low, high, sees, scale_log2,
        SCALED, R, P, RB, PB, BS, BM, BN, PRECISION, STAGES,
    )  # fmt: skip

    if SPLIT:  # noqa: SIM102, known when compiled, unlike the next
        if (keys + BN - 1) // BN > tl.load(plan + 3 * SB):
            # Its tile has several pieces: all of those before in the same tile, in other tiles and sequences count.
            slots = 0
            if s > 0:
                slots = tl.load(plan + 2 * SB + s - 1)
            slot = slots + (piece - before)
            lines = slot.to(tl.int64) * BM + tl.arange(0, BM)
            tl.store(parts + lines[:, None] * R + columns[None, :], sums, mask=(columns < R)[None, :])
            tl.store(logs + lines, most + tl.log2(tl.where(total > 0, total, 1.0)))
            return
    out_rows = out + (first_row + token).to(tl.int64) * heads * R + head * R
    made = sums.to(out.dtype.element_ty)
    tl.store(out_rows[:, None] + columns[None, :], made, mask=valid[:, None] & (columns < R)[None, :])


@triton.jit(do_not_specialize=["num_sequences"])
def join_kernel(
    parts, logs, out, starts, seq_lens, plan, num_sequences, heads,
    SINGLE: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SB: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row of a tile that has several pieces: program (tile, row)."""
    number, line = tl.program_id(0), tl.program_id(1)
    s, before = owner_of(plan + SB, number, SB)
    if s >= num_sequences:
        return
    first_row, tokens = s, 1
    if not SINGLE:
        first_row = tl.load(starts + s)
        tokens = tl.load(starts + s + 1) - first_row
    tiles = (tokens * heads + BM - 1) // BM
    row = (number - before) * BM + line
    if row >= tokens * heads:
        return
    share = tl.load(plan + 3 * SB)
    count = ((tl.load(seq_lens + s) + BN - 1) // BN + share - 1) // share
    slots = 0
    if s > 0:
        slots = tl.load(plan + 2 * SB + s - 1)
    columns = tl.arange(0, RB)
    most = tl.full([1], NEG_INF, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([RB], tl.float32)
    for begin in range(0, count, AT_ONCE):
        part = begin + tl.arange(0, AT_ONCE)
        lines = (slots + part * tiles + number - before).to(tl.int64) * BM + line
        log = tl.load(logs + lines, mask=part < count, other=NEG_INF)
        larger = tl.maximum(most, tl.max(log, 0))
        shift = tl.where(larger == NEG_INF, 0.0, larger)
        weights, fade = tl.exp2(log - shift), tl.exp2(most - shift)
        inside = (part < count)[:, None] & (columns < R)[None, :]
        values = tl.load(parts + lines[:, None] * R + columns[None, :], mask=inside, other=0)
        sums = sums * fade + tl.sum(values * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        most = larger
    target = out + ((first_row + row // heads).to(tl.int64) * heads + row % heads) * R + columns
    tl.store(target, (sums / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty), mask=columns < R)


SEQUENCES = 256  # that a plan has room for at least, so that no kernel is compiled for each number of them


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the rows and keys of a step are shared out, see `plan_kernel`.

    shares: int32 on the device. padded: sequences, rounded up to a power of two. pieces, tiles, slots: the most there
    can be of pieces, of tiles that have several pieces, and of pieces of such.
    """

    shares: torch.Tensor
    padded: int
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
    default = {"rows": rows, "keys": 32 if rows == 64 else 64, "stages": 5, "warps": 8, "waves": 1, "least": 2}
    if scaled:  # keys of 8 bits take registers on their way to 16
        rows = min(rows, 32)
        default = {**default, "rows": rows, "keys": 64}
    if backend.act == torch.float32:
        return {**default, "rows": 16, "keys": 16, "stages": 1}
    if backend.capability < (9, 0):
        default = {**default, "rows": min(rows, 32), "keys": 32}
    if backend.batch_invariant:
        return default
    key = f"{'decode' if single else 'mixed'} {params.num_heads}{' fp8' if scaled else ''}"
    return backend.tuned_configs.get("latent_attention", key, default)


def _plan(
    backend: ArrayOps, tokens: int, metadata: AttentionMetadata, params: AttentionParams, choice: KernelConfig
) -> _Plan:
    """Return the plan of a step for layers of this kind; it is computed once, on the device."""
    key = "latent", params.num_heads, choice["rows"], choice["keys"]
    found = metadata.plans.get(key)
    if found is not None:
        return found
    sequences, heads, rows = metadata.seq_lens.shape[0], params.num_heads, choice["rows"]
    most_tiles = (
        sequences * triton.cdiv(heads, rows) if metadata.single else triton.cdiv(tokens * heads, rows) + sequences
    )
    target = backend.num_sms * choice["waves"]
    # With as many tiles as programs there is nothing to gain; and results must not depend on the batch if so asked.
    split = not backend.batch_invariant and most_tiles < 4 * target
    padded = max(SEQUENCES, triton.next_power_of_2(sequences))
    shares = torch.empty(3 * padded + 1, dtype=torch.int32, device=metadata.seq_lens.device)
    plan_kernel[(1,)](
        metadata.cu_query_lens, metadata.seq_lens, shares, sequences, heads, target, choice["least"],
        SINGLE=metadata.single, SPLIT=split, BM=rows, BN=choice["keys"], SB=padded,
    )  # fmt: skip
    # A tile with several pieces has at least one whole share of the keys, so that these are at most twice the target.
    plan = _Plan(
        shares, padded, most_tiles + (target if split else 0), target if split else 0, 2 * target if split else 0
    )
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
    plan = _plan(backend, tokens, metadata, params, choice)
    data, rows = cache.data, choice["rows"]
    block_size, split = data.shape[3], plan.slots > 0
    parts = torch.empty((plan.slots, rows, value), dtype=torch.float32, device=q.device) if split else out
    logs = torch.empty((plan.slots, rows), dtype=torch.float32, device=q.device) if split else out
    padded = max(16, triton.next_power_of_2(value))
    latent_attention_kernel[(plan.pieces,)](
        q, data, cache.scales_or_data, out, parts, logs,
        metadata.block_tables, metadata.cu_query_lens, metadata.seq_lens, plan.shares,
        q.stride(0), metadata.block_tables.stride(0), data.stride(0), metadata.seq_lens.shape[0], heads,
        params.scale * math.log2(math.e),
        SINGLE=metadata.single, SPLIT=split, SCALED=cache.scales is not None, R=value, P=size - value, RB=padded,
        PB=max(16, triton.next_power_of_2(size - value)), BS=block_size, BM=rows, BN=choice["keys"], SB=plan.padded,
        PRECISION="ieee", STAGES=choice["stages"], num_warps=choice["warps"],
    )  # fmt: skip
    if split:
        join_kernel[(plan.tiles, rows)](
            parts, logs, out, metadata.cu_query_lens, metadata.seq_lens, plan.shares, metadata.seq_lens.shape[0], heads,
            SINGLE=metadata.single, R=value, RB=padded, BM=rows, BN=choice["keys"], SB=plan.padded, AT_ONCE=8,
        )  # fmt: skip
    return out
