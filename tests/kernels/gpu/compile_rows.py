"""Calls ops on rows at real shapes, to be compiled for a GPU that is not there (see `pretend_gpu`)."""

from __future__ import annotations

import torch

from quire.kernels.gpu.backend import GPUBackend

# hidden size, query heads, KV heads, of 128 elements: Qwen3-0.6B, Qwen3-30B-A3B, Llama-3.1-8B
MODELS = [(1024, 16, 8), (2048, 32, 4), (4096, 32, 8)]
HEAD = 128


def launch(capability: tuple[int, int] = (9, 0)) -> None:
    """Norms, sums, norms of heads, rotation and activations of one token and of many."""
    backend = GPUBackend("bfloat16", "bfloat16", "cpu")
    backend.capability = capability
    for hidden, heads, kv_heads in MODELS:
        weight, per_head = torch.ones(hidden), torch.ones(HEAD)
        for tokens in (1, 64, 2048):
            x = torch.ones(tokens, hidden, dtype=backend.act)
            backend.rms_norm(x, weight, 1e-5)
            backend.add_rms_norm(x, x.clone(), weight, 1e-5)
            backend.layer_norm(x, weight, weight, 1e-5)
            qkv = torch.ones(tokens, (heads + 2 * kv_heads) * HEAD, dtype=backend.act)
            q, k = qkv[:, : heads * HEAD], qkv[:, heads * HEAD : (heads + kv_heads) * HEAD]
            backend.rms_norm(q, per_head, 1e-6)
            backend.rms_norm(k, per_head, 1e-6)
            positions = torch.zeros(tokens, dtype=torch.int64)
            backend.rotary_embedding(positions, q, k, torch.ones(64, HEAD), HEAD, False)
            backend.activation(x, "silu")
    backend.rotary_embedding(positions, q, k, torch.ones(64, HEAD // 2), HEAD, True)
    latents = torch.ones(64, 576, dtype=backend.act)
    backend.rms_norm(latents[:, :512], torch.ones(512), 1e-6)
    backend.softcap(torch.ones(64, 256000), 30.0)
