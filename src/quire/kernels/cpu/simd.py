"""The vocabulary of the CPU kernels: sixteen float32 or int32 lanes as Numba types, LLVM instructions on them, and the
inner loops of matrix products and of attention.

Only generic LLVM vector operations, so the same kernel compiles for AVX-512, AVX2, NEON or plain SSE2; the exceptions
need HAS_BF16_DOT or HAS_VNNI. Arrays come in several storage formats, distinguished by their dtype, so that `load` and
`get` widen and `put` narrows without a flag: float32 as it is, uint16 for the bits of bfloat16, int16 for the bits of
float16, int8. Offsets count elements of the flat, contiguous array. No algorithm lives here, except the exponential
function and the inner loops.
"""

from __future__ import annotations

import platform

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import register_model

from quire.checkpoint.small_floats import E4M3, E5M2
from quire.kernels.cpu.jit import jit
from quire.kernels.cpu.pointers import ANY, ARRAY, INT, NOTHING, intrinsic
from quire.kernels.cpu.sizes import GROUP, LANES, SEGMENT

I8, I16, I32, I64, F16, F32 = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.HalfType(), ir.FloatType()
F32V, I32V, I16V, I8V, F16V = (ir.VectorType(element, LANES) for element in (F32, I32, I16, I8, F16))


def has_feature(name: str) -> bool:
    """Say whether kernels are compiled for a CPU with this LLVM feature; Numba's own overrides count."""
    if numba.config.CPU_FEATURES is not None:
        return f"+{name}" in numba.config.CPU_FEATURES.split(",")
    if numba.config.CPU_NAME is not None:
        return False
    return bool(llvm.get_host_cpu_features().get(name, False))


# Without these instructions LLVM would call a library function that is not there. Every AArch64 has them.
HAS_HALF = has_feature("f16c") or platform.machine().lower() in ("aarch64", "arm64")

# Products of bfloat16 pairs, added to float32 sums, in one instruction (VDPBF16PS).
HAS_BF16_DOT = has_feature("avx512bf16") and has_feature("avx512f")

# Rows of the register tile in `tile_many`: 8 x 2 sixteen-lane sums fill AVX-512's 32 registers; half as wide
# registers, or half as many, hold 2 x 2.
TILE_ROWS = 8 if has_feature("avx512f") else 2


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks; only the operands of one instruction are of it."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash(BFloat)


BF16_PAIRS, I16_PAIRS = ir.VectorType(BFloat(), 2 * LANES), ir.VectorType(I16, 2 * LANES)


class VecType(types.Type):
    """Sixteen lanes of 32 bits, held in a register."""

    def __init__(self, name: str, vector: ir.VectorType) -> None:
        super().__init__(name=name)
        self.vector = vector


@register_model(VecType)
class VecModel(PrimitiveModel):
    """Lower VecType to the LLVM vector."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.vector)


f32x16, i32x16 = VecType("f32x16", F32V), VecType("i32x16", I32V)


# Building blocks of the intrinsics: functions from LLVM values to LLVM values


def _constant(value):
    return ir.Constant(F32V, [value] * LANES)


def _integers(value):
    return ir.Constant(I32V, [value] * LANES)


def _splat(b, scalar, vector):
    undef = ir.Constant(vector, ir.Undefined)
    one = b.insert_element(undef, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, undef, _integers(0))


def _call(b, name, result, args):
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def _multiply_add(b, x, y, z):
    return _call(b, "llvm.fmuladd.v16f32", F32V, [x, y, z])


def _all(kind, value):
    """Return the constant, in every lane where `kind` is a vector."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _widen_half(b, bits, half, integer, single):
    """Turn 16-bit integers, the bits of float16, into float32; the types say whether of a vector."""
    if HAS_HALF:
        return b.fpext(b.bitcast(bits, half), single)
    wide = b.zext(bits, integer)
    magnitude = b.shl(b.and_(wide, _all(integer, 0x7FFF)), _all(integer, 13))
    finite = b.fmul(b.bitcast(magnitude, single), _all(single, 2.0**112))  # exact, subnormal numbers too
    special = b.bitcast(b.or_(magnitude, _all(integer, 0x7F800000)), single)
    value = b.select(b.icmp_unsigned(">=", magnitude, _all(integer, 0x7C00 << 13)), special, finite)
    sign = b.shl(b.and_(wide, _all(integer, 0x8000)), _all(integer, 16))
    return b.bitcast(b.or_(b.bitcast(value, integer), sign), single)


def _narrow_half(b, value):
    """Turn a float32 scalar into the bits of float16, rounded to nearest even."""
    if HAS_HALF:
        return b.bitcast(b.fptrunc(value, F16), I16)
    bits = b.bitcast(value, I32)
    size = b.and_(bits, I32(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, I32(13)), I32(1))
    normal = b.sub(b.lshr(b.add(b.add(size, I32(0xFFF)), odd), I32(13)), I32(112 << 10))
    # Adding 0.5 leaves a multiple of 2^-24, the step of subnormal numbers, in the low bits.
    half = b.fadd(b.bitcast(size, F32), ir.Constant(F32, 0.5))
    result = b.select(b.icmp_unsigned("<", size, I32(0x38800000)), b.sub(b.bitcast(half, I32), I32(0x3F000000)), normal)
    result = b.select(b.icmp_unsigned(">=", size, I32(0x477FF000)), I32(0x7C00), result)  # 65520 and more
    result = b.select(b.icmp_unsigned(">", size, I32(0x7F800000)), I32(0x7E00), result)
    sign = b.and_(b.lshr(bits, I32(16)), I32(0x8000))
    return b.trunc(b.or_(result, sign), I16)


def _round_bf16(b, value):
    """Round float32, a scalar or a vector, to nearest even: bits whose upper halves are those of bfloat16."""
    bits = b.bitcast(value, I32V if isinstance(value.type, ir.VectorType) else I32)
    odd = b.and_(b.lshr(bits, _all(bits.type, 16)), _all(bits.type, 1))
    rounded = b.add(b.add(bits, _all(bits.type, 0x7FFF)), odd)
    return b.select(b.fcmp_unordered("uno", value, value), _all(bits.type, 0x7FC00000), rounded)


def _load_vector(b, pointer, offset, vector, align):
    """Load `vector`, an LLVM type, from element `offset` of a pointer that is aligned to `align` bytes."""
    value = b.load(b.bitcast(b.gep(pointer, [offset]), vector.as_pointer()))
    value.align = align
    return value


def _load(b, storage, data, offset):
    """Load sixteen elements at `data + offset` and widen them to float32."""
    if storage == "f32":
        return _load_vector(b, data, offset, F32V, 4)
    if storage == "i8":
        return b.sitofp(b.sext(_load_vector(b, data, offset, I8V, 1), I32V), F32V)
    value = _load_vector(b, data, offset, I16V, 2)
    if storage == "bf16":
        return b.bitcast(b.shl(b.zext(value, I32V), _integers(16)), F32V)
    return _widen_half(b, value, F16V, I32V, F32V)


def _store(b, value, data, offset):
    b.store(value, b.bitcast(b.gep(data, [offset]), F32V.as_pointer())).align = 4


