"""Decode attention over a latent cache at DeepSeek-V3's sizes: 128 heads that share 512 + 64 numbers per token.

Attention reads 1152 bytes of bfloat16 a token, of which every head makes 2 x (576 + 512) operations: 242 for each byte.
That is far more than a CPU does in the time that a byte takes, so that with all heads on one machine this is bound by
arithmetic, not by memory; the last columns say how far from either limit it is. The same step with keys and values of
all heads reads 57 times as much and computes 3.4 times less. Products with W_UK and W_UV are in the absorbed time.

    python benchmarks/latent_attention.py [--contexts 128,1024,4096] [--sequences 1] [--heads 128] [--threads 2]
"""

from __future__ import annotations

import argparse
import os

import numpy as np
from common import print_header, print_table
from roofline import Limits, best, measure_limits

from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.threads import Launcher

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
BLOCK, ELEMENT = 16, 2  # tokens; bytes of bfloat16
ROTATE, REPEAT = 64 * 2**20, 3  # bytes of caches that are gone through in turn; times each is measured
HEAD_CACHE = 2 * 2**30  # bytes: larger caches of all heads are left out


def step_of(sequences: int, context: int, rng: np.random.Generator) -> AttentionMetadata:
    """Describe a step of one token for each sequence, in scattered blocks."""
    blocks = sequences * -(-context // BLOCK)
    return AttentionMetadata(
        cu_query_lens=np.arange(sequences + 1, dtype=np.int32),
        seq_lens=np.full(sequences, context, np.int32),
        block_tables=rng.permutation(blocks).astype(np.int32).reshape(sequences, -1),
        slot_mapping=np.zeros(sequences, np.int64),
    )


def absorbed(threads: int, heads: int, sequences: int, context: int) -> tuple[float, float]:
    """Return seconds of attention, and of it with the products of single heads before and after."""
    backend, rng = CPUBackend("bfloat16", "bfloat16", threads), np.random.default_rng(0)
    tokens = sequences * -(-context // BLOCK) * BLOCK
    copies = 1 + ROTATE // (tokens * (RANK + ROPE) * ELEMENT)
    caches = [backend.new_kv_cache(tokens // BLOCK, BLOCK, 1, RANK + ROPE, latent=True) for _ in range(copies)]
    vectors = rng.standard_normal((tokens, RANK + ROPE)).astype(np.float32)
    for cache in caches:
        backend.write_latent(vectors, cache, np.arange(tokens))
    matrix = HostTensor(rng.standard_normal((RANK, NOPE)).astype(np.float32), "float32")
    first, last = backend.pack_heads([matrix] * heads), backend.pack_heads([matrix.transposed()] * heads)
    metadata = step_of(sequences, context, rng)
    params = AttentionParams(heads, 1, RANK + ROPE, (NOPE + ROPE) ** -0.5, value_size=RANK)
    q = rng.standard_normal((sequences, heads * (RANK + ROPE))).astype(np.float32)
    nope = rng.standard_normal((sequences * heads, NOPE)).astype(np.float32)

    def attend() -> tuple[None]:
        for cache in caches:
            backend.paged_attention(q, cache, metadata, params)
        return (None,)

    def products() -> tuple[None]:
        backend.head_linear(backend.head_linear(nope, first), last)
        return (None,)

    seconds = best(backend.graph(attend), REPEAT) / copies
    return seconds, seconds + best(backend.graph(products), REPEAT)


def plain(threads: int, heads: int, sequences: int, context: int) -> float | None:
    """Return seconds with keys and values of all heads; None where their cache would be too large."""
    tokens, size = sequences * -(-context // BLOCK) * BLOCK, NOPE + ROPE
    if 2 * tokens * heads * size * ELEMENT > HEAD_CACHE:
        return None
    backend, rng = CPUBackend("bfloat16", "bfloat16", threads), np.random.default_rng(0)
    cache = backend.new_kv_cache(tokens // BLOCK, BLOCK, heads, size)
    for start in range(0, tokens, 64):
        k = rng.standard_normal((min(64, tokens - start), heads * size)).astype(np.float32)
        backend.write_kv(k, k, cache, np.arange(start, start + len(k)))
    metadata = step_of(sequences, context, rng)
    params = AttentionParams(heads, heads, size, size**-0.5)
    q = rng.standard_normal((sequences, heads * size)).astype(np.float32)
    return best(backend.graph(lambda: (backend.paged_attention(q, cache, metadata, params),)), REPEAT)


def row(limits: Limits, threads: int, heads: int, sequences: int, context: int) -> list[str]:
    """Measure one context."""
    seconds, whole = absorbed(threads, heads, sequences, context)
    size = sequences * context * (RANK + ROPE) * ELEMENT
    work = 2.0 * sequences * context * heads * (2 * RANK + ROPE)
    other = plain(threads, heads, sequences, context)
    return [
        f"{context}",
        f"{1e6 * seconds:.0f} us",
        f"{1e6 * whole:.0f} us",
        "too large" if other is None else f"{1e6 * other:.0f} us",
        f"{size / seconds / 1e9:.2f} GB/s, {100 * size / limits.bandwidth / seconds:.0f} %",
        f"{work / seconds / 1e9:.0f} GFLOP/s, {100 * work / limits.peaks['bfloat16'] / seconds:.0f} %",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="128,1024,4096")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print_header(f"Latent attention, {args.heads} heads, {args.sequences} sequences, {args.threads} threads")
    limits = measure_limits(Launcher(args.threads))
    print(f"read bandwidth {limits.bandwidth / 1e9:.1f} GB/s, bfloat16 {limits.peaks['bfloat16'] / 1e9:.0f} GFLOP/s\n")
    contexts = [int(context) for context in args.contexts.split(",")]
    print_table(
        ("context", "absorbed", "with products", "all heads cached", "of the bandwidth", "of the peak"),
        [row(limits, args.threads, args.heads, args.sequences, context) for context in contexts],
    )


if __name__ == "__main__":
    main()
