"""Writing keys and values into the cache, in each of its layouts and storage formats (cache.py).

An item is one KV head of one token, of up to sixteen tokens in bfloat16. In pairs, the values of two tokens that follow
one another, as those of a prompt do, are stored together. Two items may own the two halves of a pair, so that nothing
here reads what it only half overwrites.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.cache import CPUKVCache
from quire.kernels.cpu.jit import jit, op, ops_by_dtype
from quire.kernels.cpu.pointers import ANY, INT, NOTHING, bf16_ptr, f32_ptr, i8_ptr, i64_ptr, intrinsic, u32_ptr
from quire.kernels.cpu.quantize import LIMIT, row_size, steps_per
from quire.kernels.cpu.rows import as_ids
from quire.kernels.cpu.simd import I16, I32, I32V, LANES, _call, _integers, _load, _round_bf16, get, put
from quire.kernels.cpu.threads import Launcher

# Arguments of the ops; strides in elements
K, K_STRIDE, V, V_STRIDE, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, SLOTS = range(9)
HEADS, SIZE, BLOCK_SIZE, PAIRED, COUNT = range(9, 14)  # COUNT: of tokens

ROUNDER = np.float32(12582912)  # 1.5 * 2^23: added and subtracted, it rounds to the nearest integer, ties to even

TOKENS = 16  # of an item in bfloat16: their keys fill whole cache lines while these are near

I16_PAIRS, MASK = (ir.VectorType(kind, 2 * LANES) for kind in (I16, ir.IntType(1)))


@jit
def places(args, slot, head):
    """Return where a key and a value start, and how far apart neighbours in a key pair and in a value lie.

    Element d of the key is at key + d // 2 * 2 * block size + d % 2 * beside, that of the value at value + d * apart.
    """
    size, block_size = args[SIZE], args[BLOCK_SIZE]
    block, offset = slot // block_size, slot % block_size
    base = (block * args[HEADS] + head) * size * block_size
    if args[PAIRED] != 0:
        return base + 2 * offset, np.int64(1), base + offset // 2 * 2 * size + offset % 2, np.int64(2)
    return base + offset, block_size, base + offset * size, np.int64(1)


@jit
def write_one(args, keys, values, t, h):
    """Store one token and head, rounded to the nearest; a negative slot is none."""
    size, block_size = args[SIZE], args[BLOCK_SIZE]
    k, v = f32_ptr(args[K]), f32_ptr(args[V])
    slot = i64_ptr(args[SLOTS])[t]
    if slot < 0:
        return
    k_at, v_at = t * args[K_STRIDE] + h * size, t * args[V_STRIDE] + h * size
    key, beside, value, apart = places(args, slot, h)
    for d in range(size):
        put(keys, key + d // 2 * 2 * block_size + d % 2 * beside, get(k, k_at + d))
    for d in range(size):
        put(values, value + d * apart, get(v, v_at + d))


@jit
def write_floats(elements, args, first, last, scratch):
    """Store keys and values in float32 or float16."""
    keys, values = elements(args[KEYS]), elements(args[VALUES])
    for item in range(first, last):
        write_one(args, keys, values, item // args[HEADS], item % args[HEADS])


# bfloat16


def _rounded(b, floats, offset):
    """Load sixteen float32 and round them; the bits of bfloat16 are the upper halves of lanes."""
    return _round_bf16(b, _load(b, "f32", floats, offset))


def _rounded_pairs(b, floats, offset):
    """Load 32 float32 and round them to sixteen pairs of neighbours."""
    low, high = (b.bitcast(_rounded(b, floats, b.add(offset, offset.type(o))), I16_PAIRS) for o in (0, LANES))
    upper = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(1, 4 * LANES, 2)))
    return b.bitcast(b.shuffle_vector(low, high, upper), I32V)


@intrinsic(NOTHING, ANY, INT, ANY, INT, INT)
def spread_key(b, floats, at, words, to, apart):
    """words[to + i * apart] = pair i < 16 of the floats from `at` on."""
    pairs = _rounded_pairs(b, floats, at)
    for i in range(LANES):
        place = b.gep(words, [b.add(to, b.mul(apart, at.type(i)))])
        b.store(b.extract_element(pairs, I32(i)), place)


@intrinsic(NOTHING, ANY, INT, INT, ANY, INT)
def zip_values(b, floats, first, second, words, to):
    """words[to + i] = the pair of floats[first + i] and floats[second + i], i < 16."""
    low, high = (_rounded(b, floats, at) for at in (first, second))
    pairs = b.or_(b.lshr(low, _integers(16)), b.and_(high, _integers(0xFFFF0000)))
    b.store(pairs, b.bitcast(b.gep(words, [to]), I32V.as_pointer())).align = 4


@intrinsic(NOTHING, ANY, INT, ANY, INT, INT)
def put_halves(b, floats, at, words, to, half):
    """Set half 0 or 1 of words[to : to + 16] to floats[at : at + 16]; the other halves are not touched."""
    bits = _rounded(b, floats, at)
    both = b.or_(b.lshr(bits, _integers(16)), b.and_(bits, _integers(0xFFFF0000)))
    upper, lower = (ir.Constant(MASK, [i % 2 == h for i in range(2 * LANES)]) for h in (1, 0))
    mask = b.select(b.icmp_signed("!=", half, half.type(0)), upper, lower)
    place = b.bitcast(b.gep(words, [to]), I16_PAIRS.as_pointer())
    store = "llvm.masked.store.v32i16.p0v32i16"
    _call(b, store, ir.VoidType(), [b.bitcast(both, I16_PAIRS), place, I32(2), mask])


@jit
def write_paired_keys(args, t, h, slot, count):
    """Store the keys of `count` tokens, at most sixteen, in slots that follow one another in one block."""
    size, block_size, step = args[SIZE], args[BLOCK_SIZE], args[K_STRIDE]
    k, keys = f32_ptr(args[K]), u32_ptr(args[KEYS])
    at = t * step + h * size
    key = (slot // block_size * args[HEADS] + h) * (size // 2) * block_size + slot % block_size
    if size < 2 * LANES:
        for r in range(count):
            for d in range(size):
                put(bf16_ptr(args[KEYS]), 2 * (key + d // 2 * block_size + r) + d % 2, get(k, at + r * step + d))
        return
    for start in range(0, size, 2 * LANES):
        d = min(start, size - 2 * LANES)  # the last ones may be written twice
        to = key + d // 2 * block_size
        for r in range(count):
            spread_key(k, at + r * step + d, keys, to + r, block_size)


@jit
def write_paired_values(args, t, h, slot, count):
    """Store the values of tokens as of `write_paired_keys`: two of a pair at once, others by halves."""
    size, block_size, step = args[SIZE], args[BLOCK_SIZE], args[V_STRIDE]
    v, values = f32_ptr(args[V]), u32_ptr(args[VALUES])
    base = (slot // block_size * args[HEADS] + h) * (block_size // 2) * size
    r = 0
    while r < count:
        at, offset = (t + r) * step + h * size, slot % block_size + r
        value, half = base + offset // 2 * size, offset % 2
        whole = half == 0 and r + 1 < count
        r += 2 if whole else 1
        if size < LANES:
            for d in range(size):
                put(bf16_ptr(args[VALUES]), 2 * (value + d) + half, get(v, at + d))
                if whole:
                    put(bf16_ptr(args[VALUES]), 2 * (value + d) + 1, get(v, at + step + d))
            continue
        for start in range(0, size, LANES):
            d = min(start, size - LANES)
            if whole:
                zip_values(v, at + d, at + step + d, values, value + d)
            else:
                put_halves(v, at + d, values, value + d, half)


@jit
def write_paired(args, first, last, h):
    """Store head h of tokens first .. last - 1, at most sixteen, run by run of slots that follow one another."""
    slots, block_size = i64_ptr(args[SLOTS]), args[BLOCK_SIZE]
    t = first
    while t < last:
        slot = slots[t]
        if slot < 0:
            t += 1
            continue
        count, most = 1, min(last - t, block_size - slot % block_size)
        while count < most and slots[t + count] == slot + count:
            count += 1
        write_paired_keys(args, t, h, slot, count)
        write_paired_values(args, t, h, slot, count)
        t += count


@op
def write_bfloat16(args, first, last, scratch):
    """Store keys and values in bfloat16; an item is a head of TOKENS tokens."""
    heads = args[HEADS]
    for item in range(first, last):
        token, h = item // heads * TOKENS, item % heads
        end = min(token + TOKENS, args[COUNT])
        if args[PAIRED] != 0:
            write_paired(args, token, end, h)
        else:
            for t in range(token, end):
                write_one(args, bf16_ptr(args[KEYS]), bf16_ptr(args[VALUES]), t, h)


# int8


@jit
def quantize(x, at, size, octets, to, pair_step, beside):
    """Store x[at : at + size] as int8, element d at to + d // 2 * pair_step + d % 2 * beside; return their scale.

    The rule is that of quantize.py: the largest size becomes 127, a row that is not finite gets a NaN scale.
    """
    largest = row_size(x, at, size)
    factor = steps_per(largest)
    for d in range(size):
        value = np.float32(0) if factor == 0 else (x[at + d] * factor + ROUNDER) - ROUNDER
        octets[to + d // 2 * pair_step + d % 2 * beside] = np.int8(value)
    return largest / np.float32(LIMIT)


@op
def write_int8(args, first, last, scratch):
    """Store keys and values in int8, and a scale for each token and head."""
    heads, size, block_size = args[HEADS], args[SIZE], args[BLOCK_SIZE]
    for item in range(first, last):
        t, h = item // heads, item % heads
        slot = i64_ptr(args[SLOTS])[t]
        if slot < 0:
            continue
        key, beside, value, apart = places(args, slot, h)
        at = (slot // block_size * heads + h) * block_size + slot % block_size
        k, v = f32_ptr(args[K]), f32_ptr(args[V])
        key_octets, value_octets = i8_ptr(args[KEYS]), i8_ptr(args[VALUES])
        k_at, v_at = t * args[K_STRIDE] + h * size, t * args[V_STRIDE] + h * size
        f32_ptr(args[KEY_SCALES])[at] = quantize(k, k_at, size, key_octets, key, 2 * block_size, beside)
        f32_ptr(args[VALUE_SCALES])[at] = quantize(v, v_at, size, value_octets, value, 2 * apart, apart)


# Latent vectors: one for all heads of a token


@jit
def write_vectors(elements, args, first, last, scratch):
    """Items are tokens. x, elements between its rows, the cache, slots, elements of a vector."""
    x, latents, size = f32_ptr(args[0]), elements(args[2]), args[4]
    for t in range(first, last):
        slot = i64_ptr(args[3])[t]
        if slot >= 0:
            for d in range(size):
                put(latents, slot * size + d, get(x, t * args[1] + d))


WRITE_LATENT = ops_by_dtype("write_latent", write_vectors)


def write_latent(launcher: Launcher, x: np.ndarray, cache: CPUKVCache, slot_mapping: np.ndarray) -> None:
    """Emit the storing of x [T, D] at slots int64 [T], see `Backend.write_latent`; negative slots are left out."""
    slots = as_ids(launcher, slot_mapping)
    assert x.shape[1] == cache.keys.shape[2]
    x, stride = as_rows(x)
    args = x, stride, cache.keys, slots, x.shape[1]
    launcher.emit(WRITE_LATENT[cache.keys.dtype], *args, items=x.shape[0], work=8 * x.size)


WRITE = {
    **ops_by_dtype("write", write_floats, ("float32", "float16")),
    np.dtype(np.uint16): write_bfloat16,
    np.dtype(np.int8): write_int8,
}


def write_kv(launcher: Launcher, k: np.ndarray, v: np.ndarray, cache: CPUKVCache, slot_mapping: np.ndarray) -> None:
    """Emit the storing of k, v [T, Hkv*D] at slots int64 [T], see `Backend.write_kv`; negative slots are left out."""
    slots = as_ids(launcher, slot_mapping)
    k, k_stride = as_rows(k)
    v, v_stride = as_rows(v)
    count, storage = k.shape[0], cache.keys.dtype
    heads = cache.keys.shape[1]
    sizes = (heads, k.shape[1] // heads, cache.block_size, int(cache.paired), count)
    items = (-(-count // TOKENS) if storage == np.uint16 else count) * heads
    work = (4 if storage == np.uint16 and cache.paired else 24) * k.size
    target = cache.keys, cache.values, cache.key_scales, cache.value_scales
    args = k, k_stride, v, v_stride, *target, slots, *sizes
    launcher.emit(WRITE[storage], *args, items=items, work=work)
