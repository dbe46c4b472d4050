"""Products of rows with packed weights: all rows with one weight, or the rows of each expert with its own.

One path serves both: `Rows` (or `experts.Groups`, for experts) says which rows there are and emits the ops,
`ProductWeights` has the weights. The ops, and what their weights look like, are in linear.py, linear_int.py and
linear_coded.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from quire.kernels.cpu import linear_coded, linear_int, quantize
from quire.kernels.cpu.activations import NO_ACTIVATION
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.formats import COLUMNS, CPULinear
from quire.kernels.cpu.interleave import ROW_GROUP, interleave_tiles_f32, pack_bf16_tiles
from quire.kernels.cpu.jit import Op
from quire.kernels.cpu.linear import FLOAT_OPS, linear_pairs
from quire.kernels.cpu.simd import HAS_VNNI, TILE_ROWS
from quire.kernels.cpu.sizes import DOT_ROWS, padded_rows
from quire.kernels.cpu.threads import Launcher, address_of

# Granularities: an instruction has one item or several for each row, each tile of up to DOT_ROWS rows, each whole tile
# of TILE_ROWS rows, or each block of up to ROW_GROUP rows. The numbers are also the offsets of the counts of items
# within an expert's record (experts.py).
ROWS, TILES, FULL_TILES, BLOCKS = range(3, 7)
ROWS_IN = {ROWS: 1, TILES: DOT_ROWS, FULL_TILES: TILE_ROWS, BLOCKS: ROW_GROUP}
Weight = CPULinear | linear_int.IntLinear | linear_coded.CodedLinear


@dataclass(frozen=True)
class ProductWeights:
    """The weights of a product: one, or that of every expert, all of the same class, sizes and format."""

    matrices: tuple[Weight, ...]

    @property
    def one(self) -> Weight:
        """The first weight, for the sizes and the format, which all have."""
        return self.matrices[0]

    @property
    def factor(self) -> int:
        """Return the number of items of a product for each block of rows: one for 32 columns."""
        return self.one.padded // COLUMNS

    @cached_property
    def addresses(self) -> dict[str, np.ndarray]:
        """Addresses int64 [E] of the arrays of all weights, by field."""
        names = [field.name for field in fields(self.one) if isinstance(getattr(self.one, field.name), np.ndarray)]
        return {name: np.array([address_of(getattr(w, name)) for w in self.matrices], np.int64) for name in names}


class ProductRows(Protocol):
    """The rows of a product, and what depends on whether all have the same weight (`Rows`) or not (`experts.Groups`).

    The arguments of ops that differ from expert to expert are made here.
    """

    @property
    def launcher(self) -> Launcher:
        """The launcher that runs or records the ops."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def capacity(self, granularity: int) -> int:
        """Return how many rows an array needs room for that an instruction of this granularity fills."""

    @property
    def row_count(self) -> Any:
        """The argument for the number of rows."""

    def rows_of(self, array: np.ndarray, row_bytes: int) -> Any:
        """Return the argument for the address of the first row in `array`, whose rows have `row_bytes`."""

    def array_of(self, weights: ProductWeights, name: str) -> Any:
        """Return the argument for the array `name` of the weight; None if there is none."""

    def emit(
        self, op: Op, *args: Any, granularity: int, factor: int, work: int, weights: ProductWeights | None = None
    ) -> None:
        """Emit an op with `factor` items for each row, tile or block; `weights`: those it reads. See `Launcher`."""


