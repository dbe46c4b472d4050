"""Norms and activations: what the layers add to the backend's ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from quire.checkpoint.tensor import HostTensor
from quire.checkpoint.weights import DummyWeights
from quire.errors import ModelError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.layers.activation import ACTIVATIONS, Activation
from quire.layers.builder import Builder
from quire.layers.norm import HeadLayerNorm, LayerNorm, ProjectionRMSNorm, RMSNorm
from tests.helpers.ranks import run_ranks
from tests.helpers.weights import Weights

BACKEND = create_backend("reference", "float32", "float32", num_threads=1)
X = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32) * 2


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_names_mean_what_they_mean_in_transformers(name: str) -> None:
    expected = ACT2FN[name](torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(Activation(BACKEND, name)(BACKEND.from_numpy(X)), expected, atol=2e-6)


def test_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="activation 'mish' is not supported \\(supported: relu, relu2, silu"):
        Activation(BACKEND, "mish")


class Weight:
    """One vector under every name."""

    def __init__(self, vector: np.ndarray) -> None:
        self.vector = vector

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> HostTensor:
        assert shape == self.vector.shape
        return HostTensor(self.vector, "float32")


def test_norm_of_each_head_is_the_norm_of_its_slice() -> None:
    scale = np.linspace(0.5, 1.5, 4, dtype=np.float32)
    norm = RMSNorm(Builder(Weight(scale), BACKEND), "q_norm", 4, 1e-6)
    heads = X.reshape(6, 4, 4)
    expected = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(norm(BACKEND.from_numpy(X)), expected.reshape(6, 16), rtol=1e-5)
    wide = BACKEND.from_numpy(np.concatenate([X, X], axis=1))
    np.testing.assert_allclose(norm(wide[:, 16:]), expected.reshape(6, 16), rtol=1e-5)


@pytest.mark.parametrize("split", [False, True])
def test_norm_of_each_head_with_scales_of_its_own(split: bool) -> None:
    scales = np.random.default_rng(1).uniform(0.5, 1.5, (4, 4)).astype(np.float32)
    one_by_one = {f"n.norms.{head}.weight": scales[head] for head in range(4)}
    weights = Weights(one_by_one if split else {"n.weight": scales})
    norm = HeadLayerNorm(Builder(weights, BACKEND), "n", 4, 4, 1e-6, mine=range(1, 3), split=split)
    heads = X[:, 4:12].reshape(6, 2, 4)
    centred = heads - heads.mean(axis=-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6) * scales[1:3]
    np.testing.assert_allclose(norm(BACKEND.from_numpy(X)[:, 4:12]), expected.reshape(6, 8), rtol=1e-4)


@pytest.mark.parametrize(("ranks", "num_heads"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 1)])
def test_norm_over_a_projection_that_is_split_or_repeated_over_ranks(ranks: int, num_heads: int) -> None:
    x = X[:, : num_heads * 4]
    scales = np.linspace(0.5, 1.5, num_heads * 4, dtype=np.float32)
    expected = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scales

    def work(backend: Backend) -> None:
        num_mine = max(1, num_heads // ranks)
        first = backend.rank * num_heads // ranks
        builder = Builder(Weights({"n.weight": scales}), backend)
        norm = ProjectionRMSNorm(builder, "n", num_heads, 4, 1e-6, mine=range(first, first + num_mine))
        mine = slice(first * 4, (first + num_mine) * 4)
        np.testing.assert_allclose(norm(BACKEND.from_numpy(x.copy())[:, mine]), expected[:, mine], rtol=1e-5)

    run_ranks(ranks, BACKEND, work)


def test_adding_norm_updates_the_stream_in_place() -> None:
    norm = RMSNorm(Builder(DummyWeights(), BACKEND), "norm", 16, 1e-6)
    residual = BACKEND.from_numpy(X.copy())
    out = norm.add(BACKEND.from_numpy(X), residual)
    np.testing.assert_allclose(residual, 2 * X)
    np.testing.assert_allclose(out, norm(BACKEND.from_numpy(2 * X)))


def test_layer_norm_without_parameters_only_standardises() -> None:
    norm = LayerNorm(Builder(Weight(np.zeros(1, np.float32)), BACKEND), "norm", 16, 1e-5, affine=False)
    out = np.asarray(norm(BACKEND.from_numpy(X)))
    np.testing.assert_allclose(out.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(out.std(axis=1), 1, atol=1e-3)
