"""Sixteen int32 lanes as a Numba type, rounding to integers, and the inner loops of products with integer weights.

Weights are unsigned bytes or nibbles, activations signed bytes; sums are int32 and exact, so that it does not matter
by which instructions they come about: `vnni` ones need HAS_VNNI, the others only generic vector operations. Which
numbers stand for what is decided in quantize.py and linear_int.py.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from quire.kernels.cpu.simd import (
    F32,
    F32V,
    I8V,
    I16_PAIRS,
    I32,
    I32V,
    I64,
    LANES,
    TILE_ROWS,
    _broadcast,
    _call,
    _constant,
    _fma_into,
    _fold,
    _integers,
    _load,
    _load_vector,
    _multiply_add,
    _prefetch,
    _splat,
    _store,
    _Tile,
    has_feature,
)

# Products of four bytes, added to an int32 sum, in one instruction (VPDPBUSD).
HAS_VNNI = has_feature("avx512vnni") and has_feature("avx512f")

QUARTER = LANES // 4
CHAINS = 4  # sums that a one-row tile keeps for an output: a product must not wait for the one before it
UNROLL = 4  # steps of the one-row tiles in one turn of the loop; groups are whole multiples of it
ROUNDING = 12582912.0  # 1.5 * 2^23: added to a small float it leaves the nearest integer in the low bits
ROUNDING_BITS = 0x4B400000


class IntVecType(types.Type):
    """Sixteen int32 lanes, held in a register."""

    def __init__(self) -> None:
        super().__init__(name="i32x16")


@register_model(IntVecType)
class IntVecModel(PrimitiveModel):
    """Lower IntVecType to the LLVM vector."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, I32V)


i32x16 = IntVecType()


def _larger(b, x, y):
    return b.select(b.icmp_signed("<", x, y), y, x)


@intrinsic
def splat_i32(ty, value):
    """Return the integer in every lane."""
    return i32x16(types.int64), lambda ctx, b, sig, a: _splat(b, b.trunc(a[0], I32), I32V)


@intrinsic
def add_i32(ty, x, y):
    """x + y of int32 lanes."""
    return i32x16(x, y), lambda ctx, b, sig, a: b.add(a[0], a[1])


@intrinsic
def max_i32(ty, x, y):
    """The larger of each pair of int32 lanes."""
    return i32x16(x, y), lambda ctx, b, sig, a: _larger(b, *a)


@intrinsic
def clamp_i32(ty, x, low, high):
    """Return int32 lanes, those below `low` or above `high` set to that."""

    def code(ctx, b, sig, a):
        least, most = (_splat(b, b.trunc(bound, I32), I32V) for bound in a[1:])
        raised = _larger(b, a[0], least)
        return b.select(b.icmp_signed(">", raised, most), most, raised)

    return i32x16(x, types.int64, types.int64), code


@intrinsic
def reduce_add_i32(ty, x):
    """Add the int32 lanes."""
    return types.int32(x), lambda ctx, b, sig, a: _fold(b, a[0], b.add)


@intrinsic
def reduce_max_i32(ty, x):
    """Return the largest int32 lane."""
    return types.int32(x), lambda ctx, b, sig, a: _fold(b, a[0], lambda x, y: _larger(b, x, y))


@intrinsic
def abs_bits(ty, x):
    """Return the bits of |x| as int32: ordered as the values are, infinity above all numbers and NaN above infinity."""
    return i32x16(x), lambda ctx, b, sig, a: b.and_(b.bitcast(a[0], I32V), _integers(0x7FFFFFFF))


@intrinsic
def float_from_bits(ty, bits):
    """Return the float32 scalar with these bits."""
    return types.float32(types.int32), lambda ctx, b, sig, a: b.bitcast(a[0], F32)


@intrinsic
def scale_to_i32(ty, x, factor):
    """x * factor, rounded to float32 and then to the nearest int32, ties to even; 0 for NaN. Below 2^22 in size."""

    def code(ctx, b, sig, a):
        scaled = b.fmul(a[0], _splat(b, a[1], F32V))
        shifted = b.fadd(scaled, _constant(ROUNDING))
        whole = b.sub(b.bitcast(shifted, I32V), _integers(ROUNDING_BITS))
        return b.select(b.fcmp_unordered("uno", scaled, scaled), _integers(0), whole)

    return i32x16(x, types.float32), code


