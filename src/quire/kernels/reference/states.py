"""Layers with states in torch: the short convolution and the gated delta rule, one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels.backend import AttentionMetadata


def _sequences(metadata: AttentionMetadata) -> Iterator[tuple[slice, int, bool]]:
    """Yield each sequence's tokens of the step, its row in the states, and whether it starts from zeros."""
    assert metadata.state_rows is not None, "a model with states has rows for them"
    starts, lengths, rows = (x.tolist() for x in (metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows))
    for start, stop, length, row in zip(starts, starts[1:], lengths, rows):
        yield slice(start, stop), row, length == stop - start


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    metadata: AttentionMetadata,
    compute: torch.dtype,
) -> torch.Tensor:
    """See `Backend.causal_conv`, but for the activation. Sums are taken in `compute`."""
    taps = weight.shape[0]
    out = torch.empty_like(x)
    for tokens, row, fresh in _sequences(metadata):
        if fresh:
            state[row] = 0
        inputs = torch.cat([state[row], x[tokens]])
        count = tokens.stop - tokens.start
        total = sum(inputs[tap : tap + count].to(compute) * weight[tap] for tap in range(taps))
        out[tokens] = (total if bias is None else total + bias).float()
        state[row] = inputs[count:]
    return out


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    metadata: AttentionMetadata,
    compute: torch.dtype,
) -> torch.Tensor:
    """See `Backend.gated_delta`. A step's tokens are computed in `compute`; between steps the state is float32."""
    _, heads, depth, width = state.shape
    shared = heads * depth // k.shape[1]
    queries, keys = (x.unflatten(-1, (-1, depth)).repeat_interleave(shared, 1).to(compute) for x in (q, k))
    values, factors = v.unflatten(-1, (heads, width)).to(compute), decay.to(compute).exp()[..., None, None]
    out = torch.empty(q.shape[0], heads, width, dtype=q.dtype, device=q.device)
    for tokens, row, fresh in _sequences(metadata):
        if fresh:
            state[row] = 0
        matrix = state[row].to(compute)
        for t in range(tokens.start, tokens.stop):
            matrix = matrix * factors[t]
            key = keys[t, :, :, None]
            delta = (values[t] - (key * matrix).sum(1)) * beta[t, :, None]
            matrix = matrix + key * delta[:, None]
            out[t] = (queries[t, :, :, None] * matrix).sum(1)
        state[row] = matrix
    return out.flatten(1)
