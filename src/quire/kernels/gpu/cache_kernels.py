"""Triton kernels that write to the paged KV cache: rounding and quantizing of vectors, alone or after a rotation.

All are bound by memory: a token's keys and values are read once and written once, by one program with loads of 16 bytes
a thread. Nothing here allocates. They are compiled without fused operations (`enable_fp_fusion`), which would leave out
a rounding, so that what is stored is what the reference stores.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.dependent import let_next_begin, wait_for_earlier

SMALLEST: tl.constexpr = tl.constexpr(2.0**-120)  # what is smaller counts as 0, as in the reference
PLAIN: tl.constexpr = tl.constexpr(0)  # how vectors are stored: as floats,
INT8: tl.constexpr = tl.constexpr(1)  # as integers and a scale,
FP8: tl.constexpr = tl.constexpr(2)  # as float8_e4m3fn and a scale


@triton.jit
def scale_of(size, finite, STORED: tl.constexpr):
    """Return what to multiply vectors with before rounding, and the scale to store, from their largest sizes."""
    LIMIT: tl.constexpr = 127.0 if STORED == 1 else 448.0
    size = tl.where(size >= SMALLEST, size, 0.0)
    up = tl.where(size > 0, tl.div_rn(tl.full(size.shape, LIMIT, tl.float32), tl.where(size > 0, size, 1.0)), 0.0)
    scale = tl.div_rn(size, tl.full(size.shape, LIMIT, tl.float32))
    return tl.where(finite, up, 0.0), tl.where(finite, scale, float("nan"))


@triton.jit
def rounded(x, STORED: tl.constexpr):
    """Round scaled float32 numbers to what the format can hold, to the nearest, ties to even.

    Adding and subtracting a large number rounds to a multiple of its last bit. For float8 the numbers of three bits
    after the first are found in the bits themselves, so that the conversion that follows has nothing left to round.
    """
    if STORED == 1:
        return x + 12582912.0 - 12582912.0
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = x + 24576.0 - 24576.0  # subnormal: multiples of 2**-9
    x = tl.where(tl.abs(x) < 0.015625, small, normal.to(tl.float32, bitcast=True))
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def store_heads(x, data, scales, at, scale_at, offsets, mask, heads_mask, STORED: tl.constexpr):
    """Store float32 vectors [heads, D] at data + at[:, None] + offsets, and their scales at scales + scale_at."""
    if STORED == 0:
        tl.store(data + at[:, None] + offsets[None, :], x.to(data.dtype.element_ty), mask=mask)
    else:
        x = tl.where(mask, x, 0.0)
        sound = tl.abs(x) < float("inf")
        finite = tl.max(sound.to(tl.int32) ^ 1, axis=1) == 0
        up, scale = scale_of(tl.max(tl.where(sound, tl.abs(x), 0.0), axis=1), finite, STORED)
        q = rounded(tl.where(finite[:, None], x, 0.0) * up[:, None], STORED)
        tl.store(data + at[:, None] + offsets[None, :], q.to(data.dtype.element_ty), mask=mask)
        tl.store(scales + scale_at, scale, mask=heads_mask)


@triton.jit
def write_kernel(
    k, v, data, scales, slots, k_step, v_step,
    SIDES: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Store TILE heads of one token, keys and, unless the cache is latent, values. Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
        within = tl.arange(0, PADDED)
        heads_mask = heads < HEADS
        mask = heads_mask[:, None] & (within < SIZE)[None, :]
        for side in tl.static_range(SIDES):
            source = k + token * k_step if side == 0 else v + token * v_step
            x = tl.load(source + heads[:, None] * SIZE + within[None, :], mask=mask, other=0.0).to(tl.float32)
            vector = ((block * SIDES + side) * HEADS + heads) * BLOCK_SIZE + offset
            store_heads(x, data, scales, vector * SIZE, vector, within, mask, heads_mask, STORED)


@triton.jit
def _rotated(
    x, at, cos, sin, first, second, within, mask, rest_mask, weight, eps,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Norm heads if NORMED, rotate their pairs in place; return pairs and what is behind them as they were rounded."""
    at_first, at_second = x + at[:, None] + first[None, :], x + at[:, None] + second[None, :]
    a = tl.load(at_first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at_second, mask=mask, other=0.0).to(tl.float32)
    rest = 0.0
    if ROTATED < SIZE and (NORMED or KEYS):
        rest = tl.load(x + at[:, None] + within[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(a * a + b * b, axis=1)
        if ROTATED < SIZE:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        pair = tl.arange(0, cos.shape[0])
        a *= factor * tl.load(weight + first, mask=pair < ROTATED // 2, other=0.0)[None, :]
        b *= factor * tl.load(weight + second, mask=pair < ROTATED // 2, other=0.0)[None, :]
        if ROTATED < SIZE:
            rest *= factor * tl.load(weight + within, mask=within < SIZE, other=0.0)[None, :]
            rest = rest.to(x.dtype.element_ty).to(tl.float32)
            tl.store(x + at[:, None] + within[None, :], rest.to(x.dtype.element_ty), mask=rest_mask)
    low = (a * cos[None, :] - b * sin[None, :]).to(x.dtype.element_ty)
    high = (b * cos[None, :] + a * sin[None, :]).to(x.dtype.element_ty)
    tl.store(at_first, low, mask=mask)
    tl.store(at_second, high, mask=mask)
    return low.to(tl.float32), high.to(tl.float32), rest


@triton.jit
def _store_rotated(
    data, scales, vector, heads_mask, low, high, rest, first, second, within, pairs, rest_mask,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Store keys in three parts: both of each pair, and what is behind the rotated part, under one scale."""
    into = data + vector[:, None] * SIZE
    if STORED != 0:
        low, high = tl.where(pairs, low, 0.0), tl.where(pairs, high, 0.0)
        sound = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
        flaws = tl.max(sound.to(tl.int32) ^ 1, axis=1)
        size = tl.max(tl.where(sound, tl.maximum(tl.abs(low), tl.abs(high)), 0.0), axis=1)
        if ROTATED < SIZE:
            rest = tl.where(rest_mask, rest, 0.0)
            rest_sound = tl.abs(rest) < float("inf")
            flaws = tl.maximum(flaws, tl.max(rest_sound.to(tl.int32) ^ 1, axis=1))
            size = tl.maximum(size, tl.max(tl.where(rest_sound, tl.abs(rest), 0.0), axis=1))
        up, scale = scale_of(size, flaws == 0, STORED)
        whole = (flaws == 0)[:, None]
        low = rounded(tl.where(whole, low, 0.0) * up[:, None], STORED)
        high = rounded(tl.where(whole, high, 0.0) * up[:, None], STORED)
        if ROTATED < SIZE:
            rest = rounded(tl.where(whole, rest, 0.0) * up[:, None], STORED)
        tl.store(scales + vector, scale, mask=heads_mask)
    tl.store(into + first[None, :], low.to(data.dtype.element_ty), mask=pairs)
    tl.store(into + second[None, :], high.to(data.dtype.element_ty), mask=pairs)
    if ROTATED < SIZE:
        tl.store(into + within[None, :], rest.to(data.dtype.element_ty), mask=rest_mask)


@triton.jit
def rotary_write_kernel(
    positions, q, k, v, q_weight, k_weight, cos_sin, data, scales, slots, q_step, k_step, v_step, eps,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    Q_TILES: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORED: tl.constexpr, NORMED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rotate TILE heads of one token, with NORMED their RMS norms, and if they are keys, store them and their values.

    Grid: tokens, tiles of query heads and then of key heads.
    """
    let_next_begin(PDL)
    wait_for_earlier(PDL)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * ROTATED
    cos = tl.load(table + pair, mask=pair < ROTATED // 2, other=0.0)
    sin = tl.load(table + ROTATED // 2 + pair, mask=pair < ROTATED // 2, other=0.0)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + ROTATED // 2
    behind = ROTATED + tl.arange(0, REST)
    if tile < Q_TILES:
        heads = tile * TILE + tl.arange(0, TILE)
        mask = (heads < Q_HEADS)[:, None] & (pair < ROTATED // 2)[None, :]
        rest_mask = (heads < Q_HEADS)[:, None] & (behind < SIZE)[None, :]
        at = token * q_step + heads * SIZE
        _rotated(
            q, at, cos, sin, first, second, behind, mask, rest_mask, q_weight, eps, SIZE, ROTATED, NORMED, False
        )  # fmt: skip
    else:
        heads = (tile - Q_TILES) * TILE + tl.arange(0, TILE)
        heads_mask = heads < HEADS
        mask = heads_mask[:, None] & (pair < ROTATED // 2)[None, :]
        at = token * k_step + heads * SIZE
        rest_mask = heads_mask[:, None] & (behind < SIZE)[None, :]
        low, high, rest = _rotated(
            k, at, cos, sin, first, second, behind, mask, rest_mask, k_weight, eps, SIZE, ROTATED, NORMED, True
        )  # fmt: skip
        slot = tl.load(slots + token)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            vector = (block * 2 * HEADS + heads) * BLOCK_SIZE + offset
            _store_rotated(
                data, scales, vector, heads_mask, low, high, rest, first, second, behind, mask, rest_mask,
                SIZE, ROTATED, STORED,
            )  # fmt: skip
            within = tl.arange(0, PADDED)
            whole = heads_mask[:, None] & (within < SIZE)[None, :]
            x = tl.load(v + token * v_step + heads[:, None] * SIZE + within[None, :], mask=whole, other=0.0)
            vector += HEADS * BLOCK_SIZE
            store_heads(x.to(tl.float32), data, scales, vector * SIZE, vector, within, whole, heads_mask, STORED)
