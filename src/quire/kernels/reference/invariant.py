"""The reference backend with every row computed by itself, so that its bits are the same in any batch.

torch chooses how a product or a sum is cut by the shape of what it is given, and computes the elements that fill a
vector with other instructions than the few left over. So the same row in another batch may differ in its last bits.
Here an op is given one row at a time, in memory of its own, and so always the same shape; attention is given one query
and the keys that this query sees.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams, TopLogprobs
from quire.kernels.experts import RoutingParams
from quire.kernels.reference.attention import attend, read
from quire.kernels.reference.backend import ReferenceBackend, ReferenceLinear
from quire.kernels.reference.experts import ReferenceExpert


def row_by_row(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return op(x), for x [T, ...], computed for each of the T rows apart; op keeps their number."""
    if x.shape[0] <= 1:
        return op(x.clone())
    return torch.cat([op(row.clone()) for row in x.split(1)])


class InvariantReferenceBackend(ReferenceBackend):
    """`ReferenceBackend`, slower, and with the same bits in any batch."""

    rows = "apart"

    def linear(self, x: torch.Tensor, weight: ReferenceLinear) -> torch.Tensor:
        wide = weight.weight.to(self._compute)
        return row_by_row(lambda row: self._multiply(row, weight, wide), x)

    def head_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        op = super().head_linear
        return torch.cat([op(token.clone(), weight) for token in x.split(weight.shape[0])])

    def route(self, logits: torch.Tensor, params: RoutingParams) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [super(InvariantReferenceBackend, self).route(row.clone(), params) for row in logits.split(1)]
        ids, weights = zip(*rows)
        return torch.cat(ids), torch.cat(weights)

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: list[ReferenceExpert], kind: str
    ) -> torch.Tensor:
        op = super().experts
        rows = zip(x.split(1), ids.split(1), weights.split(1))
        return torch.cat([op(row.clone(), own, weight, packed, kind) for row, own, weight in rows])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        op = super().rms_norm
        return row_by_row(lambda row: op(row, weight, eps), x)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        op = super().layer_norm
        return row_by_row(lambda row: op(row, weight, bias, eps), x)

    def activation(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        op = super().activation
        return row_by_row(lambda row: op(row, kind), x)

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        heads = q.reshape(q.shape[0], params.num_heads, params.head_size)
        out = heads.new_empty((*heads.shape[:2], params.out_size))
        starts, lengths = metadata.cu_query_lens.tolist(), metadata.seq_lens.tolist()
        for s, length in enumerate(lengths):
            for row in range(starts[s], starts[s + 1]):
                position = length - (starts[s + 1] - row)
                behind, ahead = params.reach
                seen = torch.arange(max(0, position - behind), min(length, position + 1 + ahead), device=q.device)
                keys, values = read(cache, metadata.block_tables[s], seen, params, self._compute)
                query = heads[row : row + 1].to(self._compute)
                out[row] = attend(query, seen.new_tensor([position]), keys, values, seen, params)[0].to(out.dtype)
        return out.reshape(q.shape[0], -1)

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> TopLogprobs:
        op = super().top_logprobs
        rows = [op(row.clone(), chosen[r : r + 1], k) for r, row in enumerate(logits.split(1))]
        return TopLogprobs(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
