"""The inner loops of attention over bfloat16 pairs, and the conversions around them, for CPUs with HAS_BF16_DOT.

Everything here is an LLVM-level building block for `attention_bf16.py`; `transpose_tile` and `scale_add` serve the
generic path as well. A pair is two neighbours of one sum in the halves of 32 bits: two elements of a head for scores,
two positions for values. No algorithm lives here.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.cpu.simd import (
    BF16_PAIRS,
    F32V,
    I8,
    I16,
    I16_PAIRS,
    I32,
    I32V,
    I64,
    LANES,
    _broadcast_pair,
    _call,
    _dot_pairs,
    _load,
    _load_vector,
    _multiply_add,
    _prefetch,
    _splat,
    _store,
    _Tile,
    f32x16,
)

SEGMENT = 128  # positions whose scores are weighed together; see attention_softmax.py
GROUP = 8  # query rows of the largest register tile: 8 x 2 sums and the operands fill AVX-512's 32 registers
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


@intrinsic
def score_tile(ty, rows, keys0, keys1, step, q, q_at, pairs, out, out_at, values0, values1):
    """out[r * SEGMENT + j] = sum of q[r, i] * key[i, j] over all elements i of a head, for 1 to 8 rows, 32 positions.

    keys0, keys1: addresses of two times 16 positions; pair i of the elements is `step` bytes after pair i - 1.
    q: uint32 pairs, element pair i of row r at q_at + i * rows + r; `pairs` of them. out: float32 from out_at on.
    Lines at values0 and values1 are prefetched, one of each for a pair; any address will do.
    """

    def code(ctx, b, sig, a):
        rows, keys, values = a[0], a[1:3], a[9:11]
        step, q, q_at, pairs, out, out_at = a[3:9]

        def emit(n):
            tile = _Tile(b, n)
            tile.clear()
            with cgutils.for_range(b, pairs, intp=I64) as loop:
                down = b.mul(loop.index, step)
                columns = [_pairs_at(b, b.add(k, down)) for k in keys]
                for address in values:
                    _prefetch_at(b, b.add(address, b.mul(loop.index, I64(64))), MIDDLE)
                here = b.add(q_at, b.mul(loop.index, I64(n)))
                tile.add(columns, [_broadcast_pair(b, q, b.add(here, I64(r))) for r in range(n)], _dot_pairs)
            tile.store(out, out_at, I64(SEGMENT))

        _by_rows(b, rows, emit)
        return ctx.get_dummy_value()

    n = types.int64
    return types.void(n, n, n, n, q, n, n, out, n, n, n), code


@intrinsic
def value_tile(ty, rows, halves, first, last, step, column, weights, out, out_at, out_next, keys, keys_step):
    """out[r, c] = sum of weight[r, j] * value[j, c] over the positions of halves first .. last - 1; 1 to 8 rows.

    halves: int64 addresses, of 16 positions each: pair j of the positions is `step` bytes after pair j - 1, column c
    at `column` bytes + c pairs; 32 columns. weights: uint32 pairs, row r from r * SEGMENT / 2 on. out: float32, column
    c of row r at out_at + r * out_next + c. keys: addresses of the next halves, `keys_step` bytes between lines; the
    share of the lines that belongs to these columns is prefetched.
    """

    def code(ctx, b, sig, a):
        rows, halves, first, last, step, column, weights, out, out_at, out_next, keys, keys_step = a

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
        return ctx.get_dummy_value()

    n = types.int64
    return types.void(n, halves, n, n, n, n, weights, out, n, n, keys, n), code


@intrinsic
def store_pairs(ty, words, offset, first, second):
    """Store 32 values as sixteen uint32 pairs of bfloat16, rounded to nearest even; subnormal numbers become zeros."""

    def code(ctx, b, sig, a):
        _store_pairs(b, _to_pairs(b, a[2], a[3]), a[0], a[1])
        return ctx.get_dummy_value()

    return types.void(words, types.int64, first, second), code


@intrinsic
def store_weights(ty, words, offset, first, second, total):
    """Like `store_pairs`; return `total` with the rounded values added, two neighbours to a lane."""

    def code(ctx, b, sig, a):
        pairs = _to_pairs(b, a[2], a[3])
        _store_pairs(b, pairs, a[0], a[1])
        ones = b.bitcast(ir.Constant(I32V, [0x3F803F80] * LANES), BF16_PAIRS)
        return _dot_pairs(b, a[4], b.bitcast(pairs, BF16_PAIRS), ones)

    return f32x16(words, types.int64, first, second, total), code


@intrinsic
def widen_int8_pairs(ty, octets, offset, words, to):
    """Turn octets[offset : offset + 32], int8, into sixteen uint32 pairs of bfloat16 at words[to]; exact."""

    def code(ctx, b, sig, a):
        first, second = (_load(b, "i8", a[0], b.add(a[1], I64(o))) for o in (0, LANES))
        _store_pairs(b, _to_pairs(b, first, second), a[2], a[3])
        return ctx.get_dummy_value()

    return types.void(octets, types.int64, words, types.int64), code


@intrinsic
def prefetch(ty, address):
    """Start loading the cache line at this address into the first-level cache."""

    def code(ctx, b, sig, a):
        _prefetch_at(b, a[0], NEAR)
        return ctx.get_dummy_value()

    return types.void(types.int64), code


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


@intrinsic
def transpose_pairs(ty, rows, column, count, words, to):
    """words[to + i * 16 + j] = pair i < 16 of row j, from its element `column` on.

    rows: int64 addresses of sixteen rows of 16-bit elements, which may be read 62 bytes too far; elements from `count`
    on, counted from `column`, are taken to be zeros.
    """

    def code(ctx, b, sig, a):
        rows, column, count, words, to = a
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
        return ctx.get_dummy_value()

    n = types.int64
    return types.void(rows, n, n, words, n), code


@intrinsic
def interleave_pairs(ty, first, second, words, to):
    """words[to + i] = the pair of elements i < 32 of the rows at two addresses, of 16-bit elements."""

    def code(ctx, b, sig, a):
        rows = [_elements_at(b, address) for address in a[:2]]
        for half in (0, LANES):
            lanes = [half + i // 2 + 2 * LANES * (i % 2) for i in range(2 * LANES)]
            pairs = b.shuffle_vector(*rows, ir.Constant(ir.VectorType(I32, 2 * LANES), lanes))
            _store_pairs(b, b.bitcast(pairs, I32V), a[2], b.add(a[3], I64(half)))
        return ctx.get_dummy_value()

    n = types.int64
    return types.void(n, n, words, n), code


@intrinsic
def transpose_tile(ty, source, at, step, target, to, to_step):
    """target[to + i * to_step + j] = source[at + j * step + i], for 16 x 16 float32."""

    def code(ctx, b, sig, a):
        source, at, step, target, to, to_step = a
        rows = [_load(b, "f32", source, b.add(at, b.mul(step, I64(j)))) for j in range(LANES)]
        for i, row in enumerate(_transposed(b, rows)):
            _store(b, row, target, b.add(to, b.mul(to_step, I64(i))))
        return ctx.get_dummy_value()

    n = types.int64
    return types.void(source, n, n, target, n, n), code


@intrinsic
def scale_add(ty, x, before, y, now):
    """x * before + y * now with float32 scalars `before` and `now`."""

    def code(ctx, b, sig, a):
        x, before, y, now = a
        return _multiply_add(b, x, _splat(b, before, F32V), b.fmul(y, _splat(b, now, F32V)))

    return f32x16(x, types.float32, y, types.float32), code
