"""Calls latent attention at real shapes, to be compiled for a GPU that is not there (see `pretend_gpu`)."""

from __future__ import annotations

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.latent import latent_attention

RANK, ROPE, BLOCK = 512, 64, 16


def attend(backend: GPUBackend, heads: int, tokens: int, kv: torch.dtype, *, single: bool) -> None:
    """One step of one sequence, or of `tokens` if `single`."""
    count = tokens if single else 1
    data = torch.zeros((8, 1, 1, BLOCK, RANK + ROPE), dtype=kv)
    scales = torch.ones((8, 1, 1, BLOCK)) if kv.itemsize == 1 else None
    metadata = AttentionMetadata(
        cu_query_lens=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.ones(count, dtype=torch.int32),
        block_tables=torch.zeros((count, 256), dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        single=single,
    )
    params = AttentionParams(heads, 1, RANK + ROPE, 0.1, value_size=RANK)
    q = torch.zeros((tokens, heads * (RANK + ROPE)), dtype=backend.act)
    latent_attention(backend, q, KVCache(data, scales), metadata, params)


def launch(capability: tuple[int, int] = (9, 0)) -> None:
    """Decode steps of 16 to 128 heads, a prompt, and a cache of 8 bits."""
    backend = GPUBackend("bfloat16", "bfloat16", "cpu")
    backend.capability, backend.num_sms = capability, 132
    for heads in (16, 32, 128):
        attend(backend, heads, 64, torch.bfloat16, single=True)
    attend(backend, 128, 2048, torch.bfloat16, single=False)
    attend(backend, 16, 300, torch.bfloat16, single=False)
    if capability >= (8, 9):
        attend(backend, 128, 1, torch.float8_e4m3fn, single=True)
    attend(GPUBackend("float32", "float32", "cpu"), 16, 2, torch.float32, single=True)
