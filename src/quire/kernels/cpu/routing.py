"""Choosing experts: the op that turns a router's logits into numbers of experts and their weights."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, float64_from_bits, i64_ptr
from quire.kernels.cpu.simd import add, div, exp, load, load_partial, splat, store, sub
from quire.kernels.cpu.threads import SCRATCH_BYTES, Launcher
from quire.kernels.experts import RoutingParams

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
    """Return what a group is compared by."""
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
