"""Paged attention called as the CPU backend does, in every layout of the cache, and what it should give."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.attention import paged_attention
from quire.kernels.cpu.cache import KV_STORAGE, CPUKVCache, copy_blocks
from quire.kernels.cpu.kv_write import write_kv
from quire.kernels.cpu.simd import HAS_BF16_DOT
from quire.kernels.cpu.threads import Launcher
from tests.kernels.both_ways import new_launcher
from tests.kernels.scenes import Paged, normal, round_to

SEGMENT = 128  # positions whose weights are relative to the same score

# Storage of keys and values, and whether pairs of bfloat16 are multiplied
needs_dot = pytest.mark.skipif(not HAS_BF16_DOT, reason="the CPU lacks AVX-512 BF16")
# Caches of 16-bit floats differ from one of float32 in one load and one store, which `test_every_...` and products of
# such weights check; each kernel takes seconds to compile.
SINGLES = pytest.param(("bfloat16", False), marks=pytest.mark.slow)
HALF = pytest.param(("float16", False), marks=pytest.mark.slow)
FLOATS = [("float32", False), SINGLES, HALF]
PAIRS = [pytest.param(("bfloat16", True), marks=needs_dot), pytest.param(("int8", True), marks=needs_dot)]
KINDS = [*FLOATS, ("int8", False), *PAIRS]

# head size, block size, query heads, KV heads, window, softcap, sinks, alibi
SHAPES = [
    (8, 16, 4, 2, None, None, False, False),
    (24, 1, 3, 1, 5, None, True, False),
    (64, 8, 2, 2, None, 3.0, False, True),
    (128, 16, 6, 2, 40, None, True, True),
    (33, 32, 8, 1, None, 0.5, False, False),
    (16, 5, 3, 3, 1, 2.0, True, True),
    (80, 48, 9, 3, 33, None, False, False),
    (18, 6, 5, 1, 130, None, True, False),
    (96, 64, 14, 2, None, None, False, True),
]


@dataclass
class Direct:
    """The part of `Backend` that attention needs, without the backend."""

    kind: tuple[str, bool]
    num_threads: int = 1
    launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self.launcher = new_launcher(self.num_threads)

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array)

    def new_kv_cache(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> CPUKVCache:
        dtype, paired = self.kind
        return CPUKVCache.allocate(num_blocks, block_size, num_kv_heads, head_size, KV_STORAGE[dtype], paired)

    def write_kv(self, k: np.ndarray, v: np.ndarray, cache: CPUKVCache, slot_mapping: np.ndarray) -> None:
        write_kv(self.launcher, k, v, cache, slot_mapping)

    def paged_attention(
        self, q: np.ndarray, cache: CPUKVCache, metadata: AttentionMetadata, params: AttentionParams
    ) -> np.ndarray:
        return paged_attention(self.launcher, q, cache, metadata, params)

    def copy_blocks(self, cache: CPUKVCache, pairs: np.ndarray) -> None:
        copy_blocks(cache, pairs)


def layer(backend: object, shape: tuple, seed: int = 0) -> AttentionParams:
    """Make the layer's constants, its arrays on the backend (None: numpy)."""
    head_size, _, num_heads, num_kv_heads, window, softcap, sinks, alibi = shape
    rng = np.random.default_rng(seed)
    put = (lambda x: x) if backend is None else backend.from_numpy  # type: ignore[attr-defined]
    extra, slopes = put(normal(rng, num_heads)), put(rng.random(num_heads).astype(np.float32))
    scale = head_size**-0.5
    extras = (extra if sinks else None, slopes if alibi else None)
    return AttentionParams(num_heads, num_kv_heads, head_size, scale, window, softcap, *extras)


def scene_of(shape: tuple, lengths: list[int], seed: int = 1) -> Paged:
    """Draw sequences for a layer of this shape."""
    head_size, block_size, num_heads, num_kv_heads = shape[:4]
    return Paged.random(seed, lengths, block_size, num_heads, num_kv_heads, head_size)


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers, as float64, and scales [..., 1] that an int8 cache holds for heads x [..., D]."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    return np.rint(x * (np.float32(127) / largest)).astype(np.float64), (largest / np.float32(127)).astype(np.float64)


def exact(
    scene: Paged, shape: tuple, kind: tuple[str, bool], chunks: list[tuple[int, int, int]], *, causal: bool = True
) -> np.ndarray:
    """The rows of the chunks by the textbook, from keys and values as the cache holds them."""
    params, dtype = replace(layer(None, shape), causal=causal), kind[0]
    keep = scene.k, scene.v
    if dtype == "int8":
        dtype = "float32"
        for name in ("k", "v"):
            integers, scales = quantized(getattr(scene, name))
            setattr(scene, name, (integers * scales).astype(np.float32))
    whole = {s: scene.dense(s, params, dtype) for s, _, _ in chunks}
    scene.k, scene.v = keep
    return np.concatenate([whole[s][first:stop] for s, first, stop in chunks])


def rounded(scene: Paged, shape: tuple, kind: tuple[str, bool], s: int) -> np.ndarray:
    """All rows of sequence s by the textbook with what paired kernels round: queries, keys, values, and weights.

    Weights are rounded relative to the largest score of their segment. int8 scales are not rounded; that of a value is
    part of its rounded weight.
    """
    params, own = layer(None, shape), slice(scene.starts[s], scene.starts[s + 1])
    group, length = params.num_heads // params.num_kv_heads, int(scene.lengths[s])
    q = round_to(scene.q[own] * np.float32(params.scale), "bfloat16").astype(np.float64)
    k, v, k_scale, v_scale = scene.k[own], scene.v[own], 1.0, 1.0
    if kind[0] == "int8":
        (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
        k_scale, v_scale = (np.repeat(x[..., 0].T, group, axis=0)[:, None] for x in (k_scale, v_scale))
    k, v = (np.repeat(round_to(x, "bfloat16").astype(np.float64), group, axis=1) for x in (k, v))
    logits = np.einsum("ihd,jhd->hij", q, k) * k_scale
    if params.softcap is not None:
        logits = params.softcap * np.tanh(logits / params.softcap)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    if params.alibi_slopes is not None:
        logits -= np.asarray(params.alibi_slopes, np.float64)[:, None, None] * distance
    logits[:, (distance < 0) | (distance >= (params.sliding_window or length))] = -np.inf
    sink = np.full(params.num_heads, -np.inf) if params.sinks is None else np.asarray(params.sinks, np.float64)
    largest = np.maximum(logits.max(axis=-1), sink[:, None])
    total, out = np.exp(sink[:, None] - largest), 0.0
    for begin in range(0, length, SEGMENT):
        part = logits[..., begin : begin + SEGMENT]
        most = part.max(axis=-1, keepdims=True)
        seen = most > -np.inf
        weights = np.exp(np.where(seen, part - np.where(seen, most, 0), -np.inf))
        here = (weights * v_scale[..., begin : begin + SEGMENT]) if kind[0] == "int8" else weights
        here = round_to(here.astype(np.float32), "bfloat16").astype(np.float64)
        factor = np.exp(most[..., 0] - largest)
        total = total + factor * (weights if kind[0] == "int8" else here).sum(axis=-1)
        out = out + factor[..., None] * np.einsum("hij,jhd->hid", here, v[begin : begin + SEGMENT])
    return (out / total[..., None]).transpose(1, 0, 2).reshape(length, -1)