def _quarters(b, x):
    """Return the low bytes of the lanes, four to a uint32."""
    packed = b.bitcast(b.trunc(x, I8V), ir.VectorType(I32, QUARTER))
    return [b.extract_element(packed, I32(i)) for i in range(QUARTER)]


@intrinsic
def store_u8x4(ty, data, at, step, x):
    """Write the low bytes of the lanes, four to a uint32: data[at], data[at + step] and two more."""

    def code(ctx, b, sig, a):
        place = a[1]
        for word in _quarters(b, a[3]):
            b.store(word, b.gep(a[0], [place]))
            place = b.add(place, a[2])
        return ctx.get_dummy_value()

    return types.void(data, types.int64, types.int64, x), code


@intrinsic
def store_u4x8(ty, data, at, step, x):
    """Write lanes of 0 to 15, eight to a uint32: lanes 0..3 in the low halves of its bytes, 4..7 in the high ones."""

    def code(ctx, b, sig, a):
        words = _quarters(b, a[3])
        for i in (0, 1):
            word = b.or_(words[2 * i], b.shl(words[2 * i + 1], I32(4)))
            b.store(word, b.gep(a[0], [b.add(a[1], b.mul(a[2], a[2].type(i)))]))
        return ctx.get_dummy_value()

    return types.void(data, types.int64, types.int64, x), code


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

    @intrinsic
    def tile(
        ty,
        w,
        w_at,
        w_next,
        x,
        x_at,
        height,
        starts,
        starts_at,
        groups,
        steps,
        scales,
        zeros,
        s_at,
        s_next,
        o,
        at,
        ahead,
        ahead_too,
    ):
        def code(ctx, b, sig, a):
            w, w_at, w_next, x, x_at, height, starts, starts_at, groups, steps, scales, zeros, s_at, s_next = a[:14]
            out, at, *fetched = a[14:]
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
                    for line in fetched if rows > 1 else ():
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
            return ctx.get_dummy_value()

        n = types.int64
        return types.void(w, n, n, x, n, n, starts, n, n, n, scales, zeros, n, n, o, n, n, n), code

    tile.__doc__ = f"""The inner loop of products with {bits}-bit weights, for {rows} rows and 32 columns:

    out[r, c] = sum over g < groups, in order, of scale[g, c] * (F[g, r, c] + zero[g, c] / 8 * start[g, r]) with
    F[g, r, c] = start[g, r] + sum over k of group g of w[k, c] * x[r, k], in int32; without scales (a null pointer)
    there is one group and out = F. A group is `steps` uint32 of weights long. In elements:

    w      uint32, at w_at + (c // 16) * w_next + step * 16 + c % 16
    x      uint32 of four signed bytes, at x_at + (k // 4) * height + r
    start  int32, at starts_at + g * height + r
    scale, zero  the bits of float16, at s_at + (c // 16) * s_next + g * 16 + c % 16
    out    float32, at `at` + r * 32 + c

    With several rows every step fetches a line of w into the second-level cache, from `ahead` and `ahead_too` on.
    """
    return tile


def _tiles(bits, vnni):
    """Return the tiles of 8, 4 and 1 rows, or of 2, 2 and 1 where sixteen sums and more do not fit the registers."""
    return [_int_tile(rows, bits, vnni) for rows in ((8, 4, 1) if vnni else (2, 2, 1))]


int8_tiles, int4_tiles = ([_tiles(bits, False), _tiles(bits, True)] for bits in (8, 4))


def _weight_only_tile(rows):
    @intrinsic
    def tile(ty, w, w_at, w_next, x, x_at, height, steps, out, at):
        def code(ctx, b, sig, a):
            w, w_at, w_next, x, x_at, height, steps, out, at = a
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
            return ctx.get_dummy_value()

        n = types.int64
        return types.void(w, n, n, x, n, n, n, out, n), code

    tile.__doc__ = f"""Like `_int_tile` for {rows} rows of float32 x and 8-bit weights without groups.

    x[r, k] is at x_at + k * height + r; out[r, c] = sum over k of (w[k, c] - 128) * x[r, k], in the order of k.
    """
    return tile


FLOAT_ROWS = TILE_ROWS
float_many, float_four, float_one = (_weight_only_tile(rows) for rows in (FLOAT_ROWS, min(4, FLOAT_ROWS), 1))
