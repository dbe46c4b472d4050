"""Paged attention on a GPU against the reference: every kind of attention, cache and step, in small tiles."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import triton.language as tl

from quire.errors import ConfigError
from quire.kernels.backend import AttentionMetadata, AttentionParams, StepLengths
from quire.kernels.gpu import attention_kernels, attention_plan
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import STORAGE, KVCache
from quire.kernels.gpu.tuned_configs import KernelConfig, TunedConfigs
from quire.kernels.reference import ReferenceBackend
from tests.kernels.gpu.common import ACTS, DEVICE, mostly_slow
from tests.kernels.scenes import Paged

Chunks = list[tuple[int, int, int]]
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
MIXED = [(0, 5, 27), (1, 39, 40), (2, 0, 1)]


class SmallTiles(TunedConfigs):
    """Tiles so small that short sequences have several."""

    def get(self, kernel: str, key: str, default: KernelConfig) -> KernelConfig:
        small = {"rows": 16, "keys": 16, "num_stages": 1, "num_warps": 4}
        return {name: small.get(name, value) for name, value in default.items()}


@pytest.fixture(autouse=True)
def _small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "MIN_SHARE", 16)
    monkeypatch.setattr(attention_plan, "MIN_PROMPT_SHARE", 16)
    monkeypatch.setattr(attention_plan, "CHUNK", 64)


def backend_of(act: str = "float32", kv_dtype: str = "float32", **options: object) -> GPUBackend:
    backend = GPUBackend(act, kv_dtype, DEVICE, **options)  # type: ignore[arg-type]
    backend.tuned_configs = SmallTiles()
    backend.num_sms = 3  # so that keys are split, but not into many shares
    return backend


class Scene:
    """Sequences in blocks of both backends' caches, NaN wherever no token is."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, size: int, block_size: int = 4, kv_dtype: str = "float32"
    ) -> None:
        self.paged = Paged.random(sum(lengths), lengths, block_size, heads, kv_heads, size)
        self.kv_dtype, self.heads, self.kv_heads, self.size = kv_dtype, heads, kv_heads, size
        self.reference = ReferenceBackend("float32", kv_dtype, DEVICE)
        self.spec = self.paged.cache(self.reference)

    def params(self, **given: object) -> AttentionParams:
        return AttentionParams(self.heads, self.kv_heads, self.size, self.size**-0.5, **given)  # type: ignore[arg-type]

    def cache(self, backend: GPUBackend) -> KVCache:
        """Return the backend's cache, which holds what the reference does, bit for bit."""
        spec = self.spec.permute(1, 0, 3, 2, 4).contiguous()  # type: ignore[attr-defined]
        if self.kv_dtype not in ("int8", "fp8"):
            return KVCache(spec.to(STORAGE[self.kv_dtype]))
        scales = spec.abs().amax(-1) / (127 if self.kv_dtype == "int8" else 448)
        codes = torch.nan_to_num(spec / scales[..., None])
        codes = torch.round(codes) if self.kv_dtype == "int8" else codes
        return KVCache(codes.to(STORAGE[self.kv_dtype]), scales)

    def metadata(self, chunks: Chunks, *, known: bool = True, single: bool = False) -> AttentionMetadata:
        made = self.paged.metadata(chunks)
        lengths = StepLengths(np.diff(made.cu_query_lens).astype(np.int64), made.seq_lens.astype(np.int64))
        put = self.reference.from_numpy
        arrays = map(put, (made.cu_query_lens, made.seq_lens, made.block_tables, made.slot_mapping))
        return AttentionMetadata(*arrays, lengths=lengths if known else None, single=single)

    def queries(self, chunks: Chunks, act: str) -> torch.Tensor:
        """Return queries as they come: a part of longer rows."""
        rows = self.paged.rows(chunks)
        q = torch.from_numpy(self.paged.q[rows].reshape(len(rows), -1)).to(DEVICE)
        return torch.nn.functional.pad(q, (0, 24)).to(getattr(torch, act))[:, : q.shape[1]]

    def expected(self, chunks: Chunks, params: AttentionParams, act: str = "float32") -> torch.Tensor:
        q = self.queries(chunks, act).float()
        return self.reference.paged_attention(q, self.spec, self.metadata(chunks), params)

    def check(self, backend: GPUBackend, chunks: Chunks, params: AttentionParams, **step: bool) -> torch.Tensor:
        act = backend.dtype
        metadata = self.metadata(chunks, **step)
        got = backend.paged_attention(self.queries(chunks, act), self.cache(backend), metadata, params)
        assert got.dtype == backend.act
        expected = self.expected(chunks, params, act)
        assert torch.linalg.norm(got.float() - expected) <= TOLERANCES[act] * torch.linalg.norm(expected)
        if act == "float32":
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        return got


def vector(seed: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(size).astype(np.float32)).to(DEVICE)


KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"sliding_window": 21},
    "narrow": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True},
    "everything": {"sliding_window": 30, "softcap": 20.0, "sinks": True, "alibi_slopes": True},
}


def made(kind: str, heads: int) -> dict[str, object]:
    given = dict(KINDS[kind])
    for seed, name in enumerate(("sinks", "alibi_slopes")):
        if name in given:
            given[name] = vector(seed, heads)
    return given


@pytest.mark.parametrize("case", mostly_slow(product(ACTS, KINDS), ("bfloat16", "everything"), ("float32", "plain")))
def test_every_kind_of_attention_in_a_mixed_step(case: tuple[str, str]) -> None:
    act, kind = case
    scene = Scene([27, 40, 1], 4, 2, 8)
    scene.check(backend_of(act), MIXED, scene.params(**made(kind, 4)))


@pytest.mark.parametrize("case", mostly_slow(product(ACTS, KINDS), ("float16", "everything"), ("float32", "plain")))
def test_every_kind_of_attention_of_single_tokens(case: tuple[str, str]) -> None:
    act, kind = case
    scene = Scene([50, 1], 4, 2, 8)
    scene.check(backend_of(act), [(0, 49, 50), (1, 0, 1)], scene.params(**made(kind, 4)), single=True)


@pytest.mark.parametrize("case", mostly_slow(product(ACTS, STORAGE), ("bfloat16", "int8"), ("float16", "fp8")))
def test_every_type_of_cache(case: tuple[str, str]) -> None:
    act, kv_dtype = case
    scene = Scene([12, 30], 2, 2, 16, kv_dtype=kv_dtype)
    scene.check(backend_of(act, kv_dtype), [(0, 0, 12), (1, 29, 30)], scene.params())


@pytest.mark.parametrize(
    "shape",
    mostly_slow([(1, 1, 8), (3, 1, 12), (6, 2, 20), (20, 1, 16), (71, 1, 16), (130, 1, 8)], (6, 2, 20), (20, 1, 16)),
)
def test_any_group_of_heads_of_any_size(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, size = shape
    scene = Scene([7, 18], heads, kv_heads, size)
    scene.check(backend_of("float16"), [(0, 4, 7), (1, 17, 18)], scene.params(sinks=vector(0, heads)))


@pytest.mark.parametrize("block_size", mostly_slow([1, 3, 16, 24, 64], 3))
def test_blocks_of_any_size(block_size: int) -> None:
    scene = Scene([30, 41], 2, 1, 16, block_size)
    scene.check(backend_of(), [(0, 5, 30), (1, 40, 41)], scene.params())
    scene.check(backend_of(), [(0, 29, 30), (1, 40, 41)], scene.params(), single=True)


@pytest.mark.parametrize("window", mostly_slow([None, 5, 20], 5))
@pytest.mark.parametrize("lengths", mostly_slow([[50], [3, 20, 1]], [3, 20, 1]))
def test_encoders_see_both_sides(lengths: list[int], window: int | None) -> None:
    scene = Scene(lengths, 2, 2, 16)
    chunks = [(s, 0, length) for s, length in enumerate(lengths)]
    scene.check(backend_of(), chunks, scene.params(causal=False, sliding_window=window))


@pytest.mark.parametrize("count", mostly_slow(range(1, 8), 4))
def test_any_number_of_sequences_with_parts_of_any_length(count: int) -> None:
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, 25, count).tolist()
    scene = Scene(lengths, 2, 1, 8)
    chunks = [(s, int(rng.integers(0, length + (s > 0))), length) for s, length in enumerate(lengths)]
    scene.check(backend_of(), chunks, scene.params(), known=bool(count % 2))


def test_more_sequences_than_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "SEARCH", tl.constexpr(16))
    lengths = [1 + s % 3 for s in range(19)]
    scene = Scene(lengths, 1, 1, 4, 2)
    backend = backend_of()
    chunks = [(s, 0, length) for s, length in enumerate(lengths)]
    metadata = scene.metadata(chunks, known=False)
    launch = attention_plan.prompt_launch(backend, scene.cache(backend), scene.params(), 10)
    launch = launch._replace(tiling=launch.tiling._replace(short=2))
    q = scene.queries(chunks, "float32")
    out = torch.full_like(q.contiguous(), 7.0)
    backend._launch(launch, q, scene.cache(backend), metadata, scene.params(), out, 0)
    expected = scene.expected(chunks, scene.params())
    starts = metadata.cu_query_lens.tolist()
    for s, _, length in chunks:
        own = slice(starts[s], starts[s + 1])
        if length > 2:
            torch.testing.assert_close(out[own], expected[own], rtol=1e-4, atol=1e-5)
        else:
            assert (out[own] == 7).all()  # left to the other launch


