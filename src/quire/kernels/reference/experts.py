"""Mixtures of experts in plain torch: which expert computes which token, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.backend import LinearWeight
from quire.kernels.experts import Expert, RoutingParams


@dataclass(frozen=True, slots=True)
class ReferenceExpert:
    """What `pack_linear` makes of gate and up together, and of down."""

    gate_up: LinearWeight
    down: LinearWeight

    @classmethod
    def pack(cls, expert: Expert, pack_linear: Callable[..., LinearWeight]) -> ReferenceExpert:
        """Pack one expert."""
        return cls(pack_linear(*expert.first, gated=True), pack_linear(*expert.last))


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See "swiglu_oai" at `Backend.gated_linear`."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def route(logits: torch.Tensor, params: RoutingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Backend.route`."""
    logits = logits.float()
    if params.scoring == "softmax_chosen":
        ids = best(logits, params.top_k)
        weights = torch.softmax(logits.gather(1, ids), dim=-1)
    else:
        scores = torch.softmax(logits, dim=-1) if params.scoring == "softmax" else torch.sigmoid(logits)
        compared = scores if params.bias is None else scores + params.bias
        ids = best(within_groups(compared, params), params.top_k)
        weights = scores.gather(1, ids)
    if params.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * params.scale


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` largest of each row, the lower id first among equals, NaN after all others."""
    known = torch.where(scores.isnan(), -torch.inf, scores)
    return torch.sort(known, dim=-1, descending=True, stable=True).indices[:, :count]


def within_groups(scores: torch.Tensor, params: RoutingParams) -> torch.Tensor:
    """Return scores [T, E], -inf for experts of groups that are not chosen."""
    if params.num_groups == 1:
        return scores
    groups = scores.unflatten(1, (params.num_groups, -1))
    if params.group_score == "max":
        standing = groups.amax(dim=-1)
    else:
        standing = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(standing, dtype=torch.bool).scatter(1, best(standing, params.top_groups), True)
    return torch.where(chosen[:, :, None], groups, -torch.inf).flatten(1)


def mix_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[ReferenceExpert],
    compute: Callable[[torch.Tensor, ReferenceExpert], Any],
) -> torch.Tensor:
    """Return the weighted sum of compute(row, expert) over each row's experts; sums go by the order of `ids`."""
    outputs = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
    for number, expert in enumerate(experts):
        tokens, places = torch.where(ids == number)
        if len(tokens):
            outputs[tokens, places] = compute(x[tokens], expert)
    out = torch.zeros_like(x)
    for place in range(ids.shape[1]):
        out = out + weights[:, place, None] * outputs[:, place]
    return out
