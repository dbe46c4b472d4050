"""The KV cache on a GPU: what is written, rotated or not, quantized or not; blocks as bytes. Against the reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference import ReferenceBackend
from quire.step import LayerKVSpec
from tests.kernels.gpu.common import ACTS, DEVICE, mostly_slow

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")
BLOCKS, BLOCK_SIZE = 5, 4
SLOW = pytest.mark.slow


def pair(act: str, kv_dtype: str) -> tuple[GPUBackend, ReferenceBackend]:
    return GPUBackend(act, kv_dtype, DEVICE), ReferenceBackend("float32", kv_dtype, DEVICE)


def held(cache: object) -> torch.Tensor:
    """Return what a cache of the GPU backend stands for, float32 [sides, B, bs, Hkv, D], as the reference has it."""
    data = cache.data.float()  # type: ignore[attr-defined]
    if cache.scales is not None:  # type: ignore[attr-defined]
        data = data * cache.scales[..., None]  # type: ignore[attr-defined]
    return data.permute(1, 0, 3, 2, 4).cpu()


def normal(rng: np.random.Generator, rows: int, width: int, act: str) -> torch.Tensor:
    """Return numbers of all sizes, [rows, width], as a part of longer rows."""
    values = rng.standard_normal((rows, width + 16)) * np.exp2(rng.integers(-8, 4, (rows, width + 16)))
    whole = torch.from_numpy(values.astype(np.float32)).to(DEVICE).to(getattr(torch, act))
    return whole[:, 8 : 8 + width]


@pytest.mark.parametrize(("heads", "size"), [(3, 12), *(pytest.param(*it, marks=SLOW) for it in ((1, 8), (17, 128)))])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_written_is_what_the_reference_writes(kv_dtype: str, heads: int, size: int) -> None:
    rng = np.random.default_rng(size)
    slots = torch.tensor([7, -1, 0, 19, 2], device=DEVICE)
    for act in ACTS:
        k, v = (normal(rng, 5, heads * size, act) for _ in range(2))
        k[2] = 0
        gpu, reference = pair(act, kv_dtype)
        own, spec = (backend.new_kv_cache(BLOCKS, BLOCK_SIZE, heads, size) for backend in (gpu, reference))
        gpu.write_kv(k, v, own, slots)
        kept = slots >= 0
        reference.write_kv(k[kept].float(), v[kept].float(), spec, slots[kept])
        torch.testing.assert_close(held(own), spec.float().cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_vector_that_is_not_finite_is_all_nan(kv_dtype: str) -> None:
    gpu, _ = pair("float32", kv_dtype)
    cache = gpu.new_kv_cache(2, 4, 2, 8)
    k = torch.ones(2, 16, device=DEVICE)
    k[0, 3], k[1, 9] = torch.nan, torch.inf
    gpu.write_kv(k, torch.ones_like(k), cache, torch.tensor([1, 6], device=DEVICE))
    nan = held(cache).isnan()
    assert nan[0, 0, 1, 0].all() and nan[0, 1, 2, 1].all() and nan.sum() == 16


def test_every_float8_is_met() -> None:
    """Numbers between any two neighbours round to the nearer, ties to the even one, subnormals included."""
    steps = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (steps[1:] + steps[:-1]) / 2
    near = torch.cat([steps, middles, torch.nextafter(middles, steps[1:]), torch.nextafter(middles, steps[:-1])])
    x = torch.cat([near, -near])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 63)).reshape(-1, 63)
    x = torch.nn.functional.pad(x, (0, 1), value=448.0).to(DEVICE)  # so that scales are 1
    gpu, reference = pair("float32", "fp8")
    slots = torch.arange(len(x), device=DEVICE)
    own, spec = (backend.new_kv_cache(len(x), 1, 1, 64) for backend in (gpu, reference))
    gpu.write_kv(x, x, own, slots)
    reference.write_kv(x, x, spec, slots)
    torch.testing.assert_close(held(own), spec.cpu(), rtol=0, atol=0)
    torch.testing.assert_close(held(own)[0, :, 0, 0], x.cpu().to(torch.float8_e4m3fn).float(), rtol=0, atol=0)


@pytest.mark.parametrize("kv_dtype", [dtype for dtype in KV_DTYPES if dtype != "int8"])
def test_latents_are_written_alone(kv_dtype: str) -> None:
    x = normal(np.random.default_rng(1), 3, 36, "float32")
    slots = torch.tensor([9, -1, 4], device=DEVICE)
    gpu, reference = pair("float32", kv_dtype)
    own, spec = (backend.new_kv_cache(BLOCKS, BLOCK_SIZE, 1, 36, latent=True) for backend in (gpu, reference))
    gpu.write_latent(x, own, slots)
    reference.write_latent(x[slots >= 0], spec, slots[slots >= 0])
    torch.testing.assert_close(held(own), spec.float().cpu(), rtol=0, atol=0)


HEADS = [(4, 2, 16, 16), (3, 1, 24, 8), (6, 3, 10, 4), (17, 9, 128, 64)]
ROTATIONS = mostly_slow(
    product(KV_DTYPES, HEADS, [False, True], ACTS),
    ("float32", HEADS[0], False, "float32"),
    ("bfloat16", HEADS[1], True, "bfloat16"),
    ("int8", HEADS[2], False, "float16"),
    ("fp8", HEADS[0], True, "bfloat16"),
)


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotating_and_writing_at_once_is_both(case: tuple[str, tuple[int, int, int, int], bool, str]) -> None:
    kv_dtype, (heads, kv_heads, size, rotated), interleaved, act = case
    rng = np.random.default_rng(heads)
    positions, slots = torch.tensor([5, 0, 2], device=DEVICE), torch.tensor([3, -1, 12], device=DEVICE)
    table = torch.from_numpy(rng.standard_normal((6, rotated)).astype(np.float32)).to(DEVICE)
    q, k, v = (normal(rng, 3, count * size, act) for count in (heads, kv_heads, kv_heads))
    gpu, reference = pair(act, kv_dtype)
    expected = [x.float().clone() for x in (q, k)]
    reference.rotary_embedding(positions, *expected, table, size, interleaved)
    untouched = [x._base.clone() for x in (q, k)]  # type: ignore[union-attr]
    cache = gpu.new_kv_cache(BLOCKS, BLOCK_SIZE, kv_heads, size)
    gpu.rotary_write_kv(positions, q, k, v, table, size, interleaved, cache, slots)
    precision = 1e-5 if act == "float32" else 1e-2 if act == "bfloat16" else 2e-3
    for got, wanted, before in zip((q, k), expected, untouched, strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=precision, atol=precision)
        assert torch.equal(got._base[:, :8], before[:, :8]) and torch.equal(got._base[:, -8:], before[:, -8:])
    written = gpu.new_kv_cache(BLOCKS, BLOCK_SIZE, kv_heads, size)
    gpu.write_kv(k, v, written, slots)  # of keys as they were rotated, and rounded
    assert torch.equal(held(cache), held(written))


NORMED = mostly_slow(
    product([("float32", False), ("bfloat16", True), ("int8", False)], [(16, 16), (24, 8), (10, 4)], ACTS),
    (("float32", False), (24, 8), "float16"),
    (("bfloat16", True), (16, 16), "float32"),
    (("int8", False), (10, 4), "bfloat16"),
)


@pytest.mark.parametrize("case", NORMED)
def test_heads_are_normed_before_they_are_rotated(case: tuple[tuple[str, bool], tuple[int, int], str]) -> None:
    (kv_dtype, interleaved), (size, rotated), act = case
    rng = np.random.default_rng(size)
    positions, slots = torch.tensor([5, 0, 2], device=DEVICE), torch.tensor([3, -1, 12], device=DEVICE)
    table = torch.from_numpy(rng.standard_normal((6, rotated)).astype(np.float32)).to(DEVICE)
    weights = [torch.from_numpy(rng.uniform(0.5, 2, size).astype(np.float32)).to(DEVICE) for _ in range(2)]
    q, k, v = (normal(rng, 3, count * size, act) for count in (3, 2, 2))
    gpu, reference = pair(act, kv_dtype)
    expected = [reference.rms_norm(x.float(), weight, 1e-3) for x, weight in zip((q, k), weights, strict=True)]
    reference.rotary_embedding(positions, *expected, table, size, interleaved)
    cache, written = (gpu.new_kv_cache(BLOCKS, BLOCK_SIZE, 2, size) for _ in range(2))
    norms = (*weights, 1e-3)
    got = gpu.rotary_write_kv(positions, q, k, v, table, size, interleaved, cache, slots, norms)
    precision = 1e-5 if act == "float32" else 1e-2 if act == "bfloat16" else 2e-3
    for one, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(one.float(), wanted, rtol=precision, atol=precision)
    gpu.write_kv(got[1], v, written, slots)  # of keys as they were rotated, and rounded
    assert torch.equal(held(cache), held(written))


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_are_as_large_as_the_spec_says_and_travel_bit_for_bit(kv_dtype: str, latent: bool) -> None:
    if latent and kv_dtype == "int8":
        pytest.skip("latent caches are not int8")
    gpu, _ = pair("float32", kv_dtype)
    heads = 1 if latent else 3
    cache, other = (gpu.new_kv_cache(BLOCKS, BLOCK_SIZE, heads, 10, latent=latent) for _ in range(2))
    rng = np.random.default_rng(2)
    for target in (cache, other):
        for side in target.sides():
            side.copy_(torch.from_numpy(rng.integers(0, 256, side.shape, np.uint8)))
    size = LayerKVSpec(heads, 10, kv_dtype, latent=latent).block_bytes(BLOCK_SIZE)
    assert gpu.block_nbytes(cache) == size
    before = gpu.read_blocks(cache, np.arange(BLOCKS))
    assert before.dtype == np.uint8 and before.shape == (BLOCKS, size)
    gpu.copy_blocks(cache, np.array([[0, 1], [1, 2], [4, 0]]))
    after = gpu.read_blocks(cache, np.arange(BLOCKS))
    np.testing.assert_array_equal(after, before[[4, 0, 1, 3, 4]])
    read_only = np.frombuffer(after[[2, 1]].tobytes(), np.uint8).reshape(2, -1)
    there = gpu.read_blocks(other, np.arange(BLOCKS))
    gpu.write_blocks(other, np.array([3, 0]), read_only)
    there[[3, 0]] = after[[2, 1]]
    np.testing.assert_array_equal(gpu.read_blocks(other, np.arange(BLOCKS)), there)


def test_a_step_without_tokens_writes_nothing() -> None:
    gpu, _ = pair("float32", "float32")
    cache = gpu.new_kv_cache(2, 4, 1, 8)
    nothing, none = torch.zeros(0, 8, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    gpu.write_kv(nothing, nothing, cache, none)
    gpu.rotary_write_kv(none, nothing, nothing, nothing, torch.ones(4, 8, device=DEVICE), 8, False, cache, none)
    assert not cache.data.any()


def test_float8_is_refused_where_it_cannot_be_converted() -> None:
    gpu, _ = pair("float16", "fp8")
    gpu.capability = (8, 6)
    with pytest.raises(ConfigError, match=r"takes a GPU of compute capability 8\.9 or newer, this one has 8\.6"):
        gpu.new_kv_cache(2, 4, 1, 8)
