"""Writing keys and values into the cache, in each of its layouts and storage formats (cache.py).

An item is one token and one KV head.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.cache import CPUKVCache
from quire.kernels.cpu.jit import Op, op, part
from quire.kernels.cpu.pointers import floats, halves, longs, signed_octets, words
from quire.kernels.cpu.quantize import LIMIT, row_size, steps_per
from quire.kernels.cpu.simd import get, put
from quire.kernels.cpu.threads import Launcher

# Arguments of the ops; strides in elements
K, K_STRIDE, V, V_STRIDE, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, SLOTS, HEADS, SIZE, BLOCK_SIZE, PAIRED = range(13)

ROUNDER = np.float32(12582912)  # 1.5 * 2^23: added and subtracted, it rounds to the nearest integer, ties to even


@part
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


@part
def write_floats(args, keys, values, first, last):
    """Store some tokens and heads, rounded to the nearest; a negative slot is none."""
    heads, size, block_size = args[HEADS], args[SIZE], args[BLOCK_SIZE]
    k, v = floats(args[K]), floats(args[V])
    for item in range(first, last):
        t, h = item // heads, item % heads
        slot = longs(args[SLOTS])[t]
        if slot < 0:
            continue
        k_at, v_at = t * args[K_STRIDE] + h * size, t * args[V_STRIDE] + h * size
        key, beside, value, apart = places(args, slot, h)
        for d in range(size):
            put(keys, key + d // 2 * 2 * block_size + d % 2 * beside, get(k, k_at + d))
        for d in range(size):
            put(values, value + d * apart, get(v, v_at + d))


@op
def write_float32(args, first, last, scratch):
    """Store keys and values as they are."""
    write_floats(args, floats(args[KEYS]), floats(args[VALUES]), first, last)


@op
def write_bfloat16(args, first, last, scratch):
    """Store keys and values in bfloat16."""
    write_floats(args, words(args[KEYS]), words(args[VALUES]), first, last)


@op
def write_float16(args, first, last, scratch):
    """Store keys and values in float16."""
    write_floats(args, halves(args[KEYS]), halves(args[VALUES]), first, last)


@part
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
        slot = longs(args[SLOTS])[t]
        if slot < 0:
            continue
        key, beside, value, apart = places(args, slot, h)
        at = (slot // block_size * heads + h) * block_size + slot % block_size
        k, v = floats(args[K]), floats(args[V])
        key_octets, value_octets = signed_octets(args[KEYS]), signed_octets(args[VALUES])
        k_at, v_at = t * args[K_STRIDE] + h * size, t * args[V_STRIDE] + h * size
        floats(args[KEY_SCALES])[at] = quantize(k, k_at, size, key_octets, key, 2 * block_size, beside)
        floats(args[VALUE_SCALES])[at] = quantize(v, v_at, size, value_octets, value, 2 * apart, apart)


WRITE: dict[np.dtype, Op] = {
    np.dtype(np.float32): write_float32,
    np.dtype(np.uint16): write_bfloat16,
    np.dtype(np.int16): write_float16,
    np.dtype(np.int8): write_int8,
}


def write_kv(launcher: Launcher, k: np.ndarray, v: np.ndarray, cache: CPUKVCache, slot_mapping: np.ndarray) -> None:
    """Emit the storing of k, v [T, Hkv*D] at slots int64 [T], see `Backend.write_kv`; negative slots are left out."""
    assert slot_mapping.dtype == np.int64 and slot_mapping.flags.c_contiguous
    k, k_stride = as_rows(k)
    v, v_stride = as_rows(v)
    sizes = (cache.heads, cache.head_size, cache.block_size, int(cache.paired))
    launcher.emit(
        WRITE[cache.flat_keys.dtype], k, k_stride, v, v_stride, cache.flat_keys, cache.flat_values, cache.key_scales,
        cache.value_scales, slot_mapping, *sizes, items=k.shape[0] * cache.heads, work=24 * k.size,
    )  # fmt: skip
