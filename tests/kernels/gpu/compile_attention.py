"""Launches the cache's and attention's kernels at the shapes of real models, for `tests.helpers.pretend_gpu`."""

from __future__ import annotations

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import KVCache

SMS = 132
SHAPES = {"llama": (32, 8, 128), "qwen": (16, 8, 128), "gemma": (16, 8, 256), "phi": (32, 32, 96)}


def backend_of(act: str, kv_dtype: str, capability: tuple[int, int], **options: bool) -> GPUBackend:
    """Return a backend that believes in an H200, with tensors in host memory."""
    backend = GPUBackend(act, kv_dtype, "cpu", **options)
    backend.num_sms, backend.capability = SMS, capability
    return backend


def step(sequences: int, queries: int, max_blocks: int) -> AttentionMetadata:
    """Return a graph's metadata: of single tokens, or of so many rows for each sequence."""
    ids = torch.arange(sequences + 1, dtype=torch.int32)
    tables = torch.zeros(sequences, max_blocks, dtype=torch.int32)
    slots = torch.zeros(sequences * queries, dtype=torch.int64)
    return AttentionMetadata(ids * queries, ids[1:] * queries, tables, slots, single=queries == 1)


def attend(
    backend: GPUBackend, shape: str, sequences: int, queries: int, max_blocks: int = 4096, **options: object
) -> None:
    """Launch a layer's writing and attention for one step."""
    heads, kv_heads, size = SHAPES[shape]
    params = AttentionParams(heads, kv_heads, size, size**-0.5, **options)  # type: ignore[arg-type]
    cache: KVCache = backend.new_kv_cache(4, 16, kv_heads, size)
    metadata = step(sequences, queries, max_blocks)
    rows, width = sequences * queries, (heads + 2 * kv_heads) * size
    qkv = torch.zeros(rows, width, dtype=backend.act)
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    positions, table = torch.zeros(rows, dtype=torch.int64), torch.zeros(8, size)
    backend.rotary_write_kv(positions, q, k, v, table, size, False, cache, metadata.slot_mapping)
    backend.write_kv(k, v, cache, metadata.slot_mapping)
    backend.paged_attention(q, cache, metadata, params)


def launch(capability: tuple[int, int] = (9, 0)) -> None:
    """Launch what models of SHAPES need: decoding with keys split and not, prompts, long and short."""
    plain = backend_of("bfloat16", "bfloat16", capability)
    for shape in SHAPES:
        attend(plain, shape, 1, 1)
        attend(plain, shape, 8, 1024)
    attend(plain, "llama", 256, 1, 64)
    attend(plain, "llama", 1, 64)  # a chunk whose keys are split
    attend(plain, "gemma", 4, 1024, sliding_window=1024, softcap=50.0)
    for kv_dtype in ("int8", "fp8") if capability >= (8, 9) else ("int8",):
        attend(backend_of("bfloat16", kv_dtype, capability), "llama", 64, 1)
        attend(backend_of("bfloat16", kv_dtype, capability), "llama", 4, 2048)
    invariant = backend_of("bfloat16", "bfloat16", capability, batch_invariant=True)
    attend(invariant, "llama", 8, 1)
    attend(invariant, "llama", 4, 512)
