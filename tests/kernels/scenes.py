"""Random inputs for kernel tests: checkpoint tensors in any dtype, and sequences scattered over a poisoned cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import AttentionMetadata, AttentionParams, Backend
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.simd import HAS_BF16_DOT
from quire.kernels.reference import ReferenceBackend

DTYPES = ("float32", "bfloat16", "float16")
# Every kernel of `linear`: dtype, and whether it uses dot products
LINEARS = [
    ("float32", False),
    ("bfloat16", False),
    pytest.param("bfloat16", True, marks=pytest.mark.skipif(not HAS_BF16_DOT, reason="the CPU lacks AVX-512 BF16")),
    ("float16", False),
]


def pair(
    dtype: str = "float32", kv_dtype: str | None = None, *, dot_products: bool = True
) -> tuple[CPUBackend, ReferenceBackend]:
    """Return the CPU backend and its oracle, which rounds the inputs of `linear` if the former does."""
    cpu = CPUBackend(dtype, kv_dtype or dtype, dot_products=dot_products)
    return cpu, ReferenceBackend(dtype, kv_dtype or dtype, round_linear_inputs=dtype == "bfloat16" and cpu.bf16_dot)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal float32."""
    return rng.standard_normal(shape).astype(np.float32)


def as_lists(prompt: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, ids and counts of `apply_penalties`: prompt bool [P, V], counts int32 [P, V]."""
    seen = prompt | (counts > 0)
    starts = np.concatenate([[0], seen.sum(axis=1).cumsum()])
    return starts, np.nonzero(seen)[1].astype(np.int32), counts[seen]


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values rounded to `dtype`, by numpy and, for bfloat16, by arithmetic on exponents."""
    if dtype == "float32":
        return values.astype(np.float32)
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(np.float32)


def host(values: np.ndarray, dtype: str = "float32") -> HostTensor:
    """Return the values as a checkpoint would hold them."""
    if dtype == "bfloat16":
        return HostTensor((round_to(values, dtype).view(np.uint32) >> 16).astype(np.uint16), dtype)
    return HostTensor(values.astype(dtype), dtype)


@dataclass
class Paged:
    """Sequences with the keys and values of their whole context, in scattered blocks."""

    q: np.ndarray  # [sum of lengths, Hq, D]: a query for every position
    k: np.ndarray  # [sum of lengths, Hkv, D]
    v: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray
    num_blocks: int
    block_size: int

    @classmethod
    def random(
        cls, seed: int, lengths: list[int], block_size: int, num_heads: int, num_kv_heads: int, head_size: int
    ) -> Paged:
        """Draw everything; blocks are a random permutation, table entries past the end are any block."""
        rng = np.random.default_rng(seed)
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        free = rng.permutation(num_blocks).tolist()
        tables = rng.integers(0, num_blocks, (len(lengths), max(needed) + 1)).astype(np.int32)
        for row, count in zip(tables, needed, strict=True):
            row[:count] = [free.pop() for _ in range(count)]
        total = sum(lengths)
        q, k, v = (normal(rng, total, heads, head_size) for heads in (num_heads, num_kv_heads, num_kv_heads))
        return cls(q, k, v, np.array(lengths, np.int32), tables, num_blocks, block_size)

    @property
    def starts(self) -> np.ndarray:
        """Where each sequence starts in q, k and v."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def slots(self, s: int, first: int, stop: int) -> np.ndarray:
        """Slots of positions first..stop of sequence s."""
        positions = np.arange(first, stop)
        blocks = self.tables[s, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def cache(self, backend: Backend) -> object:
        """Return a cache full of NaN but for the sequences' keys and values."""
        heads, size = self.k.shape[1:]
        cache = backend.new_kv_cache(self.num_blocks, self.block_size, heads, size)
        everywhere = np.arange(self.num_blocks * self.block_size)
        poison = np.full((everywhere.size, heads * size), np.nan, np.float32)
        put = backend.from_numpy
        backend.write_kv(put(poison), put(poison), cache, put(everywhere))
        slots = np.concatenate([self.slots(s, 0, n) for s, n in enumerate(self.lengths)])
        flat = (len(slots), heads * size)
        backend.write_kv(put(self.k.reshape(flat)), put(self.v.reshape(flat)), cache, put(slots))
        return cache

    def rows(self, chunks: list[tuple[int, int, int]]) -> np.ndarray:
        """Return the rows of q, k and v of a step: (sequence, first, stop) says which positions are computed."""
        return np.concatenate([self.starts[s] + np.arange(first, stop) for s, first, stop in chunks])

    def metadata(self, chunks: list[tuple[int, int, int]]) -> AttentionMetadata:
        """Describe a step, in numpy."""
        counts = [stop - first for _, first, stop in chunks]
        lengths = np.array([stop for _, _, stop in chunks], np.int32)
        return AttentionMetadata(
            cu_query_lens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            seq_lens=lengths,
            block_tables=self.tables[[s for s, _, _ in chunks]],
            slot_mapping=np.concatenate([self.slots(*chunk) for chunk in chunks]),
        )

    def attend(
        self, backend: Backend, cache: object, params: AttentionParams, chunks: list[tuple[int, int, int]]
    ) -> np.ndarray:
        """One step: (sequence, first, stop) says which positions are computed -> [T, Hq*D]."""
        rows, metadata = self.rows(chunks), self.metadata(chunks)
        for name in ("cu_query_lens", "seq_lens", "block_tables", "slot_mapping"):
            setattr(metadata, name, backend.from_numpy(getattr(metadata, name)))
        q = backend.from_numpy(self.q[rows].reshape(len(rows), -1))
        return backend.to_numpy(backend.paged_attention(q, cache, metadata, params))

    def dense(self, s: int, params: AttentionParams, kv_dtype: str) -> np.ndarray:
        """Attention of all positions of sequence s by the textbook, in float64 -> [length, Hq*D]."""
        own = slice(self.starts[s], self.starts[s + 1])
        group = params.num_heads // params.num_kv_heads
        k, v = (np.repeat(round_to(x[own], kv_dtype).astype(np.float64), group, axis=1) for x in (self.k, self.v))
        logits = np.einsum("ihd,jhd->hij", self.q[own].astype(np.float64), k) * params.scale
        if params.softcap is not None:
            logits = params.softcap * np.tanh(logits / params.softcap)
        distance = np.arange(len(k))[:, None] - np.arange(len(k))[None, :]
        if params.alibi_slopes is not None:
            logits -= np.asarray(params.alibi_slopes, np.float64)[:, None, None] * distance
        hidden = (distance < 0) | (distance >= (params.sliding_window or len(k)))
        if not params.causal:
            hidden = np.abs(distance) >= (params.sliding_window or len(k))
        logits[:, hidden] = -np.inf
        sinks = np.full(params.num_heads, -np.inf) if params.sinks is None else np.asarray(params.sinks, np.float64)
        largest = np.maximum(logits.max(axis=-1), sinks[:, None])
        weights = np.exp(logits - largest[..., None])
        weights /= (weights.sum(axis=-1) + np.exp(sinks[:, None] - largest))[..., None]
        return np.einsum("hij,jhd->ihd", weights, v).reshape(len(k), -1)
