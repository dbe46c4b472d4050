"""Attention over a latent cache on a GPU: decoding, prompts and chunks with the heads of DeepSeek's models.

Caches are larger than L2, and repetitions take turns among them, so that what is read comes from memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from benchmarks.gpu.case import Case, Tuning

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.backend import GPUBackend

RANK, ROPE, BLOCK_SIZE = 512, 64, 16
L2_BYTES = 60 << 20
DECODES = [(1, 4096), (1, 65536), (16, 4096), (64, 4096), (256, 1024)]  # sequences, context
HEADS = (16, 128)  # of DeepSeek-V2-Lite, or of a V3 on 8 GPUs; of a V3
PROMPTS = [(1, 2048, 2048), (1, 1024, 16384)]  # sequences, tokens, context


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; lengths and numbers of sequences are divided by `scale`, for tests."""
    for heads in HEADS:
        for sequences, context in DECODES:
            name = f"{heads} heads decode {sequences} x {context}"
            yield attend(backend, name, heads, max(1, sequences // scale), 1, max(1, context // scale))
        for sequences, tokens, context in PROMPTS:
            name = f"{heads} heads prompt {sequences} x {tokens} of {context}"
            yield attend(backend, name, heads, sequences, max(2, tokens // scale), max(2, context // scale))


def attend(backend: GPUBackend, name: str, heads: int, sequences: int, tokens: int, context: int) -> Case:
    """Return the case of a recorded step with `tokens` of each sequence at the end of its context."""
    device, size = backend.device, RANK + ROPE
    blocks = -(-context // BLOCK_SIZE)
    nbytes = sequences * blocks * BLOCK_SIZE * size * backend.act.itemsize
    caches = [
        backend.new_kv_cache(sequences * blocks, BLOCK_SIZE, 1, size, latent=True)
        for _ in range(min(8, 2 + 2 * L2_BYTES // nbytes))
    ]
    for cache in caches:
        cache.data.copy_(torch.randn(cache.data.shape, device=device, dtype=backend.act))
    metadata = AttentionMetadata(
        cu_query_lens=torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens,
        seq_lens=torch.full((sequences,), context, dtype=torch.int32, device=device),
        block_tables=torch.randperm(sequences * blocks, device=device).int().view(sequences, blocks),
        slot_mapping=torch.zeros(sequences * tokens, dtype=torch.int64, device=device),
        single=tokens == 1,
    )
    params = AttentionParams(heads, 1, size, 0.1, value_size=RANK)
    q = torch.randn(sequences * tokens, heads * size, device=device).to(backend.act)

    def run(i: int) -> None:
        backend.paged_attention(q, caches[i % len(caches)], metadata, params)

    pairs = sequences * tokens * (context - (tokens - 1) / 2)  # of a query and a key that it sees
    moved = q.element_size() * q.shape[0] * heads * (size + RANK)
    default = {"num_warps": 8, "waves": 1, "least": 2}
    candidates = [
        {"rows": rows, "keys": keys, "num_stages": stages, **default, "waves": waves, "least": least}
        for rows in ((16, 64) if heads <= 16 else (64,))
        for keys, stages in ((32, 5), (32, 7), (64, 3), (64, 5))
        if rows < 64 or (keys, stages) != (64, 5)  # which is more shared memory than there is
        for waves, least in ((1, 2), (2, 2), (2, 4))
    ]
    return Case(
        name,
        run,
        num_bytes=sequences * context * size * caches[0].data.element_size() + moved,
        flops=2.0 * pairs * heads * (size + RANK),
        tuning=Tuning(
            "latent_attention",
            f"{'decode' if tokens == 1 else 'mixed'} {heads}{'' if caches[0].scales is None else ' fp8'}",
            candidates,
        ),
    )
