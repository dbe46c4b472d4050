"""Choosing tokens from logits, in torch on the host and in float64: what `sample` and `top_logprobs` mean, spelled out.

Float64 makes the choice the same on every backend: two ways of adding up a vocabulary differ by some 1e-13.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.kernels.backend import SamplingOptions, TopLogprobs


def sample_row(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Choose one token of one row of float32 logits [V]; the order of the steps is that of `Backend.sample`."""
    top = logits.max()
    if temperature == 0 or not torch.isfinite(top):
        return int((logits == top).nonzero()[0, 0]) if not torch.isnan(top) else 0
    weights = ((logits.double() - top.double()) / temperature).exp()
    keep = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.shape[0]:
        keep &= logits >= logits.topk(top_k).values[-1]
    keep &= weights >= min_p
    order = torch.sort(logits, descending=True, stable=True).indices
    order = order[keep[order]]
    cumulative = weights[order].cumsum(0)
    kept = cumulative.shape[0]
    if top_p < 1:
        kept = min(kept, 1 + int((cumulative < top_p * cumulative[-1]).sum()))
    mass = float(cumulative[kept - 1])
    goal = min(uniform * mass, math.nextafter(mass, 0.0))  # rounding must not push the goal past the last token
    return int(order[int((cumulative <= goal).sum())])


def sample_rows(logits: torch.Tensor, options: SamplingOptions, uniforms: np.ndarray) -> np.ndarray:
    """Apply `sample_row` to each row of logits [R, V] -> int64 [R]."""
    host = logits.float().cpu()
    rows = zip(host, *(column.tolist() for column in (*options, uniforms)), strict=True)
    return np.array([sample_row(*row) for row in rows], dtype=np.int64)


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, k: int) -> TopLogprobs:
    """See `Backend.top_logprobs`."""
    host = logits.float().cpu()
    ids = chosen.cpu()[:, None]
    logprobs = torch.log_softmax(host.double(), dim=-1)
    best = torch.sort(host, dim=-1, descending=True, stable=True).indices[:, :k]
    ids_and_best = torch.cat([ids, best], dim=1)
    ranks = 1 + (host > host.gather(1, ids)).sum(dim=1)
    found = ids_and_best, logprobs.gather(1, ids_and_best).float(), ranks
    return TopLogprobs(*(array.to(logits.device) for array in found))
