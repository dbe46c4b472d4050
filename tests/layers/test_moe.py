"""Mixtures of experts as a layer: tensors in any layout, ranks that each hold a share, and what is never quantized."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.kernels.experts import RoutingParams
from quire.layers.builder import Builder
from quire.layers.moe import MoE, MoENames, MoEOptions
from tests.helpers.ranks import run_ranks
from tests.helpers.weights import Weights

BACKEND = create_backend("reference", "float32", "float32", num_threads=1)
EXPERTS, HIDDEN, INNER, SHARED = 4, 12, 6, 10
RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.standard_normal((7, HIDDEN)).astype(np.float32))
OPTIONS: dict[str, Any] = {
    "routing": RoutingParams(EXPERTS, 2, "sigmoid", renormalize=True, scale=1.5),
    "inner_size": INNER,
    "hidden_act": "silu",
}


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def single(**more: np.ndarray) -> Weights:
    """Each expert's matrices by themselves, as in files on the hub."""
    weights = Weights({"gate.weight": random(EXPERTS, HIDDEN), **more})
    for e in range(EXPERTS):
        weights[f"experts.{e}.gate_proj.weight"] = random(INNER, HIDDEN)
        weights[f"experts.{e}.up_proj.weight"] = random(INNER, HIDDEN)
        weights[f"experts.{e}.down_proj.weight"] = random(HIDDEN, INNER)
    return weights


def stacked(weights: Weights) -> Weights:
    """The same experts in two tensors."""
    rest = {name: array for name, array in weights.items() if not name.startswith("experts.")}
    of = {
        part: np.stack([weights[f"experts.{e}.{part}_proj.weight"] for e in range(EXPERTS)])
        for part in ("gate", "up", "down")
    }
    return Weights(
        {**rest, "experts.gate_up_proj": np.concatenate([of["gate"], of["up"]], 1), "experts.down_proj": of["down"]}
    )


def compute(weights: Weights, backend: Backend = BACKEND, **options: Any) -> torch.Tensor:
    builder = Builder(weights, backend)
    result: torch.Tensor = MoE(builder, HIDDEN, MoEOptions(**{**OPTIONS, **options}))(X)
    return result


def by_hand(weights: Weights) -> torch.Tensor:
    """What the layer of OPTIONS is, token by token."""
    at = {name: torch.from_numpy(array) for name, array in weights.items()}
    rows = []
    for x in X:
        scores = torch.sigmoid(at["gate.weight"] @ x)
        chosen = scores.argsort(descending=True)[:2]
        total = sum(scores[e] for e in chosen)
        said = []
        for e in chosen.tolist():
            gate, up, down = (at[f"experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            said.append(1.5 * scores[e] / total * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x))))
        rows.append(said[0] + said[1])
    return torch.stack(rows)


def test_a_token_is_computed_by_the_experts_it_is_routed_to() -> None:
    weights = single()
    torch.testing.assert_close(compute(weights), by_hand(weights), rtol=1e-5, atol=1e-5)


def test_both_layouts_of_tensors_hold_the_same_experts() -> None:
    weights = single()
    torch.testing.assert_close(compute(stacked(weights)), compute(weights), rtol=0, atol=0)


def test_transposed_stacks_alternate_gate_and_up() -> None:
    weights = single()
    stack = stacked(weights)
    gate_up = stack.pop("experts.gate_up_proj")
    stack["experts.gate_up_proj"] = np.empty((EXPERTS, HIDDEN, 2 * INNER), np.float32)
    stack["experts.gate_up_proj"][:, :, ::2] = gate_up[:, :INNER].transpose(0, 2, 1)
    stack["experts.gate_up_proj"][:, :, 1::2] = gate_up[:, INNER:].transpose(0, 2, 1)
    stack["experts.down_proj"] = np.ascontiguousarray(stack["experts.down_proj"].transpose(0, 2, 1))
    torch.testing.assert_close(compute(stack, transposed=True), compute(weights), rtol=0, atol=0)


def test_a_shared_expert_is_weighted_by_its_gate() -> None:
    weights = single()
    without = compute(weights)
    for name, shape in {
        "gate_proj": (SHARED, HIDDEN),
        "up_proj": (SHARED, HIDDEN),
        "down_proj": (HIDDEN, SHARED),
    }.items():
        weights[f"shared_experts.{name}.weight"] = random(*shape)
    weights["shared_expert_gate.weight"] = random(1, HIDDEN)
    gate, up, down = (
        torch.from_numpy(weights[f"shared_experts.{part}_proj.weight"]) for part in ("gate", "up", "down")
    )
    whole = (torch.nn.functional.silu(X @ gate.T) * (X @ up.T)) @ down.T
    torch.testing.assert_close(compute(weights, shared_size=SHARED) - without, whole, rtol=1e-4, atol=1e-4)
    through = torch.sigmoid(X @ torch.from_numpy(weights["shared_expert_gate.weight"]).T)
    gated = compute(weights, shared_size=SHARED, shared_gate=True) - without
    torch.testing.assert_close(gated, whole * through, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_ranks_together_compute_what_one_computes(ranks: int, transposed: bool) -> None:
    shared = {"gate_proj": (SHARED + 2, HIDDEN), "up_proj": (SHARED + 2, HIDDEN), "down_proj": (HIDDEN, SHARED + 2)}
    weights = single(**{f"shared_experts.{name}.weight": random(*shape) for name, shape in shared.items()})
    options: dict[str, Any] = {"shared_size": SHARED + 2}
    if transposed:
        weights["experts.gate_up_proj"] = random(EXPERTS, HIDDEN, 2 * INNER)
        weights["experts.gate_up_proj_bias"] = random(EXPERTS, 2 * INNER)
        weights["experts.down_proj"] = random(EXPERTS, INNER, HIDDEN)
        weights["experts.down_proj_bias"] = random(EXPERTS, HIDDEN)
        options = {"transposed": True, "expert_bias": True, "hidden_act": "swiglu_oai"}
    expected = compute(weights, **options)
    for result in run_ranks(ranks, BACKEND, lambda backend: compute(weights, backend, **options)):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_an_inner_size_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4; .* the model's size of mlp.experts, 6"):
        run_ranks(4, BACKEND, lambda backend: compute(single(), backend))


def test_the_router_is_never_quantized() -> None:
    weights = single()
    backend = create_backend("reference", "float32", "float32", num_threads=1, quantization="int4")
    layer = MoE(Builder(weights, backend), HIDDEN, MoEOptions(**OPTIONS))
    plain = MoE(Builder(weights, BACKEND), HIDDEN, MoEOptions(**OPTIONS))
    torch.testing.assert_close(layer.router(X), plain.router(X), rtol=0, atol=0)
    assert not torch.equal(layer(X), plain(X))


def test_the_layer_may_have_its_published_name_or_that_of_transformers() -> None:
    weights, names = single(), MoENames(block="block_sparse_moe")
    for block in ("block_sparse_moe", "mlp"):
        below = Weights({f"layers.0.{block}.{name}": array for name, array in weights.items()})
        assert names.under(Builder(below, BACKEND).under("layers.0")).prefix == f"layers.0.{block}."
