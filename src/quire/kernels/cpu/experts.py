"""Mixtures of experts: routing, and sum over the chosen experts of weight * down(act(gate x) * up x).

Which expert computes which rows is known only when a program runs. So `group` emits an op that sorts pairs of a token
and an expert by expert, and writes down for each expert that has any where its rows begin and how many they are.
`Groups.emit` emits an op that carries out another one for every such expert, with that expert's rows and weights as
arguments. The inner ops are those of any product (products.py) and know nothing of this. Only weights of experts that
have rows are read. Then every token adds up its rows in the order of its choices.

Rows of an expert lie together, and as many more are kept as the tiles of products have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from quire.errors import ModelError
from quire.kernels.cpu import team, threads
from quire.kernels.cpu.activations import COST, NO_ACTIVATION, PIECE, activate_rows, pieces_of
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.interleave import ROW_GROUP, tile_height
from quire.kernels.cpu.jit import Op, jit, op
from quire.kernels.cpu.pointers import INT, f32_ptr, float64_from_bits, i64_ptr, intrinsic
from quire.kernels.cpu.products import BLOCKS, FULL_TILES, ROWS, ROWS_IN, TILES, ProductWeights, Weight, multiply
from quire.kernels.cpu.rows import copy_row
from quire.kernels.cpu.simd import (
    TILE_ROWS,
    add,
    div,
    exp,
    load,
    load_partial,
    mul,
    multiply_add,
    splat,
    store,
    store_lanes,
    sub,
)
from quire.kernels.cpu.sizes import DOT_ROWS, SCRATCH_BYTES, expert_rows
from quire.kernels.cpu.team import call_op, offset
from quire.kernels.cpu.threads import Launcher, address_of
from quire.kernels.experts import Expert, RoutingParams

# Routing


SCORINGS = ("softmax", "sigmoid", "softmax_chosen")
SOFTMAX, SIGMOID, SOFTMAX_CHOSEN = range(3)
MAX, TOP2 = range(2)
LOWEST = np.float32(-np.inf)
TINY = np.float32(1e-20)


@jit
def softmax(x, count):
    """Turn x[0 : count] into its softmax; what follows up to a multiple of sixteen is written to as well."""
    size, total = LOWEST, np.float32(0)
    for i in range(count):
        size = max(size, x[i])
    for i in range(0, count, 16):
        store(x, i, exp(sub(load(x, i), splat(size))))
    for i in range(count):
        total += x[i]
    for i in range(count):
        x[i] /= total


@jit
def score(logits, at, count, scoring, out):
    """Write the scores of logits[at : at + count] to `out`."""
    one = splat(np.float32(1))
    for i in range(0, count, 16):
        v = load_partial(logits, at + i, min(16, count - i))
        store(out, i, div(one, add(one, exp(sub(splat(np.float32(0)), v)))) if scoring == SIGMOID else v)
    if scoring == SOFTMAX:
        softmax(out, count)


@jit
def take_largest(values, start, stop, taken):
    """Return which of values[start : stop] is largest among those not taken yet, and take it."""
    best = np.int64(-1)
    for i in range(start, stop):
        if taken[i] == 0 and (best < 0 or values[i] > values[best]):
            best = i
    taken[best] = 1
    return best


@jit
def group_score(values, start, stop, rule):
    """Return the score of a group: its largest value, or for TOP2 the sum of its two largest."""
    first, second = LOWEST, LOWEST
    for i in range(start, stop):
        if values[i] > first:
            first, second = values[i], first
        elif values[i] > second:
            second = values[i]
    return first + second if rule == TOP2 and stop - start > 1 else first


@jit
def mask_groups(values, count, groups, chosen, rule, own, taken):
    """Set to -inf what is in no group of the `chosen` best; `own` and `taken` have room for all groups."""
    size = count // groups
    for g in range(groups):
        own[g], taken[g] = group_score(values, g * size, (g + 1) * size, rule), 0
    for _ in range(chosen):
        take_largest(own, 0, groups, taken)
    for g in range(groups):
        if taken[g] == 0:
            for i in range(g * size, (g + 1) * size):
                values[i] = LOWEST


@jit
def weigh(weights, at, count, scoring, renormalize, scale, room):
    """Make the scores of the chosen experts, weights[at : at + count], their weights."""
    if scoring == SOFTMAX_CHOSEN:
        for j in range(count):
            room[j] = weights[at + j]
        softmax(room, count)
        for j in range(count):
            weights[at + j] = room[j]
    if renormalize != 0:
        total = np.float32(0)
        for j in range(count):
            total += weights[at + j]
        for j in range(count):
            weights[at + j] /= total + TINY
    for j in range(count):
        weights[at + j] *= scale


@op
def route_rows(args, first, last, scratch):
    """One item is one row.

    Logits, their row step, experts, k, scoring, renormalize, scale, groups, chosen groups, their rule, bias or 0, ids,
    weights, values between two pieces of scratch.
    """
    logits, step, experts, chosen, scoring = f32_ptr(args[0]), args[1], args[2], args[3], args[4]
    scale, bias, ids, weights = np.float32(float64_from_bits(args[6])), args[10], i64_ptr(args[11]), f32_ptr(args[12])
    size = 4 * args[13]
    scores, compared, room = f32_ptr(scratch), f32_ptr(scratch + size), f32_ptr(scratch + 2 * size)
    taken = i64_ptr(scratch + 3 * size)
    for row in range(first, last):
        score(logits, row * step, experts, scoring, scores)
        for e in range(experts):
            value = scores[e] + f32_ptr(bias)[e] if bias != 0 else scores[e]
            compared[e] = value if value == value else LOWEST
        if args[7] > 1:
            mask_groups(compared, experts, args[7], args[8], args[9], room, taken)
        for e in range(experts):
            taken[e] = 0
        at = row * chosen
        for j in range(chosen):
            best = take_largest(compared, 0, experts, taken)
            ids[at + j], weights[at + j] = best, scores[best]
        weigh(weights, at, chosen, scoring, args[5], scale, room)


def route(launcher: Launcher, logits: np.ndarray, params: RoutingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int64 [T, k] and weights float32 [T, k], see `Backend.route`; logits [T, E]."""
    source, step = as_rows(logits)
    tokens, experts, chosen = source.shape[0], params.num_experts, params.top_k
    if source.shape[1] != experts:
        raise ValueError(f"route: logits are {source.shape}, of {experts} experts")
    ids, weights = launcher.empty((tokens, chosen), np.int64), launcher.empty((tokens, chosen))
    room = -(-experts // 16) * 16
    assert room * 20 <= SCRATCH_BYTES, "scores fit an op's scratch"
    rule = MAX if params.group_score == "max" else TOP2
    scoring = SCORINGS.index(params.scoring), int(params.renormalize), float(params.scale)
    grouping = params.num_groups, params.top_groups, rule
    args = source, step, experts, chosen, *scoring, *grouping, params.bias, ids, weights, room
    launcher.emit(route_rows, *args, items=tokens, work=tokens * experts * (chosen + 8))
    return ids, weights


# Grouped instructions


# A record of an expert that has rows: its number, its first row, how many rows, and, counted from the first expert on,
# rows, tiles of DOT_ROWS, whole tiles of TILE_ROWS, and groups of ROW_GROUP before it (ROWS to BLOCKS of products.py).
# The last record ends the counts.
RECORD = 8
EXPERT, FIRST, COUNT = range(3)
INNER_ARGS = team.ROW - team.ARGS
ADVANCE, LOOK_UP, PUT_COUNT = range(3)  # what becomes of an argument
PATCH = 3  # int64 of one: which argument, what becomes of it, with what


class ExpertRows(NamedTuple):
    """An argument that becomes the address of an expert's first row in `array`, whose rows are `step` bytes apart."""

    array: np.ndarray
    step: int


class ExpertArray(NamedTuple):
    """An argument that becomes the expert's entry of `table`, int64 [E]."""

    table: np.ndarray


class ExpertRowCount:
    """An argument that becomes the number of the expert's rows."""


class RowSplit(NamedTuple):
    """The items of a grouped instruction: `factor` for each row, tile or block (the granularity, see products.py)."""

    granularity: int
    factor: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a token and an expert, sorted by expert: the `products.ProductRows` of a grouped product.

    Attributes:
        records: int64, one for each expert that has rows, see RECORD. words: the number of records, then the number of
            items for each of `splits`.
        places: int64 [count], the row of each pair.
        splits: those of the instructions that may follow. count, padded: number of pairs, and of rows kept for them.
    """

    launcher: Launcher
    records: np.ndarray
    words: np.ndarray
    places: np.ndarray
    splits: tuple[RowSplit, ...]
    count: int
    padded: int

    @property
    def row_count(self) -> ExpertRowCount:
        return ExpertRowCount()

    def capacity(self, granularity: int) -> int:
        return self.padded

    def rows_of(self, array: np.ndarray, row_bytes: int) -> ExpertRows:
        return ExpertRows(array, row_bytes)

    def array_of(self, weights: ProductWeights, name: str) -> ExpertArray | None:
        return None if getattr(weights.one, name) is None else ExpertArray(weights.addresses[name])

    def emit(
        self, op: Op, *args: Any, granularity: int, factor: int, work: int, weights: ProductWeights | None = None
    ) -> None:
        """Emit `op` for the rows of every expert; `granularity` and `factor` must be among `splits`."""
        assert len(args) <= INNER_ARGS, f"{op.name} has too many arguments"
        words, patches = np.zeros(INNER_ARGS, np.int64), []
        for place, arg in enumerate(args):
            if isinstance(arg, ExpertRows):
                words[place] = address_of(arg.array)
                patches += [place, ADVANCE, arg.step]
            elif isinstance(arg, ExpertArray):
                patches += [place, LOOK_UP, address_of(arg.table)]
            elif isinstance(arg, ExpertRowCount):
                patches += [place, PUT_COUNT, 0]
            elif arg is not None:
                words[place] = int(arg)
        at = 1 + self.splits.index(RowSplit(granularity, factor))
        # All pairs may have the same expert, or as many as there are.
        most = factor * self.count
        fewest = factor * -(-self.count // ROWS_IN[granularity])
        patched = op.address, words, len(patches) // PATCH, np.array(patches, np.int64)
        self.launcher.emit(
            each_group,
            *(self.records, self.words, granularity, factor, *patched),
            items=most,
            work=work,
            items_at=self.words[at : at + 1],
            alone_below=1 + threads.SMALL_WORK * most // max(1, work),
            grain=max(1, fewest // (self.launcher.num_threads * threads.PIECES)),
            holds=weights,
        )


@op
def group_pairs(args, first, last, scratch):
    """ids, pairs, experts, records, words, places, number of splits, then the granularity and factor of each."""
    ids, pairs, experts = i64_ptr(args[0]), args[1], args[2]
    records, words, places = i64_ptr(args[3]), i64_ptr(args[4]), i64_ptr(args[5])
    counts = i64_ptr(scratch)
    for e in range(experts):
        counts[e] = 0
    for p in range(pairs):
        counts[ids[p]] += 1
    at, row, rows, tiles, whole, blocks = 0, 0, 0, 0, 0, 0
    for e in range(experts + 1):
        count = counts[e] if e < experts else 0
        if count > 0 or e == experts:
            records[at + EXPERT], records[at + FIRST], records[at + COUNT] = e, row, count
            records[at + ROWS], records[at + TILES] = rows, tiles
            records[at + FULL_TILES], records[at + BLOCKS] = whole, blocks
            at += RECORD
        if count > 0:
            counts[e] = row
            rest = count % DOT_ROWS
            row += count - rest + (tile_height(rest) if rest > 0 else 0)
            rows += count
            tiles += (count + DOT_ROWS - 1) // DOT_ROWS
            whole += count // TILE_ROWS
            blocks += (count + ROW_GROUP - 1) // ROW_GROUP
    words[0] = at // RECORD - 1
    for u in range(args[6]):
        words[1 + u] = records[at - RECORD + args[7 + 2 * u]] * args[8 + 2 * u]
    for p in range(pairs):
        places[p] = counts[ids[p]]
        counts[ids[p]] += 1


@intrinsic(types.CPointer(INT))
def own_arguments(b):
    """Return memory for the arguments of one op, on the stack."""
    return cgutils.alloca_once(b, ir.IntType(64), size=INNER_ARGS)


@jit
def record_of(records, count, granularity, before):
    """Return the number of the record in which row, tile or block number `before` lies."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if records[middle * RECORD + granularity] <= before:
            low = middle
        else:
            high = middle
    return low


@op
def each_group(args, first, last, scratch):
    """records, words, granularity and factor, inner op, its arguments, number of patches, patches."""
    records, granularity, factor = i64_ptr(args[0]), args[2], args[3]
    arguments, patches = i64_ptr(args[5]), i64_ptr(args[7])
    own = own_arguments()
    place = record_of(records, i64_ptr(args[1])[0], granularity, first // factor)
    while first < last:
        record = offset(records, place * RECORD)
        begin, end = record[granularity] * factor, record[RECORD + granularity] * factor
        for i in range(INNER_ARGS):
            own[i] = arguments[i]
        for p in range(args[6]):
            which, what, value = patches[p * PATCH], patches[p * PATCH + 1], patches[p * PATCH + 2]
            if what == ADVANCE:
                own[which] += record[FIRST] * value
            elif what == LOOK_UP:
                own[which] = i64_ptr(value)[record[EXPERT]]
            else:
                own[which] = record[COUNT]
        stop = min(last, end)
        if stop > first:
            call_op(args[4], own, first - begin, stop - begin, scratch)
            first = stop
        place += 1


def group(launcher: Launcher, ids: np.ndarray, experts: int, splits: tuple[RowSplit, ...]) -> Groups:
    """Emit the sorting of pairs by their experts, ids int64 [T, k] of `route`; `splits`: see `Groups`."""
    assert ids.dtype == np.int64 and ids.flags.c_contiguous
    assert 8 * experts <= SCRATCH_BYTES, "counts fit an op's scratch"
    pairs = ids.size
    active = min(pairs, experts)
    records = launcher.empty(((active + 1) * RECORD,), np.int64)
    words, places = launcher.empty((1 + len(splits),), np.int64), launcher.empty((pairs,), np.int64)
    settings = [number for split in splits for number in split]
    args = ids, pairs, experts, records, words, places, len(splits), *settings
    launcher.emit(group_pairs, *args, items=1, work=4 * (pairs + experts), alone_below=2)
    return Groups(launcher, records, words, places, splits, pairs, expert_rows(pairs, experts))


# Experts


@dataclass(frozen=True, slots=True)
class CPUExperts:
    """All experts of a layer: their gate and up projections, and their down projections."""

    first: ProductWeights
    last: ProductWeights

    @property
    def splits(self) -> tuple[RowSplit, ...]:
        """The splits of all instructions that may follow the grouping."""
        products = [RowSplit(BLOCKS, weights.factor) for weights in (self.first, self.last)]
        pieces = RowSplit(ROWS, pieces_of(self.first.one.outputs // 2))
        return tuple(dict.fromkeys((RowSplit(TILES, 1), RowSplit(FULL_TILES, 1), *products, pieces)))


def pack_experts(experts: Iterable[Expert], pack_linear: Callable[..., Weight]) -> CPUExperts:
    """Pack experts one by one with the backend's `pack_linear`. Raises ModelError where they differ in format."""
    pairs = [(pack_linear(*expert.first, gated=True), pack_linear(*expert.last)) for expert in experts]
    both = [ProductWeights(matrices) for matrices in zip(*pairs, strict=True)]
    for weights in both:
        if any(_kind(matrix) != _kind(weights.one) for matrix in weights.matrices):
            raise ModelError("the experts of a layer are quantized in different ways (expected the same for all)")
    return CPUExperts(*both)


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
            store_lanes(out, row * width + i, total, min(16, width - i))


# What a backend calls


def experts(
    launcher: Launcher,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    packed: CPUExperts,
    activation_id: int,
    vnni: bool,
    round_inputs: bool,
) -> np.ndarray:
    """Return float32 [T, H], see `Backend.experts`. Arguments are those of `products.linear`."""
    x, step = as_rows(x)
    tokens, chosen = ids.shape
    if x.shape[1] != packed.first.one.inputs:
        raise ValueError(f"experts: x is {x.shape}, the experts have {packed.first.one.inputs} inputs")
    if tokens == 0:
        return launcher.empty((0, packed.last.one.outputs))
    groups = group(launcher, ids, len(packed.first.matrices), packed.splits)
    gathered = launcher.empty((groups.padded, x.shape[1]))
    sizes = {"items": groups.count, "work": 3 * groups.count * x.shape[1]}
    launcher.emit(gather_rows, x, step, x.shape[1], groups.places, chosen, gathered, **sizes)
    settings = vnni, round_inputs
    if packed.first.one.gated:
        inner = multiply(groups, gathered, x.shape[1], packed.first, activation_id, *settings)
    else:
        both = multiply(groups, gathered, x.shape[1], packed.first, NO_ACTIVATION, *settings)
        inner = _gate(groups, both, packed, activation_id)
        del both
    del gathered
    results = multiply(groups, inner, inner.shape[1], packed.last, NO_ACTIVATION, *settings)
    del inner
    width = packed.last.one.outputs
    out = launcher.empty((tokens, width))
    pieces = pieces_of(width)
    summed = results, results.shape[1], groups.places, weights, chosen, out, width, pieces
    launcher.emit(combine_expert_rows, *summed, items=tokens * pieces, work=2 * groups.count * width)
    return out


def _gate(groups: Groups, both: np.ndarray, packed: CPUExperts, activation_id: int) -> np.ndarray:
    """Return activation(gate) * up of products whose columns do not alternate, [capacity, I]."""
    width = packed.first.one.outputs // 2
    out, pieces = groups.launcher.empty((groups.padded, width)), pieces_of(width)
    args = (
        groups.rows_of(both, 4 * both.shape[1]),
        both.shape[1],
        groups.rows_of(out, 4 * width),
        width,
        activation_id,
        1,
        pieces,
    )
    groups.emit(activate_rows, *args, granularity=ROWS, factor=pieces, work=COST * groups.count * width)
    return out
