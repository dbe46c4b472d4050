"""Sixteen lanes of small codes to floats: a table of sixteen looked up by nibbles, and bytes that are 8-bit floats.

Or to pairs of bfloat16, 32 at once. What codes mean is decided in linear_coded.py.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quire.kernels.cpu.simd import (
    F16V,
    F32V,
    I16,
    I16V,
    I32,
    I32V,
    LANES,
    _call,
    _integers,
    _splat,
    _widen_half,
    f32x16,
    has_feature,
)
from quire.kernels.cpu.simd_int import _load_words, i32x16

HAS_WIDE_LOOKUP = has_feature("avx512f")
PAIRS = ir.VectorType(I16, 2 * LANES)


def _splat_words(b, scalar):
    undef = ir.Constant(PAIRS, ir.Undefined)
    one = b.insert_element(undef, scalar, I32(0))
    return b.shuffle_vector(one, undef, ir.Constant(ir.VectorType(I32, 2 * LANES), [0] * 2 * LANES))


@intrinsic
def load_codes(ty, data, offset):
    """Return the uint32 data[offset : offset + 16]."""
    return i32x16(data, types.int64), lambda ctx, b, sig, a: _load_words(b, a[0], a[1])


@intrinsic
def look_up(ty, table, places, codes, shift):
    """Return table[codes >> shift & 15] of float32: `table` as a vector, `places` as the address of the same."""

    def code(ctx, b, sig, a):
        table, places, codes, shift = a
        index = b.lshr(codes, _splat(b, b.trunc(shift, I32), I32V))
        if HAS_WIDE_LOOKUP:  # looks at the low four bits only
            return _call(b, "llvm.x86.avx512.permvar.sf.512", F32V, [table, index])
        index, found = b.and_(index, _integers(15)), ir.Constant(F32V, ir.Undefined)
        for lane in range(LANES):
            one = b.load(b.gep(places, [b.extract_element(index, I32(lane))]))
            found = b.insert_element(found, one, I32(lane))
        return found

    return f32x16(f32x16, places, i32x16, types.int64), code


@intrinsic
def small_floats(ty, codes, shift, e5m2):
    """Return codes >> shift & 255 as 8-bit floats: E5M2, or E4M3 divided by 256 (NaN excluded)."""

    def code(ctx, b, sig, a):
        codes, shift, e5m2 = a
        octets = b.and_(b.lshr(codes, _splat(b, b.trunc(shift, I32), I32V)), _integers(0xFF))
        sign = b.shl(b.and_(octets, _integers(0x80)), _integers(8))
        # The bits of a float16 with the same exponent field, whose bias is 8 more.
        short = b.or_(sign, b.shl(b.and_(octets, _integers(0x7F)), _integers(7)))
        half = b.select(b.icmp_signed("!=", e5m2, e5m2.type(0)), b.shl(octets, _integers(8)), short)
        return _widen_half(b, b.trunc(half, I16V), F16V, I32V, F32V)

    return f32x16(i32x16, types.int64, types.int64), code


@intrinsic
def table_pairs(ty, table, codes, shift):
    """Return pairs of bfloat16: those at codes >> shift & 15 and at codes >> (shift + 16) & 15 of a table, which is
    sixteen bfloat16 twice over. Needs HAS_BF16_DOT, as `float_pairs` does.
    """

    def code(ctx, b, sig, a):
        table, codes, shift = a
        # It looks at five bits of each half.
        places = b.bitcast(b.lshr(codes, _splat(b, b.trunc(shift, I32), I32V)), PAIRS)
        found = _call(b, "llvm.x86.avx512.permvar.hi.512", PAIRS, [b.bitcast(table, PAIRS), places])
        return b.bitcast(found, I32V)

    return i32x16(i32x16, i32x16, types.int64), code


def _float_pairs(fraction):
    """Make the intrinsic for 8-bit floats with so many bits of fraction."""
    bias = (1 << (6 - fraction)) - 1

    @intrinsic
    def pairs(ty, smallest, codes, second):
        def code(ctx, b, sig, a):
            smallest, codes, second = a

            def all_of(value):
                return ir.Constant(PAIRS, [value] * 2 * LANES)

            shift = _splat_words(b, b.shl(b.trunc(second, I16), I16(3)))
            octets = b.lshr(b.bitcast(codes, PAIRS), shift)
            size = b.and_(octets, all_of(0x7F))
            normal = b.add(b.shl(size, all_of(7 - fraction)), all_of(127 - bias << 7))
            low = _call(b, "llvm.x86.avx512.permvar.hi.512", PAIRS, [b.bitcast(smallest, PAIRS), size])
            value = b.select(b.icmp_unsigned("<", size, all_of(1 << fraction)), low, normal)
            sign = b.and_(b.shl(octets, all_of(8)), all_of(0x8000))
            return b.bitcast(b.or_(value, sign), I32V)

        return i32x16(i32x16, i32x16, types.int64), code

    pairs.__doc__ = f"""Return pairs of bfloat16 from 8-bit floats with {fraction} bits of fraction (NaN excluded).

    They are bytes 0 and 2 of each of the codes, or 1 and 3 of the `second` pair; `smallest` are the bfloat16 of what
    has no leading one.
    """
    return pairs


e4m3_pairs, e5m2_pairs = _float_pairs(3), _float_pairs(2)


@intrinsic
def store_codes(ty, target, at, values):
    """Write uint32 target[at : at + 16]."""

    def code(ctx, b, sig, a):
        b.store(a[2], b.bitcast(b.gep(a[0], [a[1]]), I32V.as_pointer())).align = 4
        return ctx.get_dummy_value()

    return types.void(target, types.int64, i32x16), code
