"""Matrix products with integer weights: packing them, out = x @ weight.T (+ bias), and looking up rows.

    out[m, n] = x_scale[m] * column_scale[n] * F[m, n] (+ bias[n])

F sums products of integers: exactly in int32 within a group of k, in float32 over groups. Floats are quantized as
quantize.py says; quantized checkpoints keep their integers. `FLOAT_OP` is weight-only: it leaves x in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.checkpoint.tensor import HostTensor, Integers, QuantizedTensor, Tensor
from quire.errors import ConfigError
from quire.kernels.cpu import quantize
from quire.kernels.cpu.activations import activate, gated
from quire.kernels.cpu.arrays import Slabs, as_rows
from quire.kernels.cpu.formats import STORAGE
from quire.kernels.cpu.interleave import DOT_ROWS, ROW_GROUP, gated_columns, next_panel, padded_rows, tile_height
from quire.kernels.cpu.jit import Op, jit, op, op_of
from quire.kernels.cpu.pointers import f16_ptr, f32_ptr, i32_ptr, i64_ptr, u8_ptr, u32_ptr
from quire.kernels.cpu.simd import add, get, load, mul, splat, store
from quire.kernels.cpu.simd_int import (
    FLOAT_ROWS,
    HAS_VNNI,
    float_four,
    float_many,
    float_one,
    int4_tiles,
    int8_tiles,
)
from quire.kernels.cpu.threads import Launcher, address_of
from quire.kernels.weight_storage import stored_group

COLUMNS = 32  # of an item: two vectors
DEPTH_UNIT = 16  # K of weights without groups is padded to a multiple of it
GROUPS = (32, 64, 128)
STAGED_ELEMENTS = 1 << 20  # of a weight that are copied at a time, where it cannot be read in place
DIRECT_BYTES = 1 << 25  # of a weight that are packed at a time, where it can
NO_ACTIVATION = -1
LEVELS = ("avx512_vnni", "generic")
EIGHT_BIT_ZEROS = 16  # of which zero points of 8 bits are multiples: tiles know those of 4 bits


# Products


@jit
def write_rows(sums, count, scales, x_scales, bias, column, row, out, stride, kind, halves):
    """Scale `count` rows of 32 sums, in place, and write them; `x_scales` and `bias` are addresses, 0 for none."""
    for r in range(count):
        factor = get(f32_ptr(x_scales), row + r) if x_scales != 0 else np.float32(1)
        for half in range(0, COLUMNS, 16):
            value = mul(mul(load(sums, r * COLUMNS + half), load(scales, column + half)), splat(factor))
            if bias != 0:
                value = add(value, load(f32_ptr(bias), column + half))
            store(sums, r * COLUMNS + half, value)
    if kind >= 0 and not halves:
        for place in range(0, count * COLUMNS, 16):
            store(sums, place, activate(load(sums, place), kind))
    for r in range(count):
        left, right = load(sums, r * COLUMNS), load(sums, r * COLUMNS + 16)
        if halves:
            store(out, (row + r) * stride + column // 2, gated(left, right, kind))
        else:
            store(out, (row + r) * stride + column, left)
            store(out, (row + r) * stride + column + 16, right)


@jit
def item_range(item, rows):
    """Return the first column, the first row and the last row + 1 of an item."""
    blocks = (rows + ROW_GROUP - 1) // ROW_GROUP
    row = item % blocks * ROW_GROUP
    return item // blocks * COLUMNS, row, min(row + ROW_GROUP, rows)


def _items(bits, vnni):
    many, four, one = (int8_tiles if bits == 8 else int4_tiles)[vnni]
    many_rows, few_rows, in_word = 8 if vnni else 2, 4 if vnni else 2, 32 // bits

    @jit
    def items(args, first, last, scratch):
        """One item is 32 columns of up to ROW_GROUP rows.

        Weight, depth, group, column scales, group scales or 0, zeros or 0, bias or 0, packed x, starts, x scales, out,
        its row stride, rows, activation, gated. Layouts: `IntLinear` and `quantize_tiles`.
        """
        w, depth, group, packed, starts = u32_ptr(args[0]), args[1], args[2], u32_ptr(args[7]), i32_ptr(args[8])
        scales, zeros, rows, sums = f16_ptr(args[4]), f16_ptr(args[5]), args[12], f32_ptr(scratch)
        groups, steps, w_next = depth // group, group // in_word, depth // in_word * 16
        for item in range(first, last):
            column, begin, end = item_range(item, rows)
            w_at, s_at, s_next = column // 16 * w_next, column * groups, 16 * groups
            row = begin
            while row < end:
                height = tile_height(end - row)
                ahead, ahead_too = next_panel(w_at, w_next, row, rows)
                x_at, start, to, r = row * depth // 4, row * groups, (row - begin) * COLUMNS, 0
                weights, groupings = (w, w_at, w_next, packed), (groups, steps, scales, zeros, s_at, s_next, sums)
                while r + many_rows <= height:
                    places = x_at + r, height, starts, start + r
                    many(*weights, *places, *groupings, to + r * COLUMNS, ahead, ahead_too)
                    r += many_rows
                while r + few_rows <= height:
                    places = x_at + r, height, starts, start + r
                    four(*weights, *places, *groupings, to + r * COLUMNS, ahead, ahead_too)
                    r += few_rows
                while r < height:
                    places = x_at + r, height, starts, start + r
                    one(*weights, *places, *groupings, to + r * COLUMNS, ahead, ahead_too)
                    r += 1
                row += height
            out, stride = f32_ptr(args[10]), args[11]
            scales_at, count, kind = f32_ptr(args[3]), end - begin, args[13]
            write_rows(sums, count, scales_at, args[9], args[6], column, begin, out, stride, kind, args[14])

    return items


OPS: dict[tuple[int, str], Op] = {
    (bits, level): op_of(f"linear_int{bits}_{level}", _items(bits, level != "generic"))
    for bits in (8, 4)
    for level in LEVELS
}


@op
def linear_int8_float(args, first, last, scratch):
    """Like `_items` without groups and with x in float32 by `interleave_tiles`; starts and x scales are 0."""
    w, depth, packed, rows, sums = u32_ptr(args[0]), args[1], f32_ptr(args[7]), args[12], f32_ptr(scratch)
    for item in range(first, last):
        column, begin, end = item_range(item, rows)
        w_at, w_next, steps, row = column * depth // 4, depth * 4, depth // 4, begin
        while row < end:
            height = tile_height(end - row)
            x_at, to, r = row * depth, (row - begin) * COLUMNS, 0
            while r + FLOAT_ROWS <= height:
                float_many(w, w_at, w_next, packed, x_at + r, height, steps, sums, to + r * COLUMNS)
                r += FLOAT_ROWS
            while r + 4 <= height:
                float_four(w, w_at, w_next, packed, x_at + r, height, steps, sums, to + r * COLUMNS)
                r += 4
            while r < height:
                float_one(w, w_at, w_next, packed, x_at + r, height, steps, sums, to + r * COLUMNS)
                r += 1
            row += height
        out, stride = f32_ptr(args[10]), args[11]
        scales_at, count, kind = f32_ptr(args[3]), end - begin, args[13]
        write_rows(sums, count, scales_at, args[9], args[6], column, begin, out, stride, kind, args[14])


FLOAT_OP = linear_int8_float


@op
def embedding_rows(args, first, last, scratch):
    """ids, weight, bits, depth, width, group, column scales, group scales, zeros, out, order: an item is a row."""
    ids, octet, bits, depth, width, group = i64_ptr(args[0]), u8_ptr(args[1]), args[2], args[3], args[4], args[5]
    scales, out, groups = f32_ptr(args[6]), f32_ptr(args[9]), depth // group
    for item in range(first, last):
        column = ids[item]
        lane, block = column % 16, column // 16
        size, place = np.float32(1), block * groups * 16 + lane
        for k in range(width):
            if bits == 8:
                value = np.float32(np.int32(octet[((block * (depth // 4) + k // 4) * 16 + lane) * 4 + k % 4]) - 128)
            else:
                pair = np.int32(octet[((block * (depth // 8) + k // 8) * 16 + lane) * 4 + k % 4])
                value = np.float32((pair >> (k // 4 % 2 * 4) & 15) - 8)
            if args[7] != 0:
                if args[8] != 0:
                    zero = get(f16_ptr(args[8]), place + k // group * 16)
                    value -= zero * np.float32(EIGHT_BIT_ZEROS) if bits == 8 else zero
                size = get(f16_ptr(args[7]), place + k // group * 16)
            to = i64_ptr(args[10])[k] if args[10] != 0 else k
            out[item * width + to] = value * (size * scales[column])


# Weights


@dataclass(frozen=True, slots=True)
class IntLinear:
    """A packed integer weight; w[n, k] = column_scale[n] * group_scale[n, k // group] * (u - 128 or 8 - zero).

    Attributes:
        data: uint32 [padded/16][depth/4][16] of four u8 of neighbouring k, the first in the low byte; or
            [padded/16][depth/8][16] of eight u4: k 0..3 in the low halves of the bytes, 4..7 in the high ones.
        scales: float32 [padded], one for every column.
        group_scales: the bits of float16, int16 [padded/16][depth/group][16]; None for all 1, in one group.
        zeros: likewise, relative to the middle of the range, sixteenths of them for 8 bits; None for all 0.
        bias: float32 [padded], or None.
        outputs: rows of all parts together. gated: the first half of them, the gate, and the second alternate by
            sixteens.
        inputs, depth: K, without and with padding. group: K of a group; `depth` where there is one only.
        order: int64 [K], the input that each k is for, None for 0, 1, ...
    """

    data: np.ndarray
    scales: np.ndarray
    group_scales: np.ndarray | None
    zeros: np.ndarray | None
    bias: np.ndarray | None
    outputs: int
    inputs: int
    depth: int
    bits: int
    group: int
    gated: bool = False
    order: np.ndarray | None = None

    @property
    def padded(self) -> int:
        """Columns as stored, a multiple of 32."""
        return self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.data, self.scales, self.group_scales, self.zeros, self.bias, self.order)
        return sum(array.nbytes for array in arrays if array is not None)

    def columns(self, ids: np.ndarray) -> np.ndarray:
        """Return where rows `ids` of the weight are stored."""
        return gated_columns(ids, self.outputs) if self.gated else ids

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows `ids` of the weight as float32 [len(ids), K]."""
        columns = self.columns(np.asarray(ids))
        block, lane = columns // 16, columns % 16
        words = self.data.reshape(-1, self.depth * self.bits // 32, 16)[block, :, lane]
        stored = np.ascontiguousarray(words).view(np.uint8)
        if self.bits == 4:
            quads = stored.reshape(len(columns), -1, 1, 4)
            stored = np.concatenate([quads & 15, quads >> 4], axis=2).reshape(len(columns), -1)
        values = stored.astype(np.float32) - np.float32(1 << (self.bits - 1))
        scale = self.scales[columns, None]
        if self.group_scales is not None:
            if self.zeros is not None:
                values -= self._by_k(self.zeros, block, lane) * np.float32(1 if self.bits == 4 else EIGHT_BIT_ZEROS)
            scale = self._by_k(self.group_scales, block, lane) * scale
        found = (values * scale)[:, : self.inputs]
        return found if self.order is None else found[:, np.argsort(self.order)]

    def _by_k(self, stored: np.ndarray, block: np.ndarray, lane: np.ndarray) -> np.ndarray:
        groups = stored.view(np.float16).reshape(-1, self.depth // self.group, 16)[block, :, lane]
        return np.repeat(groups.astype(np.float32), self.group, axis=1)


def _blank(
    outputs: int,
    inputs: int,
    bits: int,
    group: int | None,
    gated: bool,
    zeros: bool = False,
    memory: Slabs | None = None,
) -> IntLinear:
    """Return a weight with room for everything, its data in `memory` if given; what no part will fill is 0."""
    assert outputs % 2 == 0 or not gated, "gate and up differ in size"
    padded = -(-outputs // (2 * 16)) * (2 * 16)
    unit = group or DEPTH_UNIT
    depth = -(-inputs // unit) * unit
    size = padded * depth * bits // 32
    data = np.empty(size, np.uint32) if memory is None else memory.empty(size, np.uint32)
    places = padded * (depth // unit)
    relative = np.zeros(places, np.int16) if group else None
    shifts = np.zeros(places, np.int16) if zeros else None
    scales = np.zeros(padded, np.float32)
    weight = IntLinear(data, scales, relative, shifts, None, outputs, inputs, depth, bits, group or depth, gated)
    unused = np.setdiff1d(np.arange(padded), weight.columns(np.arange(outputs)))
    data.reshape(-1, depth * bits // 32, 16)[unused // 16, :, unused % 16] = 0x80808080 if bits == 8 else 0x88888888
    return weight


def _with_bias(weight: IntLinear, biases: Sequence[Tensor] | None) -> IntLinear:
    """Return the weight with the stacked biases in the order of its columns."""
    if biases is None:
        return weight
    bias = np.zeros(weight.padded, np.float32)
    bias[weight.columns(np.arange(weight.outputs))] = np.concatenate([b.to_float32().reshape(-1) for b in biases])
    return replace(weight, bias=bias)


def _readable(tensor: Tensor) -> bool:
    """Say whether an op can read the tensor's rows where they lie."""
    if not isinstance(tensor, HostTensor):
        return False
    array, size = tensor.array, tensor.array.itemsize
    in_order = array.shape[1] <= 1 or array.strides[1] == size
    known = tensor.dtype in ("float32", "bfloat16", "float16") and array.dtype.isnative
    return known and in_order and array.strides[0] % size == 0 and address_of(array) % size == 0


def _pieces(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row and the rows of pieces that an op can read: the tensor as it is, or copies of some rows."""
    if _readable(tensor):
        count = max(1, DIRECT_BYTES // max(1, abs(tensor.array.strides[0])))
        for start in range(0, tensor.shape[0], count):
            piece = tensor.rows(start, start + count)
            yield start, piece
            if tensor.shape[0] > count:  # a large one; what was packed of it need not stay in memory
                piece.release()
        return
    count = max(1, STAGED_ELEMENTS // max(1, tensor.shape[1]))
    for start in range(0, tensor.shape[0], count):
        values = tensor.rows(start, min(start + count, tensor.shape[0])).to_float32()
        yield start, HostTensor(np.require(values, np.float32, ["C", "A"]), "float32")


def _pack(parts: Sequence[Tensor], weight: IntLinear, launcher: Launcher) -> None:
    """Quantize all parts into `weight`."""
    base, inputs = 0, weight.inputs
    for number, tensor in enumerate(parts):
        assert tensor.shape[1] == inputs
        for start, piece in _pieces(tensor):
            count = piece.shape[0]
            pack_op = quantize.PACK[weight.bits][STORAGE[piece.dtype]]
            extra = () if weight.group_scales is None else (weight.group, weight.group_scales)
            source = piece.array, piece.array.strides[0] // piece.array.itemsize, inputs, weight.depth
            target = weight.data, weight.scales, base + start, number if weight.gated else -1
            launcher.emit(pack_op, *source, *target, *extra, items=count, work=count * inputs, grain=64)
        base += 0 if weight.gated else tensor.shape[0]


def pack_int8(
    parts: Sequence[Tensor], biases: Sequence[Tensor] | None, launcher: Launcher, gated: bool = False
) -> IntLinear:
    """Stack matrices [N_i, K] along N and quantize every row to 8 bits; reads a part only when its turn comes.

    `gated` takes two parts of the same size, gate and up.
    """
    assert not gated or len(parts) == 2
    weight = _blank(
        sum(tensor.shape[0] for tensor in parts), parts[0].shape[1], 8, None, gated, memory=launcher.weights
    )
    _pack(parts, weight, launcher)
    return _with_bias(weight, biases)


def pack_int4(
    parts: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    launcher: Launcher,
    group: int = 64,
    gated: bool = False,
) -> IntLinear:
    """Like `pack_int8` to 4 bits with a scale for every `group` neighbours of a row. Raises ConfigError for others."""
    if group not in GROUPS:
        raise ConfigError(f"group is {group}; allowed: {', '.join(map(str, GROUPS))}", param="group")
    assert not gated or len(parts) == 2
    weight = _blank(
        sum(tensor.shape[0] for tensor in parts), parts[0].shape[1], 4, group, gated, memory=launcher.weights
    )
    assert weight.depth // group * 4 <= 1 << 20, "group scales of a row fit an op's scratch"
    _pack(parts, weight, launcher)
    return _with_bias(weight, biases)


# What a backend calls


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """x [M, K] as `quantize_tiles` leaves it; fits weights of the same bits, depth and group."""

    packed: np.ndarray
    starts: np.ndarray
    scales: np.ndarray
    rows: int


def resolve_level(level: str | None) -> str:
    """Return the level asked for, or the best of this CPU for None. Raises ConfigError for one that it lacks."""
    allowed = LEVELS if HAS_VNNI else LEVELS[1:]
    if level is not None and level not in allowed:
        raise ConfigError(f"simd_level is {level!r}; allowed on this CPU: {', '.join(allowed)}", param="simd_level")
    return level or allowed[0]


def quantize_rows(launcher: Launcher, x: np.ndarray, weight: IntLinear) -> QuantizedRows:
    """Quantize x float32 [M, K] for products with `weight` or others like it."""
    x, stride = as_rows(x)
    rows, padded = x.shape[0], padded_rows(x.shape[0])
    packed = launcher.empty((padded * weight.depth // 4,), np.uint32)
    starts = launcher.empty((padded * (weight.depth // weight.group),), np.int32)
    scales = launcher.empty((padded,), np.float32)
    source = x, stride, rows, weight.inputs, weight.depth, weight.group, 1 << (weight.bits - 1)
    sharing = {"items": -(-rows // DOT_ROWS), "work": rows * weight.depth}
    launcher.emit(quantize.quantize_tiles, *source, packed, starts, scales, weight.order, **sharing)
    return QuantizedRows(packed, starts, scales, rows)


def linear(
    launcher: Launcher,
    x: np.ndarray | QuantizedRows,
    weight: IntLinear,
    activation: int | None = None,
    level: str | None = None,
    round_inputs: bool = True,
) -> np.ndarray:
    """Return x @ weight.T (+ bias) as float32 [M, N], a view with padded rows.

    `activation` is one of activations.py's or None. A gated weight gives activation(gate) * up, [M, N/2]. Without
    `round_inputs` x stays float32, for 8-bit weights without groups (ValueError for others).
    """
    rows = x.rows if isinstance(x, QuantizedRows) else x.shape[0]
    assert activation is not None or not weight.gated
    width, outputs = (size // 2 if weight.gated else size for size in (weight.padded, weight.outputs))
    out = launcher.empty((rows, width), np.float32)
    if rows == 0:
        return out[:, :outputs]
    if round_inputs:
        product = OPS[weight.bits, resolve_level(level)]
        made = x if isinstance(x, QuantizedRows) else quantize_rows(launcher, x, weight)
        packed, starts, scales = made.packed, made.starts, made.scales
    else:
        product, starts, scales = FLOAT_OP, None, None
        packed = _interleaved(launcher, x, weight)
    blocks = -(-rows // ROW_GROUP)
    arrays = weight.data, weight.depth, weight.group, weight.scales, weight.group_scales, weight.zeros, weight.bias
    kind = NO_ACTIVATION if activation is None else activation
    sharing: dict[str, Any] = {"items": weight.padded // COLUMNS * blocks, "work": rows * weight.padded * weight.depth}
    if blocks == 1:
        sharing |= {"fetch": weight.data, "fetch_bytes": COLUMNS * weight.depth * weight.bits // 8}
    launcher.emit(product, *arrays, packed, starts, scales, out, width, rows, kind, int(weight.gated), **sharing)
    return out[:, :outputs]


def _interleaved(launcher: Launcher, x: np.ndarray | QuantizedRows, weight: IntLinear) -> np.ndarray:
    """Return x by `interleave_tiles`."""
    if weight.bits != 8 or weight.group_scales is not None or isinstance(x, QuantizedRows):
        raise ValueError("inputs stay float32 for 8-bit weights without groups only")
    x, stride = as_rows(x)
    rows, padded = x.shape[0], padded_rows(x.shape[0])
    packed = launcher.empty((padded * weight.depth,), np.float32)
    args, items = (x, stride, rows, weight.inputs, weight.depth, packed), -(-rows // DOT_ROWS)
    launcher.emit(quantize.interleave_tiles, *args, items=items, work=rows * weight.depth)
    return packed


def embed(launcher: Launcher, ids: np.ndarray, weight: IntLinear) -> np.ndarray:
    """Return rows `ids` (int64 [T], read when the instruction runs) of a weight that is not gated, float32 [T, K]."""
    assert not weight.gated
    assert ids.dtype == np.int64 and ids.flags.c_contiguous
    out = launcher.empty((ids.shape[0], weight.inputs), np.float32)
    sizes, scales = (weight.bits, weight.depth, weight.inputs, weight.group), (weight.scales, weight.group_scales)
    args = ids, weight.data, *sizes, *scales, weight.zeros, out, weight.order
    launcher.emit(embedding_rows, *args, items=ids.shape[0], work=8 * out.size)
    return out


LANES = 16


def pack_integers(
    parts: Sequence[QuantizedTensor], biases: Sequence[Tensor] | None, launcher: Launcher, gated: bool = False
) -> IntLinear | None:
    """Stack matrices [N_i, K] of one layout along N, reading some rows at a time; None if their orders differ.

    Group scales become float16 relative to a power of two for each row, zero points float16: values that were float16
    or bfloat16 stay exact unless they are 2^14 times smaller than the largest of their row. Whole zero points do.
    `gated` takes two parts of the same size, gate and up.
    """
    layout = parts[0].layout
    assert layout is not None and all(tensor.layout == layout for tensor in parts)
    orders = [_integers(tensor.rows(0, 1)).order for tensor in parts]
    order = orders[0]
    if order is not None and not all(other is not None and np.array_equal(order, other) for other in orders):
        return None
    outputs, inputs = sum(tensor.shape[0] for tensor in parts), parts[0].shape[1]
    group = stored_group(layout, inputs)
    weight = _blank(outputs, inputs, layout.bits, group or None, gated, layout.zeros, launcher.weights)
    if order is not None:
        assert 4 * inputs <= 1 << 20, "a row fits an op's scratch"
        weight = replace(weight, order=np.array(order, np.int64))
    fill_by_rows(parts, weight.depth, launcher.num_threads, lambda first, some: _fill(weight, first, _integers(some)))
    return _with_bias(weight, biases)


def fill_by_rows(
    parts: Sequence[QuantizedTensor], depth: int, num_threads: int, fill: Callable[[int, QuantizedTensor], None]
) -> None:
    """Call fill(number of the first row, some rows) for pieces of all parts, by several threads.

    numpy does most of it without the interpreter's lock. Pieces begin at multiples of sixteen rows of a part.
    """
    step = max(LANES, STAGED_ELEMENTS // depth // LANES * LANES)
    pieces, base = [], 0
    for tensor in parts:
        for start in range(0, tensor.shape[0], step):
            pieces.append((base + start, tensor.rows(start, min(start + step, tensor.shape[0]))))
        base += tensor.shape[0]

    def work(piece: tuple[int, QuantizedTensor]) -> None:
        fill(*piece)
        piece[1].release()

    if num_threads == 1 or len(pieces) == 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, pieces))


def _integers(tensor: QuantizedTensor) -> Integers:
    found = tensor.integers()
    assert found is not None, "its layout says that there are integers"
    return found


def _fill(weight: IntLinear, first: int, some: Integers) -> None:
    """Store rows from number `first` on."""
    count = len(some.values)
    columns = weight.columns(np.arange(first, first + count))
    values = some.values if weight.bits == 4 else some.values.view(np.uint8) ^ np.uint8(128)
    _put(weight, columns, values)
    if weight.group_scales is None:
        weight.scales[columns] = some.scales.reshape(-1)
        return
    zeros = some.zeros
    if zeros is not None:
        zeros = zeros - np.float32(8) if weight.bits == 4 else zeros / np.float32(EIGHT_BIT_ZEROS)
    _put_scales(weight, columns, some.scales, zeros)


def _put(weight: IntLinear, columns: np.ndarray, values: np.ndarray) -> None:
    """Store unsigned integers uint8 [n, K] of some columns."""
    row_words, count = weight.depth * weight.bits // 32, len(values)
    blocks = weight.data.reshape(-1, row_words, LANES)
    stage = np.full((count, weight.depth), 1 << (weight.bits - 1), np.uint8)
    stage[:, : weight.inputs] = values
    if weight.bits == 4:
        eights = stage.reshape(count, -1, 2, 4)
        stage = np.bitwise_or(eights[:, :, 0], eights[:, :, 1] << 4, dtype=np.uint8).reshape(count, -1)
    put_packed(blocks, columns, np.ascontiguousarray(stage).view(np.uint32))


def put_packed(blocks: np.ndarray, columns: np.ndarray, found: np.ndarray) -> None:
    """Store uint32 [n, words] of some columns in [N/16][words][16]; fast where they fill blocks."""
    lanes = columns.reshape(-1, LANES) if len(columns) % LANES == 0 else columns[None, :0]
    if lanes.size and not (lanes[:, 0] % LANES).any() and (lanes == lanes[:, :1] + np.arange(LANES)).all():
        blocks[lanes[:, 0] // LANES] = found.reshape(-1, LANES, found.shape[1]).transpose(0, 2, 1)
    else:
        blocks[columns // LANES, :, columns % LANES] = found


def _put_scales(weight: IntLinear, columns: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> None:
    """Store scales and zero points [n, K/group], the latter relative as `IntLinear` says."""
    wide = scales.astype(np.float32)
    largest = np.abs(wide).max(axis=1)
    powers = np.where(largest > 0, np.ldexp(np.float32(1), np.frexp(largest)[1]), np.float32(0)).astype(np.float32)
    weight.scales[columns] = np.where(np.isfinite(largest), powers, np.nan)
    usable = np.where(np.isfinite(largest) & (powers > 0), powers, np.float32(np.inf))[:, None]
    assert weight.group_scales is not None
    _put_by_group(weight, columns, np.where(np.isfinite(wide), wide, 0) / usable, weight.group_scales)
    if zeros is not None:
        assert weight.zeros is not None
        _put_by_group(weight, columns, zeros, weight.zeros)


def _put_by_group(weight: IntLinear, columns: np.ndarray, values: np.ndarray, target: np.ndarray) -> None:
    by_lane = target.view(np.float16).reshape(-1, weight.depth // weight.group, LANES)
    by_lane[columns // LANES, : values.shape[1], columns % LANES] = values
