"""The vocabulary of the CPU kernels: sixteen float32 lanes as a Numba type, and LLVM instructions on it.

Only generic LLVM vector operations, so the same kernel compiles for AVX-512, AVX2, NEON or plain SSE2; the exception is
`dot_many` with its neighbours, for CPUs with `HAS_BF16_DOT`. Arrays come in three storage formats told apart by their
dtype, so that `load` and `get` widen and `put` narrows without a flag: float32 as it is, uint16 for the bits of
bfloat16, int16 for the bits of float16. Offsets count elements of the flat, contiguous array. No algorithm lives here,
except the exponential function and the inner loops of all matrix products.
"""

from __future__ import annotations

import platform

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

LANES = 16
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
    """Sixteen float32 lanes, held in a register."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


@register_model(VecType)
class VecModel(PrimitiveModel):
    """Lower VecType to the LLVM vector."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, F32V)


f32x16 = VecType()


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


def _storage(array_type):
    """Return "f32", "bf16", "f16" or "i8" for a Numba array type."""
    return {types.float32: "f32", types.uint16: "bf16", types.int16: "f16", types.int8: "i8"}[array_type.dtype]


def _data(ctx, b, array_type, array):
    """Return the address of an array's data; a typed pointer is that already."""
    return array if isinstance(array_type, types.CPointer) else ctx.make_array(array_type)(ctx, b, array).data


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
    halves = []
    for value in (low, high):
        bits = b.bitcast(value, I32V)
        odd = b.and_(b.lshr(bits, _integers(16)), _integers(1))
        rounded = b.lshr(b.add(b.add(bits, _integers(0x7FFF)), odd), _integers(16))
        halves.append(b.select(b.fcmp_unordered("uno", value, value), _integers(0x7FC0), rounded))
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


@intrinsic
def load(ty, array, offset):
    """Return array[offset : offset + 16] widened to float32."""

    def code(ctx, b, sig, a):
        return _load(b, _storage(sig.args[0]), _data(ctx, b, sig.args[0], a[0]), a[1])

    return f32x16(array, offset), code


@intrinsic
def store(ty, array, offset, value):
    """Write the lanes to the float32 array[offset : offset + 16]."""

    def code(ctx, b, sig, a):
        _store(b, a[2], _data(ctx, b, sig.args[0], a[0]), a[1])
        return ctx.get_dummy_value()

    return types.void(array, offset, value), code


@intrinsic
def get(ty, array, offset):
    """Return array[offset] widened to float32."""

    def code(ctx, b, sig, a):
        value = b.load(b.gep(_data(ctx, b, sig.args[0], a[0]), [a[1]]))
        storage = _storage(sig.args[0])
        if storage == "f32":
            return value
        if storage == "i8":
            return b.sitofp(b.sext(value, I32), F32)
        if storage == "bf16":
            return b.bitcast(b.shl(b.zext(value, I32), ir.Constant(I32, 16)), F32)
        return _widen_half(b, value, F16, I32, F32)

    return types.float32(array, offset), code


