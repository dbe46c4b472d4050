"""Mixtures of experts: sum over the chosen experts of weight * down(act(gate x) * up x).

Pairs of a token and one of its experts are sorted by expert (grouped.py), their rows brought together, and each product
is that of linear.py or linear_int.py, carried out for the rows of one expert after the other with its weights. Only
weights of experts that have rows are read. Then every token adds up its rows in the order of its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

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
    ExpertArray,
    ExpertRowCount,
    ExpertRows,
    Groups,
    Unit,
    emit_grouped,
    group,
)
from quire.kernels.cpu.interleave import interleave_tiles_f32, pack_bf16_tiles
from quire.kernels.cpu.jit import Op, op
from quire.kernels.cpu.pointers import f32_ptr, i64_ptr
from quire.kernels.cpu.rows import copy_row
from quire.kernels.cpu.simd import load, mul, multiply_add, splat, store, store_partial
from quire.kernels.cpu.threads import Launcher, address_of
from quire.kernels.experts import Expert

COLUMNS = 32  # of an item of every product
NO_ACTIVATION = -1
ROW_COUNT = ExpertRowCount()
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

    def own(self, name: str) -> ExpertArray | None:
        """Return the addresses of every expert's array of this name, None where they have none."""
        return None if getattr(self.one, name) is None else ExpertArray(self._tables[name])

    @property
    def code_args(self) -> tuple[int | ExpertArray | None, ...]:
        """What ops of products with codes have among their arguments besides; nothing for other weights."""
        if not isinstance(self.one, linear_coded.CodedLinear):
            return ()
        depth, group, _, short, _, kind = linear_coded.code_args(self.one)
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
def gather_rows(args, first, last, scratch):
    """Items are pairs. x, elements between its rows, width, places of the pairs, pairs of a row, out."""
    x, stride, width, places, out = f32_ptr(args[0]), args[1], args[2], i64_ptr(args[3]), f32_ptr(args[5])
    for pair in range(first, last):
        copy_row(x, pair // args[4] * stride, out, places[pair] * width, width)


@op
def combine_expert_rows(args, first, last, scratch):
    """Items are pieces of rows. y, elements between its rows, places, weights, pairs of a row, out, width, pieces."""
    y, stride, places, weights, times = f32_ptr(args[0]), args[1], i64_ptr(args[2]), f32_ptr(args[3]), args[4]
    out, width, pieces = f32_ptr(args[5]), args[6], args[7]
    for item in range(first, last):
        row, begin = item // pieces, item % pieces * PIECE
        for i in range(begin, min(begin + PIECE, width), 16):
            total = mul(load(y, places[row * times] * stride + i), splat(weights[row * times]))
            for j in range(row * times + 1, (row + 1) * times):
                total = multiply_add(load(y, places[j] * stride + i), splat(weights[j]), total)
            if width - i >= 16:
                store(out, row * width + i, total)
            else:
                store_partial(out, row * width + i, total, width - i)


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
    args = x, step, x.shape[1], groups.places, chosen, spread
    launcher.emit(gather_rows, *args, items=groups.pairs, work=3 * groups.pairs * x.shape[1])
    products = Products(launcher, groups, int_level, round_inputs)
    inner = products.gated(spread, packed.first, kind)
    del spread
    results = products.product(inner, packed.last, None)
    del inner
    width = packed.last.one.outputs
    out = launcher.empty((tokens, width))
    pieces = -(-width // PIECE)
    summed = results, results.shape[1], groups.places, weights, chosen, out, width, pieces
    launcher.emit(combine_expert_rows, *summed, items=tokens * pieces, work=2 * groups.pairs * width)
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
        rows = ExpertRows(both, 4 * both.shape[1]), both.shape[1], ExpertRows(out, 4 * width), width
        self._emit(activate_rows, *rows, kind, 1, pieces.factor, unit=pieces, work=COST * self.groups.pairs * width)
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

    def _emit(self, inner: Op, *args: Any, unit: Unit, work: int) -> None:
        """Run or record `inner` for the rows of every expert."""
        emit_grouped(self.launcher, self.groups, inner, *args, unit=unit, work=work)

    def _emit_product(self, inner: Op, stack: Stack, *args: Any) -> None:
        """Run or record a product with each expert's matrix of the stack."""
        work = self.groups.pairs * stack.one.padded * stack.one.depth
        emit_grouped(self.launcher, self.groups, inner, *args, unit=stack.unit, work=work, holds=stack)

    def _pairs(self, x: np.ndarray, stack: Stack, width: int, activation: int) -> np.ndarray:
        """See `linear.linear` with paired weights."""
        launcher, groups, depth, step = self.launcher, self.groups, stack.one.inputs, x.shape[1]
        pairs = (depth + 1) // 2
        packed = ExpertRows(launcher.empty((groups.capacity * pairs,), np.uint32), 4 * pairs)
        source = ExpertRows(x, 4 * step), step
        self._emit(pack_bf16_tiles, *source, packed, ROW_COUNT, depth, unit=Unit(TILES, 1), work=groups.pairs * depth)
        out, product = launcher.empty((groups.capacity, width)), linear.linear_pairs
        if isinstance(stack.one, linear_coded.CodedLinear):
            product = linear_coded.pair_op(stack.one)
        weights, target = (stack.own("data"), stack.own("bias")), ExpertRows(out, 4 * width)
        numbers = width, ROW_COUNT, pairs, activation, *stack.code_args
        self._emit_product(product, stack, *weights, packed, target, *numbers)
        return out

    def _floats(
        self, x: np.ndarray, stack: Stack, one: CPULinear | linear_coded.CodedLinear, width: int, activation: int
    ) -> np.ndarray:
        launcher, groups, depth, step = self.launcher, self.groups, one.inputs, x.shape[1]
        product = linear.FLOAT_OPS[one.data.dtype] if isinstance(one, CPULinear) else linear_coded.coded_floats
        packed = ExpertRows(launcher.empty((groups.capacity * depth,)), 4 * depth)
        source, work = (ExpertRows(x, 4 * step), step), 4 * groups.pairs * depth
        self._emit(interleave_tiles_f32, *source, packed, depth, unit=Unit(WHOLE, 1), work=work)
        out = launcher.empty((groups.capacity, width))
        weights, target = (stack.own("data"), stack.own("bias")), ExpertRows(out, 4 * width)
        numbers = width, ROW_COUNT, depth, activation, *stack.code_args
        self._emit_product(product, stack, *weights, *source, packed, target, *numbers)
        return out

    def _integers(
        self, x: np.ndarray, stack: Stack, one: linear_int.IntLinear, width: int, activation: int
    ) -> np.ndarray:
        launcher, groups, step, starts, scales = self.launcher, self.groups, x.shape[1], None, None
        source = ExpertRows(x, 4 * step), step, ROW_COUNT, one.inputs, one.depth
        tiles, work = Unit(TILES, 1), groups.pairs * one.depth
        if self.round_inputs:
            product, parts = linear_int.OPS[one.bits, self.int_level], one.depth // one.group
            packed = ExpertRows(launcher.empty((groups.capacity * one.depth // 4,), np.uint32), one.depth)
            starts = ExpertRows(launcher.empty((groups.capacity * parts,), np.int32), 4 * parts)
            scales = ExpertRows(launcher.empty((groups.capacity,)), 4)
            made = one.group, 1 << (one.bits - 1), packed, starts, scales, stack.own("order")
            self._emit(quantize.quantize_tiles, *source, *made, unit=tiles, work=work)
        else:
            product = linear_int.FLOAT_OP
            packed = ExpertRows(launcher.empty((groups.capacity * one.depth,)), 4 * one.depth)
            self._emit(quantize.interleave_tiles, *source, packed, unit=tiles, work=work)
        out = launcher.empty((groups.capacity, width))
        scaling = stack.own("scales"), stack.own("group_scales"), stack.own("zeros"), stack.own("bias")
        target = ExpertRows(out, 4 * width), width, ROW_COUNT, activation, int(one.gated)
        weights = stack.own("data"), one.depth, one.group, *scaling
        self._emit_product(product, stack, *weights, packed, starts, scales, *target)
        return out


def _pieces_unit(width: int) -> Unit:
    return Unit(ROWS, max(1, -(-width // PIECE)))
