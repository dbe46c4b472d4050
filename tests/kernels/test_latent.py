"""The latent cache and attention over it, and products of single heads: against numpy, in scattered poisoned blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.heads import head_linear, pack_heads
from quire.kernels.cpu.simd import HAS_BF16_DOT
from quire.kernels.cpu.sizes import SEGMENT
from quire.kernels.reference import ReferenceBackend
from quire.kernels.reference.backend import InvariantReferenceBackend
from quire.step import DTYPE_BYTES, LayerKVSpec
from tests.kernels.both_ways import both_ways, new_launcher
from tests.kernels.scenes import normal, round_to

LENGTHS = [70, 1, 33, 300]
# Whole prompts, single tokens and chunks in one step: (sequence, first, stop).
MIXED = [(0, 0, 70), (1, 0, 1), (2, 32, 33), (3, 140, 297)]
# heads, size of a vector, of them value, block size
SHAPES = [(4, 24, 16, 4), (16, 33, 17, 1), (3, 72, 64, 16), (72, 48, 32, 5)]
FLOATS = ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
# Kernels for vectors and matrices of 16-bit floats differ from those for float32 in one load: see `paged_scenes`.
KINDS = ["float32", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bfloat16", "float16"))]
needs_dot = pytest.mark.skipif(not HAS_BF16_DOT, reason="the CPU lacks AVX-512 BF16")
MATRICES = [
    ("float32", False),
    pytest.param("bfloat16", False, marks=pytest.mark.slow),
    pytest.param("bfloat16", True, marks=needs_dot),
    pytest.param("float16", False, marks=pytest.mark.slow),
]
DOTS = [False, pytest.param(True, marks=needs_dot)]  # whether products of pairs are used


@dataclass
class Latents:
    """Sequences whose vectors lie in scattered blocks of a cache that is otherwise full of NaN."""

    shape: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        heads, size, _, block_size = self.shape
        rng = np.random.default_rng(3)
        needed = [-(-length // block_size) for length in LENGTHS]
        self.num_blocks = sum(needed) + 3
        free = rng.permutation(self.num_blocks).tolist()
        self.tables = np.zeros((len(LENGTHS), max(needed) + 1), np.int32)
        for row, count in zip(self.tables, needed, strict=True):
            row[:count] = [free.pop() for _ in range(count)]
        self.vectors = [normal(rng, length, size) for length in LENGTHS]
        self.queries = [normal(rng, length, heads, size) for length in LENGTHS]
        self.params = AttentionParams(heads, 1, size, size**-0.5, value_size=self.shape[2])

    def slots(self, s: int, first: int, stop: int) -> np.ndarray:
        """Slots of positions first .. stop of sequence s."""
        positions, block_size = np.arange(first, stop), self.shape[3]
        return self.tables[s, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def cache(self, backend: CPUBackend | ReferenceBackend) -> object:
        """Fill a cache."""
        cache = backend.new_kv_cache(self.num_blocks, self.shape[3], 1, self.shape[1], latent=True)
        everywhere, put = np.arange(self.num_blocks * self.shape[3]), backend.from_numpy
        poison = np.full((everywhere.size, self.shape[1]), np.nan, np.float32)
        backend.write_latent(put(poison), cache, put(everywhere))
        slots = np.concatenate([self.slots(s, 0, length) for s, length in enumerate(LENGTHS)])
        backend.write_latent(put(np.concatenate(self.vectors)), cache, put(slots))
        return cache

    def attend(
        self, backend: CPUBackend | ReferenceBackend, cache: object, chunks: list[tuple[int, int, int]]
    ) -> np.ndarray:
        """One step -> [T, Hq * value size]."""
        counts, put = [stop - first for _, first, stop in chunks], backend.from_numpy
        metadata = AttentionMetadata(
            cu_query_lens=put(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            seq_lens=put(np.array([stop for _, _, stop in chunks], np.int32)),
            block_tables=put(self.tables[[s for s, _, _ in chunks]]),
            slot_mapping=put(np.concatenate([self.slots(*chunk) for chunk in chunks])),
        )
        q = np.concatenate([self.queries[s][first:stop] for s, first, stop in chunks])
        out = backend.paged_attention(put(q.reshape(len(q), -1)), cache, metadata, self.params)
        return np.array(backend.to_numpy(out))

    def exact(self, kind: str, chunks: list[tuple[int, int, int]]) -> np.ndarray:
        """The rows of the chunks by the textbook."""
        parts = []
        for s, first, stop in chunks:
            held = round_to(self.vectors[s], kind).astype(np.float64)
            logits = np.einsum("ihd,jd->hij", self.queries[s].astype(np.float64), held) * self.params.scale
            logits[:, np.arange(len(held))[None, :] > np.arange(len(held))[:, None]] = -np.inf
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out = np.einsum("hij,jd->ihd", weights, held[:, : self.shape[2]])
            parts.append(out[first:stop].reshape(stop - first, -1))
        return np.concatenate(parts)

    def rounded(self, s: int) -> np.ndarray:
        """All rows of sequence s by the textbook with what pairs round: vectors, scaled queries, and weights.

        Weights are rounded relative to the largest score of their segment.
        """
        held = round_to(self.vectors[s], "bfloat16").astype(np.float64)
        q = round_to(self.queries[s] * np.float32(self.params.scale), "bfloat16").astype(np.float64)
        logits, count = np.einsum("ihd,jd->hij", q, held), len(held)
        logits[:, np.arange(count)[None, :] > np.arange(count)[:, None]] = -np.inf
        largest, total, out = logits.max(axis=-1, keepdims=True), 0.0, 0.0
        for begin in range(0, count, SEGMENT):
            part = logits[..., begin : begin + SEGMENT]
            most = part.max(axis=-1, keepdims=True)
            seen = most > -np.inf
            weights = np.exp(np.where(seen, part - np.where(seen, most, 0), -np.inf)).astype(np.float32)
            weights, factor = round_to(weights, "bfloat16").astype(np.float64), np.exp(most - largest)
            total = total + factor * weights.sum(axis=-1, keepdims=True)
            out = out + factor * np.einsum("hij,jd->hid", weights, held[begin : begin + SEGMENT, : self.shape[2]])
        return (out / total).transpose(1, 0, 2).reshape(count, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_heads_attend_to_the_shared_vectors(shape: tuple[int, int, int, int], kind: str) -> None:
    scene, backend = Latents(shape), CPUBackend("float32", kind, num_threads=2, dot_products=False)
    got = scene.attend(backend, scene.cache(backend), MIXED)
    np.testing.assert_allclose(got, scene.exact(kind, MIXED), atol=1e-5)


@needs_dot
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_round_queries_and_weights_and_nothing_else(shape: tuple[int, int, int, int]) -> None:
    scene, backend = Latents(shape), CPUBackend("float32", "bfloat16", num_threads=2)
    got = scene.attend(backend, scene.cache(backend), MIXED)
    np.testing.assert_allclose(got, scene.exact("bfloat16", MIXED), atol=2e-2)
    error = np.abs(got - np.concatenate([scene.rounded(s)[first:stop] for s, first, stop in MIXED]))
    # A weight that lies between two bfloat16 numbers to within an error of float32 may go either way.
    assert np.quantile(error, 0.9) < 1e-5


@needs_dot
def test_recorded_attention_reads_lengths_and_tables_when_it_runs() -> None:
    scene, backend = Latents(SHAPES[1]), CPUBackend("float32", "bfloat16", num_threads=2)
    cache = scene.cache(backend)
    metadata = AttentionMetadata(
        np.array([0, 1, 2], np.int32), np.zeros(2, np.int32), np.zeros_like(scene.tables[:2]), np.zeros(2, np.int64)
    )
    q = np.zeros((2, scene.shape[0] * scene.shape[1]), np.float32)
    run = backend.graph(lambda: (backend.paged_attention(q, cache, metadata, scene.params),))
    for pair in ([(0, 69, 70), (3, 299, 300)], [(3, 129, 130), (1, 0, 1)]):
        metadata.seq_lens[:] = [stop for _, _, stop in pair]
        metadata.block_tables[:] = scene.tables[[s for s, _, _ in pair]]
        q[:] = np.concatenate([scene.queries[s][first:stop].reshape(1, -1) for s, first, stop in pair])
        (got,) = run()
        np.testing.assert_array_equal(got, scene.attend(backend, cache, pair))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("backend_class", [ReferenceBackend, InvariantReferenceBackend])
def test_the_reference_backends_say_the_same(backend_class: type[ReferenceBackend], kind: str) -> None:
    scene, backend = Latents(SHAPES[0]), backend_class("float32", kind)
    got = scene.attend(backend, scene.cache(backend), MIXED)
    np.testing.assert_allclose(got, scene.exact(kind, MIXED), atol=1e-5)


@pytest.mark.parametrize("dots", DOTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_in_chunks_alone_in_company_and_on_threads(
    shape: tuple[int, int, int, int], dots: bool
) -> None:
    kind = "bfloat16" if dots else "float32"
    scene, (one, two) = Latents(shape), (CPUBackend("float32", kind, count, dot_products=dots) for count in (1, 2))
    cache = scene.cache(one)
    whole = scene.attend(one, cache, [(3, 0, 300)])
    alone = np.concatenate([scene.attend(two, cache, [(3, i, i + 1)]) for i in range(0, 300, 23)])
    np.testing.assert_array_equal(alone, whole[::23])
    company = scene.attend(two, cache, [(0, 0, 70), (3, 113, 278), (1, 0, 1)])
    np.testing.assert_array_equal(company[70:235], whole[113:278])


@pytest.mark.parametrize("dots", DOTS)
def test_a_long_context_is_split_among_threads_without_a_trace(dots: bool) -> None:
    heads, size, length = 32, 40, 5000
    rng, results = np.random.default_rng(0), []
    vectors, q = normal(rng, length, size), normal(rng, 1, heads * size)
    metadata = [
        np.array([0, 1], np.int32),
        np.array([length], np.int32),
        np.arange(-(-length // 16), dtype=np.int32)[None],
        np.array([length - 1]),
    ]
    for threads in (1, 2):
        backend = CPUBackend("float32", "bfloat16" if dots else "float32", threads, dot_products=dots)
        cache = backend.new_kv_cache(-(-length // 16), 16, 1, size, latent=True)
        backend.write_latent(vectors, cache, np.arange(length))
        params = AttentionParams(heads, 1, size, size**-0.5, value_size=32)
        results.append(np.array(backend.paged_attention(q, cache, AttentionMetadata(*metadata), params)))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("backend_class", [ReferenceBackend, CPUBackend])
def test_blocks_move_as_wholes_and_hold_one_vector_per_token(backend_class: type, kind: str) -> None:
    backend, block_size, size = backend_class("float32", kind), 4, 24
    cache = backend.new_kv_cache(5, block_size, 1, size, latent=True)
    per_token = backend.block_nbytes(cache) / block_size
    print(f"{kind}: {per_token:.0f} bytes per token")
    assert per_token == size * DTYPE_BYTES[kind]
    assert backend.block_nbytes(cache) == LayerKVSpec(1, size, kind, latent=True).block_bytes(block_size)
    x = normal(np.random.default_rng(0), 20, size)
    backend.write_latent(backend.from_numpy(x), cache, backend.from_numpy(np.arange(20)))
    before = backend.read_blocks(cache, np.arange(5)).copy()
    assert before.shape == (5, backend.block_nbytes(cache)) and len(np.unique(before, axis=0)) == 5
    backend.copy_blocks(cache, np.array([[0, 3], [3, 1]]))
    after = backend.read_blocks(cache, np.arange(5)).copy()
    np.testing.assert_array_equal(after, before[[0, 3, 2, 0, 4]])
    backend.write_blocks(cache, np.array([1, 3]), before[[1, 3]])
    np.testing.assert_array_equal(backend.read_blocks(cache, np.arange(5)), before)


@pytest.mark.parametrize("kind", FLOATS)
def test_negative_slots_are_left_out(kind: str) -> None:
    backend = CPUBackend("float32", kind)
    cache = backend.new_kv_cache(2, 4, 1, 8, latent=True)
    backend.write_latent(np.ones((3, 8), np.float32), cache, np.array([-1, 2, -1]))
    held = np.flatnonzero(backend.read_blocks(cache, np.arange(2)).reshape(8, -1).any(axis=1))
    assert held.tolist() == [2]


@pytest.mark.parametrize(("dtype", "paired"), MATRICES)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(4, 16, 24), (3, 33, 7), (2, 96, 20), (2, 161, 37)])
@pytest.mark.parametrize("tokens", [1, 9, 65])
def test_each_head_has_a_matrix_of_its_own(
    tokens: int, heads: int, outputs: int, inputs: int, dtype: str, paired: bool
) -> None:
    rng = np.random.default_rng(1)
    matrices = [HostTensor(normal(rng, inputs, outputs).T, "float32") for _ in range(heads)]
    held = [round_to(matrix.array, dtype).astype(np.float64) for matrix in matrices]

    def draw(seed: int) -> tuple[np.ndarray]:
        return (normal(np.random.default_rng(seed), tokens * heads, inputs + 5),)

    def expect(wide: np.ndarray) -> tuple[np.ndarray]:
        x = wide[:, 5:].reshape(tokens, heads, inputs)
        x = (round_to(x, "bfloat16") if paired else x).astype(np.float64)
        return (np.einsum("tha,hba->thb", x, held).reshape(-1, outputs),)

    launchers = [new_launcher(1), new_launcher(2)]
    weights = [pack_heads(launcher, matrices, dtype, paired) for launcher in launchers]
    packed = dict(zip(map(id, launchers), weights))
    both_ways(
        launchers,
        lambda launcher, wide: (head_linear(launcher, wide[:, 5:], packed[id(launcher)]),),
        draw,
        expect,
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-4),
    )
    for backend_class in (ReferenceBackend, InvariantReferenceBackend):
        backend, (x,) = backend_class(dtype, round_linear_inputs=paired), draw(0)
        got = backend.head_linear(backend.from_numpy(x[:, 5:]), backend.pack_heads(matrices))
        np.testing.assert_allclose(backend.to_numpy(got), expect(x)[0], atol=1e-4)


@pytest.mark.parametrize("paired", [False, pytest.param(True, marks=needs_dot)])
def test_a_token_is_the_same_in_any_company(paired: bool) -> None:
    rng, launcher = np.random.default_rng(2), new_launcher(1)
    matrices = [HostTensor(normal(rng, 40, 12), "float32") for _ in range(5)]
    weight = pack_heads(launcher, matrices, "bfloat16" if paired else "float32", paired)
    x = normal(rng, 70 * 5, 12)
    whole = np.array(head_linear(launcher, x, weight))
    for t in (0, 8, 63, 64, 69):
        np.testing.assert_array_equal(head_linear(launcher, x[5 * t : 5 * t + 5], weight), whole[5 * t : 5 * t + 5])
