"""Attention over a latent cache on the GPU against the reference, in scattered blocks between poisoned ones."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.latent import latent_attention
from quire.kernels.reference.attention import paged_attention
from tests.kernels.gpu.common import ACTS, DEVICE, mostly_slow

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
# heads, elements of a vector, of them value, tokens of a block
SHAPES = [(4, 24, 16, 4), (16, 33, 17, 1), (40, 48, 32, 16), (3, 32, 32, 5)]
CHUNKS = [(21, 21), (1, 1), (1, 33), (6, 80)]  # tokens of the step, and of the context, of each sequence


class Scene(NamedTuple):
    q: torch.Tensor
    cache: KVCache
    metadata: AttentionMetadata
    params: AttentionParams


def draw(
    act: torch.dtype,
    shape: tuple[int, int, int, int],
    chunks: list[tuple[int, int]],
    *,
    single: bool = False,
    padding: int = 0,
    fp8: bool = False,
) -> Scene:
    """Draw a step; `padding` sequences without tokens, or one row each if `single`, come after, and are NaN."""
    heads, size, value, block_size = shape
    generator = torch.Generator().manual_seed(1)
    needed = [-(-keys // block_size) for _, keys in chunks]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    data = torch.full((len(order), 1, 1, block_size, size), float("nan"), dtype=torch.float8_e4m3fn if fp8 else act)
    scales = torch.full((len(order), 1, 1, block_size), float("nan")) if fp8 else None
    tables = torch.zeros((len(chunks) + padding, max(needed) + 1), dtype=torch.int32)
    for s, (_, keys) in enumerate(chunks):
        tables[s, : needed[s]] = torch.tensor([order.pop() for _ in range(needed[s])])
        for p in range(keys):
            block, at = tables[s, p // block_size], p % block_size
            data[block, 0, 0, at] = torch.randn(size, generator=generator).to(data.dtype)
            if scales is not None:
                scales[block, 0, 0, at] = 0.5 + torch.rand((), generator=generator)
    counts = [count for count, _ in chunks] + [int(single)] * padding
    q = torch.randn((sum(counts) + padding, heads * size), generator=generator)
    q[sum(count for count, _ in chunks) :] = float("nan")
    metadata = AttentionMetadata(
        torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
        torch.tensor([keys for _, keys in chunks] + [0] * padding, dtype=torch.int32).to(DEVICE),
        tables.to(DEVICE),
        torch.zeros(len(q), dtype=torch.int64).to(DEVICE),
        single=single,
    )
    cache = KVCache(data.to(DEVICE), None if scales is None else scales.to(DEVICE))
    return Scene(q.to(act).to(DEVICE), cache, metadata, AttentionParams(heads, 1, size, size**-0.5, value_size=value))


def expected(scene: Scene, sequences: int) -> torch.Tensor:
    """Return the rows of the first sequences by the reference, in float64."""
    data, scales, metadata = scene.cache.data, scene.cache.scales, scene.metadata
    plain = (data.float() if scales is None else data.float() * scales[..., None])[:, 0, 0]
    kept = AttentionMetadata(
        metadata.cu_query_lens[: sequences + 1].cpu(),
        metadata.seq_lens[:sequences].cpu(),
        metadata.block_tables.cpu(),
        metadata.slot_mapping,
    )
    rows = int(kept.cu_query_lens[-1])
    return paged_attention(scene.q[:rows].float().cpu(), plain[None, :, :, None].cpu(), kept, scene.params)


def close(got: torch.Tensor, want: torch.Tensor, act: str) -> None:
    wanted = got[: len(want)].float().cpu()
    assert torch.isfinite(wanted).all()
    assert float((wanted - want).norm() / want.norm()) < TOLERANCE[act]


@pytest.mark.parametrize("act", mostly_slow(ACTS, "float32"))
@pytest.mark.parametrize("shape", mostly_slow(SHAPES[:2], SHAPES[1]))
def test_prompts_chunks_and_tokens_attend_in_one_step(shape: tuple[int, int, int, int], act: str) -> None:
    backend = GPUBackend(act, act, DEVICE)
    heads = 2 if act == "float32" else shape[0]  # float32 is slow to interpret
    scene = draw(backend.act, (heads, *shape[1:]), CHUNKS, padding=2)
    close(latent_attention(backend, *scene), expected(scene, len(CHUNKS)), act)


@pytest.mark.parametrize("act", mostly_slow(ACTS, "float16"))
@pytest.mark.parametrize("shape", mostly_slow(SHAPES, SHAPES[0]))
def test_single_tokens_attend_by_parts_of_their_keys(shape: tuple[int, int, int, int], act: str) -> None:
    backend = GPUBackend(act, act, DEVICE)
    backend.num_sms = 16  # with fewer, tiles alone would keep them busy
    chunks = [(1, 70), (1, 1), (1, 150), (1, 64)]
    scene = draw(backend.act, shape, chunks, single=True, padding=1)
    got = latent_attention(backend, *scene)
    close(got, expected(scene, 4), act)
    (plan,) = scene.metadata.plans.values()
    assert DEVICE == "cuda" or plan.shares[2 * (len(plan.shares) // 3) - 1] > 0, "no tile had several pieces"
    again = latent_attention(backend, *scene)  # by the same plan
    torch.testing.assert_close(again[:4], got[:4], rtol=0, atol=0)


def test_a_cache_of_eight_bits_has_a_scale_for_each_token() -> None:
    backend = GPUBackend("float16", "fp8", DEVICE)
    scene = draw(torch.float16, (4, 48, 32, 4), CHUNKS[1:], fp8=True)
    close(latent_attention(backend, *scene), expected(scene, 3), "float16")


def test_a_row_is_the_same_in_any_company_if_so_asked() -> None:
    backend = GPUBackend("float16", "float16", DEVICE, batch_invariant=True)
    shape = (4, 24, 16, 4)
    scene = draw(torch.float16, shape, CHUNKS)
    whole = latent_attention(backend, *scene)
    metadata = scene.metadata
    for s, (count, keys) in enumerate(CHUNKS):
        last = int(metadata.cu_query_lens[s + 1])
        for tokens, single in ((count, False), (1, True)):
            alone = AttentionMetadata(
                torch.tensor([0, tokens], dtype=torch.int32).to(DEVICE),
                torch.tensor([keys], dtype=torch.int32).to(DEVICE),
                metadata.block_tables[s : s + 1],
                metadata.slot_mapping[:tokens],
                single=single,
            )
            got = latent_attention(backend, scene.q[last - tokens : last], scene.cache, alone, scene.params)
            torch.testing.assert_close(got, whole[last - tokens : last], rtol=0, atol=0)


def test_a_step_of_no_rows_gives_none() -> None:
    backend = GPUBackend("float16", "float16", DEVICE)
    scene = draw(torch.float16, SHAPES[0], CHUNKS)
    assert latent_attention(backend, scene.q[:0], *scene[1:]).shape == (0, 4 * 16)
