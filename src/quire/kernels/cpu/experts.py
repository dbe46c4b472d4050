"""Mixtures of experts: sum over the chosen experts of weight * down(act(gate x) * up x).

Pairs of a token and one of its experts are sorted by expert (grouped.py), their rows brought together, and each product
is that of linear.py or linear_int.py, carried out for the rows of one expert after the other with its weights. Only
weights of experts that have rows are read. Then every token adds up its rows in the order of its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from quire.errors import ModelError
from quire.kernels.cpu import linear, linear_coded, linear_int, quantize
from quire.kernels.cpu.activations import COST, PIECE, activate_rows
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.formats import CPULinear
from quire.kernels.cpu.grouped import (
    BLOCKS,
    ROWS,
    TILES,
    WHOLE,
    Groups,
    NumRows,
    OwnOf,
    RowsOf,
    Unit,
    emit_grouped,
    group,
)
from quire.kernels.cpu.interleave import round_tiles, weave_tiles
from quire.kernels.cpu.jit import op
from quire.kernels.cpu.pointers import floats, longs
from quire.kernels.cpu.simd import load, load_some, mul, multiply_add, splat, store, store_some
from quire.kernels.cpu.threads import Launcher, address_of
from quire.kernels.experts import Expert

COLUMNS = 32  # of an item of every product
NO_ACTIVATION = -1
NUM_ROWS = NumRows()
Weight = CPULinear | linear_int.IntLinear | linear_coded.CodedLinear


@dataclass(frozen=True)
class Stack:
    """One matrix of every expert, all packed alike."""

    weights: tuple[Weight, ...]

    @cached_property
    def one(self) -> Weight:
        """Any of them, to tell sizes and formats."""
        return self.weights[0]

    @property
    def unit(self) -> Unit:
        """What the items of a product are."""
        return Unit(BLOCKS, self.one.padded // COLUMNS)

    def own(self, name: str) -> OwnOf | None:
        """Return where each expert's array of this name lies, None where they have none."""
        return None if getattr(self.one, name) is None else OwnOf(self._tables[name])

    @property
    def coding(self) -> tuple[int | OwnOf | None, ...]:
        """What ops of products with codes have among their arguments besides; nothing for other weights."""
        if not isinstance(self.one, linear_coded.CodedLinear):
            return ()
        depth, group, _, short, _, kind = linear_coded.coding(self.one)
        return depth, group, self.own("scales"), short, self.own("table"), kind

    @cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        names = [field.name for field in fields(self.one) if isinstance(getattr(self.one, field.name), np.ndarray)]
        return {name: np.array([address_of(getattr(w, name)) for w in self.weights], np.int64) for name in names}


