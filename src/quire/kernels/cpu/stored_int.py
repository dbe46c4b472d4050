"""Integer weights of quantized checkpoints, packed with the integers that they have; see `IntLinear`.

Scales become float16 relative to a power of two for each row, zero points float16: those that were float16 or bfloat16
stay what they are, unless they are 2^14 times smaller than the largest of their row. Whole zero points always do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from quire.checkpoint.tensor import Integers, QuantizedTensor, Tensor
from quire.kernels.cpu.linear_int import EIGHT_BIT_ZEROS, STAGED_ELEMENTS, IntLinear, _blank, _with_bias
from quire.kernels.cpu.threads import Launcher
from quire.kernels.weight_storage import stored_group

LANES = 16


def pack_integers(
    parts: Sequence[QuantizedTensor], biases: Sequence[Tensor] | None, launcher: Launcher, gated: bool = False
) -> IntLinear | None:
    """Stack matrices [N_i, K] of one layout along N, reading some rows at a time; None if their orders differ.

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
    put_words(blocks, columns, np.ascontiguousarray(stage).view(np.uint32))


def put_words(blocks: np.ndarray, columns: np.ndarray, found: np.ndarray) -> None:
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
