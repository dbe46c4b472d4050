"""Routing: which experts a row goes to, and with which weights, as one Triton kernel. What experts compute is not here.

One program of one warp has one row, whose experts lie before it as a table of groups and their members. The best ones
are found one after the other by a maximum over keys in which an expert's score comes first and its number second, so
that there are no equals. A row of 128 experts is half a kilobyte: the time is that of a launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts import RoutingParams
from quire.kernels.gpu.kernel_args import power_of_two, rows_of
from quire.kernels.gpu.logits_kernels import key_of

TAKEN = tl.constexpr(-(1 << 63))  # below every key
LAST = tl.constexpr(0x7FFFFFFF)  # all bits but the sign


@triton.jit
def sort_key(values, numbers):
    """Return int64 keys in the order of float32 values, NaN as -inf; among equals the lower number has the higher."""
    known = tl.where(values != values, float("-inf"), values)
    return (key_of(known).to(tl.int64) << 32) | (numbers ^ LAST).to(tl.int64)


@triton.jit
def key_number(key):
    """Return the number in a key."""
    return ((key & 0xFFFFFFFF) ^ LAST).to(tl.int32)


@triton.jit
def _all_max(x):
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def _all_sum(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _group_standing(compared, valid, members, FORM: tl.constexpr, SIZE: tl.constexpr):
    """Return what groups are compared by, float32 [G]; NaN for one with a NaN, as sums and maxima of them would be."""
    known = tl.where(valid & (compared == compared), compared, float("-inf"))
    odd = tl.max(tl.where(valid & (compared != compared), 1, 0), axis=1)
    first = tl.max(known, axis=1)
    if FORM.rule == "top2" and SIZE > 1:
        place = tl.min(tl.where(known == first[:, None], members, LAST), axis=1)
        first += tl.max(tl.where(members == place[:, None], float("-inf"), known), axis=1)
    return tl.where(odd > 0, float("nan"), first)


@triton.jit
def _keep_groups(keys, standing, groups, lowest, GROUPS: tl.constexpr, TOP: tl.constexpr):
    """Return keys in which experts of all but the TOP best groups are `lowest`, the keys of -inf."""
    order = tl.where(groups < GROUPS, sort_key(standing[:, None], groups), TAKEN)
    kept = groups < 0
    for _ in range(TOP):
        best = _all_max(order)
        kept |= order == best
        order = tl.where(order == best, TAKEN, order)
    return tl.where(kept, keys, lowest)


class Routing(NamedTuple):
    """What routing is compiled for, see `RoutingParams`; G, S and K are groups, the experts of a group, and top_k, made
    powers of two.
    """

    experts: int
    top_k: int
    scoring: str
    renormalize: bool
    groups: int
    top_groups: int
    rule: str
    G: int
    S: int
    K: int


@triton.jit
def _route_row(logits, bias, ids, weights, scale, FORM: tl.constexpr):
    """Route one row: logits are `Rows` [T, E], bias float32 [E] or None; ids int64 and weights float32 [T, k]."""
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = FORM.experts // FORM.groups
    groups, members = tl.arange(0, FORM.G)[:, None], tl.arange(0, FORM.S)[None, :]
    number = groups * size + members
    valid = (groups < FORM.groups) & (members < size)
    own = tl.load(logits.data + row * logits.stride + number, valid, other=float("-inf")).to(tl.float32)
    scores = own
    if FORM.scoring == "softmax":
        # A maximum may or may not see NaN; the sum does.
        scores = tl.exp(own - _all_max(own))
        scores = scores / _all_sum(tl.where(valid, scores, 0.0))
    elif FORM.scoring == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-own))
    compared = scores
    if bias is not None:
        compared = scores + tl.load(bias + number, valid, other=0.0)
    keys = sort_key(compared, number)
    if FORM.groups > 1:
        standing = _group_standing(compared, valid, members, FORM, size)
        lowest = sort_key(tl.zeros_like(own) - float("inf"), number)
        keys = _keep_groups(keys, standing, groups, lowest, FORM.groups, FORM.top_groups)
    keys = tl.where(valid, keys, TAKEN)
    places = tl.arange(0, FORM.K)
    chosen, weight = places * 0, places * 0.0
    for place in range(FORM.top_k):
        best = _all_max(keys)
        mine = keys == best
        chosen = tl.where(places == place, key_number(best), chosen)
        weight = tl.where(places == place, _all_sum(tl.where(mine, scores, 0.0)), weight)
        keys = tl.where(mine, TAKEN, keys)
    real = places < FORM.top_k
    if FORM.scoring == "softmax_chosen":
        weight = tl.exp(weight - tl.max(tl.where(real, weight, float("-inf")), axis=0))
        weight = weight / tl.sum(tl.where(real, weight, 0.0), axis=0)
    if FORM.renormalize:
        weight = weight / (tl.sum(tl.where(real, weight, 0.0), axis=0) + 1e-20)
    tl.store(ids + row * FORM.top_k + places, chosen.to(tl.int64), real)
    tl.store(weights + row * FORM.top_k + places, weight * scale, real)


def route(logits: torch.Tensor, params: RoutingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int64 [T, k] and weights float32 [T, k] for logits [T, E], see `Backend.route`."""
    tokens, top_k, groups = logits.shape[0], params.top_k, params.num_groups
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return ids, weights
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    # A choice by logits has groups in no model, and in no backend.
    groups = 1 if params.scoring == "softmax_chosen" else groups
    padded = power_of_two(groups), power_of_two(params.num_experts // groups), power_of_two(top_k)
    rules = params.scoring, params.renormalize, groups, params.top_groups, params.group_score
    form = Routing(params.num_experts, top_k, *rules, *padded)
    _route_row[(tokens,)](rows_of(logits), params.bias, ids, weights, params.scale, FORM=form, num_warps=1)
    return ids, weights
