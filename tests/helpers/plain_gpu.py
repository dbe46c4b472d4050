"""A backend with a GPU's graphs and the reference's ops: tests of graphs need no kernels, and see no rounding.

What the reference works out on the host, attention and states, is here done on the device, as a graph needs it.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.graphs import GraphOps, splitting_op
from quire.kernels.reference.attention import visible
from quire.kernels.reference.backend import ReferenceBackend
from tests.helpers.graph_tape import TapeCapture


class PlainGPU(GraphOps, ArrayOps, ReferenceBackend):
    """Float32 on tensors in host memory. `capture` is a tape; None computes everything op by op.

    `asides` counts calls of ops that follow the step, `whole` those of them that had no lengths to go by.
    """

    name = "reference"
    _compute = torch.float64
    _round_linear_inputs = False

    def __init__(self, capture: TapeCapture | None = None, max_graph_tokens: int = 64) -> None:
        self._given = capture
        super().__init__("float32", "float32", "cpu", max_cudagraph_capture_size=max_graph_tokens)
        self.asides = self.whole = 0

    def new_capture(self) -> Any:
        """The one of the test."""
        return self._given

    def _count(self, metadata: AttentionMetadata) -> None:
        self.asides += 1
        self.whole += metadata.lengths is None
        if metadata.lengths is not None:  # of this step, not of the one that was captured
            assert metadata.seq_lens.tolist() == list(metadata.lengths.seq_lens)
            assert torch.diff(metadata.cu_query_lens).tolist() == list(metadata.lengths.query_lens)

    def new_kv_cache(self, num_blocks: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Backend.new_kv_cache`; one block more, where slots of -1 are written."""
        return super().new_kv_cache(num_blocks + 1, *args, **kwargs)

    @splitting_op(lambda self, q, cache, metadata, params, fresh=None: (len(q), params.num_heads * params.out_size))
    def paged_attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        fresh: Any = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.paged_attention`: every row with all that its block table names, masked."""
        self._count(metadata)
        rows = torch.arange(len(q))
        if metadata.single:
            own, positions = rows, metadata.seq_lens - 1
        else:
            own = (rows[:, None] >= metadata.cu_query_lens[None, 1:]).sum(1).clamp(max=len(metadata.seq_lens) - 1)
            positions = metadata.seq_lens[own] - metadata.cu_query_lens[own + 1] + rows
        tables = metadata.block_tables[own].long()
        keys, values = (side[tables].flatten(1, 2).to(self._compute) for side in cache)  # [T, P, Hkv, D]
        places = torch.arange(keys.shape[1])
        seen = visible(positions, places, params) & (places < metadata.seq_lens[own][:, None])
        group = params.num_heads // params.num_kv_heads
        keys, values = (x.masked_fill(~seen[..., None, None], 0).repeat_interleave(group, 2) for x in (keys, values))
        heads = q.unflatten(1, (params.num_heads, -1)).to(self._compute)
        logits = params.scale * torch.einsum("thd,tphd->thp", heads, keys)
        weights = torch.softmax(logits.masked_fill(~seen[:, None], float("-inf")), -1)
        result = torch.einsum("thp,tphd->thd", weights, values).flatten(1).float()
        return result if out is None else out.copy_(result)

    @splitting_op(lambda self, x, *args, **kwargs: tuple(x.shape))
    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> torch.Tensor:
        """See `Backend.causal_conv`."""
        self._count(metadata)
        if not metadata.single:
            return super().causal_conv(x, weight, bias, state, metadata, activation)
        rows = metadata.state_rows
        known = state[rows].masked_fill((metadata.seq_lens == 1)[:, None, None], 0)
        window = torch.cat([known, x[:, None]], 1)
        total = sum(window[:, tap].to(self._compute) * weight[tap] for tap in range(weight.shape[0]))
        state[rows] = window[:, 1:]
        out = (total if bias is None else total + bias).float()
        return out if activation is None else self.activation(out, activation)

    @splitting_op(lambda self, q, k, v, *args: tuple(v.shape))
    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `Backend.gated_delta`."""
        self._count(metadata)
        if not metadata.single:
            return super().gated_delta(q, k, v, decay, beta, state, metadata)
        _, heads, depth, width = state.shape
        rows, shared = metadata.state_rows, heads * depth // k.shape[1]
        queries, keys = (x.unflatten(-1, (-1, depth)).repeat_interleave(shared, 1).to(self._compute) for x in (q, k))
        matrix = state[rows].masked_fill((metadata.seq_lens == 1)[:, None, None, None], 0).to(self._compute)
        matrix = matrix * decay.to(self._compute).exp()[..., None, None]
        delta = v.unflatten(-1, (heads, width)) - (keys[..., None] * matrix).sum(2)
        matrix = matrix + keys[..., None] * (delta * beta[..., None])[:, :, None]
        state[rows] = matrix.float()
        return (queries[..., None] * matrix).sum(2).flatten(1).float()