@intrinsic
def put(ty, array, offset, value):
    """Set array[offset] to the float32 value, rounded to nearest even in the array's format; NaN stays NaN."""

    def code(ctx, b, sig, a):
        storage, value = _storage(sig.args[0]), a[2]
        if storage == "bf16":
            bits = b.bitcast(value, I32)
            odd = b.and_(b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
            rounded = b.lshr(b.add(b.add(bits, ir.Constant(I32, 0x7FFF)), odd), ir.Constant(I32, 16))
            is_nan = b.fcmp_unordered("uno", value, value)
            value = b.trunc(b.select(is_nan, ir.Constant(I32, 0x7FC0), rounded), I16)
        elif storage == "f16":
            value = _narrow_half(b, value)
        b.store(value, b.gep(_data(ctx, b, sig.args[0], a[0]), [a[1]]))
        return ctx.get_dummy_value()

    return types.void(array, offset, types.float32), code


@intrinsic
def load_partial(ty, array, offset, count):
    """Return array[offset : offset + count] in the first lanes, count <= 16, and 0 in the others."""

    def code(ctx, b, sig, a):
        storage, data = _storage(sig.args[0]), _data(ctx, b, sig.args[0], a[0])
        lanes = ir.ArrayType(F32 if storage == "f32" else I16, LANES)
        place, index = cgutils.alloca_once(b, lanes), a[1].type
        b.store(ir.Constant(lanes, None), place)
        first = b.bitcast(place, data.type)
        with cgutils.for_range(b, a[2], intp=index) as loop:
            b.store(b.load(b.gep(data, [b.add(a[1], loop.index)])), b.gep(first, [loop.index]))
        return _load(b, storage, first, index(0))

    return f32x16(array, types.int64, types.int64), code


@intrinsic
def store_partial(ty, array, offset, value, count):
    """Write the first count <= 16 lanes to the float32 array[offset : offset + count]."""

    def code(ctx, b, sig, a):
        data = _data(ctx, b, sig.args[0], a[0])
        place = cgutils.alloca_once(b, F32V)
        b.store(a[2], place)
        first = b.bitcast(place, F32.as_pointer())
        with cgutils.for_range(b, a[3], intp=a[1].type) as loop:
            b.store(b.load(b.gep(first, [loop.index])), b.gep(data, [b.add(a[1], loop.index)]))
        return ctx.get_dummy_value()

    return types.void(array, types.int64, value, types.int64), code


# Arithmetic


@intrinsic
def splat(ty, x):
    """Return the float32 scalar in every lane."""
    return f32x16(types.float32), lambda ctx, b, sig, a: _splat(b, a[0], F32V)


@intrinsic
def add(ty, x, y):
    """x + y."""
    return f32x16(x, y), lambda ctx, b, sig, a: b.fadd(a[0], a[1])


@intrinsic
def sub(ty, x, y):
    """x - y."""
    return f32x16(x, y), lambda ctx, b, sig, a: b.fsub(a[0], a[1])


@intrinsic
def mul(ty, x, y):
    """x * y."""
    return f32x16(x, y), lambda ctx, b, sig, a: b.fmul(a[0], a[1])


@intrinsic
def div(ty, x, y):
    """x / y."""
    return f32x16(x, y), lambda ctx, b, sig, a: b.fdiv(a[0], a[1])


@intrinsic
def multiply_add(ty, x, y, z):
    """x * y + z, fused where the CPU can."""
    return f32x16(x, y, z), lambda ctx, b, sig, a: _multiply_add(b, *a)


@intrinsic
def maximum(ty, x, y):
    """The larger of each pair of lanes."""
    return f32x16(x, y), lambda ctx, b, sig, a: _maximum(b, *a)


@intrinsic
def exp(ty, x):
    """e^x in every lane."""
    return f32x16(x), lambda ctx, b, sig, a: _exp(b, a[0])


@intrinsic
def reduce_sum(ty, x):
    """Add the lanes, as a tree."""
    return types.float32(x), lambda ctx, b, sig, a: _fold(b, a[0], b.fadd)


@intrinsic
def reduce_max(ty, x):
    """Return the largest lane."""
    return types.float32(x), lambda ctx, b, sig, a: _fold(b, a[0], lambda x, y: _maximum(b, x, y))


@intrinsic
def lane_indices(ty):
    """0.0, 1.0, ... 15.0."""
    return f32x16(), lambda ctx, b, sig, a: ir.Constant(F32V, [float(i) for i in range(LANES)])


@intrinsic
def float64_bits(ty, x):
    """Return the bits of a float64 scalar as int64."""
    return types.int64(types.float64), lambda ctx, b, sig, a: b.bitcast(a[0], ir.IntType(64))


@intrinsic
def select_lanes(ty, x, first, stop, other):
    """Return x in lanes first <= i < stop and the scalar `other` elsewhere; the bounds are int64 and may be outside."""

    def code(ctx, b, sig, a):
        wide = ir.VectorType(ir.IntType(64), LANES)
        lanes = ir.Constant(wide, list(range(LANES)))
        inside = b.and_(
            b.icmp_signed(">=", lanes, _splat(b, a[1], wide)), b.icmp_signed("<", lanes, _splat(b, a[2], wide))
        )
        return b.select(inside, a[0], _splat(b, a[3], F32V))

    return f32x16(x, types.int64, types.int64, types.float32), code


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
    @intrinsic
    def tile(ty, w, w_at, w_step, w_next, x, x_at, x_step, x_next, depth, out, out_at, out_next, resume):
        def code(ctx, b, sig, a):
            w, x, out = (_data(ctx, b, sig.args[i], a[i]) for i in (0, 4, 9))
            w_at, w_step, w_next, x_at, x_step, x_next = a[1], a[2], a[3], a[5], a[6], a[7]
            index, place, tile = w_at.type, (out, a[10], a[11]), _Tile(b, rows)
            tile.start(a[12], *place)
            with cgutils.for_range(b, a[8], intp=index) as loop:
                step = b.add(w_at, b.mul(loop.index, w_step))
                weights = [_load(b, _storage(sig.args[0]), w, b.add(step, o)) for o in (index(0), w_next)]
                x_row = b.add(x_at, b.mul(loop.index, x_step))
                factors = (_broadcast(b, x, b.add(x_row, b.mul(x_next, index(r)))) for r in range(rows))
                tile.add(weights, factors, _fma_into)
            tile.store(*place)
            return ctx.get_dummy_value()

        n = types.int64
        return types.void(w, n, n, n, x, n, n, n, n, out, n, n, n), code

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
    @intrinsic
    def tile(ty, w, w_at, w_next, x, x_at, pairs, out, out_at, out_next, resume, prefetch0, prefetch1):
        def code(ctx, b, sig, a):
            w, x, out = (_data(ctx, b, sig.args[i], a[i]) for i in (0, 3, 6))
            index, place, tile = a[1].type, (out, a[7], a[8]), _Tile(b, rows)
            tile.start(a[9], *place)
            with cgutils.for_range(b, a[5], intp=index) as loop:
                down = b.mul(loop.index, index(w_step))
                step = b.add(a[1], down)
                columns = [_load_vector(b, w, b.add(step, o), BF16_PAIRS, 2) for o in (index(0), a[2])]
                for line in {a[10]: None, a[11]: None}:
                    _prefetch(b, b.gep(w, [b.add(line, down)]))
                x_row = b.add(a[4], b.mul(loop.index, index(rows)))
                tile.add(columns, (_broadcast_pair(b, x, b.add(x_row, index(r))) for r in range(rows)), _dot_pairs)
            tile.store(*place)
            return ctx.get_dummy_value()

        n = types.int64
        return types.void(w, n, n, x, n, n, out, n, n, n, n, n), code

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
