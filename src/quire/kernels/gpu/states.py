"""Layers with states: short convolutions and the gated delta rule.

Which kernel computes what; they are in `states_conv.py`, `states_delta.py` and `states_chunks.py`. Sequences of a
padded step that are not there (a seq_len of 0) have no state that is read or written.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu import states_chunks, states_delta
from quire.kernels.gpu.activations import KINDS, activation_number
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.graphs_pieces import follows_step
from quire.kernels.gpu.norms import as_rows
from quire.kernels.gpu.states_conv import convolve

FEW_TOKENS = 32  # one after the other they are done before chunks of them would be prepared


class StateOps(ArrayOps):
    """Layers with states."""

    @follows_step(lambda self, x, *args, **kwargs: tuple(x.shape))
    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> torch.Tensor:
        kind = KINDS["none"] if activation is None else activation_number(activation, gated=False)
        return convolve(as_rows(x), weight, bias, state, metadata, kind, self.act)

    @follows_step(lambda self, q, k, v, *args: tuple(v.shape))
    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`out` is what recordings in pieces want written.

        How a prompt is cut into steps shows in the last bits, unless results must not depend on the batch.
        """
        out = torch.empty(v.shape, dtype=self.act, device=v.device) if out is None else out
        if v.shape[0] == 0:
            return out
        one_by_one = metadata.single or self.batch_invariant or v.shape[0] <= FEW_TOKENS
        compute = states_delta.scan if one_by_one else states_chunks.advance
        compute(as_rows(q), as_rows(k), as_rows(v), as_rows(decay), as_rows(beta), state, metadata, out)
        return out

    def copy_states(self, state: torch.Tensor, pairs: np.ndarray) -> None:
        """All at once, each from where its last source had its own from."""
        origins: dict[int, int] = {}
        for source, destination in pairs.tolist():
            origins[destination] = origins.get(source, source)
        if origins:
            rows = self.from_numpy(np.array([list(origins), list(origins.values())], np.int64))
            state.index_copy_(0, rows[0], state.index_select(0, rows[1]))