class Rows:
    """`count` rows with the same weight."""

    def __init__(self, launcher: Launcher, count: int) -> None:
        self.launcher, self.count, self.row_count = launcher, count, count

    def capacity(self, granularity: int) -> int:
        if granularity == FULL_TILES:
            return self.count // TILE_ROWS * TILE_ROWS
        return padded_rows(self.count) if granularity == TILES else self.count

    def rows_of(self, array: np.ndarray, row_bytes: int) -> np.ndarray:
        return array

    def array_of(self, weights: ProductWeights, name: str) -> Any:
        return getattr(weights.one, name)

    def emit(
        self, op: Op, *args: Any, granularity: int, factor: int, work: int, weights: ProductWeights | None = None
    ) -> None:
        parts = self.count // TILE_ROWS if granularity == FULL_TILES else -(-self.count // ROWS_IN[granularity])
        prefetched: dict[str, Any] = {}
        if weights is not None and parts == 1:
            data = weights.one.data
            prefetched = {"prefetch": data, "prefetch_bytes": data.nbytes // factor}
        self.launcher.emit(op, *args, items=parts * factor, work=work, **prefetched)


def linear(
    launcher: Launcher,
    x: np.ndarray,
    weight: Weight,
    activation_id: int = NO_ACTIVATION,
    *,
    vnni: bool = HAS_VNNI,
    round_inputs: bool = True,
) -> np.ndarray:
    """Return x [T, K] times the weight (+ bias), [T, N]; of a gated weight activation(gate) * up, [T, N/2].

    Args:
        x: rows anywhere in memory. activation_id: of a gated weight, see activations.py; NO_ACTIVATION of others.
        vnni, round_inputs: of integer weights: whether AVX-512 VNNI is used; whether x is rounded to 8 bits. It may
            stay float32 for 8-bit weights without groups only (ValueError for others).
    """
    assert (activation_id >= 0) == weight.gated
    outputs = weight.outputs // 2 if weight.gated else weight.outputs
    if x.shape[0] == 0:
        return launcher.empty((0, outputs))
    x, step = as_rows(x)
    out = multiply(Rows(launcher, x.shape[0]), x, step, ProductWeights((weight,)), activation_id, vnni, round_inputs)
    return out[: x.shape[0], :outputs]


def multiply(
    rows: ProductRows,
    x: np.ndarray,
    step: int,
    weights: ProductWeights,
    activation_id: int,
    vnni: bool,
    round_inputs: bool,
) -> np.ndarray:
    """Emit a product, see `linear`, of rows `step` elements apart; rows and columns of the result are padded."""
    source = rows.rows_of(x, 4 * step), step
    if isinstance(weights.one, linear_int.IntLinear):
        return _integers(rows, source, weights, weights.one, activation_id, vnni, round_inputs)
    if weights.one.paired:
        return _pairs(rows, source, weights, weights.one, activation_id)
    return _floats(rows, source, weights, weights.one, activation_id)


def _pairs(
    rows: ProductRows,
    source: Any,
    weights: ProductWeights,
    one: CPULinear | linear_coded.CodedLinear,
    activation_id: int,
) -> np.ndarray:
    """Emit the rounding of rows to tiles of pairs of bfloat16, and their product."""
    pairs, capacity = (one.inputs + 1) // 2, rows.capacity(TILES)
    packed = rows.rows_of(rows.launcher.empty((capacity * pairs,), np.uint32), 4 * pairs)
    args = *source, packed, rows.row_count, one.inputs
    rows.emit(pack_bf16_tiles, *args, granularity=TILES, factor=1, work=rows.count * one.inputs)
    product = linear_coded.pair_op(one) if isinstance(one, linear_coded.CodedLinear) else linear_pairs
    return _product(rows, product, weights, capacity, activation_id, (packed, pairs))


def _floats(
    rows: ProductRows,
    source: Any,
    weights: ProductWeights,
    one: CPULinear | linear_coded.CodedLinear,
    activation_id: int,
) -> np.ndarray:
    """Emit the packing of the rows that fill whole tiles, and the product of all in float32."""
    depth = one.inputs
    packed = rows.rows_of(rows.launcher.empty((rows.capacity(FULL_TILES) * depth,)), 4 * depth)
    work = 4 * rows.count * depth
    rows.emit(interleave_tiles_f32, *source, packed, depth, granularity=FULL_TILES, factor=1, work=work)
    product = FLOAT_OPS[one.data.dtype] if isinstance(one, CPULinear) else linear_coded.coded_floats
    return _product(rows, product, weights, rows.capacity(ROWS), activation_id, (*source, packed, depth))


def _coding(rows: ProductRows, weights: ProductWeights) -> tuple[Any, ...]:
    """Return the arguments that ops of codes have beyond those of floats; none for other weights."""
    if not isinstance(weights.one, linear_coded.CodedLinear):
        return ()
    weight, scales = weights.one, rows.array_of(weights, "scales")
    short = int(weight.scales.dtype == np.uint16)
    return weight.depth, weight.group, scales, short, rows.array_of(weights, "table"), linear_coded.kind_of(weight)


def _product(
    rows: ProductRows, op: Op, weights: ProductWeights, capacity: int, activation_id: int, inputs: tuple[Any, ...]
) -> np.ndarray:
    """Emit an op of float weights or codes; `inputs` are its arguments after the activation's id, see linear.py."""
    one = weights.one
    width = one.padded // 2 if one.gated else one.padded
    out = rows.launcher.empty((capacity, width))
    target = rows.rows_of(out, 4 * width), width, rows.row_count
    work = rows.count * one.padded * one.depth
    args = (
        rows.array_of(weights, "data"),
        rows.array_of(weights, "bias"),
        *target,
        activation_id,
        *inputs,
        *_coding(rows, weights),
    )
    rows.emit(op, *args, granularity=BLOCKS, factor=weights.factor, work=work, weights=weights)
    return out


def _integers(
    rows: ProductRows,
    source: Any,
    weights: ProductWeights,
    one: linear_int.IntLinear,
    activation_id: int,
    vnni: bool,
    round_inputs: bool,
) -> np.ndarray:
    """Emit the packing of rows in tiles, in 8 bits or float32, and their product with integers."""
    launcher, capacity, depth = rows.launcher, rows.capacity(TILES), one.depth
    width = one.padded // 2 if one.gated else one.padded
    out = rows.launcher.empty((rows.capacity(ROWS), width))
    read = *source, rows.row_count, one.inputs, depth
    if round_inputs:
        op, parts = linear_int.OPS[one.bits, vnni], depth // one.group
        packed = rows.rows_of(launcher.empty((capacity * depth // 4,), np.uint32), depth)
        starts = rows.rows_of(launcher.empty((capacity * parts,), np.int32), 4 * parts)
        scales = rows.rows_of(launcher.empty((capacity,)), 4)
        made = one.group, 1 << (one.bits - 1), packed, starts, scales, rows.array_of(weights, "order")
        rows.emit(quantize.quantize_tiles, *read, *made, granularity=TILES, factor=1, work=rows.count * depth)
    else:
        if one.bits != 8 or one.group_scales is not None:
            raise ValueError("inputs stay float32 for 8-bit weights without groups only")
        op, starts, scales = linear_int.FLOAT_OP, None, None
        packed = rows.rows_of(launcher.empty((capacity * depth,)), 4 * depth)
        rows.emit(quantize.interleave_tiles, *read, packed, granularity=TILES, factor=1, work=rows.count * depth)
    factors = (rows.array_of(weights, name) for name in ("scales", "group_scales", "zeros", "bias"))
    args = rows.array_of(weights, "data"), depth, one.group, *factors, packed, starts, scales
    target = rows.rows_of(out, 4 * width), width, rows.row_count, activation_id
    work = rows.count * one.padded * depth
    rows.emit(op, *args, *target, granularity=BLOCKS, factor=weights.factor, work=work, weights=weights)
    return out
