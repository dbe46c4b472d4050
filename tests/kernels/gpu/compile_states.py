"""Calls layers with states at real shapes, to be compiled for a GPU that is not there (see `pretend_gpu`)."""

from __future__ import annotations

import torch

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.backend import GPUBackend

KEY_HEADS, HEADS, SIZE, TAPS = 16, 32, 128, 4  # of Qwen3-Next-80B-A3B


def launch(capability: tuple[int, int] = (9, 0)) -> None:
    """Single tokens, a few of them, and a prompt."""
    for dtype in ("bfloat16", "float16"):
        backend = GPUBackend(dtype, dtype, "cpu")
        backend.capability = capability
        keys, values = KEY_HEADS * SIZE, HEADS * SIZE
        for tokens, single in ((2, True), (16, False), (2048, False)):
            count = tokens if single else 1
            metadata = AttentionMetadata(
                cu_query_lens=torch.arange(count + 1, dtype=torch.int32),
                seq_lens=torch.ones(count, dtype=torch.int32),
                block_tables=torch.zeros((count, 1), dtype=torch.int32),
                slot_mapping=torch.zeros(tokens, dtype=torch.int64),
                state_rows=torch.zeros(count, dtype=torch.int64),
                single=single,
            )
            mixed = torch.zeros(tokens, 2 * keys + 2 * values, dtype=backend.act)
            width = 2 * keys + values
            weight, window = torch.zeros(TAPS, width), torch.zeros(2, TAPS - 1, width)
            qkv = backend.causal_conv(mixed[:, :width], weight, None, window, metadata, "silu")
            q, k, v = qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :]
            gates = torch.zeros(tokens, 2 * HEADS)
            state = torch.zeros(2, HEADS, SIZE, SIZE)
            backend.gated_delta(q, k, v, gates[:, :HEADS], gates[:, HEADS:], state, metadata)
