"""Paged attention and the KV cache on a GPU: decoding, prompts, mixed steps, writing, at the shapes of real models.

Caches are larger than L2, and repetitions take turns with layers, so that what is read comes from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from benchmarks.gpu.case import Case, Run, Tuning

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import KVCache, power_of_two

BLOCK_SIZE = 16
L2_BYTES = 60 << 20
MAX_BYTES = 24 << 30  # of caches of one case
SHAPES = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
DECODES = [(1, 4096), (1, 65536), (16, 4096), (64, 1024), (64, 8192), (256, 1024), (256, 4096)]  # sequences, context
PROMPTS = [(8, 1024), (1, 8192), (1, 32768)]  # sequences, tokens
CHUNKS = [(2048, 32768)]  # tokens, context


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; lengths and numbers of sequences are divided by `scale`, for tests."""
    for name, shape in SHAPES.items():
        for sequences, context in DECODES:
            yield decode(backend, f"{name} decode {sequences} x {context}", shape, sequences, context, scale)
    shape = SHAPES["8B"]
    for sequences, tokens in PROMPTS:
        yield prompt(backend, f"8B prompt {sequences} x {tokens}", shape, sequences, tokens, tokens, scale)
    for tokens, context in CHUNKS:
        yield prompt(backend, f"8B chunk {tokens} of {context}", shape, 1, tokens, context, scale)
    for tokens in (64, 8192):
        yield writing(backend, f"8B rotate and write {tokens}", shape, max(1, tokens // scale))


def _caches(backend: GPUBackend, blocks: int, shape: tuple[int, int, int]) -> list[KVCache]:
    """Return caches that are together larger than L2, two at least, filled with numbers."""
    _, kv_heads, size = shape
    made = [backend.new_kv_cache(blocks, BLOCK_SIZE, kv_heads, size)]
    nbytes = backend.block_nbytes(made[0]) * blocks
    number = 2 if blocks < 64 else min(max(2, 2 * L2_BYTES // nbytes + 1), max(1, MAX_BYTES // nbytes))
    made += [backend.new_kv_cache(blocks, BLOCK_SIZE, kv_heads, size) for _ in range(number - 1)]
    for cache in made:
        if cache.scales is None:
            cache.data.normal_()
        else:
            cache.scales.fill_(0.01)
            cache.data.view(torch.int8).random_(-100, 100)
    return made


def _step(backend: GPUBackend, sequences: int, queries: int, context: int) -> AttentionMetadata:
    """Return a recording's metadata: blocks of a sequence lie anywhere."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(sequences * blocks, device=backend.device).int().view(sequences, blocks)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=backend.device) * queries
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=backend.device)
    positions = torch.arange(context - queries, context, device=backend.device)
    slots = tables.long()[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(starts, lengths, tables, slots.reshape(-1), single=queries == 1)


def _run(
    backend: GPUBackend, caches: list[KVCache], metadata: AttentionMetadata, params: AttentionParams, rows: int
) -> Run:
    q = [torch.randn(rows, params.num_heads * params.head_size, device=backend.device).to(backend.act) for _ in "ab"]
    return lambda i: backend.paged_attention(q[i % 2], caches[i % len(caches)], metadata, params)


def _tuning_key(cache: KVCache, shape: tuple[int, int, int]) -> str:
    heads, kv_heads, size = shape
    return f"{heads // kv_heads}x{size} {str(cache.data.dtype).removeprefix('torch.')} {cache.block_size}"


def decode(
    backend: GPUBackend, name: str, shape: tuple[int, int, int], sequences: int, context: int, scale: int
) -> Case:
    """One token of each sequence: bound by reading the context's keys and values."""
    heads, kv_heads, size = shape
    sequences, context = max(1, sequences // scale), max(2, context // scale)
    caches = _caches(backend, sequences * -(-context // BLOCK_SIZE), shape)
    params = AttentionParams(heads, kv_heads, size, size**-0.5)
    metadata = _step(backend, sequences, 1, context)
    per_token = backend.block_nbytes(caches[0]) / BLOCK_SIZE
    candidates = [
        {"keys": keys, "num_warps": warps, "num_stages": stages, "places": places}
        for keys, warps, stages, places in product((32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3))
    ]
    dense = [
        torch.randn(sequences, number, tokens, size, device=backend.device).to(backend.act)
        for number, tokens in ((heads, 1), (kv_heads, context), (kv_heads, context))
    ]
    return Case(
        name,
        _run(backend, caches, metadata, params, sequences),
        num_bytes=sequences * context * per_token + 2 * sequences * heads * size * backend.act.itemsize,
        flops=4.0 * sequences * context * heads * size,
        against={"sdpa, contiguous": lambda i: _sdpa(dense, False)},
        tuning=Tuning("decode_attention", _tuning_key(caches[0], shape), candidates),
    )


def prompt(
    backend: GPUBackend, name: str, shape: tuple[int, int, int], sequences: int, tokens: int, context: int, scale: int
) -> Case:
    """Prompts, or a chunk at the end of a long one: bound by computing."""
    heads, kv_heads, size = shape
    sequences, tokens, context = max(1, sequences // scale), max(2, tokens // scale), max(2, context // scale)
    caches = _caches(backend, sequences * -(-context // BLOCK_SIZE), shape)
    params = AttentionParams(heads, kv_heads, size, size**-0.5)
    metadata = _step(backend, sequences, tokens, context)
    pairs = sequences * (tokens * (context - tokens) + tokens * (tokens + 1) / 2)
    dense = [
        torch.randn(sequences, number, length, size, device=backend.device).to(backend.act)
        for number, length in ((heads, tokens), (kv_heads, context), (kv_heads, context))
    ]
    many = sequences * tokens * heads >= 128 * backend.num_sms
    candidates = [
        {"rows": rows, "keys": keys, "num_warps": warps, "num_stages": stages}
        for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
        if rows * power_of_two(size) <= 128 * 128 * warps // 4
    ]
    against = {"sdpa, contiguous": lambda i: _sdpa(dense, True)} if tokens == context else {}
    return Case(
        name,
        _run(backend, caches, metadata, params, sequences * tokens),
        num_bytes=float(sequences * context * backend.block_nbytes(caches[0]) / BLOCK_SIZE),
        flops=4.0 * pairs * heads * size,
        against=against,
        tuning=Tuning("prompt_attention", f"{_tuning_key(caches[0], shape)} {'many' if many else 'few'}", candidates),
    )


def _sdpa(parts: list[torch.Tensor], causal: bool) -> torch.Tensor:
    q, k, v = parts
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def writing(backend: GPUBackend, name: str, shape: tuple[int, int, int], tokens: int) -> Case:
    """Rotate queries and keys of a step, and store its keys and values: bound by memory."""
    heads, kv_heads, size = shape
    caches = _caches(backend, -(-tokens // BLOCK_SIZE), shape)
    metadata = _step(backend, 1, tokens, tokens)
    width = (heads + 2 * kv_heads) * size
    qkv = [torch.randn(tokens, width, device=backend.device).to(backend.act) for _ in range(len(caches))]
    positions = torch.arange(tokens, device=backend.device)
    table = torch.randn(tokens, size, device=backend.device)

    def run(i: int) -> None:
        cache = caches[i % len(caches)]
        q, k, v = qkv[i % len(qkv)].split([heads * size, kv_heads * size, kv_heads * size], dim=1)
        backend.rotary_write_kv(positions, q, k, v, table, size, False, cache, metadata.slot_mapping)

    rotated = 2 * (heads + kv_heads) * size * backend.act.itemsize  # read and written
    written = kv_heads * size * backend.act.itemsize + backend.block_nbytes(caches[0]) / BLOCK_SIZE
    return Case(name, run, num_bytes=tokens * (rotated + written + 4.0 * size))
