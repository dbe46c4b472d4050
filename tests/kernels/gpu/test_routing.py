"""Routing on the GPU against the reference: the same experts, the same weights, whatever the logits are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.experts import RoutingParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference.backend import ReferenceBackend
from tests.kernels.gpu.common import DEVICE, mostly_slow

GPU = GPUBackend("float32", "float32", DEVICE)
SCORINGS = ["softmax", "sigmoid", "softmax_chosen"]


def check(logits: np.ndarray, params: RoutingParams) -> tuple[np.ndarray, np.ndarray]:
    """Compare both backends on these logits and return what they say."""
    bias = None if params.bias is None else torch.from_numpy(params.bias)
    expected = ReferenceBackend().route(torch.from_numpy(logits.copy()), replace(params, bias=bias))
    own = replace(params, bias=None if bias is None else bias.to(DEVICE))
    ids, weights = (array.cpu().numpy() for array in GPU.route(torch.from_numpy(logits).to(DEVICE), own))
    assert (ids.dtype, weights.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(ids, expected[0].numpy())
    np.testing.assert_allclose(weights, expected[1].numpy(), rtol=2e-6, atol=1e-7)
    return ids, weights


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.data())
def test_routing_is_that_of_the_reference(data: st.DataObject) -> None:
    compare(data)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_routing_is_that_of_the_reference_many_times(data: st.DataObject) -> None:
    compare(data)


def compare(data: st.DataObject) -> None:
    """Draw logits and parameters of all kinds, and ask for what the reference says."""
    groups = data.draw(st.sampled_from([1, 1, 2, 3, 4]))
    number = groups * data.draw(st.integers(1, 12))
    top_groups = data.draw(st.integers(1, groups))
    chosen = data.draw(st.integers(1, min(9, number // groups * top_groups)))
    scoring = data.draw(st.sampled_from(SCORINGS))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    # Numbers apart from each other, so that both round to the same order; every third one twice, for ties.
    values = rng.permutation(number).astype(np.float32) / 4
    logits = np.stack([rng.permutation(values // 3 if row % 3 == 0 else values) for row in range(3)]).astype(np.float32)
    plain = scoring == "softmax_chosen"
    params = RoutingParams(
        number,
        chosen,
        scoring,
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1.0, 2.5])),
        1 if plain else groups,
        1 if plain else top_groups,
        data.draw(st.sampled_from(["max", "top2"])),
        rng.permutation(number).astype(np.float32) if not plain and data.draw(st.booleans()) else None,
    )
    if number // groups * top_groups < chosen:
        params = replace(params, top_k=1)
    check(logits, params)


def test_many_experts_and_rows_that_are_views() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    check(logits[:, :256], RoutingParams(256, 8, "sigmoid", True, 2.5, 8, 4, "top2"))
    check(logits[::2, 7:263], RoutingParams(256, 8, renormalize=True))
    check(logits[:, ::3], RoutingParams(100, 6))


def test_the_lower_id_comes_first_among_equals() -> None:
    ids, weights = check(np.zeros((2, 7), np.float32), RoutingParams(7, 3, renormalize=True))
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    assert check(np.array([[-0.0, 0.0, -1.0]], np.float32), RoutingParams(3, 2, "softmax_chosen"))[0].tolist() == [
        [0, 1]
    ]


def test_a_bias_changes_the_choice_and_no_weight() -> None:
    bias = np.array([-9.0, 0.0, 0.0, 9.0], np.float32)
    ids, weights = check(np.array([[2.0, 1.0, 0.0, -1.0]], np.float32), RoutingParams(4, 2, "sigmoid", bias=bias))
    assert ids.tolist() == [[3, 1]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp([[1.0, -1.0]])), rtol=1e-6)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("groups", mostly_slow([1, 2], 2))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_whatever_the_logits_are_ids_are_in_range_and_differ(scoring: str, groups: int) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0], np.float32)
    logits = np.stack([np.random.default_rng(seed).choice(odd, 6) for seed in range(8)])
    logits[0] = np.nan
    groups = 1 if scoring == "softmax_chosen" else groups
    params = RoutingParams(6, 3, scoring, num_groups=groups, top_groups=groups, bias=None)  # type: ignore[arg-type]
    ids, _ = GPU.route(torch.from_numpy(logits).to(DEVICE), params)
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in ids.tolist())
    alone, _ = GPU.route(torch.from_numpy(logits[5:6]).to(DEVICE), params)
    assert alone.tolist() == ids[5:6].tolist()


def test_no_rows_are_no_work() -> None:
    ids, weights = GPU.route(torch.empty(0, 6, device=DEVICE), RoutingParams(6, 2))
    assert ids.shape == weights.shape == (0, 2)