@pytest.mark.parametrize("kind", mostly_slow(["plain", "window", "sinks"], "sinks"))
def test_few_queries_on_long_contexts_share_their_keys(kind: str) -> None:
    scene = Scene([100], 2, 1, 8)
    params = scene.params(**made(kind, 2))
    backend = backend_of()
    backend.num_sms = 8
    launch = attention_plan.prompt_launch(backend, scene.cache(backend), params, 10)
    assert launch.splits(2, 100)[1] > 1
    scene.check(backend, [(0, 88, 98)], params)


def test_both_kernels_agree() -> None:
    scene = Scene([36, 20], 4, 2, 16)
    backend, params = backend_of("float16"), scene.params()
    chunks = [(0, 35, 36), (1, 19, 20)]
    single = scene.check(backend, chunks, params, single=True)
    launch = attention_plan.prompt_launch(backend, scene.cache(backend), params, 2)
    launch = launch._replace(tiling=launch.tiling._replace(short=0))
    out = torch.empty_like(single)
    backend._launch(
        launch, scene.queries(chunks, "float16"), scene.cache(backend), scene.metadata(chunks), params, out, 0
    )
    torch.testing.assert_close(single, out, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("single", [True, False])
def test_padding_disturbs_nobody(single: bool) -> None:
    scene = Scene([14, 34], 4, 2, 8)
    backend, params = backend_of(), scene.params()
    chunks: Chunks = [(0, 13, 14), (1, 33, 34)] if single else [(0, 4, 14), (1, 33, 34)]
    step = scene.metadata(chunks, known=False, single=single)
    rows, q = len(scene.paged.rows(chunks)), scene.queries(chunks, "float32")
    padded_q = torch.cat([q, torch.full((3, q.shape[1]), torch.nan, device=DEVICE)])
    ends = step.cu_query_lens[-1:].expand(3) + (torch.arange(1, 4, device=DEVICE, dtype=torch.int32) if single else 0)
    padded = replace(
        step,
        cu_query_lens=torch.cat([step.cu_query_lens, ends]),
        seq_lens=torch.nn.functional.pad(step.seq_lens, (0, 3)),
        block_tables=torch.nn.functional.pad(step.block_tables, (0, 2, 0, 3), value=-7),
        slot_mapping=torch.nn.functional.pad(step.slot_mapping, (0, 3), value=-1),
        plans={},
    )
    got = backend.paged_attention(padded_q, scene.cache(backend), padded, params)
    torch.testing.assert_close(got[:rows], scene.expected(chunks, params), rtol=1e-4, atol=1e-5)


def test_blocks_behind_the_window_and_past_the_end_may_be_anything() -> None:
    scene = Scene([64, 30], 2, 1, 8)
    backend, params = backend_of(), scene.params(sliding_window=10)
    chunks = [(0, 60, 64), (1, 29, 30)]
    before = scene.check(backend, chunks, params)
    cache = scene.cache(backend)
    cache.data[scene.paged.tables[0, :12].tolist()] = torch.nan
    metadata = scene.metadata(chunks)
    metadata.block_tables[0, :12] = -1
    metadata.block_tables[0, 16:] = 1 << 30
    metadata.block_tables[1, 8:] = -5
    assert torch.equal(backend.paged_attention(scene.queries(chunks, "float32"), cache, metadata, params), before)


def test_a_recorded_shape_holds_for_other_lengths() -> None:
    """What is launched depends on shapes alone, and is right for any lengths that fit."""
    scene = Scene([40, 40, 40], 2, 1, 8)
    backend, params = backend_of(), scene.params()
    cache = scene.cache(backend)
    step = scene.metadata([(s, 0, 1) for s in range(3)], known=False, single=True)
    for ends in ([1, 2, 3], [40, 17, 32]):
        chunks = [(s, end - 1, end) for s, end in enumerate(ends)]
        step.seq_lens.copy_(torch.tensor(ends))
        got = backend.paged_attention(scene.queries(chunks, "float32"), cache, step, params)
        torch.testing.assert_close(got, scene.expected(chunks, params), rtol=1e-4, atol=1e-5)
    mixed = scene.metadata([(0, 0, 10), (1, 0, 1), (2, 0, 1)], known=False)
    for chunks in ([(0, 30, 40), (1, 20, 21), (2, 30, 31)], [(0, 5, 6), (1, 0, 2), (2, 23, 32)]):
        now = scene.metadata(chunks)
        mixed.seq_lens.copy_(now.seq_lens)
        mixed.cu_query_lens.copy_(now.cu_query_lens)
        got = backend.paged_attention(scene.queries(chunks, "float32"), cache, mixed, params)
        torch.testing.assert_close(got, scene.expected(chunks, params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", mostly_slow(["plain", "window", "sinks"], "plain"))
@pytest.mark.parametrize("act", mostly_slow(ACTS, "bfloat16"))
def test_batch_invariant_bits_depend_on_neither_batch_nor_chunk(act: str, kind: str) -> None:
    scene = Scene([140, 41, 7], 2, 1, 16)
    params = scene.params(**made(kind, 2))
    backend = backend_of(act, batch_invariant=True)
    alone = scene.check(backend, [(0, 139, 140)], params, single=True)
    cache = scene.cache(backend)

    def last_of_first(chunks: Chunks, row: int, *, single: bool = False, known: bool = True) -> torch.Tensor:
        metadata = scene.metadata(chunks, single=single, known=known)
        return backend.paged_attention(scene.queries(chunks, act), cache, metadata, params)[row : row + 1]

    assert torch.equal(last_of_first([(1, 40, 41), (0, 139, 140), (2, 6, 7)], 1, single=True), alone)
    assert torch.equal(last_of_first([(2, 0, 7), (0, 139, 140)], 7), alone)
    assert torch.equal(last_of_first([(0, 120, 140), (1, 40, 41)], 19, known=False), alone)
    assert torch.equal(last_of_first([(0, 70, 140)], 69), alone)


def fresh_of(scene: Scene, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    rows = scene.paged.rows(chunks)
    k, v = (torch.from_numpy(x[rows].reshape(len(rows), -1)).to(DEVICE) for x in (scene.paged.k, scene.paged.v))
    return k, v


def test_torch_computes_whole_prompts_and_triton_the_rest() -> None:
    scene = Scene([5, 18, 18, 20, 17], 2, 1, 8)
    backend, params = backend_of(attention_backend="torch"), scene.params()
    chunks = [(0, 4, 5), (1, 0, 18), (2, 0, 18), (3, 16, 20), (4, 0, 17)]
    expected, fresh = scene.expected(chunks, params), fresh_of(scene, chunks)
    cache = scene.cache(backend)
    step = scene.metadata(chunks)
    got = backend.paged_attention(scene.queries(chunks, "float32"), cache, step, params, fresh)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert step.plans["whole prompts", 16] == [(1, 18, 2), (41, 17, 1)]
    # With a poisoned `fresh` only those prompts change, so that it is torch who computed them.
    poisoned = backend.paged_attention(
        scene.queries(chunks, "float32"), cache, scene.metadata(chunks), params, (fresh[0], fresh[1] * torch.nan)
    )
    whole = torch.zeros(len(got), dtype=torch.bool)
    whole[1:37] = whole[41:58] = True
    assert poisoned[whole].isnan().all() and torch.equal(poisoned[~whole], got[~whole])
    chunks = chunks[1:2]
    for changed, extra in ((params, None), (replace(params, sliding_window=9), fresh_of(scene, chunks))):
        other = backend.paged_attention(scene.queries(chunks, "float32"), cache, scene.metadata(chunks), changed, extra)
        torch.testing.assert_close(other, scene.expected(chunks, changed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("act", "size", "torchs"), [("float16", 16, True), ("float32", 16, False), ("float16", 20, False)]
)
def test_by_default_torch_has_what_needs_no_memory_for_all_pairs(act: str, size: int, torchs: bool) -> None:
    scene = Scene([18], 2, 1, size, kv_dtype=act)
    backend, params, chunks = backend_of(act, act, attention_backend="torch"), scene.params(), [(0, 0, 18)]
    backend.attention_backend = "auto"
    fresh, queries = fresh_of(scene, chunks), scene.queries(chunks, act)
    got = backend.paged_attention(queries, scene.cache(backend), scene.metadata(chunks), params, fresh)
    torch.testing.assert_close(got.float(), scene.expected(chunks, params, act), rtol=1e-2, atol=1e-2)
    fresh[1].fill_(torch.nan)
    got = backend.paged_attention(queries, scene.cache(backend), scene.metadata(chunks), params, fresh)
    assert bool(got.isnan().all()) == torchs


def test_steps_without_tokens_are_empty() -> None:
    scene = Scene([3], 2, 1, 8)
    backend = backend_of()
    none = torch.zeros(0, 16, device=DEVICE)
    step = scene.metadata([(0, 3, 3)])
    assert backend.paged_attention(none, scene.cache(backend), step, scene.params()).shape == (0, 16)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_flashinfer_is_refused_where_it_is_not_installed() -> None:
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        backend_of("float16", "float16", attention_backend="flashinfer")


@pytest.mark.parametrize(
    ("asked", "said"), [("auto", "there is no GPU"), ("triton", "as asked"), ("torch", "16 tokens or more")]
)
def test_what_was_chosen_is_logged(asked: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    if DEVICE == "cuda" and asked == "auto":
        said = "512 tokens or more"
    with caplog.at_level("INFO", logger="quire.kernels.gpu.attention"):
        backend_of(attention_backend=asked)
    assert len(caplog.messages) == 1 and said in caplog.text