def _to_bf16_pairs(b, low, high):
    """Round 32 floats, two vectors, to nearest even bfloat16; neighbours become the halves of sixteen 32-bit lanes.

    With the instruction that does it (HAS_BF16_DOT), subnormal results are zeros, as they are in the products.
    """
    if HAS_BF16_DOT:
        pairs = _call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16_PAIRS, [high, low])
        return b.bitcast(pairs, I32V)
    halves = [b.lshr(_round_bf16(b, value), _integers(16)) for value in (low, high)]
    lanes = ir.VectorType(I32, LANES)
    even = b.shuffle_vector(*halves, ir.Constant(lanes, list(range(0, 2 * LANES, 2))))
    uneven = b.shuffle_vector(*halves, ir.Constant(lanes, list(range(1, 2 * LANES, 2))))
    return b.or_(even, b.shl(uneven, _integers(16)))


def _exp(b, x):
    """e^x to about two units in the last place; exactly 1 at 0, 0 below -87, finite above 88.

    x = n ln 2 + r with |r| <= ln(2)/2 and e^r by its Taylor series to degree 7 (remainder 5e-9). Adding 1.5 * 2^23
    rounds to an integer that can then be read from the low bits.
    """
    magic = 12582912.0
    x = b.select(b.fcmp_ordered(">", x, _constant(88.0)), _constant(88.0), x)
    shifted = _multiply_add(b, x, _constant(1.4426950408889634), _constant(magic))
    n = b.fsub(shifted, _constant(magic))
    r = _multiply_add(b, n, _constant(-0.693359375), x)
    r = _multiply_add(b, n, _constant(2.12194440e-4), r)
    series = _constant(1 / 5040)
    for factor in (720, 120, 24, 6, 2, 1, 1):
        series = _multiply_add(b, series, r, _constant(1 / factor))
    exponent = b.shl(b.add(b.bitcast(shifted, I32V), _integers(127)), _integers(23))
    result = b.fmul(series, b.bitcast(exponent, F32V))
    return b.select(b.fcmp_unordered("<", x, _constant(-87.0)), _flush(b, x), result)


def _flush(b, x):
    """0 in every lane, NaN where x is."""
    return b.select(b.fcmp_unordered("uno", x, x), x, _constant(0.0))


def _fold(b, x, combine):
    """Combine the lanes as a binary tree, halves first; the order is part of every result that is a sum."""
    width = LANES
    while width > 1:
        width //= 2
        undef = ir.Constant(x.type, ir.Undefined)
        halves = [
            b.shuffle_vector(x, undef, ir.Constant(ir.VectorType(I32, width), list(range(start, start + width))))
            for start in (0, width)
        ]
        x = combine(*halves)
    return b.extract_element(x, ir.Constant(I32, 0))


def _maximum(b, x, y):
    return b.select(b.fcmp_ordered("<", x, y), y, x)


# Memory


@intrinsic(f32x16, ARRAY, ANY)
def load(b, array, offset):
    """Return array[offset : offset + 16] widened to float32."""
    return _load(b, array.storage, array.data, offset)


@intrinsic(NOTHING, ANY, ANY, ANY)
def store(b, array, offset, value):
    """Write the lanes to the float32 array[offset : offset + 16]."""
    _store(b, value, array, offset)


@intrinsic(types.float32, ARRAY, ANY)
def get(b, array, offset):
    """Return array[offset] widened to float32."""
    value = b.load(b.gep(array.data, [offset]))
    if array.storage == "f32":
        return value
    if array.storage == "i8":
        return b.sitofp(b.sext(value, I32), F32)
    if array.storage == "bf16":
        return b.bitcast(b.shl(b.zext(value, I32), ir.Constant(I32, 16)), F32)
    return _widen_half(b, value, F16, I32, F32)


@intrinsic(NOTHING, ARRAY, ANY, types.float32)
def put(b, array, offset, value):
    """Set array[offset] to the float32 value, rounded to nearest even in the array's format; NaN stays NaN."""
    if array.storage == "bf16":
        value = b.trunc(b.lshr(_round_bf16(b, value), I32(16)), I16)
    elif array.storage == "f16":
        value = _narrow_half(b, value)
    b.store(value, b.gep(array.data, [offset]))


@intrinsic(f32x16, ARRAY, INT, INT)
def load_partial(b, array, offset, count):
    """Return array[offset : offset + count] in the first lanes, count <= 16, and 0 in the others."""
    storage, data = array
    lanes = ir.ArrayType(F32 if storage == "f32" else I16, LANES)
    place, index = cgutils.alloca_once(b, lanes), offset.type
    b.store(ir.Constant(lanes, None), place)
    first = b.bitcast(place, data.type)
    with cgutils.for_range(b, count, intp=index) as loop:
        b.store(b.load(b.gep(data, [b.add(offset, loop.index)])), b.gep(first, [loop.index]))
    return _load(b, storage, first, index(0))


@intrinsic(NOTHING, ANY, INT, ANY, INT)
def store_partial(b, array, offset, value, count):
    """Write the first count <= 16 lanes to the float32 array[offset : offset + count]."""
    place = cgutils.alloca_once(b, F32V)
    b.store(value, place)
    first = b.bitcast(place, F32.as_pointer())
    with cgutils.for_range(b, count, intp=offset.type) as loop:
        b.store(b.load(b.gep(first, [loop.index])), b.gep(array, [b.add(offset, loop.index)]))


@jit
def load_lanes(x, at, count):
    """Return x[at : at + count] in the first lanes, count <= 16."""
    return load(x, at) if count == LANES else load_partial(x, at, count)


@jit
def store_lanes(x, at, value, count):
    """Write the first count <= 16 lanes to the float32 x[at : at + count]."""
    if count == LANES:
        store(x, at, value)
    else:
        store_partial(x, at, value, count)


# Arithmetic


@intrinsic(f32x16, types.float32)
def splat(b, x):
    """Return the float32 scalar in every lane."""
    return _splat(b, x, F32V)


def _lanewise(instruction, kind=f32x16):
    @intrinsic(kind, kind, kind)
    def operation(b, x, y):
        return getattr(b, instruction)(x, y)

    return operation


