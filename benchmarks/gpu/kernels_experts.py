"""Routing and experts on a GPU, at the shapes of Qwen3-30B-A3B and GPT-OSS-120B.

All experts of a layer are far larger than L2, and choices take turns, so that a repetition finds few of its weights
there. Bytes are those of the experts that were chosen, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from benchmarks.gpu.case import Case, Run, Tuning
from torch.nn import functional as F

from quire.kernels.experts import RoutingParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.experts import PackedExperts, few_pairs
from quire.kernels.gpu.linear_weights import GPULinear

TURNS = 8
TOKENS = (1, 4, 16, 64, 256, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer: its experts, how many a token has, and their sizes."""

    name: str
    number: int
    top_k: int
    hidden: int
    inner: int

    @property
    def expert_elements(self) -> int:
        """Elements of the matrices of one expert."""
        return 3 * self.hidden * self.inner


SHAPES = (Shape("30B-A3B", 128, 8, 2048, 768), Shape("120B", 128, 4, 2880, 2880))


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; sizes, and numbers of experts, are divided by `scale`, for tests."""
    for shape in SHAPES:
        least = max(1, shape.number // scale, shape.top_k)
        small = Shape(shape.name, least, shape.top_k, shape.hidden // scale, shape.inner // scale)
        packed = new_experts(backend, small)
        for tokens in dict.fromkeys(max(1, tokens // scale) for tokens in TOKENS):
            yield experts(backend, small, packed, tokens)
        del packed
    for tokens in (1, 64, 2048):
        yield route(backend, max(1, tokens // scale))


def new_experts(backend: GPUBackend, shape: Shape) -> PackedExperts:
    """Return a layer's experts, random."""

    def stack(outputs: int, inputs: int) -> GPULinear:
        made = torch.empty((shape.number, outputs, inputs), dtype=backend.act, device=backend.device)
        made = made.normal_(std=0.02) if backend.device.type == "cuda" else made.zero_()
        return GPULinear("float", made, outputs, inputs, inputs)

    return PackedExperts(stack(2 * shape.inner, shape.hidden), stack(shape.hidden, shape.inner))


def draw_ids(shape: Shape, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Return choices of experts, all equally likely, for each turn."""
    scores = torch.rand((TURNS, tokens, shape.number), generator=torch.Generator().manual_seed(tokens))
    return list(scores.topk(shape.top_k).indices.to(device))


def _candidates(rows: bool) -> list[dict[str, int]]:
    """Return tiles to try: of experts by rows, or by blocks."""
    if rows:
        return [
            {"BN": n, "BK": k, "num_warps": warps, "num_stages": stages}
            for n in (4, 8, 16, 32)
            for k in (128, 256, 512)
            for warps in (4, 8)
            for stages in (2, 3, 4)
            if n * k <= 4096 * warps // 4
        ]
    return [
        {"BN": n, "BK": k, "num_warps": warps, "num_stages": stages}
        for n in (32, 64, 128)
        for k in (64, 128)
        for warps in (4, 8)
        for stages in (3, 4)
        if n * k <= 8192
    ]


def experts(backend: GPUBackend, shape: Shape, packed: PackedExperts, tokens: int) -> Case:
    """Return `experts` of so many tokens."""
    ids = draw_ids(shape, tokens, backend.device)
    weights = torch.rand((tokens, shape.top_k), device=backend.device)
    x = torch.randn((tokens, shape.hidden), device=backend.device).to(backend.act)
    read = sum(len(own.unique()) for own in ids) / TURNS
    pairs, size = tokens * shape.top_k, backend.act.itemsize
    passed = 2 * tokens * shape.hidden + 2 * pairs * shape.inner
    rows = not backend.batch_invariant and few_pairs(tokens, shape.top_k, shape.number)
    if rows:
        kernel, key = "experts_rows_in", f"h{shape.hidden}_i{shape.inner}_pairs{pairs}"
    else:
        kernel, key = "experts_in", f"h{shape.hidden}_i{shape.inner}_m{backend._block_size(pairs, shape.number)}"
    return Case(
        f"experts {shape.name} T={tokens}",
        lambda turn: backend.experts(x, ids[turn % TURNS], weights, packed, "silu"),
        size * (read * shape.expert_elements + passed),
        2.0 * pairs * shape.expert_elements,
        against=_grouped(x, ids, packed, shape),
        tuning=Tuning(kernel, key, _candidates(rows)),
    )


def _grouped(x: torch.Tensor, ids: list[torch.Tensor], packed: PackedExperts, shape: Shape) -> dict[str, Run]:
    """Return torch's own grouped products of rows that are sorted already, where it has them."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return {}
    sorted_rows = []
    for own in ids:
        order = own.flatten().argsort()
        ends = own.flatten().bincount(minlength=shape.number).cumsum(0).to(torch.int32)
        sorted_rows.append((x[order // shape.top_k], ends))

    def run(turn: int) -> torch.Tensor:
        rows, ends = sorted_rows[turn % TURNS]
        gate, up = torch._grouped_mm(rows, packed.first.data.mT, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, packed.last.data.mT, offs=ends)

    return {"grouped_mm, sorted": run}


def route(backend: GPUBackend, tokens: int) -> Case:
    """Return routing of so many tokens."""
    params = RoutingParams(128, 8, renormalize=True)
    logits = torch.randn((tokens, 128), device=backend.device)

    def torch_route(_: int) -> torch.Tensor:
        weights, _ids = logits.softmax(dim=-1).topk(8)
        return weights / weights.sum(dim=-1, keepdim=True)

    return Case(
        f"route 8 of 128 T={tokens}",
        lambda turn: backend.route(logits, params),
        tokens * (128 * 4 + 8 * 12),
        against={"softmax, topk": torch_route},
    )
