"""Sixteen lanes of small codes to floats: a table of sixteen looked up by nibbles, and bytes that are 8-bit floats.

And tiles of products that make pairs of bfloat16 of them on the way. Which codes there are is decided in
linear_coded.py.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.checkpoint.small_floats import E4M3, E5M2
from quire.kernels.cpu.simd import (
    BF16_PAIRS,
    F16V,
    F32,
    F32V,
    I8,
    I16_PAIRS,
    I16V,
    I32,
    I32V,
    LANES,
    _broadcast_pair,
    _call,
    _constant,
    _dot_pairs,
    _integers,
    _load,
    _load_vector,
    _multiply_add,
    _prefetch,
    _splat,
    _store,
    _Tile,
    _widen_half,
    f32x16,
    has_feature,
)
from quire.kernels.cpu.simd_int import _load_words, i32x16

HAS_WIDE_LOOKUP = has_feature("avx512f")
HAS_BYTE_LOOKUP = has_feature("avx512vbmi")
LOOKUP_WORDS = "llvm.x86.avx512.permvar.hi.512"
BYTES = ir.VectorType(I8, 4 * LANES)
COLUMNS = 2 * LANES  # of a tile


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
def decode_fp8(ty, codes, shift, e5m2):
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


# What an array of weights holds is told by the type of its elements.
SOURCES = {types.uint16: _Panel, types.uint32: _Table, types.int32: _ScaledTable, types.uint8: _Octets}


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

    @intrinsic
    def tile(
        ty,
        w,
        look,
        second,
        scales,
        scale_at,
        scale_next,
        shift,
        w_at,
        w_next,
        steps,
        x,
        x_at,
        panel,
        panel_at,
        panel_next,
        sums,
        sums_at,
        resume,
        out,
        out_at,
        out_next,
        finish,
        factors,
        groups,
    ):
        keeps = rows == 8 and SOURCES[w.dtype] is not _Panel

        def code(ctx, b, sig, a):
            source, panel = SOURCES[w.dtype](b, a[:7]), a[12:15]
            w_at, w_next, steps = a[7], a[8], a[9]
            index, tile = w_at.type, _ScaledTile(b, rows, a[15:23])
            with cgutils.for_range(b, a[23], intp=index) as group:
                tile.start(tile.resume, *tile.parked)
                with cgutils.for_range(b, steps, intp=index) as loop:
                    step = b.add(b.mul(group.index, steps), loop.index)
                    lines = [b.add(w_at, step)]
                    lines.append(b.add(lines[0], w_next))
                    columns = [source.weights(line, step, c) for c, line in enumerate(lines)]
                    if keeps:
                        for line in lines:
                            _prefetch(b, _line(b, a[0], b.add(line, b.add(w_next, w_next))))
                    for pair in range(source.pairs):
                        k = b.add(b.mul(step, index(source.pairs)), index(pair))
                        if keeps:
                            _keep(b, [column[pair] for column in columns], panel, k)
                        x_row = b.add(a[11], b.mul(k, index(rows)))
                        factors = (_broadcast_pair(b, a[10], b.add(x_row, index(r))) for r in range(rows))
                        tile.add([column[pair] for column in columns], factors, _dot_pairs)
                tile.finish(a[3], b.add(a[4], b.mul(group.index, index(LANES))), a[5])
            return ctx.get_dummy_value()

        n = types.int64
        return types.void(w, look, n, scales, *[n] * 6, x, n, panel, n, n, sums, n, n, out, *[n] * 5), code

    tile.__doc__ = f"""Like `simd.dot_many` with weights that are codes: {rows} rows and 32 columns.

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
    codes, for the rows that follow; and it fetches the codes of the next columns into the second-level cache.
    """
    return tile


coded_many, coded_four, coded_one = _coded_tile(8), _coded_tile(4), _coded_tile(1)


@intrinsic
def unpack_word(ty, w, look, second, scales, scale_at, scale_next, shift, w_at, w_next, panel, panel_at, panel_next):
    """Write the pairs of one word of each of 32 columns to the panel, see `coded_many`."""

    def code(ctx, b, sig, a):
        source, (w_at, w_next, panel, panel_at, panel_next) = SOURCES[w.dtype](b, a[:7]), a[7:]
        for c in (0, 1):
            line, to = (b.add(w_at, w_next), b.add(panel_at, panel_next)) if c else (w_at, panel_at)
            for pair, value in enumerate(source.weights(line, w_at.type(0), c)):
                _store_line(b, b.bitcast(value, I32V), panel, b.add(to, to.type(pair)))
        return ctx.get_dummy_value()

    n = types.int64
    return types.void(w, look, n, scales, n, n, n, n, n, panel, n, n), code