add, sub, mul, div = (_lanewise(instruction) for instruction in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic(f32x16, ANY, ANY, ANY)
def multiply_add(b, x, y, z):
    """x * y + z, fused where the CPU can."""
    return _multiply_add(b, x, y, z)


@intrinsic(f32x16, ANY, ANY)
def maximum(b, x, y):
    """The larger of each pair of lanes."""
    return _maximum(b, x, y)


@intrinsic(f32x16, ANY)
def exp(b, x):
    """e^x in every lane."""
    return _exp(b, x)


@intrinsic(types.float32, ANY)
def reduce_sum(b, x):
    """Add the lanes, as a tree."""
    return _fold(b, x, b.fadd)


@intrinsic(types.float32, ANY)
def reduce_max(b, x):
    """Return the largest lane."""
    return _fold(b, x, lambda x, y: _maximum(b, x, y))


@intrinsic(f32x16)
def lane_indices(b):
    """0.0, 1.0, ... 15.0."""
    return ir.Constant(F32V, [float(i) for i in range(LANES)])


@intrinsic(types.int64, types.float64)
def float64_bits(b, x):
    """Return the bits of a float64 scalar as int64."""
    return b.bitcast(x, ir.IntType(64))


@intrinsic(f32x16, ANY, INT, INT, types.float32)
def select_lanes(b, x, first, stop, other):
    """Return x in lanes first <= i < stop and the scalar `other` elsewhere; the bounds are int64 and may be outside."""
    wide = ir.VectorType(ir.IntType(64), LANES)
    lanes = ir.Constant(wide, list(range(LANES)))
    inside = b.and_(
        b.icmp_signed(">=", lanes, _splat(b, first, wide)), b.icmp_signed("<", lanes, _splat(b, stop, wide))
    )
    return b.select(inside, x, _splat(b, other, F32V))


# Inner loops of matrix products


class _Tile:
    """A register tile of float32 sums: `rows` rows of two vectors."""

    def __init__(self, b, rows):
        self.b, self.rows = b, rows
        self.sums = [[cgutils.alloca_once(b, F32V) for _ in (0, 1)] for _ in range(rows)]

    def each(self, at, step):
        """Yield every sum with its offset in an array where rows are `step` elements apart."""
        b = self.b
        for r, row in enumerate(self.sums):
            for c, total in enumerate(row):
                yield total, b.add(b.add(at, b.mul(step, step.type(r))), step.type(LANES * c))

    def clear(self):
        for row in self.sums:
            for total in row:
                self.b.store(_constant(0.0), total)

    def start(self, resume, out, at, step):
        """Load the sums from float32 `out` if `resume` is not 0, else set them to 0."""
        b, places = self.b, list(self.each(at, step))
        with b.if_else(b.icmp_signed("!=", resume, resume.type(0))) as (resumed, fresh):
            with resumed:
                for total, place in places:
                    b.store(_load(b, "f32", out, place), total)
            with fresh:
                self.clear()

    def add(self, columns, factors, multiply_add):
        """Replace every sum by multiply_add(b, sum, columns[c], the row's factor)."""
        for row, factor in zip(self.sums, factors, strict=True):
            for total, column in zip(row, columns, strict=True):
                self.b.store(multiply_add(self.b, self.b.load(total), column, factor), total)

    def store(self, out, at, step):
        for total, place in self.each(at, step):
            _store(self.b, self.b.load(total), out, place)


def _fma_into(b, total, x, y):
    return _multiply_add(b, x, y, total)


def _dot_pairs(b, total, x, y):
    """Add the products of bfloat16 pairs to float32 sums; needs HAS_BF16_DOT."""
    return _call(b, "llvm.x86.avx512bf16.dpbf16ps.512", F32V, [total, x, y])


def _broadcast(b, pointer, offset):
    """Return element `offset`, of 32 bits, in every lane."""
    value = b.load(b.gep(pointer, [offset]))
    return _splat(b, value, ir.VectorType(value.type, LANES))


def _broadcast_pair(b, pointer, offset):
    """Return the bfloat16 pair in word `offset` in every lane."""
    return b.bitcast(_broadcast(b, pointer, offset), BF16_PAIRS)


def _prefetch(b, pointer, level=2):
    """Prefetch the cache line at any address into the second-level cache, or with level 3 into the first."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    b.call(function, [b.bitcast(pointer, I8.as_pointer()), I32(0), I32(level), I32(1)])


def _float_tile(rows):
    @intrinsic(NOTHING, ARRAY, INT, INT, INT, ANY, INT, INT, INT, INT, ANY, INT, INT, INT)
    def tile(b, w, w_at, w_step, w_next, x, x_at, x_step, x_next, depth, out, out_at, out_next, resume):
        index, place, tile = w_at.type, (out, out_at, out_next), _Tile(b, rows)
        tile.start(resume, *place)
        with cgutils.for_range(b, depth, intp=index) as loop:
            step = b.add(w_at, b.mul(loop.index, w_step))
            weights = [_load(b, w.storage, w.data, b.add(step, o)) for o in (index(0), w_next)]
            x_row = b.add(x_at, b.mul(loop.index, x_step))
            factors = (_broadcast(b, x, b.add(x_row, b.mul(x_next, index(r)))) for r in range(rows))
            tile.add(weights, factors, _fma_into)
        tile.store(*place)

    tile.__doc__ = f"""The inner loop of every float matrix product, for {rows} rows and 32 columns:

    out[r, c] = (out[r, c] if resume else 0) + sum over k < depth of w[k, c] * x[r, k], added in the order of k,
    so that an element's bits do not depend on how many rows are computed together. Strides, in elements:

    w[k, c]   at w_at + k * w_step + (c // 16) * w_next + c % 16; any storage format
    x[r, k]   at x_at + k * x_step + r * x_next; float32
    out[r, c] at out_at + r * out_next + c; float32
    """
    return tile


tile_many, tile_four, tile_two, tile_one = _float_tile(TILE_ROWS), _float_tile(4), _float_tile(2), _float_tile(1)


def _pair_tile(rows, w_step=2 * LANES):
    @intrinsic(NOTHING, ANY, INT, INT, ANY, INT, INT, ANY, INT, INT, INT, INT, INT)
    def tile(b, w, w_at, w_next, x, x_at, pairs, out, out_at, out_next, resume, prefetch0, prefetch1):
        index, place, tile = w_at.type, (out, out_at, out_next), _Tile(b, rows)
        tile.start(resume, *place)
        with cgutils.for_range(b, pairs, intp=index) as loop:
            down = b.mul(loop.index, index(w_step))
            step = b.add(w_at, down)
            columns = [_load_vector(b, w, b.add(step, o), BF16_PAIRS, 2) for o in (index(0), w_next)]
            for line in {prefetch0: None, prefetch1: None}:
                _prefetch(b, b.gep(w, [b.add(line, down)]))
            x_row = b.add(x_at, b.mul(loop.index, index(rows)))
            tile.add(columns, (_broadcast_pair(b, x, b.add(x_row, index(r))) for r in range(rows)), _dot_pairs)
        tile.store(*place)

    tile.__doc__ = f"""Like `tile_many` for bfloat16 on both sides, {rows} rows and 32 columns; needs HAS_BF16_DOT.

    An element takes one pair of k after the other, with the same instruction whatever the number of rows. Subnormal
    numbers count as zeros. In elements:

    w[k, c]   at w_at + (k // 2) * {w_step} + (c // 16) * w_next + c % 16 * 2 + k % 2; uint16, the bits of bfloat16
    x[r, k]   half k % 2 of x_at + (k // 2) * {rows} + r; uint32, the lower half first; k < 2 * pairs
    out[r, c] at out_at + r * out_next + c; float32

    Every step prefetches a line of w into the second-level cache, from prefetch0 and from prefetch1 on.
    """
    return tile


dot_many, dot_four, dot_one = _pair_tile(8), _pair_tile(4), _pair_tile(1)
panel_many, panel_four, panel_one = (_pair_tile(rows, 4 * LANES) for rows in (8, 4, 1))  # both vectors side by side


# Lanes of int32


# Products of four bytes, added to an int32 sum, in one instruction (VPDPBUSD).
HAS_VNNI = has_feature("avx512vnni") and has_feature("avx512f")

QUARTER = LANES // 4
CHAINS = 4  # sums that a one-row tile keeps for an output: a product must not wait for the one before it
UNROLL = 4  # steps of the one-row tiles in one turn of the loop; groups are whole multiples of it
ROUNDING = 12582912.0  # 1.5 * 2^23: added to a small float it leaves the nearest integer in the low bits
ROUNDING_BITS = 0x4B400000


def _larger(b, x, y):
    return b.select(b.icmp_signed("<", x, y), y, x)


add_i32 = _lanewise("add", i32x16)


@intrinsic(i32x16, INT)
def splat_i32(b, value):
    """Return the integer in every lane."""
    return _splat(b, b.trunc(value, I32), I32V)


@intrinsic(i32x16, ANY, ANY)
def max_i32(b, x, y):
    """The larger of each pair of int32 lanes."""
    return _larger(b, x, y)


@intrinsic(i32x16, ANY, INT, INT)
def clamp_i32(b, x, low, high):
    """Return int32 lanes, those below `low` or above `high` set to that."""
    least, most = (_splat(b, b.trunc(bound, I32), I32V) for bound in (low, high))
    raised = _larger(b, x, least)
    return b.select(b.icmp_signed(">", raised, most), most, raised)


@intrinsic(types.int32, ANY)
def reduce_add_i32(b, x):
    """Add the int32 lanes."""
    return _fold(b, x, b.add)


@intrinsic(types.int32, ANY)
def reduce_max_i32(b, x):
    """Return the largest int32 lane."""
    return _fold(b, x, lambda x, y: _larger(b, x, y))


@intrinsic(i32x16, ANY)
def abs_bits(b, x):
    """Return the bits of |x| as int32: ordered as the values are, infinity above all numbers and NaN above infinity."""
    return b.and_(b.bitcast(x, I32V), _integers(0x7FFFFFFF))


@intrinsic(types.float32, types.int32)
def float_from_bits(b, bits):
    """Return the float32 scalar with these bits."""
    return b.bitcast(bits, F32)


@intrinsic(i32x16, ANY, types.float32)
def scale_to_i32(b, x, factor):
    """x * factor, rounded to float32 and then to the nearest int32, ties to even; 0 for NaN. Below 2^22 in size."""
    scaled = b.fmul(x, _splat(b, factor, F32V))
    shifted = b.fadd(scaled, _constant(ROUNDING))
    whole = b.sub(b.bitcast(shifted, I32V), _integers(ROUNDING_BITS))
    return b.select(b.fcmp_unordered("uno", scaled, scaled), _integers(0), whole)


def _quarters(b, x):
    """Return the low bytes of the lanes, four to a uint32."""
    packed = b.bitcast(b.trunc(x, I8V), ir.VectorType(I32, QUARTER))
    return [b.extract_element(packed, I32(i)) for i in range(QUARTER)]


@intrinsic(NOTHING, ANY, INT, INT, ANY)
def store_u8x4(b, data, at, step, x):
    """Write the low bytes of the lanes, four to a uint32: data[at], data[at + step] and two more."""
    place = at
    for word in _quarters(b, x):
        b.store(word, b.gep(data, [place]))
        place = b.add(place, step)


@intrinsic(NOTHING, ANY, INT, INT, ANY)
def store_u4x8(b, data, at, step, x):
    """Write lanes of 0 to 15, eight to a uint32: lanes 0..3 in the low halves of its bytes, 4..7 in the high ones."""
    words = _quarters(b, x)
    for i in (0, 1):
        word = b.or_(words[2 * i], b.shl(words[2 * i + 1], I32(4)))
        b.store(word, b.gep(data, [b.add(at, b.mul(step, step.type(i)))]))


# Inner loops


def _load_words(b, data, offset):
    return _load_vector(b, data, offset, I32V, 4)


def _shifted(b, x, left, right):
    """Shift the lanes left, then right, keeping their sign; works on 16 and on 32 bits."""
    bits = [ir.Constant(x.type, [count] * x.type.count) for count in (left, right)]
    return b.ashr(b.shl(x, bits[0]), bits[1]) if left else b.ashr(x, bits[1])


def _pair_sums(b, x, y):
    """Return sums of neighbouring products of int16, as int32: PMADDWD where there is one."""
    wide = ir.VectorType(I32, 2 * LANES)
    products = b.mul(b.sext(x, wide), b.sext(y, wide))
    undef = ir.Constant(wide, ir.Undefined)
    even, odd = (
        b.shuffle_vector(products, undef, ir.Constant(I32V, list(range(start, 2 * LANES, 2)))) for start in (0, 1)
    )
    return b.add(even, odd)


def _operand(b, octets, vnni):
    """Prepare sixteen times four unsigned bytes for `_dot`."""
    if vnni:
        return octets
    low = _integers(0x00FF00FF)
    return [b.bitcast(b.and_(x, low), I16_PAIRS) for x in (octets, b.lshr(octets, _integers(8)))]


def _dot(b, sums, operand, word, vnni):
    """Add the products of four unsigned bytes in every lane of `operand` with the four signed ones of a scalar."""
    factors = _splat(b, word, I32V)
    if vnni:
        return _call(b, "llvm.x86.avx512.vpdpbusd.512", I32V, [sums, operand, factors])
    pairs = b.bitcast(factors, I16_PAIRS)
    even, odd = _shifted(b, pairs, 8, 8), _shifted(b, pairs, 0, 8)
    return b.add(sums, b.add(_pair_sums(b, operand[0], even), _pair_sums(b, operand[1], odd)))


def _octets(b, words, bits):
    """Return the vectors of unsigned bytes that a vector of storage holds, in the order of k."""
    if bits == 8:
        return [words]
    low = _integers(0x0F0F0F0F)
    return [b.and_(words, low), b.and_(b.lshr(words, _integers(4)), low)]


def _counted(b, count, unroll, body):
    """Call body(i, i % unroll) for i < count, `unroll` times in one turn of a loop; count is a multiple of that."""
    with cgutils.for_range(b, b.udiv(count, count.type(unroll)), intp=count.type) as loop:
        for i in range(unroll):
            body(b.add(b.mul(loop.index, count.type(unroll)), count.type(i)), i)


def _finish_group(b, sums, out, at, scales, zeros, starts):
    """out += scale * (sum + zero / 8 * start) for the tile's rows, or out = sum where there are no scales.

    `scales` and `zeros` are (data, offsets of both vectors); a null pointer is none.
    """
    rows = len(sums) // 2

    def place(r, c):
        return b.add(at, at.type(2 * LANES * r + LANES * c))

    grouped = b.icmp_unsigned("!=", b.ptrtoint(scales[0], I64), I64(0))
    with b.if_else(grouped) as (with_scales, without):
        with without:
            for i, place_at in enumerate(place(r, c) for r in range(rows) for c in (0, 1)):
                _store(b, b.sitofp(b.load(sums[i]), F32V), out, place_at)
        with with_scales:
            values = [cgutils.alloca_once(b, F32V) for _ in sums]
            for value, count in zip(values, sums, strict=True):
                b.store(b.sitofp(b.load(count), F32V), value)
            with b.if_then(b.icmp_unsigned("!=", b.ptrtoint(zeros[0], I64), I64(0))):
                for c in (0, 1):
                    eighth = b.fmul(_load(b, "f16", zeros[0], zeros[1][c]), _constant(0.125))
                    for r in range(rows):
                        start = b.sitofp(_splat(b, b.load(starts[r]), I32V), F32V)
                        value = values[2 * r + c]
                        b.store(_multiply_add(b, eighth, start, b.load(value)), value)
            for c in (0, 1):
                scale = _load(b, "f16", scales[0], scales[1][c])
                for r in range(rows):
                    so_far = _load(b, "f32", out, place(r, c))
                    _store(b, _multiply_add(b, scale, b.load(values[2 * r + c]), so_far), out, place(r, c))


def _begin_sums(b, sums, begin):
    """Let the first chain's two sums of a row begin with the value at its address, those of other chains with 0."""
    for r, address in enumerate(begin):
        value = _splat(b, b.load(address), I32V)
        b.store(value, sums[0][2 * r])
        b.store(value, sums[0][2 * r + 1])
    for place in (place for places in sums[1:] for place in places):
        b.store(_integers(0), place)


def _add_products(b, into, operands, x, from_x, vnni):
    """Add the products of four bytes of each row with both vectors of weights to the row's two sums."""
    for r in range(len(into) // 2):
        word = b.load(b.gep(x, [b.add(from_x, from_x.type(r))]))
        for c in (0, 1):
            place = into[2 * r + c]
            b.store(_dot(b, b.load(place), operands[c], word, vnni), place)


def _fold_chains(b, sums):
    """Add the other chains' sums to the first one's."""
    for places in sums[1:]:
        for total, place in zip(sums[0], places, strict=True):
            b.store(b.add(b.load(total), b.load(place)), total)


def _int_tile(rows, bits, vnni):
    unroll = UNROLL if rows == 1 else 1
    chains = CHAINS if rows == 1 else 1
    per_step = 8 // bits  # uint32 of activations for one of weights

    @intrinsic(NOTHING, ANY, INT, INT, ANY, INT, INT, ANY, INT, INT, INT, ANY, ANY, INT, INT, ANY, INT, INT, INT)
    def tile(b, w, w_at, w_next, x, x_at, height, starts, starts_at, groups, steps, scales, zeros, s_at, *rest):
        s_next, out, at, *prefetched = rest
        index = w_at.type
        sums = [[cgutils.alloca_once(b, I32V) for _ in range(2 * rows)] for _ in range(chains)]
        for i in range(2 * rows):
            _store(b, _constant(0.0), out, b.add(at, index(LANES * i)))
        with cgutils.for_range(b, groups, intp=index) as loop:
            first = b.add(starts_at, b.mul(loop.index, height))
            begin = [b.gep(starts, [b.add(first, index(r))]) for r in range(rows)]
            _begin_sums(b, sums, begin)
            done = b.mul(loop.index, steps)

            def step(i, turn):
                number = b.add(done, i)
                from_w = b.add(w_at, b.mul(number, index(LANES)))
                from_x = b.add(x_at, b.mul(b.mul(number, index(per_step)), height))
                both = [_octets(b, _load_words(b, w, b.add(from_w, o)), bits) for o in (index(0), w_next)]
                for line in prefetched if rows > 1 else ():
                    _prefetch(b, b.gep(w, [b.add(line, b.mul(number, index(LANES)))]))
                for k in range(per_step):
                    operands = [_operand(b, octets[k], vnni) for octets in both]
                    _add_products(b, sums[(turn * per_step + k) % chains], operands, x, from_x, vnni)
                    from_x = b.add(from_x, height)

            _counted(b, steps, unroll, step)
            _fold_chains(b, sums)
            here = b.add(s_at, b.mul(loop.index, index(LANES)))
            both = [here, b.add(here, s_next)]
            _finish_group(b, sums[0], out, at, (scales, both), (zeros, both), begin)

    tile.__doc__ = f"""The inner loop of products with {bits}-bit weights, for {rows} rows and 32 columns:

    Arguments: w, w_at, w_next, x, x_at, height, starts, starts_at, groups, steps, scales, zeros, s_at, s_next, out, at,
    ahead, ahead_too.

    out[r, c] = sum over g < groups, in order, of scale[g, c] * (F[g, r, c] + zero[g, c] / 8 * start[g, r]) with
    F[g, r, c] = start[g, r] + sum over k of group g of w[k, c] * x[r, k], in int32; without scales (a null pointer)
    there is one group and out = F. A group is `steps` uint32 of weights long. In elements:

    w      uint32, at w_at + (c // 16) * w_next + step * 16 + c % 16
    x      uint32 of four signed bytes, at x_at + (k // 4) * height + r
    start  int32, at starts_at + g * height + r
    scale, zero  the bits of float16, at s_at + (c // 16) * s_next + g * 16 + c % 16
    out    float32, at `at` + r * 32 + c

    With several rows every step prefetches a line of w into the second-level cache, from `ahead` and `ahead_too` on.
    """
    return tile


def _tiles(bits, vnni):
    """Return the tiles of 8, 4 and 1 rows, or of 2, 2 and 1 where sixteen sums and more do not fit the registers."""
    return [_int_tile(rows, bits, vnni) for rows in ((8, 4, 1) if vnni else (2, 2, 1))]


int8_tiles, int4_tiles = ([_tiles(bits, False), _tiles(bits, True)] for bits in (8, 4))


def _weight_only_tile(rows):
    @intrinsic(NOTHING, ANY, INT, INT, ANY, INT, INT, ANY, INT, INT, INT, ANY, ANY, INT, INT, ANY, INT, INT, INT)
    def tile(b, w, w_at, w_next, x, x_at, height, starts, starts_at, groups, steps, scales, zeros, s_at, *rest):
        _, out, at, *_ = rest
        index, tile = w_at.type, _Tile(b, rows)
        tile.clear()
        with cgutils.for_range(b, steps, intp=index) as loop:
            from_w = b.add(w_at, b.mul(loop.index, index(LANES)))
            signed = [b.xor(_load_words(b, w, b.add(from_w, o)), _integers(0x80808080)) for o in (index(0), w_next)]
            from_x = b.add(x_at, b.mul(b.mul(loop.index, index(4)), height))
            for k in range(4):
                columns = [b.sitofp(_shifted(b, words, 24 - 8 * k, 24), F32V) for words in signed]
                tile.add(columns, (_broadcast(b, x, b.add(from_x, index(r))) for r in range(rows)), _fma_into)
                from_x = b.add(from_x, height)
        tile.store(out, at, index(2 * LANES))

    tile.__doc__ = f"""Like `_int_tile`, with its arguments, for {rows} rows of float32 and ungrouped 8-bit weights.

    x[r, k] is at x_at + k * height + r; out[r, c] = sum over k of (w[k, c] - 128) * x[r, k], in the order of k.
    """
    return tile


FLOAT_ROWS = TILE_ROWS
float_tiles = [_weight_only_tile(rows) for rows in (FLOAT_ROWS, min(4, FLOAT_ROWS), 1)]


# Pairs of bfloat16, for attention


HALF_PAIRS = 8  # pairs of positions in half a tile

NEAR, MIDDLE = 3, 2  # what a prefetch aims at: the first or the second-level cache


def _pairs_at(b, address):
    """Load sixteen pairs from an integer address."""
    return _load_vector(b, b.inttoptr(address, I8.as_pointer()), I64(0), BF16_PAIRS, 2)


def _elements_at(b, address):
    """Load thirty-two 16-bit elements from an integer address."""
    return _load_vector(b, b.inttoptr(address, I8.as_pointer()), I64(0), I16_PAIRS, 2)


def _prefetch_at(b, address, level):
    _prefetch(b, b.inttoptr(address, I8.as_pointer()), level)


def _to_pairs(b, first, second):
    """Round 32 values to bfloat16 (nearest even; subnormal numbers become zeros) and put neighbours together."""
    return b.bitcast(_call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16_PAIRS, [second, first]), I32V)


def _store_pairs(b, pairs, words, index):
    b.store(pairs, b.bitcast(b.gep(words, [index]), I32V.as_pointer())).align = 4


def _by_rows(b, rows, emit):
    """Emit a switch with the body `emit(n)` for every height of a tile."""
    done = b.append_basic_block("done")
    choose = b.switch(rows, done)
    for n in range(1, GROUP + 1):
        block = b.append_basic_block(f"rows{n}")
        choose.add_case(I64(n), block)
        b.position_at_end(block)
        emit(n)
        b.branch(done)
    b.position_at_end(done)


@intrinsic(NOTHING, INT, INT, INT, INT, ANY, INT, INT, ANY, INT, INT, INT)
def score_tile(b, rows, keys0, keys1, step, q, q_at, pairs, out, out_at, values0, values1):
    """out[r * SEGMENT + j] = sum of q[r, i] * key[i, j] over all elements i of a head, for 1 to 8 rows, 32 positions.

    keys0, keys1: addresses of two times 16 positions; pair i of the elements is `step` bytes after pair i - 1.
    q: uint32 pairs, element pair i of row r at q_at + i * rows + r; `pairs` of them. out: float32 from out_at on.
    Lines at values0 and values1 are prefetched, one of each for a pair; any address will do.
    """

    def emit(n):
        tile = _Tile(b, n)
        tile.clear()
        with cgutils.for_range(b, pairs, intp=I64) as loop:
            down = b.mul(loop.index, step)
            columns = [_pairs_at(b, b.add(k, down)) for k in (keys0, keys1)]
            for address in (values0, values1):
                _prefetch_at(b, b.add(address, b.mul(loop.index, I64(64))), MIDDLE)
            here = b.add(q_at, b.mul(loop.index, I64(n)))
            tile.add(columns, [_broadcast_pair(b, q, b.add(here, I64(r))) for r in range(n)], _dot_pairs)
        tile.store(out, out_at, I64(SEGMENT))

    _by_rows(b, rows, emit)


@intrinsic(NOTHING, INT, ANY, INT, INT, INT, INT, ANY, ANY, INT, INT, ANY, INT)
def value_tile(b, rows, halves, first, last, step, column, weights, out, out_at, out_next, keys, keys_step):
    """out[r, c] = sum of weight[r, j] * value[j, c] over the positions of halves first .. last - 1; 1 to 8 rows.

    halves: int64 addresses, of 16 positions each: pair j of the positions is `step` bytes after pair j - 1, column c
    at `column` bytes + c pairs; 32 columns. weights: uint32 pairs, row r from r * SEGMENT / 2 on. out: float32, column
    c of row r at out_at + r * out_next + c. keys: addresses of the next halves, `keys_step` bytes between lines; the
    share of the lines that belongs to these columns is prefetched.
    """

    def emit(n):
        tile = _Tile(b, n)
        tile.clear()
        with cgutils.for_range_slice(b, first, last, I64(1), intp=I64) as (half, _):
            base = b.add(b.load(b.gep(halves, [half])), column)
            lines = b.mul(b.sdiv(column, I64(8)), keys_step)  # 32 columns are 128 bytes and 16 lines of keys
            ahead = b.add(b.load(b.gep(keys, [half])), lines)
            with cgutils.for_range(b, I64(HALF_PAIRS), intp=I64) as loop:
                here = b.add(base, b.mul(loop.index, step))
                columns = [_pairs_at(b, b.add(here, I64(o))) for o in (0, 64)]
                for o in (0, HALF_PAIRS):
                    _prefetch_at(b, b.add(ahead, b.mul(b.add(loop.index, I64(o)), keys_step)), MIDDLE)
                at = b.add(b.mul(half, I64(HALF_PAIRS)), loop.index)
                places = [b.add(at, I64(r * SEGMENT // 2)) for r in range(n)]
                tile.add(columns, [_broadcast_pair(b, weights, place) for place in places], _dot_pairs)
        tile.store(out, out_at, out_next)

    _by_rows(b, rows, emit)


@intrinsic(NOTHING, ANY, INT, ANY, ANY)
def store_pairs(b, words, offset, first, second):
    """Store 32 values as sixteen uint32 pairs of bfloat16, rounded to nearest even; subnormal numbers become zeros."""
    _store_pairs(b, _to_pairs(b, first, second), words, offset)


@intrinsic(f32x16, ANY, INT, ANY, ANY, ANY)
def store_weights(b, words, offset, first, second, total):
    """Like `store_pairs`; return `total` with the rounded values added, two neighbours to a lane."""
    pairs = _to_pairs(b, first, second)
    _store_pairs(b, pairs, words, offset)
    ones = b.bitcast(ir.Constant(I32V, [0x3F803F80] * LANES), BF16_PAIRS)
    return _dot_pairs(b, total, b.bitcast(pairs, BF16_PAIRS), ones)


@intrinsic(NOTHING, ANY, INT, ANY, INT)
def widen_int8_pairs(b, octets, offset, words, to):
    """Turn octets[offset : offset + 32], int8, into sixteen uint32 pairs of bfloat16 at words[to]; exact."""
    first, second = (_load(b, "i8", octets, b.add(offset, I64(o))) for o in (0, LANES))
    _store_pairs(b, _to_pairs(b, first, second), words, to)


@intrinsic(NOTHING, INT)
def prefetch(b, address):
    """Start loading the cache line at this address into the first-level cache."""
    _prefetch_at(b, address, NEAR)


def _transposed(b, rows):
    """Transpose sixteen vectors of sixteen 32-bit lanes."""
    rows = list(rows)
    for apart in (1, 2, 4, 8):  # rows that many apart trade the blocks that lie across the diagonal
        below = [i if i & apart == 0 else LANES + i - apart for i in range(LANES)]
        above = [i + apart if i & apart == 0 else LANES + i for i in range(LANES)]
        masks = [ir.Constant(I32V, mask) for mask in (below, above)]
        for i in range(LANES):
            if i & apart == 0:
                pair = rows[i], rows[i + apart]
                rows[i], rows[i + apart] = (b.shuffle_vector(*pair, mask) for mask in masks)
    return rows


@intrinsic(NOTHING, ANY, INT, INT, ANY, INT)
def transpose_pairs(b, rows, column, count, words, to):
    """words[to + i * 16 + j] = pair i < 16 of row j, from its element `column` on.

    rows: int64 addresses of sixteen rows of 16-bit elements, which may be read 62 bytes too far; elements from `count`
    on, counted from `column`, are taken to be zeros.
    """
    lanes = ir.Constant(I16_PAIRS, list(range(2 * LANES)))
    most = b.select(b.icmp_signed("<", count, I64(2 * LANES)), count, I64(2 * LANES))
    first = b.insert_element(ir.Constant(I16_PAIRS, ir.Undefined), b.trunc(most, I16), I32(0))
    limit = b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, 2 * LANES), [0] * 2 * LANES))
    inside = b.icmp_signed("<", lanes, limit)
    loaded = []
    for j in range(LANES):
        elements = _elements_at(b, b.add(b.load(b.gep(rows, [I64(j)])), b.mul(column, I64(2))))
        kept = b.select(inside, elements, ir.Constant(I16_PAIRS, [0] * 2 * LANES))
        loaded.append(b.bitcast(kept, I32V))
    for i, row in enumerate(_transposed(b, loaded)):
        _store_pairs(b, row, words, b.add(to, I64(i * LANES)))


@intrinsic(NOTHING, INT, INT, ANY, INT)
def interleave_pairs(b, first, second, words, to):
    """words[to + i] = the pair of elements i < 32 of the rows at two addresses, of 16-bit elements."""
    rows = [_elements_at(b, address) for address in (first, second)]
    for half in (0, LANES):
        lanes = [half + i // 2 + 2 * LANES * (i % 2) for i in range(2 * LANES)]
        pairs = b.shuffle_vector(*rows, ir.Constant(ir.VectorType(I32, 2 * LANES), lanes))
        _store_pairs(b, b.bitcast(pairs, I32V), words, b.add(to, I64(half)))


@intrinsic(NOTHING, ANY, INT, INT, ANY, INT, INT)
def transpose_tile(b, source, at, step, target, to, to_step):
    """target[to + i * to_step + j] = source[at + j * step + i], for 16 x 16 float32."""
    rows = [_load(b, "f32", source, b.add(at, b.mul(step, I64(j)))) for j in range(LANES)]
    for i, row in enumerate(_transposed(b, rows)):
        _store(b, row, target, b.add(to, b.mul(to_step, I64(i))))


@intrinsic(f32x16, ANY, types.float32, ANY, types.float32)
def scale_add(b, x, before, y, now):
    """x * before + y * now with float32 scalars `before` and `now`."""
    return _multiply_add(b, x, _splat(b, before, F32V), b.fmul(y, _splat(b, now, F32V)))


# Codes of small floats


HAS_WIDE_LOOKUP = has_feature("avx512f")
HAS_BYTE_LOOKUP = has_feature("avx512vbmi")
LOOKUP_WORDS = "llvm.x86.avx512.permvar.hi.512"
BYTES = ir.VectorType(I8, 4 * LANES)
COLUMNS = 2 * LANES  # of a tile


@intrinsic(i32x16, ANY, INT)
def load_codes(b, data, offset):
    """Return the uint32 data[offset : offset + 16]."""
    return _load_words(b, data, offset)


@intrinsic(f32x16, f32x16, ANY, i32x16, INT)
def look_up(b, table, places, codes, shift):
    """Return table[codes >> shift & 15] of float32: `table` as a vector, `places` as the address of the same."""
    index = b.lshr(codes, _splat(b, b.trunc(shift, I32), I32V))
    if HAS_WIDE_LOOKUP:  # looks at the low four bits only
        return _call(b, "llvm.x86.avx512.permvar.sf.512", F32V, [table, index])
    index, found = b.and_(index, _integers(15)), ir.Constant(F32V, ir.Undefined)
    for lane in range(LANES):
        one = b.load(b.gep(places, [b.extract_element(index, I32(lane))]))
        found = b.insert_element(found, one, I32(lane))
    return found


@intrinsic(f32x16, i32x16, INT, INT)
def decode_fp8(b, codes, shift, e5m2):
    """Return codes >> shift & 255 as 8-bit floats: E5M2, or E4M3 divided by 256 (NaN excluded)."""
    octets = b.and_(b.lshr(codes, _splat(b, b.trunc(shift, I32), I32V)), _integers(0xFF))
    sign = b.shl(b.and_(octets, _integers(0x80)), _integers(8))
    # The bits of a float16 with the same exponent field, whose bias is 8 more.
    short = b.or_(sign, b.shl(b.and_(octets, _integers(0x7F)), _integers(7)))
    half = b.select(b.icmp_signed("!=", e5m2, e5m2.type(0)), b.shl(octets, _integers(8)), short)
    return _widen_half(b, b.trunc(half, I16V), F16V, I32V, F32V)


# Pairs of bfloat16; all of it needs HAS_BF16_DOT


def _line(b, pointer, at, vector=I32V):
    """Return the address of vector `at`, of 64 bytes, after a pointer."""
    octets = b.bitcast(pointer, I8.as_pointer())
    return b.bitcast(b.gep(octets, [b.mul(at, at.type(64))]), vector.as_pointer())


def _load_line(b, pointer, at, vector=I32V):
    return _load_vector(b, _line(b, pointer, at, vector), at.type(0), vector, 4)


def _store_line(b, value, pointer, at):
    b.store(value, _line(b, pointer, at)).align = 4


def _all_words(value):
    return ir.Constant(I16_PAIRS, [value] * 2 * LANES)


class _Panel:
    """Pairs as they are, one vector of them after the other."""

    pairs = 1

    def __init__(self, b, args):
        self.b, self.w = b, args[0]

    def weights(self, at, step, column):
        return [self.b.bitcast(_load_line(self.b, self.w, at), BF16_PAIRS)]


class _Table:
    """Nibbles that look up a table of bfloat16, which is there twice; a lookup sees five bits of each half."""

    pairs = 4

    def __init__(self, b, args):
        self.b, self.w = b, args[0]
        self.table = _load_line(b, args[1], args[2].type(0), I16_PAIRS)

    def weights(self, at, step, column):
        b, codes, found = self.b, _load_line(self.b, self.w, at), []
        for pair in range(self.pairs):
            places = b.bitcast(b.lshr(codes, _integers(4 * pair)), I16_PAIRS)
            found.append(_call(b, LOOKUP_WORDS, I16_PAIRS, [self.table, places]))
        return [b.bitcast(value, BF16_PAIRS) for value in self.scaled(found, step, column)]

    def scaled(self, found, step, column):
        return found


class _ScaledTable(_Table):
    """Like `_Table`, times powers of two: what is not zero has uint16 scales[place, column] added to its bits."""

    def __init__(self, b, args):
        super().__init__(b, args)
        self.scales, self.at, self.next, self.shift = args[3:7]

    def scaled(self, found, step, column):
        b = self.b
        at = b.add(self.at, b.shl(b.lshr(step, self.shift), step.type(4)))
        powers = _load_vector(b, self.scales, b.add(at, self.next) if column else at, I16V, 2)
        twice = ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 for i in range(2 * LANES)])
        powers = b.shuffle_vector(powers, powers, twice)
        zero = [b.icmp_unsigned("==", b.and_(value, _all_words(0x7FFF)), _all_words(0)) for value in found]
        return [b.select(z, value, b.add(value, powers)) for z, value in zip(zero, found, strict=True)]


class _Octets:
    """8-bit floats, NaN excluded: E4M3, or E5M2 where `args[2]` is not 0. Their sign is that of what is looked up.

    The 128 sizes are looked up as two bytes each; or, where the CPU cannot, those without a leading one are, and the
    others have their exponent's bias changed.
    """

    pairs = 2

    def __init__(self, b, args):
        self.b, self.w = b, args[0]
        longer = b.icmp_signed("!=", args[2], args[2].type(0))
        if HAS_BYTE_LOOKUP:
            self.tables = [b.select(longer, *both) for both in zip(*map(_byte_tables, (E5M2, E4M3)), strict=True)]
            return
        self.table = _load_line(b, args[1], args[2].type(0), I16_PAIRS)
        self.settings = [
            b.select(longer, _all_words(second), _all_words(first))
            for first, second in ((4, 5), (120 << 7, 112 << 7), (1 << 3, 1 << 2))
        ]

    def weights(self, at, step, column):
        b, codes = self.b, _load_line(self.b, self.w, at)
        pairs = self.looked_up(codes) if HAS_BYTE_LOOKUP else [self.computed(codes, pair) for pair in range(2)]
        return [b.bitcast(value, BF16_PAIRS) for value in pairs]

    def looked_up(self, codes):
        b, places = self.b, self.b.bitcast(codes, BYTES)
        lows, highs = (
            _call(b, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, [first, places, second])
            for first, second in (self.tables[:2], self.tables[2:])
        )
        highs = b.or_(highs, b.and_(places, ir.Constant(BYTES, [0x80] * 4 * LANES)))
        lows, highs, eight = b.bitcast(lows, I16_PAIRS), b.bitcast(highs, I16_PAIRS), _all_words(8)
        return [
            b.or_(b.and_(lows, _all_words(0x00FF)), b.shl(highs, eight)),
            b.or_(b.lshr(lows, eight), b.and_(highs, _all_words(0xFF00))),
        ]

    def computed(self, codes, pair):
        b, (shift, bias, limit) = self.b, self.settings
        octets = b.lshr(b.bitcast(codes, I16_PAIRS), _all_words(8 * pair))
        size = b.and_(octets, _all_words(0x7F))
        low = _call(b, LOOKUP_WORDS, I16_PAIRS, [self.table, size])
        value = b.select(b.icmp_unsigned("<", size, limit), low, b.add(b.shl(size, shift), bias))
        return b.or_(value, b.and_(b.shl(octets, _all_words(8)), _all_words(0x8000)))


def _byte_tables(worth):
    """Return the lower bytes of 128 floats as bfloat16, then the upper ones, each as two constants."""
    bits = np.nan_to_num(worth[:128]).view(np.uint32) >> 16
    halves = [bits & 0xFF, bits >> 8]
    return [ir.Constant(BYTES, [int(v) for v in half[i : i + 64]]) for half in halves for i in (0, 64)]


# What an array of weights holds, by the type of its elements.
SOURCES = {"bf16": _Panel, "u32": _Table, "i32": _ScaledTable, "u8": _Octets}


def _keep(b, columns, panel, k):
    """Write vectors of pair k of both halves of the columns to a panel: its pointer, and where they begin in it."""
    pointer, at, following = panel
    for column, to in zip(columns, (at, b.add(at, following)), strict=True):
        _store_line(b, b.bitcast(column, I32V), pointer, b.add(to, k))


class _ScaledTile(_Tile):
    """Sums that are parked in `parked` between panels, or multiplied by their columns' scales and added to `out`."""

    def __init__(self, b, rows, args):
        super().__init__(b, rows)
        parked, parked_at, self.resume, out, out_at, out_next, self.ends, self.factors = args
        self.parked, self.out = (parked, parked_at, parked_at.type(COLUMNS)), (out, out_at, out_next)

    def scales(self, scales, at, following):
        """Return two vectors of bfloat16, of float32, or of 1, as `factors` is 1, 0, or another."""
        b, kinds = self.b, self.factors.type
        found = [cgutils.alloca_once(b, F32V) for _ in (0, 1)]
        for place in found:
            b.store(_constant(1.0), place)
        for kind, storage, pointer in ((0, "f32", b.bitcast(scales, F32.as_pointer())), (1, "bf16", scales)):
            with b.if_then(b.icmp_signed("==", self.factors, kinds(kind))):
                for place, from_at in zip(found, (at, b.add(at, following)), strict=True):
                    b.store(_load(b, storage, pointer, from_at), place)
        return [b.load(place) for place in found]

    def finish(self, scales, at, following):
        b = self.b
        with b.if_else(b.icmp_signed("!=", self.ends, self.ends.type(0))) as (finished, unfinished):
            with finished:
                factors = self.scales(scales, at, following)
                for i, (total, place) in enumerate(self.each(*self.out[1:])):
                    before = _load(b, "f32", self.out[0], place)
                    _store(b, _multiply_add(b, b.load(total), factors[i % 2], before), self.out[0], place)
            with unfinished:
                self.store(*self.parked)


def _coded_tile(rows):
    """Make the tile of so many rows."""

    @intrinsic(NOTHING, ARRAY, ANY, INT, ANY, *[INT] * 6, ANY, INT, ANY, INT, INT, ANY, INT, INT, ANY, *[INT] * 5)
    def tile(b, w, look, second, scales, scale_at, scale_next, shift, w_at, w_next, steps, x, x_at, *rest):
        panel, sums, groups = rest[:3], rest[3:11], rest[11]
        keeps = rows == 8 and SOURCES[w.storage] is not _Panel
        source = SOURCES[w.storage](b, (w.data, look, second, scales, scale_at, scale_next, shift))
        index, tile = w_at.type, _ScaledTile(b, rows, sums)
        with cgutils.for_range(b, groups, intp=index) as group:
            tile.start(tile.resume, *tile.parked)
            with cgutils.for_range(b, steps, intp=index) as loop:
                step = b.add(b.mul(group.index, steps), loop.index)
                lines = [b.add(w_at, step)]
                lines.append(b.add(lines[0], w_next))
                columns = [source.weights(line, step, c) for c, line in enumerate(lines)]
                if keeps:
                    for line in lines:
                        _prefetch(b, _line(b, w.data, b.add(line, b.add(w_next, w_next))))
                for pair in range(source.pairs):
                    k = b.add(b.mul(step, index(source.pairs)), index(pair))
                    if keeps:
                        _keep(b, [column[pair] for column in columns], panel, k)
                    x_row = b.add(x_at, b.mul(k, index(rows)))
                    factors = (_broadcast_pair(b, x, b.add(x_row, index(r))) for r in range(rows))
                    tile.add([column[pair] for column in columns], factors, _dot_pairs)
            tile.finish(scales, b.add(scale_at, b.mul(group.index, index(LANES))), scale_next)

    tile.__doc__ = f"""Like `simd.dot_many` with weights that are codes: {rows} rows and 32 columns.

    Arguments: w, look, second, scales, scale_at, scale_next, shift, w_at, w_next, steps, x, x_at, panel, panel_at,
    panel_next, sums, sums_at, resume, out, out_at, out_next, finish, factors, groups.

    out[r, c] += scale[c] * (what resumes + sum over k of w[k, c] * x[r, k]), pair after pair, in one instruction each;
    or, unless `finish`, the sum is kept. So for each of the `groups`, which follow one another. Each of the `steps` is
    one vector of words, those of sixteen columns, for either half of the columns, and as many pairs as their type says,
    see SOURCES. Scales are the next sixteen for each group: bfloat16 if `factors` is 1, float32 if 0, else 1.

    w            vectors of 64 bytes, at w_at and w_at + w_next; what to look things up in, `look` to `shift`, is
                 explained at the sources
    x[r, k]      half k % 2 of x_at + (k // 2) * {rows} + r; uint32
    sums[r, c]   at sums_at + r * 32 + c; float32
    out[r, c]    at out_at + r * out_next + c; float32

    A tile of 8 rows writes the pairs of bfloat16 to the vectors at panel_at and panel_at + panel_next, where w are
    codes, for the rows that follow; and it prefetches the codes of the next columns into the second-level cache.
    """
    return tile


coded_many, coded_four, coded_one = _coded_tile(8), _coded_tile(4), _coded_tile(1)


@intrinsic(NOTHING, ARRAY, ANY, INT, ANY, INT, INT, INT, INT, INT, ANY, INT, INT)
def unpack_word(b, w, look, second, scales, scale_at, scale_next, shift, w_at, w_next, panel, panel_at, panel_next):
    """Write the pairs of one word of each of 32 columns to the panel, see `coded_many`."""
    source = SOURCES[w.storage](b, (w.data, look, second, scales, scale_at, scale_next, shift))
    for c in (0, 1):
        line, to = (b.add(w_at, w_next), b.add(panel_at, panel_next)) if c else (w_at, panel_at)
        for pair, value in enumerate(source.weights(line, w_at.type(0), c)):
            _store_line(b, b.bitcast(value, I32V), panel, b.add(to, to.type(pair)))