@dataclass(frozen=True, slots=True)
class CPUExperts:
    """All experts of a layer: gate and up, and down."""

    first: Stack
    last: Stack

    @property
    def units(self) -> tuple[Unit, ...]:
        """Those of all instructions that may follow the grouping."""
        pieces = _pieces_unit(self.first.one.outputs // 2)
        return tuple(dict.fromkeys((Unit(TILES, 1), Unit(WHOLE, 1), self.first.unit, self.last.unit, pieces)))


def pack_experts(experts: Iterable[Expert], pack_linear: Callable[..., Weight]) -> CPUExperts:
    """Pack experts one by one with the backend's `pack_linear`. Raises ModelError where they differ in format."""
    pairs = [(pack_linear(*expert.first, gated=True), pack_linear(*expert.last)) for expert in experts]
    stacks = [Stack(weights) for weights in zip(*pairs, strict=True)]
    for stack in stacks:
        if any(_kind(weight) != _kind(stack.one) for weight in stack.weights):
            raise ModelError("the experts of a layer are quantized in different ways (expected the same for all)")
    return CPUExperts(*stacks)


def _kind(weight: Weight) -> tuple[object, ...]:
    """Return all that must be the same for all experts: class, sizes, and which arrays there are."""
    values = [getattr(weight, field.name) for field in fields(weight)]
    return type(weight), *((v.shape, v.dtype) if isinstance(v, np.ndarray) else v for v in values)


# Ops


@op
def spread_rows(args, first, last, scratch):
    """Items are pairs. x, elements between its rows, width, places of the pairs, pairs of a row, out."""
    x, stride, width, places, times, out = floats(args[0]), args[1], args[2], longs(args[3]), args[4], floats(args[5])
    whole = width // 16 * 16
    for pair in range(first, last):
        source, target = pair // times * stride, places[pair] * width
        for i in range(0, whole, 16):
            store(out, target + i, load(x, source + i))
        if whole < width:
            store_some(out, target + whole, load_some(x, source + whole, width - whole), width - whole)


@op
def mix_rows(args, first, last, scratch):
    """Items are pieces of rows. y, elements between its rows, places, weights, pairs of a row, out, width, pieces."""
    y, stride, places, weights, times = floats(args[0]), args[1], longs(args[2]), floats(args[3]), args[4]
    out, width, pieces = floats(args[5]), args[6], args[7]
    for item in range(first, last):
        row, begin = item // pieces, item % pieces * PIECE
        for i in range(begin, min(begin + PIECE, width), 16):
            total = mul(load(y, places[row * times] * stride + i), splat(weights[row * times]))
            for j in range(row * times + 1, (row + 1) * times):
                total = multiply_add(load(y, places[j] * stride + i), splat(weights[j]), total)
            if width - i >= 16:
                store(out, row * width + i, total)
            else:
                store_some(out, row * width + i, total, width - i)


# What a backend calls


def experts(
    launcher: Launcher,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    packed: CPUExperts,
    kind: int,
    int_level: str,
    round_inputs: bool,
) -> np.ndarray:
    """Return float32 [T, H], see `Backend.experts`. `kind` is an activation's, the rest as for `linear_int.linear`."""
    x, step = as_rows(x)
    tokens, chosen = ids.shape
    if x.shape[1] != packed.first.one.inputs:
        raise ValueError(f"experts: x is {x.shape}, the experts have {packed.first.one.inputs} inputs")
    if tokens == 0:
        return launcher.empty((0, packed.last.one.outputs))
    groups = group(launcher, ids, len(packed.first.weights), packed.units)
    spread = launcher.empty((groups.capacity, x.shape[1]))
    launcher.emit(
        spread_rows, x, step, x.shape[1], groups.places, chosen, spread, items=groups.pairs,
        work=3 * groups.pairs * x.shape[1],
    )  # fmt: skip
    products = Products(launcher, groups, int_level, round_inputs)
    inner = products.gated(spread, packed.first, kind)
    del spread
    results = products.product(inner, packed.last, None)
    del inner
    width = packed.last.one.outputs
    out = launcher.empty((tokens, width))
    pieces = -(-width // PIECE)
    launcher.emit(
        mix_rows, results, results.shape[1], groups.places, weights, chosen, out, width, pieces, items=tokens * pieces,
        work=2 * groups.pairs * width,
    )  # fmt: skip
    return out


class Products:
    """Products of rows that lie by expert, [capacity, any width >= K], with each expert's own matrix."""

    def __init__(self, launcher: Launcher, groups: Groups, int_level: str, round_inputs: bool) -> None:
        self.launcher, self.groups = launcher, groups
        self.int_level, self.round_inputs = int_level, round_inputs

    def gated(self, x: np.ndarray, stack: Stack, kind: int) -> np.ndarray:
        """Return activation(gate) * up, [capacity, I or more]."""
        if stack.one.gated:
            return self.product(x, stack, kind)
        both, width = self.product(x, stack, None), stack.one.outputs // 2
        out, pieces = self.launcher.empty((self.groups.capacity, width)), _pieces_unit(width)
        emit_grouped(
            self.launcher, self.groups, activate_rows, RowsOf(both, 4 * both.shape[1]), both.shape[1],
            RowsOf(out, 4 * width), width, kind, 1, pieces.factor, unit=pieces, work=COST * self.groups.pairs * width,
        )  # fmt: skip
        return out

    def product(self, x: np.ndarray, stack: Stack, kind: int | None) -> np.ndarray:
        """Return the rows times the matrices, [capacity, N or more], N halved for a gated one with its activation."""
        width = stack.one.padded // 2 if stack.one.gated else stack.one.padded
        activation = NO_ACTIVATION if kind is None else kind
        if isinstance(stack.one, linear_int.IntLinear):
            return self._integers(x, stack, stack.one, width, activation)
        if stack.one.paired:
            return self._pairs(x, stack, width, activation)
        return self._floats(x, stack, stack.one, width, activation)

    def _work(self, stack: Stack) -> int:
        return self.groups.pairs * stack.one.padded * stack.one.depth

    def _pairs(self, x: np.ndarray, stack: Stack, width: int, activation: int) -> np.ndarray:
        """See `linear.linear` with paired weights."""
        launcher, groups, depth, step = self.launcher, self.groups, stack.one.inputs, x.shape[1]
        pairs = (depth + 1) // 2
        packed = launcher.empty((groups.capacity * pairs,), np.uint32)
        emit_grouped(
            launcher, groups, round_tiles, RowsOf(x, 4 * step), step, RowsOf(packed, 4 * pairs), NUM_ROWS, depth,
            unit=Unit(TILES, 1), work=groups.pairs * depth,
        )  # fmt: skip
        out, product = launcher.empty((groups.capacity, width)), linear.linear_pairs
        if isinstance(stack.one, linear_coded.CodedLinear):
            product = linear_coded.pair_op(stack.one)
        emit_grouped(
            launcher, groups, product, stack.own("data"), stack.own("bias"), RowsOf(packed, 4 * pairs),
            RowsOf(out, 4 * width), width, NUM_ROWS, pairs, activation, *stack.coding, unit=stack.unit,
            work=self._work(stack), holds=stack,
        )  # fmt: skip
        return out

    def _floats(
        self, x: np.ndarray, stack: Stack, one: CPULinear | linear_coded.CodedLinear, width: int, activation: int
    ) -> np.ndarray:
        """See `linear.linear`."""
        launcher, groups, depth, step = self.launcher, self.groups, one.inputs, x.shape[1]
        product = linear.FLOAT_OPS[one.data.dtype] if isinstance(one, CPULinear) else linear_coded.coded_floats
        packed = launcher.empty((groups.capacity * depth,))
        emit_grouped(
            launcher, groups, weave_tiles, RowsOf(x, 4 * step), step, RowsOf(packed, 4 * depth), depth,
            unit=Unit(WHOLE, 1), work=4 * groups.pairs * depth,
        )  # fmt: skip
        out = launcher.empty((groups.capacity, width))
        emit_grouped(
            launcher, groups, product, stack.own("data"), stack.own("bias"), RowsOf(x, 4 * step), step,
            RowsOf(packed, 4 * depth), RowsOf(out, 4 * width), width, NUM_ROWS, depth, activation, *stack.coding,
            unit=stack.unit, work=self._work(stack), holds=stack,
        )  # fmt: skip
        return out

    def _integers(
        self, x: np.ndarray, stack: Stack, one: linear_int.IntLinear, width: int, activation: int
    ) -> np.ndarray:
        """See `linear_int.linear`."""
        launcher, groups, step, starts, scales = self.launcher, self.groups, x.shape[1], None, None
        source = RowsOf(x, 4 * step), step, NUM_ROWS, one.inputs, one.depth
        tiles, work = Unit(TILES, 1), groups.pairs * one.depth
        if self.round_inputs:
            product, parts = linear_int.OPS[one.bits, self.int_level], one.depth // one.group
            packed = RowsOf(launcher.empty((groups.capacity * one.depth // 4,), np.uint32), one.depth)
            starts = RowsOf(launcher.empty((groups.capacity * parts,), np.int32), 4 * parts)
            scales = RowsOf(launcher.empty((groups.capacity,)), 4)
            offset = 1 << (one.bits - 1)
            emit_grouped(
                launcher, groups, quantize.quantize_tiles, *source, one.group, offset, packed, starts, scales,
                stack.own("order"), unit=tiles, work=work,
            )  # fmt: skip
        else:
            product = linear_int.FLOAT_OP
            packed = RowsOf(launcher.empty((groups.capacity * one.depth,)), 4 * one.depth)
            emit_grouped(launcher, groups, quantize.interleave_tiles, *source, packed, unit=tiles, work=work)
        out = launcher.empty((groups.capacity, width))
        emit_grouped(
            launcher, groups, product, stack.own("data"), one.depth, one.group, stack.own("scales"),
            stack.own("group_scales"), stack.own("zeros"), stack.own("bias"), packed, starts, scales,
            RowsOf(out, 4 * width), width, NUM_ROWS, activation, int(one.gated), unit=stack.unit,
            work=self._work(stack), holds=stack,
        )  # fmt: skip
        return out


def _pieces_unit(width: int) -> Unit:
    return Unit(ROWS, max(1, -(-width // PIECE)))
