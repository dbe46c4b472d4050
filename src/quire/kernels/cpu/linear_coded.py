"""Matrix products with weights stored as codes of small floats, with scales: 4 bits that look up a table, or FP8.

A weight [N, K] is stored as uint32 of eight nibbles or four bytes, [N/16][K/8 or K/4][16]: even k in the lower half of
a word, odd ones in the upper half. An item, 32 columns, turns some depth of its codes into numbers in scratch
memory, in the layout of float weights, and has tiles of rows multiply them; then the next. Where the CPU multiplies
pairs, the first tile unpacks codes as it goes and leaves the numbers to the others.

In float32 a result is that of the weight that the codes stand for, to the bit. Where the CPU multiplies pairs of
bfloat16, x is rounded to it, as are the sixteen values of a table (those of 8-bit floats are in it already), and scales
come after: out[m, n] = sum over groups g of scale[n, g] * sum over k in g of value(code[n, k]) * x[m, k]. Only powers
of two, MXFP4's, are in the values before they are multiplied: exactly, as they change exponents alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.checkpoint.small_floats import E4M3, E5M2, NONFINITE
from quire.checkpoint.tensor import Codes, HostTensor, QuantizedTensor, Tensor
from quire.kernels.cpu.formats import COLUMNS, stack_biases, to_storage
from quire.kernels.cpu.interleave import ROW_GROUP, gated_columns, tile_height
from quire.kernels.cpu.jit import Op, jit, op_of
from quire.kernels.cpu.linear import ARG_ROWS, BIAS, DEPTH, PAIRS, X_PAIRS, fill_bias, multiply_rows, product_items
from quire.kernels.cpu.linear_int import fill_by_rows, put_packed
from quire.kernels.cpu.pointers import bf16_ptr, f32_ptr, i32_ptr, u8_ptr, u32_ptr
from quire.kernels.cpu.simd import (
    coded_four,
    coded_many,
    coded_one,
    decode_fp8,
    load,
    load_codes,
    look_up,
    mul,
    splat,
    store,
    unpack_word,
)
from quire.kernels.cpu.sizes import DEPTH_UNIT
from quire.kernels.cpu.threads import Launcher

PANEL = 1024  # k that are unpacked at a time: they fit the second-level cache with the rows of an item
SUMS_AT = 4 * ROW_GROUP * COLUMNS  # in scratch, behind the rows of a gated item
PANEL_AT = 2 * SUMS_AT
PANEL_LINES = PANEL // 2  # cache lines of sixteen columns of pairs
TABLE, E4M3_CODES, E5M2_CODES, POWERS = range(4)
KINDS = {"table": TABLE, "e4m3": E4M3_CODES, "e5m2": E5M2_CODES}
ONE_BITS = 0x3F80  # 1 in bfloat16
SHORT = np.float32(256)  # what `decode_fp8` leaves out of E4M3

# Arguments of ops of codes, after those of linear.py for pairs, or for floats: depth of w, group, scales, whether these
# are bfloat16, table, kind of the codes. Powers are stored as what they add to the bits of bfloat16.
PAIR_DEPTH, PAIR_GROUP, PAIR_SCALES, PAIR_SHORT, PAIR_TABLE, PAIR_KIND = range(PAIRS + 1, PAIRS + 7)
FLOAT_DEPTH, FLOAT_GROUP, FLOAT_SCALES, FLOAT_SHORT, FLOAT_TABLE, FLOAT_KIND = range(DEPTH + 1, DEPTH + 7)


# Unpacking


@jit
def scale_of(scales, short, at, kind):
    """Return the scales of sixteen columns; `short` ones are bfloat16."""
    found = load(bf16_ptr(scales), at) if short else load(f32_ptr(scales), at)
    return mul(found, splat(SHORT)) if kind == E4M3_CODES else found


@jit
def shift_of(k, bits):
    """Return where code k of a uint32 begins."""
    return k // 2 * bits + k % 2 * 16


@jit
def unpack_floats(w, at, count, table, kind, scale, panel, to):
    """Write `count` k of sixteen columns as float32: panel[to + k * 16 + column]."""
    if kind == TABLE:
        worth = load(table, 0)
        for step in range((count + 7) // 8):
            codes = load_codes(w, at + step * 16)
            for k in range(8):
                store(panel, to + (step * 8 + k) * 16, mul(look_up(worth, table, codes, shift_of(k, 4)), scale))
    else:
        other = np.int64(kind == E5M2_CODES)
        for step in range((count + 3) // 4):
            codes = load_codes(w, at + step * 16)
            for k in range(4):
                store(panel, to + (step * 4 + k) * 16, mul(decode_fp8(codes, shift_of(k, 8), other), scale))


@jit
def run_end(k, stop, group):
    """Return where the group of k, or `stop`, ends."""
    return min(stop, (k // group + 1) * group)


@jit
def clear(target, place, step, height):
    """Set `height` rows of 32 to 0."""
    for r in range(height):
        store(target, place + r * step, splat(np.float32(0)))
        store(target, place + r * step + 16, splat(np.float32(0)))


@jit
def panel_of_floats(w, args, column, start, stop, panel):
    """Unpack k start .. stop - 1 of 32 columns to float32, [2][PANEL][16]."""
    depth, group, kind = args[FLOAT_DEPTH], args[FLOAT_GROUP], args[FLOAT_KIND]
    scales, short, table = args[FLOAT_SCALES], args[FLOAT_SHORT], f32_ptr(args[FLOAT_TABLE])
    in_word, groups = 8 if kind == TABLE else 4, (depth + group - 1) // group
    for half in range(2):
        block = column // 16 + half
        k = start
        while k < stop:
            end = run_end(k, stop, group)
            scale = scale_of(scales, short, (block * groups + k // group) * 16, kind)
            from_w = (block * (depth // in_word) + k // in_word) * 16
            to = half * PANEL * 16 + (k - start) * 16
            unpack_floats(w, from_w, end - k, table, kind, scale, panel, to)
            k = end


# Products


@jit
def run_tile(height, w, args, scale_at, shift, lines, x_at, panel, panel_at, target, groups):
    """Call `coded_many`, or its neighbour of this height.

    `lines`: where w begins, from one sixteen columns to the next, and steps. `target`: from `sums` to `finish`.
    """
    kind, depth, group = args[PAIR_KIND], args[PAIR_DEPTH], args[PAIR_GROUP]
    second, factors = np.int64(kind == E5M2_CODES), 2 if kind == POWERS else args[PAIR_SHORT]
    scale_next = (depth + group - 1) // group * 16
    codes = w, u32_ptr(args[PAIR_TABLE]), second, bf16_ptr(args[PAIR_SCALES]), scale_at, scale_next, shift
    operands = u32_ptr(args[X_PAIRS]), x_at, panel, panel_at, PANEL_LINES
    if height == 8:
        coded_many(*codes, *lines, *operands, *target, factors, groups)
    elif height == 4:
        coded_four(*codes, *lines, *operands, *target, factors, groups)
    else:
        coded_one(*codes, *lines, *operands, *target, factors, groups)


@jit
def pair_tile(w, args, column, begin, stop, row, fresh, height, panel, sums, at, out, place, step):
    """Add the products of k begin .. stop - 1 to a tile, group after group; the `fresh` one, the first, unpacks w."""
    depth, own, pairs, kind = args[PAIR_DEPTH], args[PAIR_GROUP], args[PAIRS], args[PAIR_KIND]
    in_word, count = 4 if kind in (E4M3_CODES, E5M2_CODES) else 8, (depth + own - 1) // own
    group, block, w_next, shift = own, column // 16, depth // in_word, 0
    if kind == POWERS:
        group = depth
        while in_word << shift < own:
            shift += 1
    k = begin
    while k < stop:
        groups = (stop - k) // group if k % group == 0 else 0  # whole ones, which go together
        until = run_end(k, stop, group) if groups == 0 else k + group
        resume, finish = np.int64(k % group != 0), np.int64(until % group == 0 or until == 2 * pairs)
        groups, from_k = max(groups, 1), k
        s_at = (block * count + k // own) * 16
        if fresh:
            steps, w_at = (until - k) // in_word, block * w_next + k // in_word
            from_k = k + steps * in_word
            target = sums, at, resume, out, place, step, finish * (from_k == until)
            x_at, panel_at = row * pairs + k // 2 * height, (k - begin) // 2
            run_tile(height, w, args, s_at, shift, (w_at, w_next, steps), x_at, panel, panel_at, target, groups)
            resume = 1
            if from_k < until:
                second, scales = np.int64(kind == E5M2_CODES), bf16_ptr(args[PAIR_SCALES])
                codes = w, u32_ptr(args[PAIR_TABLE]), second, scales
                scale_at, panel_at = s_at + (steps >> shift) * 16, (from_k - begin) // 2 % PANEL_LINES
                unpack_word(*codes, scale_at, count * 16, shift, w_at + steps, w_next, panel, panel_at, PANEL_LINES)
        if from_k < until:
            lines = (from_k - begin) // 2 % PANEL_LINES, PANEL_LINES, (until - from_k) // 2
            target, x_at = (sums, at, resume, out, place, step, finish), row * pairs + from_k // 2 * height
            run_tile(height, panel, args, s_at, shift, lines, x_at, panel, 0, target, groups)
        k += (until - k) * groups


@jit
def multiply_code_pairs(w, args, column, start, stop, out, to, step, scratch):
    """Do an item in pairs of bfloat16, see `product_items`; the type of w says what its codes are.

    Nibbles need not be looked up anew for every row: the first tile leaves what it unpacks to the others.
    """
    rows, pairs = args[ARG_ROWS], args[PAIRS]
    sums, panel = f32_ptr(scratch + SUMS_AT), bf16_ptr(scratch + PANEL_AT)
    depth = PANEL if tile_height(rows - start) == 8 else 2 * pairs  # of what one tile alone reads nothing is kept
    for begin in range(0, 2 * pairs, depth):
        end = min(begin + depth, 2 * pairs)
        row = start
        while row < stop:
            height, place, at = tile_height(rows - row), to + (row - start) * step, (row - start) * COLUMNS
            if begin == 0:
                if args[BIAS] == 0:
                    clear(out, place, step, height)
                fill_bias(args, column, out, place, step, height)
            pair_tile(w, args, column, begin, end, row, row == start, height, panel, sums, at, out, place, step)
            row += height


@jit
def multiply_code_floats(w, args, column, start, stop, out, to, step, scratch):
    """Do an item in float32, see `product_items`."""
    panel, depth = f32_ptr(scratch + PANEL_AT), args[DEPTH]
    fill_bias(args, column, out, to, step, stop - start)
    for k in range(0, depth, PANEL):
        end, resume = min(k + PANEL, depth), np.int64(k > 0 or args[BIAS] != 0)
        panel_of_floats(w, args, column, k, end, panel)
        multiply_rows(panel, 0, PANEL * 16, args, k, end - k, start, stop, out, to, step, resume)


_pair_items = product_items(multiply_code_pairs)
_octets = op_of("coded_octets", _pair_items, u8_ptr)
PAIR_OPS = {
    TABLE: op_of("coded_tables", _pair_items, u32_ptr),
    POWERS: op_of("coded_powers", _pair_items, i32_ptr),
    E4M3_CODES: _octets,
    E5M2_CODES: _octets,
}
coded_floats = op_of("coded_floats", product_items(multiply_code_floats), u32_ptr)


# Weights


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """A weight as codes; w[n, k] = value(code) * scale[n, k // group].

    Attributes:
        data: uint32 [padded/16][depth/8 or depth/4][16], see above.
        scales: float32, or the bits of bfloat16, [padded/16][depth/group][16].
        table: float32 [16] of 4-bit codes; unused, but there, for 8 bits. If `paired`, bfloat16 [32]: the table twice,
            or what 8-bit floats without a leading one are worth.
        bias: float32 [padded], or None. kind: "table", "e4m3" or "e5m2".
        inputs, depth: K, without and with padding. group: at most depth.
        paired: products round x and the weight to bfloat16. gated: as in `CPULinear`.
        powers: scales are powers of two, of which uint16 has what they add to the bits of a bfloat16.
    """

    data: np.ndarray
    scales: np.ndarray
    table: np.ndarray
    bias: np.ndarray | None
    outputs: int
    inputs: int
    depth: int
    kind: str
    group: int
    paired: bool
    gated: bool = False
    powers: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.kind == "table" else 8

    @property
    def padded(self) -> int:
        """N as stored, a multiple of 32."""
        return self.data.size * 32 // self.bits // self.depth

    def packed_columns(self, ids: np.ndarray) -> np.ndarray:
        """Return where rows `ids` of the weight are stored."""
        return gated_columns(ids, self.outputs) if self.gated else ids


def pack_codes(
    parts: Sequence[QuantizedTensor],
    biases: Sequence[Tensor] | None,
    launcher: Launcher,
    paired: bool = False,
    gated: bool = False,
) -> CodedLinear | None:
    """Stack matrices of one layout along N and pack their codes as they are; None if their tables differ."""
    layout = parts[0].layout
    assert layout is not None and all(part.layout == layout for part in parts)
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    tables = [_codes(tensor.rows(0, 1)).table for tensor in parts]
    own = [found for found in tables if found is not None]
    if not all(np.array_equal(own[0], found) for found in own):
        return None
    table = _table(layout.kind, tables[0], paired)
    padded, depth = -(-outputs // COLUMNS) * COLUMNS, -(-inputs // DEPTH_UNIT) * DEPTH_UNIT
    group = layout.group or depth
    data = launcher.weights.empty(padded * depth * layout.bits // 32, np.uint32)
    data[:] = 0
    scales = np.zeros(padded * -(-depth // group), np.uint16 if layout.scale_bytes == 2 else np.float32)
    bias = stack_biases(biases, outputs, padded, gated)
    weight = CodedLinear(data, scales, table, bias, outputs, inputs, depth, layout.kind, group, paired, gated)
    fill_by_rows(parts, depth, launcher.num_threads, lambda first, some: _fill(weight, first, _codes(some)))
    return with_powers(weight) if paired else weight


def with_powers(weight: CodedLinear) -> CodedLinear:
    """Return the weight with its scales as what is added to exponents, if that is possible."""
    group, sizes = weight.group, weight.table[:16] & 0x7FFF
    can_add = PANEL % group == 0 and group & (group - 1) == 0
    if weight.kind != "table" or weight.scales.dtype != np.uint16 or not can_add or sizes[0] != 0:
        return weight
    # Products must stay normal numbers. Smaller scales, below 2^-125, are those of groups of zeros; others are rounded.
    smallest, largest = int(sizes[sizes > 0].min()) >> 7, int(sizes.max()) >> 7
    lowest, highest = (128 - smallest) << 7, (381 - largest) << 7
    normal = weight.scales > 0x7F
    if (weight.scales[normal] & 0x7F).any() or (weight.scales > highest).any():
        return weight
    weight.scales[...] = np.maximum(weight.scales, max(0, lowest)) - np.uint16(ONE_BITS)
    return replace(weight, powers=True)


def _table(kind: str, table: np.ndarray | None, paired: bool) -> np.ndarray:
    """Return the table that ops of this kind look things up in."""
    if not paired:
        return np.zeros(16, np.float32) if table is None else np.array(table, np.float32)
    if table is not None:
        wide = np.tile(np.asarray(table, np.float32), 2)
    else:
        wide = np.zeros(32, np.float32)
        fraction, worth = (3, E4M3) if kind == "e4m3" else (2, E5M2)
        wide[: 1 << fraction] = worth[: 1 << fraction]
    return to_storage(HostTensor(wide, "float32"), "bfloat16")


def _codes(part: QuantizedTensor) -> Codes:
    found = part.codes()
    assert found is not None, "its layout says that there are codes"
    return found


def _fill(weight: CodedLinear, first: int, some: Codes) -> None:
    """Store rows from number `first` on."""
    count = some.codes.shape[0]
    columns = weight.packed_columns(np.arange(first, first + count))
    stage = np.zeros((count, weight.depth), np.uint8)
    stage[:, : weight.inputs] = some.codes
    scales = some.scales
    if some.kind in NONFINITE:
        scales = _spoiled(some, weight.group)
        stage[np.isin(stage, NONFINITE[some.kind])] = 0
    put_codes(weight.data.reshape(-1, weight.depth * weight.bits // 32, 16), columns, stage, weight.bits)
    target = weight.scales.reshape(-1, -(-weight.depth // weight.group), 16)
    stored = (scales.astype(np.float32).view(np.uint32) >> 16) if target.dtype == np.uint16 else scales
    target[columns // 16, : stored.shape[1], columns % 16] = stored


def _spoiled(some: Codes, group: int) -> np.ndarray:
    """Return scales that are NaN where a code of their group is no finite number, so that the row's results are."""
    mask = 0x7F if some.kind == "e4m3" else 0x7C
    bad = some.codes & mask == mask
    if not bad.any():
        return some.scales
    places = range(0, bad.shape[1], group)
    found = np.stack([bad[:, k : k + group].any(axis=1) for k in places], axis=1)
    return np.where(found, np.float32(np.nan), some.scales)


def put_codes(blocks: np.ndarray, columns: np.ndarray, codes: np.ndarray, bits: int) -> None:
    """Store codes uint8 [n, depth] of `columns` in uint32 [N/16][depth * bits / 32][16]."""
    count, order = len(codes), [*range(0, 32 // bits, 2), *range(1, 32 // bits, 2)]
    codes = codes.reshape(count, -1, 32 // bits)[:, :, order].reshape(count, -1)
    if bits == 4:
        codes = np.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, dtype=np.uint8)
    put_packed(blocks, columns, np.ascontiguousarray(codes).view(np.uint32))


def kind_of(weight: CodedLinear) -> int:
    """Return the kind of its codes and scales, as the ops number them."""
    return POWERS if weight.powers else KINDS[weight.kind]


def pair_op(weight: CodedLinear) -> Op:
    """Return the op of products with a paired weight."""
    return PAIR_OPS[kind_of(weight)]
