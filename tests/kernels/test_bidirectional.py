"""Attention of encoders: every token sees all of its text, or what is near it to either side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.reference import ReferenceBackend
from quire.kernels.reference.backend import InvariantReferenceBackend
from tests.kernels.both_ways import new_launcher
from tests.kernels.paged_scenes import KINDS, PAIRS, Direct, layer, quantized, scene_of
from tests.kernels.scenes import Paged

LENGTHS = [70, 1, 33, 300]
WHOLE = [(s, 0, length) for s, length in enumerate(LENGTHS)]
# head size, block size, query heads, KV heads, window, softcap, sinks, alibi
SHAPES = [
    (8, 16, 4, 2, None, None, False, False),
    (24, 1, 3, 1, 5, None, True, False),
    (64, 32, 2, 2, 65, None, False, False),
    (33, 5, 8, 1, 40, 0.5, False, False),
    (18, 6, 5, 1, 1, None, True, False),
]


def encoder(backend: object, shape: tuple) -> AttentionParams:
    """Make the layer's constants."""
    return replace(layer(backend, shape), causal=False)


def by_torch(scene: Paged, shape: tuple) -> np.ndarray:
    """All rows by torch's attention, without sinks and softcap."""
    params, parts = encoder(None, shape), []
    for s in range(len(LENGTHS)):
        own = slice(scene.starts[s], scene.starts[s + 1])
        q, k, v = (torch.from_numpy(x[own]).double().transpose(0, 1) for x in (scene.q, scene.k, scene.v))
        at = torch.arange(q.shape[1])
        near = (at[:, None] - at[None, :]).abs() < (params.sliding_window or 10**6)
        out = F.scaled_dot_product_attention(q, k, v, near, scale=params.scale, enable_gqa=True)
        parts.append(out.transpose(0, 1).reshape(len(at), -1).numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize("backend_class", [ReferenceBackend, InvariantReferenceBackend])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
def test_the_reference_backends_do_what_torch_does(shape: tuple, backend_class: type[ReferenceBackend]) -> None:
    scene, backend = scene_of(shape, LENGTHS), backend_class("float32", "float32")
    got = scene.attend(backend, scene.cache(backend), encoder(backend, shape), WHOLE)
    np.testing.assert_allclose(got, by_torch(scene, shape), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_see_what_is_before_and_after_them(shape: tuple, kind: tuple[str, bool]) -> None:
    scene, backend = scene_of(shape, LENGTHS), Direct(kind)
    cache = scene.cache(backend)
    got, dtype = scene.attend(backend, cache, encoder(backend, shape), WHOLE), kind[0]
    if dtype == "int8":
        dtype = "float32"
        for name in ("k", "v"):
            integers, scales = quantized(getattr(scene, name))
            setattr(scene, name, (integers * scales).astype(np.float32))
    expected = np.concatenate([scene.dense(s, encoder(None, shape), dtype) for s, _, _ in WHOLE])
    np.testing.assert_allclose(got, expected, atol=2e-2 if cache.paired else 1e-5)


@pytest.mark.parametrize("kind", [("float32", False), PAIRS[0]])
def test_company_and_threads_do_not_change_a_bit(kind: tuple[str, bool]) -> None:
    for shape in (SHAPES[0], SHAPES[3]):
        scene = scene_of(shape, LENGTHS)
        one, two = Direct(kind), Direct(kind, num_threads=2)
        cache, params = scene.cache(one), encoder(None, shape)
        together = scene.attend(one, cache, params, WHOLE)
        np.testing.assert_array_equal(scene.attend(two, cache, params, WHOLE), together)
        alone = np.concatenate([scene.attend(one, cache, params, [chunk]) for chunk in WHOLE])
        np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recorded_step_runs_with_other_lengths(threads: int) -> None:
    shape, rng = SHAPES[3], np.random.default_rng(5)
    scene, backend = scene_of(shape, LENGTHS), Direct(("float32", False), threads)
    launcher = backend.launcher = new_launcher(threads)
    cache, params = scene.cache(backend), encoder(None, shape)
    full = scene.metadata([(3, 0, 300)])
    held = AttentionMetadata(
        full.cu_query_lens.copy(), full.seq_lens.copy(), full.block_tables.copy(), full.slot_mapping.copy()
    )
    q = rng.standard_normal((300, scene.q[0].size)).astype(np.float32)
    with launcher.record() as made:
        out = backend.paged_attention(q, cache, held, params)
    for length in (300, 130, 33):
        rows = scene.rows([(3, 0, length)])
        q[:length] = scene.q[rows].reshape(length, -1)
        held.cu_query_lens[1] = held.seq_lens[0] = length
        made[0].run()
        got = np.array(out.view(np.ndarray))[:length]
        expected = scene.attend(Direct(("float32", False)), cache, params, [(3, 0, length)])
        np.testing.assert_array_equal(got, expected)
