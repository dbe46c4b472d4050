"""Products of rows with packed weights: all rows with one weight, or the rows of each expert with its own.

One path serves both: `Rows` (or `experts.Groups`, for experts) says which rows there are and emits the ops, a `Stack`
has the weights. The ops, and what their weights look like, are in linear.py, linear_int.py and linear_coded.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from quire.kernels.cpu import linear_coded, linear_int, quantize
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.formats import COLUMNS, CPULinear
from quire.kernels.cpu.interleave import ROW_GROUP, interleave_tiles_f32, pack_bf16_tiles
from quire.kernels.cpu.jit import Op
from quire.kernels.cpu.linear import FLOAT_OPS, NO_GATE, linear_pairs
from quire.kernels.cpu.simd import TILE_ROWS
from quire.kernels.cpu.sizes import DOT_ROWS, padded_rows
from quire.kernels.cpu.threads import Launcher, address_of

# What the items of an instruction are: a row, up to DOT_ROWS rows, TILE_ROWS whole rows, or up to ROW_GROUP rows.
ROWS, TILES, WHOLE, BLOCKS = range(3, 7)
ROWS_IN = {ROWS: 1, TILES: DOT_ROWS, WHOLE: TILE_ROWS, BLOCKS: ROW_GROUP}
Weight = CPULinear | linear_int.IntLinear | linear_coded.CodedLinear


@dataclass(frozen=True)
class Stack:
    """A weight, or one matrix of every expert, all packed alike."""

    weights: tuple[Weight, ...]

    @property
    def one(self) -> Weight:
        """Any of them, to tell sizes and formats."""
        return self.weights[0]

    @property
    def factor(self) -> int:
        """Items of a product for each block of rows."""
        return self.one.padded // COLUMNS

    @cached_property
    def addresses(self) -> dict[str, np.ndarray]:
        """Addresses int64 [E] of the arrays of all weights, by field."""
        names = [field.name for field in fields(self.one) if isinstance(getattr(self.one, field.name), np.ndarray)]
        return {name: np.array([address_of(getattr(w, name)) for w in self.weights], np.int64) for name in names}


class ProductRows(Protocol):
    """Rows to multiply. Arguments of ops are made by it, since experts have rows and arrays of their own."""

    @property
    def launcher(self) -> Launcher:
        """What runs or records ops."""

    @property
    def count(self) -> int:
        """How many rows there are."""

    def capacity(self, kind: int) -> int:
        """Return how many rows an array has room for that is filled by items of this kind."""

    @property
    def row_count(self) -> Any:
        """The argument that is the number of rows."""

    def at(self, array: np.ndarray, row_bytes: int) -> Any:
        """Return the argument for where rows of `row_bytes` begin in `array`."""

    def own(self, stack: Stack, name: str) -> Any:
        """Return the argument for an array of a weight."""

    def emit(self, op: Op, *args: Any, kind: int, factor: int, work: int, stack: Stack | None = None) -> None:
        """Emit an op of `factor` items for each of a `kind`; `work`: multiply-adds. A product names its weights."""


class Rows:
    """`count` rows with the same weight."""

    def __init__(self, launcher: Launcher, count: int) -> None:
        self.launcher, self.count, self.row_count = launcher, count, count

    def capacity(self, kind: int) -> int:
        if kind == WHOLE:
            return self.count // TILE_ROWS * TILE_ROWS
        return padded_rows(self.count) if kind == TILES else self.count

    def at(self, array: np.ndarray, row_bytes: int) -> np.ndarray:
        return array

    def own(self, stack: Stack, name: str) -> Any:
        return getattr(stack.one, name)

    def emit(self, op: Op, *args: Any, kind: int, factor: int, work: int, stack: Stack | None = None) -> None:
        units = self.count // TILE_ROWS if kind == WHOLE else -(-self.count // ROWS_IN[kind])
        fetched: dict[str, Any] = {}
        if stack is not None and units == 1:
            data = stack.one.data
            fetched = {"fetch": data, "fetch_bytes": data.nbytes // factor}
        self.launcher.emit(op, *args, items=units * factor, work=work, **fetched)


def linear(
    launcher: Launcher,
    x: np.ndarray,
    weight: Weight,
    gate: int | None = None,
    *,
    int_level: str | None = None,
    round_inputs: bool = True,
) -> np.ndarray:
    """Return x [T, K] times the weight (+ bias), [T, N]; of a gated weight activation(gate) * up, [T, N/2].

    Args:
        x: rows anywhere. gate: kind of the activation of a gated weight, a number of activations.py.
        int_level, round_inputs: of integer weights: one of `linear_int.LEVELS`, None for the best of this CPU; whether
            x is rounded to 8 bits. It stays float32 for 8-bit weights without groups only (ValueError for others).
    """
    assert (gate is not None) == weight.gated
    outputs = weight.outputs // 2 if weight.gated else weight.outputs
    if x.shape[0] == 0:
        return launcher.empty((0, outputs))
    x, step = as_rows(x)
    out = multiply(Rows(launcher, x.shape[0]), x, step, Stack((weight,)), gate, int_level, round_inputs)
    return out[: x.shape[0], :outputs]


def multiply(
    rows: ProductRows,
    x: np.ndarray,
    step: int,
    stack: Stack,
    gate: int | None,
    int_level: str | None,
    round_inputs: bool,
) -> np.ndarray:
    """Emit `linear` for rows that are `step` elements apart; columns, and rows of whole tiles, are padded."""
    source, kind = (rows.at(x, 4 * step), step), NO_GATE if gate is None else gate
    if isinstance(stack.one, linear_int.IntLinear):
        return _integers(rows, source, stack, stack.one, kind, int_level, round_inputs)
    if stack.one.paired:
        return _pairs(rows, source, stack, stack.one, kind)
    return _floats(rows, source, stack, stack.one, kind)


def _pairs(
    rows: ProductRows, source: Any, stack: Stack, one: CPULinear | linear_coded.CodedLinear, kind: int
) -> np.ndarray:
    """Round rows to bfloat16, in tiles of pairs, and multiply them."""
    pairs, capacity = (one.inputs + 1) // 2, rows.capacity(TILES)
    packed = rows.at(rows.launcher.empty((capacity * pairs,), np.uint32), 4 * pairs)
    args = *source, packed, rows.row_count, one.inputs
    rows.emit(pack_bf16_tiles, *args, kind=TILES, factor=1, work=rows.count * one.inputs)
    product = linear_coded.pair_op(one) if isinstance(one, linear_coded.CodedLinear) else linear_pairs
    return _product(rows, product, stack, capacity, (packed,), (pairs, kind, *_coding(rows, stack)))


def _floats(
    rows: ProductRows, source: Any, stack: Stack, one: CPULinear | linear_coded.CodedLinear, kind: int
) -> np.ndarray:
    """Pack the rows that fill whole tiles, and multiply all in float32."""
    depth = one.inputs
    packed = rows.at(rows.launcher.empty((rows.capacity(WHOLE) * depth,)), 4 * depth)
    work = 4 * rows.count * depth
    rows.emit(interleave_tiles_f32, *source, packed, depth, kind=WHOLE, factor=1, work=work)
    product = FLOAT_OPS[one.data.dtype] if isinstance(one, CPULinear) else linear_coded.coded_floats
    inputs = *source, packed
    return _product(rows, product, stack, rows.capacity(ROWS), inputs, (depth, kind, *_coding(rows, stack)))


def _coding(rows: ProductRows, stack: Stack) -> tuple[Any, ...]:
    """Return the further arguments of ops of codes; none for other weights."""
    if not isinstance(stack.one, linear_coded.CodedLinear):
        return ()
    weight, scales = stack.one, rows.own(stack, "scales")
    short = int(weight.scales.dtype == np.uint16)
    return weight.depth, weight.group, scales, short, rows.own(stack, "table"), linear_coded.kind_of(weight)


def _product(
    rows: ProductRows, op: Op, stack: Stack, capacity: int, inputs: tuple[Any, ...], numbers: tuple[Any, ...]
) -> np.ndarray:
    """Emit an op of float weights or codes: weight, bias, inputs, out, its row step, rows, numbers."""
    one = stack.one
    width = one.padded // 2 if one.gated else one.padded
    out = rows.launcher.empty((capacity, width))
    target = rows.at(out, 4 * width), width, rows.row_count
    work = rows.count * one.padded * one.depth
    weights = rows.own(stack, "data"), rows.own(stack, "bias")
    rows.emit(op, *weights, *inputs, *target, *numbers, kind=BLOCKS, factor=stack.factor, work=work, stack=stack)
    return out


def _integers(
    rows: ProductRows,
    source: Any,
    stack: Stack,
    one: linear_int.IntLinear,
    kind: int,
    int_level: str | None,
    round_inputs: bool,
) -> np.ndarray:
    """Round rows to 8 bits, or leave them in float32, in tiles, and multiply them."""
    launcher, capacity, depth = rows.launcher, rows.capacity(TILES), one.depth
    width = one.padded // 2 if one.gated else one.padded
    out = rows.launcher.empty((rows.capacity(ROWS), width))
    read = *source, rows.row_count, one.inputs, depth
    if round_inputs:
        op, parts = linear_int.OPS[one.bits, linear_int.resolve_level(int_level)], depth // one.group
        packed = rows.at(launcher.empty((capacity * depth // 4,), np.uint32), depth)
        starts = rows.at(launcher.empty((capacity * parts,), np.int32), 4 * parts)
        scales = rows.at(launcher.empty((capacity,)), 4)
        made = one.group, 1 << (one.bits - 1), packed, starts, scales, rows.own(stack, "order")
        rows.emit(quantize.quantize_tiles, *read, *made, kind=TILES, factor=1, work=rows.count * depth)
    else:
        if one.bits != 8 or one.group_scales is not None:
            raise ValueError("inputs stay float32 for 8-bit weights without groups only")
        op, starts, scales = linear_int.FLOAT_OP, None, None
        packed = rows.at(launcher.empty((capacity * depth,)), 4 * depth)
        rows.emit(quantize.interleave_tiles, *read, packed, kind=TILES, factor=1, work=rows.count * depth)
    factors = (rows.own(stack, name) for name in ("scales", "group_scales", "zeros", "bias"))
    args = rows.own(stack, "data"), depth, one.group, *factors, packed, starts, scales
    target = rows.at(out, 4 * width), width, rows.row_count, kind
    work = rows.count * one.padded * depth
    rows.emit(op, *args, *target, kind=BLOCKS, factor=stack.factor, work=work, stack=stack)
    return out
