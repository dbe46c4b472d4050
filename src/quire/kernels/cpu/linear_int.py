"""Matrix products with integer weights: packing them, out = x @ weight.T (+ bias), and looking up rows.

    out[m, n] = x_scale[m] * column_scale[n] * F[m, n] (+ bias[n])

F sums products of integers: exactly in int32 within a group of k, in float32 over groups. Floats are quantized as
quantize.py says; quantized checkpoints keep their integers. `FLOAT_OP` is weight-only: it leaves x in float32.
products.py emits these ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from quire.checkpoint.tensor import HostTensor, Integers, QuantizedTensor, Tensor
from quire.kernels.cpu import quantize
from quire.kernels.cpu.activations import gated
from quire.kernels.cpu.arrays import Slabs
from quire.kernels.cpu.formats import DIRECT_BYTES, STAGED_ELEMENTS, STORAGE, stack_biases
from quire.kernels.cpu.interleave import gated_columns, next_panel, tile_height
from quire.kernels.cpu.jit import Op, jit, op, op_of
from quire.kernels.cpu.linear import item_range
from quire.kernels.cpu.pointers import f16_ptr, f32_ptr, i32_ptr, i64_ptr, u8_ptr, u32_ptr
from quire.kernels.cpu.simd import (
    FLOAT_ROWS,
    add,
    float_tiles,
    get,
    int4_tiles,
    int8_tiles,
    load,
    mul,
    splat,
    store,
)
from quire.kernels.cpu.sizes import COLUMNS, DEPTH_UNIT, LANES, SCRATCH_BYTES
from quire.kernels.cpu.threads import Launcher, address_of
from quire.kernels.weight_storage import stored_group

GROUPS = (32, 64, 128)
EIGHT_BIT_ZEROS = 16  # of which zero points of 8 bits are multiples: tiles know those of 4 bits


# Products


@jit
def write_rows(sums, count, scales, x_scales, bias, column, row, out, stride, activation_id):
    """Scale `count` rows of 32 sums, in place, and write them; `x_scales` and `bias` are addresses, 0 for none."""
    for r in range(count):
        factor = get(f32_ptr(x_scales), row + r) if x_scales != 0 else np.float32(1)
        for half in range(0, COLUMNS, 16):
            value = mul(mul(load(sums, r * COLUMNS + half), load(scales, column + half)), splat(factor))
            if bias != 0:
                value = add(value, load(f32_ptr(bias), column + half))
            store(sums, r * COLUMNS + half, value)
    for r in range(count):
        left, right = load(sums, r * COLUMNS), load(sums, r * COLUMNS + 16)
        if activation_id >= 0:
            store(out, (row + r) * stride + column // 2, gated(left, right, activation_id))
        else:
            store(out, (row + r) * stride + column, left)
            store(out, (row + r) * stride + column + 16, right)


def _items(tiles, many_rows, few_rows, weights_in_word, input_ptr, inputs_in_word):
    many, few, one = tiles

    @jit
    def items(args, first, last, scratch):
        """One item is 32 columns of up to ROW_GROUP rows.

        Weight, depth, group, column scales, group scales or 0, zeros or 0, bias or 0, packed x, starts, x scales, out,
        its row stride, rows, id of the gate's activation or NO_ACTIVATION. Layouts: `IntLinear` and `quantize_tiles`;
        or `interleave_tiles` for x in float32, where starts and x scales are 0 and there are no groups.
        """
        w, depth, group, starts = u32_ptr(args[0]), args[1], args[2], i32_ptr(args[8])
        packed, scales, zeros, rows = input_ptr(args[7]), f16_ptr(args[4]), f16_ptr(args[5]), args[12]
        sums = f32_ptr(scratch)
        groups, steps, w_next = depth // group, group // weights_in_word, depth // weights_in_word * 16
        for item in range(first, last):
            column, begin, end = item_range(item, rows)
            w_at, s_at, s_next = column // 16 * w_next, column * groups, 16 * groups
            row = begin
            while row < end:
                height = tile_height(end - row)
                ahead, ahead_too = next_panel(w_at, w_next, row, rows)
                x_at, start, to, r = row * depth // inputs_in_word, row * groups, (row - begin) * COLUMNS, 0
                weights, groupings = (w, w_at, w_next, packed), (groups, steps, scales, zeros, s_at, s_next, sums)
                while r + many_rows <= height:
                    places = x_at + r, height, starts, start + r
                    many(*weights, *places, *groupings, to + r * COLUMNS, ahead, ahead_too)
                    r += many_rows
                while r + few_rows <= height:
                    places = x_at + r, height, starts, start + r
                    few(*weights, *places, *groupings, to + r * COLUMNS, ahead, ahead_too)
                    r += few_rows
                while r < height:
                    places = x_at + r, height, starts, start + r
                    one(*weights, *places, *groupings, to + r * COLUMNS, ahead, ahead_too)
                    r += 1
                row += height
            out, stride = f32_ptr(args[10]), args[11]
            scales_at, count, activation_id = f32_ptr(args[3]), end - begin, args[13]
            write_rows(sums, count, scales_at, args[9], args[6], column, begin, out, stride, activation_id)

    return items


def _integer_items(bits, vnni):
    tiles = (int8_tiles if bits == 8 else int4_tiles)[vnni]
    return _items(tiles, 8 if vnni else 2, 4 if vnni else 2, 32 // bits, u32_ptr, 4)


OPS: dict[tuple[int, bool], Op] = {  # by bits, and whether they use VNNI
    (bits, vnni): op_of(f"linear_int{bits}_{'avx512_vnni' if vnni else 'generic'}", _integer_items(bits, vnni))
    for bits in (8, 4)
    for vnni in (True, False)
}
FLOAT_OP = op_of("linear_int8_float", _items(float_tiles, FLOAT_ROWS, min(4, FLOAT_ROWS), 4, f32_ptr, 1))


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

    def packed_columns(self, ids: np.ndarray) -> np.ndarray:
        """Return where rows `ids` of the weight are stored."""
        return gated_columns(ids, self.outputs) if self.gated else ids


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
    unused = np.setdiff1d(np.arange(padded), weight.packed_columns(np.arange(outputs)))
    data.reshape(-1, depth * bits // 32, 16)[unused // 16, :, unused % 16] = 0x80808080 if bits == 8 else 0x88888888
    return weight


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


def pack_floats(
    parts: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    launcher: Launcher,
    bits: int,
    group: int | None = None,
    gated: bool = False,
) -> IntLinear:
    """Stack matrices [N_i, K] along N and quantize every row to 8 bits, or every `group` neighbours of a row to 4.

    Reads a part only when its turn comes. `gated` takes two parts of the same size, gate and up; `group` is one of
    GROUPS.
    """
    assert bits == 8 or group in GROUPS
    assert not gated or len(parts) == 2
    outputs, inputs = sum(tensor.shape[0] for tensor in parts), parts[0].shape[1]
    weight = _blank(outputs, inputs, bits, group, gated, memory=launcher.weights)
    assert weight.depth // weight.group * 4 <= SCRATCH_BYTES, "group scales of a row fit an op's scratch"
    base = 0
    for number, tensor in enumerate(parts):
        assert tensor.shape[1] == inputs
        for start, piece in _pieces(tensor):
            count = piece.shape[0]
            pack_op = quantize.PACK[bits][STORAGE[piece.dtype]]
            extra = () if weight.group_scales is None else (weight.group, weight.group_scales)
            source = piece.array, piece.array.strides[0] // piece.array.itemsize, inputs, weight.depth
            target = weight.data, weight.scales, base + start, number if gated else -1
            launcher.emit(pack_op, *source, *target, *extra, items=count, work=count * inputs, grain=64)
        base += 0 if gated else tensor.shape[0]
    return replace(weight, bias=stack_biases(biases, outputs, weight.padded, gated))


# What a backend calls


def embed(launcher: Launcher, ids: np.ndarray, weight: IntLinear) -> np.ndarray:
    """Return rows `ids` (int64 [T], read when the instruction runs) of a weight that is not gated, float32 [T, K]."""
    assert not weight.gated
    assert ids.dtype == np.int64 and ids.flags.c_contiguous
    out = launcher.empty((ids.shape[0], weight.inputs), np.float32)
    sizes, scales = (weight.bits, weight.depth, weight.inputs, weight.group), (weight.scales, weight.group_scales)
    args = ids, weight.data, *sizes, *scales, weight.zeros, out, weight.order
    launcher.emit(embedding_rows, *args, items=ids.shape[0], work=8 * out.size)
    return out


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
        assert 4 * inputs <= SCRATCH_BYTES, "a row fits an op's scratch"
        weight = replace(weight, order=np.array(order, np.int64))
    fill_by_rows(parts, weight.depth, launcher.num_threads, lambda first, some: _fill(weight, first, _integers(some)))
    return replace(weight, bias=stack_biases(biases, outputs, weight.padded, gated))


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
    columns = weight.packed_columns(np.arange(first, first + count))
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
