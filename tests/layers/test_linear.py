"""Linear layers and vocabulary tables: ranks hold disjoint shares that together compute what one rank computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from quire.errors import ConfigError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.layers.builder import Builder, share_of
from quire.layers.embedding import LMHead, PositionEmbedding, VocabParallelEmbedding
from quire.layers.linear import (
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.weights import Weights

BACKEND = create_backend("reference", "float32", "float32", num_threads=1)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 12)).astype(np.float32)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def numpy(array: Any) -> np.ndarray:
    return np.array(BACKEND.to_numpy(array))


def on_ranks(size: int, weights: Weights, work: Any) -> list[Any]:
    if size == 1:
        return [work(Builder(weights, BACKEND))]
    return run_ranks(size, BACKEND, lambda backend: work(Builder(weights, backend)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_merged_column_layer(ranks: int, bias: bool, fused: bool, transposed: bool) -> None:
    matrices, biases = [random(8, 12), random(4, 12)], [random(8), random(4)]
    stored = {"a": matrices[0], "b": matrices[1]} if not fused else {"ab": np.concatenate(matrices)}
    weights = Weights({f"m.{name}.weight": matrix.T if transposed else matrix for name, matrix in stored.items()})
    stored_biases = {"a": biases[0], "b": biases[1]} if not fused else {"ab": np.concatenate(biases)}
    weights.update({f"m.{name}.bias": vector for name, vector in stored_biases.items()})

    def work(builder: Builder) -> np.ndarray:
        layer = ColumnParallelLinear(builder.under("m"), tuple(stored), 12, (8, 4), bias=bias, transposed=transposed)
        return numpy(layer(BACKEND.from_numpy(X)))

    expected = [X @ matrix.T + (vector if bias else 0) for matrix, vector in zip(matrices, biases)]
    results = on_ranks(ranks, weights, work)
    for index, (size, whole) in enumerate(zip((8, 4), expected)):
        start = 0 if index == 0 else 8 // ranks
        parts = [result[:, start : start + size // ranks] for result in results]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hidden_act", ["silu", "gelu_new", "relu"])
def test_gated_layer_multiplies_up_by_the_activated_gate(ranks: int, bias: bool, fused: bool, hidden_act: str) -> None:
    gate, up, gate_bias, up_bias = random(6, 12), random(6, 12), random(6), random(6)
    if fused:
        weights = Weights({"gu.weight": np.concatenate([gate, up]), "gu.bias": np.concatenate([gate_bias, up_bias])})
    else:
        weights = Weights({"g.weight": gate, "u.weight": up, "g.bias": gate_bias, "u.bias": up_bias})

    def work(builder: Builder) -> np.ndarray:
        names = ("gu",) if fused else ("g", "u")
        return numpy(GatedColumnParallelLinear(builder, names, 12, 6, hidden_act, bias=bias)(BACKEND.from_numpy(X)))

    gates, ups = X @ gate.T + gate_bias * bias, X @ up.T + up_bias * bias
    expected = ACT2FN[hidden_act](torch.from_numpy(gates)).numpy() * ups
    np.testing.assert_allclose(np.concatenate(on_ranks(ranks, weights, work), axis=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize("fused", [False, True])
def test_qkv_layer_splits_by_heads_and_repeats_kv_heads_where_ranks_outnumber_them(
    ranks: int, kv_heads: int, fused: bool
) -> None:
    heads, size = 4, 3
    matrices = [random(heads * size, 12), random(kv_heads * size, 12), random(kv_heads * size, 12)]
    biases = [random(matrix.shape[0]) for matrix in matrices]
    names = ("qkv",) if fused else ("q", "k", "v")
    weights = Weights(zip([f"{n}.weight" for n in names], [np.concatenate(matrices)] if fused else matrices))
    weights.update(zip([f"{n}.bias" for n in names], [np.concatenate(biases)] if fused else biases))

    def work(builder: Builder) -> tuple[np.ndarray, ...]:
        layer = QKVParallelLinear(builder, names, 12, num_heads=heads, num_kv_heads=kv_heads, head_size=size, bias=True)
        assert (layer.num_heads, layer.num_kv_heads) == (heads // ranks, max(1, kv_heads // ranks))
        return tuple(numpy(part) for part in layer(BACKEND.from_numpy(X)))

    q, k, v = ((X @ matrix.T + vector).reshape(5, -1, size) for matrix, vector in zip(matrices, biases))
    for rank, result in enumerate(on_ranks(ranks, weights, work)):
        mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
        kv_mine = sorted({head * kv_heads // heads for head in mine})
        for part, whole, chosen in zip(result, (q, k, v), (list(mine), kv_mine, kv_mine)):
            np.testing.assert_allclose(part, whole[:, chosen].reshape(5, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_qkv_stored_by_kv_head_is_that_of_separate_tensors(ranks: int, kv_heads: int) -> None:
    heads, size, group = 4, 3, 4 // kv_heads
    matrices = [random(heads * size, 12), random(kv_heads * size, 12), random(kv_heads * size, 12)]
    biases = [random(matrix.shape[0]) for matrix in matrices]
    separate = Weights(zip([f"{name}.weight" for name in "qkv"], matrices))
    separate.update(zip([f"{name}.bias" for name in "qkv"], biases))

    def fused(parts: list[np.ndarray]) -> np.ndarray:
        q, k, v = parts
        rows = []
        for head in range(kv_heads):
            rows += [q[head * group * size : (head + 1) * group * size]]
            rows += [k[head * size : (head + 1) * size], v[head * size : (head + 1) * size]]
        return np.concatenate(rows)

    grouped = Weights({"qkv.weight": fused(matrices), "qkv.bias": fused(biases)})

    def outputs(weights: Weights, names: tuple[str, ...]) -> list[tuple[np.ndarray, ...]]:
        def work(builder: Builder) -> tuple[np.ndarray, ...]:
            layer = QKVParallelLinear(
                builder,
                names,
                12,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_size=size,
                bias=True,
                by_kv_head=len(names) == 1,
            )
            return tuple(numpy(part) for part in layer(BACKEND.from_numpy(X)))

        return on_ranks(ranks, weights, work)

    for ours, expected in zip(outputs(grouped, ("qkv",)), outputs(separate, ("q", "k", "v"))):
        for part, whole in zip(ours, expected):
            np.testing.assert_array_equal(part, whole)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_row_layer_sums_over_ranks_and_adds_its_bias_once(ranks: int, transposed: bool) -> None:
    matrix, bias = random(7, 12), random(7)
    weights = Weights({"o.weight": matrix.T if transposed else matrix, "o.bias": bias})

    def work(builder: Builder) -> np.ndarray:
        layer = RowParallelLinear(builder, "o", 12, 7, bias=True, transposed=transposed)
        share = 12 // ranks
        mine = X[:, builder.backend.rank * share : (builder.backend.rank + 1) * share]
        return numpy(layer(BACKEND.from_numpy(np.ascontiguousarray(mine))))

    for result in on_ranks(ranks, weights, work):
        np.testing.assert_allclose(result, X @ matrix.T + bias, rtol=1e-5, atol=1e-5)


def test_replicated_layer() -> None:
    weights = Weights({"p.weight": random(7, 12), "p.bias": random(7)})
    layer = ReplicatedLinear(Builder(weights, BACKEND), "p", 12, 7, bias=True)
    expected = X @ weights["p.weight"].T + weights["p.bias"]
    np.testing.assert_allclose(numpy(layer(BACKEND.from_numpy(X))), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_that_no_number_of_ranks_divides(ranks: int, tied: bool) -> None:
    table, head = random(13, 12), random(13, 12)
    weights = Weights({"embed.weight": table, "head.weight": head})
    ids = np.array([0, 12, 6, 7, 12, 4])

    def work(builder: Builder) -> tuple[np.ndarray, np.ndarray]:
        embedding = VocabParallelEmbedding(builder, "embed", 13, 12)
        lm_head = LMHead(builder, "head", 13, 12, tied_to=embedding if tied else None)
        return numpy(embedding(BACKEND.from_numpy(ids))), numpy(lm_head(BACKEND.from_numpy(X)))

    for rows, logits in on_ranks(ranks, weights, work):
        np.testing.assert_array_equal(rows, table[ids])
        assert logits.shape == (5, 13)
        np.testing.assert_allclose(logits, X @ (table if tied else head).T, rtol=1e-5, atol=1e-5)


def test_position_table_skips_its_unused_rows() -> None:
    weights = Weights({"p.weight": random(10, 4)})
    layer = PositionEmbedding(Builder(weights, BACKEND), "p", 8, 4, skip=2)
    rows = numpy(layer(BACKEND.from_numpy(np.array([0, 7]))))
    np.testing.assert_array_equal(rows, weights["p.weight"][[2, 9]])


def test_sizes_that_ranks_cannot_share_name_the_option() -> None:
    def work(backend: Backend) -> None:
        share_of(backend, 10, "number of attention heads")

    with pytest.raises(ConfigError, match="tensor_parallel_size is 4; it must divide the model's number of attention"):
        run_ranks(4, BACKEND, work)


def test_builder_prefixes_and_the_optional_outer_one() -> None:
    with_prefix = Builder(Weights({"model.decoder.w": random(2)}), BACKEND)
    without = Builder(Weights({"decoder.w": random(2)}), BACKEND)
    neither = Builder(Weights(), BACKEND)
    assert with_prefix.under_if("model", "decoder.w").under("decoder").has("w")
    assert without.under_if("model", "decoder.w").under("decoder").has("w")
    assert neither.under_if("model", "decoder.w").prefix == "model."
