"""Mixtures of experts on the CPU: routing and what experts compute, against the reference, recorded and at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.checkpoint.tensor import HostTensor
from quire.errors import ModelError
from quire.kernels.cpu import activations
from quire.kernels.cpu import experts as cpu_experts
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.experts import route
from quire.kernels.cpu.threads import Launcher
from quire.kernels.experts import Expert, RoutingParams
from quire.kernels.reference.backend import InvariantReferenceBackend, ReferenceBackend
from tests.kernels.both_ways import Results, both_ways, new_launcher

LAUNCHERS = [new_launcher(1), new_launcher(2)]


def tensor(rng: np.random.Generator, *shape: int) -> HostTensor:
    return HostTensor((rng.standard_normal(shape) * 0.3).astype(np.float32), "float32")


def some_experts(number: int, hidden: int, inner: int, bias: bool) -> list[Expert]:
    rng = np.random.default_rng(number + hidden)
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)] + ([(inner,), (inner,), (hidden,)] if bias else [])
    return [Expert(*(tensor(rng, *shape) for shape in shapes)) for _ in range(number)]


def backends(dtype: str, quantization: str | None, dots: bool = True) -> tuple[ReferenceBackend, CPUBackend]:
    cpu = CPUBackend(dtype, num_threads=1, dot_products=dots, quantization=quantization)
    rounds = dtype == "bfloat16" and cpu.bf16_dot
    return ReferenceBackend(dtype, round_linear_inputs=rounds, quantization=quantization), cpu


def draw_choices(rng: np.random.Generator, tokens: int, number: int, chosen: int, kind: str) -> np.ndarray:
    """Ids of `chosen` different experts each: any, all tokens the same ones, or some experts for nobody."""
    among = {"any": number, "same": chosen, "few": max(chosen, number // 2)}[kind]
    return np.stack([rng.permutation(among)[:chosen] for _ in range(tokens)]).astype(np.int64)


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 2e-6) -> None:
    assert got.shape == want.shape
    size = max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * size)
    assert np.median(np.abs(got - want)) <= 2e-6 * size


def check_experts(
    form: tuple[str, str | None, bool], sizes: tuple[int, int, int, int], tokens: int, choices: str, kind: str
) -> None:
    number, chosen, hidden, inner = sizes
    reference, cpu = backends(*form)
    plain = some_experts(number, hidden, inner, bias=kind == "swiglu_oai")
    expected, packed = reference.pack_experts(plain), cpu.pack_experts(plain)

    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed + tokens)
        wide = rng.standard_normal((tokens, hidden + 3)).astype(np.float32)
        weights = rng.random((tokens, chosen)).astype(np.float32)
        return wide, draw_choices(rng, tokens, number, chosen, choices if seed else "any"), weights

    def compute(launcher: Launcher, wide: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> Results:
        act = activations.SWIGLU_OAI if kind == "swiglu_oai" else activations.SILU
        x, rounded = wide[:, 1 : hidden + 1], form[1] != "int8-weight-only"
        return (cpu_experts.experts(launcher, x, ids, weights, packed, act, cpu.vnni, rounded),)

    def expect(wide: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> Results:
        given = (torch.from_numpy(np.ascontiguousarray(a)) for a in (wide[:, 1 : hidden + 1], ids, weights))
        return (reference.experts(*given, expected, kind).numpy(),)

    # Where inputs are rounded, what is halfway between two numbers may go either way in the second product.
    tolerance = 2e-6 if form[0] != "bfloat16" and form[1] is None else 5e-3
    both_ways(LAUNCHERS, compute, draw, expect, partial(close, tolerance=tolerance))


FORMS = {
    "float32": ("float32", None, True),
    "bfloat16": ("bfloat16", None, True),
    "bfloat16-generic": ("bfloat16", None, False),
    "float16": ("float16", None, True),
    "int8": ("float32", "int8", True),
    "int8-generic": ("float32", "int8", False),
    "int4": ("float32", "int4", True),
    "int8-weight-only": ("bfloat16", "int8-weight-only", True),
}
QUICK = ("float32", "bfloat16", "int8", "int4")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in QUICK else (pytest.mark.slow,)) for form in FORMS]
)
@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
def test_every_form_of_weights_gives_what_the_reference_gives(form: str, kind: str, always_parallel: None) -> None:
    for tokens in (1, 2, 7, 33, 130) if kind == "silu" else (1, 33):
        check_experts(FORMS[form], (4, 2, 40, 48), tokens, "few", kind)
    check_experts(FORMS[form], (3, 2, 34, 23), 9, "any", kind)  # gate and up that cannot alternate


SIZES = [(1, 1, 16, 16), (3, 3, 7, 33), (12, 8, 70, 65), (300, 2, 20, 32)]


@pytest.mark.parametrize(
    ("sizes", "choices"),
    [
        pytest.param(
            sizes,
            choices,
            marks=() if choices == "same" or (sizes[0] == 12 and choices == "any") else (pytest.mark.slow,),
        )
        for sizes in SIZES
        for choices in ("any", "same", "few")
    ],
)
def test_any_sizes_and_any_choices(sizes: tuple[int, int, int, int], choices: str, always_parallel: None) -> None:
    for tokens in (1, 5, 66):
        check_experts(FORMS["float32"], sizes, tokens, choices, "silu")


@pytest.mark.parametrize("form", QUICK)
def test_a_row_is_the_same_alone_and_among_others(form: str) -> None:
    _, cpu = backends(*FORMS[form])
    packed = cpu.pack_experts(some_experts(6, 40, 32, bias=False))
    rng = np.random.default_rng(1)
    x, weights = rng.standard_normal((37, 40)).astype(np.float32), rng.random((37, 2)).astype(np.float32)
    ids = draw_choices(rng, 37, 6, 2, "any")
    together = np.array(cpu.experts(x, ids, weights, packed, "silu"))
    for row in range(37):
        own = slice(row, row + 1)
        alone = cpu.experts(x[own].copy(), ids[own].copy(), weights[own].copy(), packed, "silu")
        np.testing.assert_array_equal(alone, together[own])


def test_the_invariant_reference_computes_rows_apart() -> None:
    backend = InvariantReferenceBackend()
    packed = backend.pack_experts(some_experts(5, 33, 23, bias=True))
    rng = np.random.default_rng(2)
    x, logits = (torch.from_numpy(rng.standard_normal((21, width)).astype(np.float32)) for width in (33, 5))
    params = RoutingParams(5, 3, renormalize=True)
    ids, weights = backend.route(logits, params)
    together = backend.experts(x, ids, weights, packed, "swiglu_oai")
    for row in range(21):
        own = slice(row, row + 1)
        alone = backend.route(logits[own], params)
        torch.testing.assert_close(alone, (ids[own], weights[own]), rtol=0, atol=0)
        torch.testing.assert_close(backend.experts(x[own], *alone, packed, "swiglu_oai"), together[own], rtol=0, atol=0)


def test_experts_that_nobody_chose_do_not_matter() -> None:
    _, cpu = backends("float32", None)
    packed = cpu.pack_experts(some_experts(6, 40, 32, bias=False))
    x = np.random.default_rng(3).standard_normal((5, 40)).astype(np.float32)
    ids, weights = np.array([[1, 4]] * 5), np.ones((5, 2), np.float32)
    before = np.array(cpu.experts(x, ids, weights, packed, "silu"))
    for other in (0, 2, 3, 5):
        for product in (packed.first, packed.last):
            product.matrices[other].data[...] = np.nan
    np.testing.assert_array_equal(cpu.experts(x, ids, weights, packed, "silu"), before)
    ids[2, 1] = 3
    assert np.isnan(cpu.experts(x, ids, weights, packed, "silu")).any(axis=1).tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_no_tokens_are_no_work() -> None:
    _, cpu = backends("float32", None)
    packed = cpu.pack_experts(some_experts(4, 16, 16, bias=False))
    nobody = np.zeros((0, 2), np.int64), np.zeros((0, 2), np.float32)
    assert cpu.experts(np.zeros((0, 16), np.float32), *nobody, packed, "silu").shape == (0, 16)


def test_experts_are_packed_one_after_the_other() -> None:
    _, cpu = backends("float32", None)
    plain, waiting = some_experts(4, 16, 16, bias=False), []

    def each() -> Iterator[Expert]:
        for number, expert in enumerate(plain):
            waiting.append(number)
            yield expert

    packs, pack = [], cpu.pack_linear

    def noted(*args: Any, **options: Any) -> Any:
        packs.append(waiting[-1])
        return pack(*args, **options)

    cpu.pack_linear = noted  # type: ignore[method-assign]
    cpu.pack_experts(each())
    assert packs == [0, 0, 1, 1, 2, 2, 3, 3]


def test_experts_that_differ_in_size_are_refused() -> None:
    _, cpu = backends("float32", None)
    with pytest.raises(ModelError, match="the same for all"):
        cpu.pack_experts(some_experts(1, 16, 16, bias=False) + some_experts(1, 16, 32, bias=False))


# Routing


def check_routing(logits: np.ndarray, params: RoutingParams) -> tuple[np.ndarray, np.ndarray]:
    """Compare both backends on these logits and return what they say."""
    bias = None if params.bias is None else torch.from_numpy(params.bias)
    expected = ReferenceBackend().route(
        torch.from_numpy(logits.copy()), RoutingParams(*(getattr(params, name) for name in FIELDS), bias)
    )
    for launcher in LAUNCHERS:
        ids, weights = route(launcher, logits, params)
        np.testing.assert_array_equal(ids, expected[0].numpy())
        np.testing.assert_allclose(weights, expected[1].numpy(), rtol=2e-6, atol=1e-7)
    return np.array(ids), np.array(weights)


FIELDS = ("num_experts", "top_k", "scoring", "renormalize", "scale", "num_groups", "top_groups", "group_score")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_routing_is_that_of_the_reference(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([1, 1, 2, 4]))
    number = groups * data.draw(st.integers(1, 12))
    top_groups = data.draw(st.integers(1, groups))
    chosen = data.draw(st.integers(1, min(9, number // groups * top_groups)))
    scoring = data.draw(st.sampled_from(["softmax", "sigmoid", "softmax_chosen"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    # Numbers apart from each other, so that both round to the same order; every third one twice, for ties.
    values = rng.permutation(number).astype(np.float32) / 4
    logits = np.stack([rng.permutation(values // 3 if row % 3 == 0 else values) for row in range(5)]).astype(np.float32)
    biased = scoring != "softmax_chosen" and data.draw(st.booleans())
    params = RoutingParams(
        number,
        chosen,
        scoring,
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1.0, 2.5])),
        groups if scoring != "softmax_chosen" else 1,
        top_groups if scoring != "softmax_chosen" else 1,
        data.draw(st.sampled_from(["max", "top2"])),
        rng.permutation(number).astype(np.float32) if biased else None,
    )
    check_routing(logits, params)


def test_the_lower_id_comes_first_among_equals() -> None:
    ids, weights = check_routing(np.zeros((2, 7), np.float32), RoutingParams(7, 3, renormalize=True))
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_a_bias_changes_the_choice_and_no_weight() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([-9.0, 0.0, 0.0, 9.0], np.float32)
    ids, weights = check_routing(logits, RoutingParams(4, 2, "sigmoid", bias=bias))
    assert ids.tolist() == [[3, 1]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp([[1.0, -1.0]])), rtol=1e-6)


def test_groups_are_chosen_by_their_best_or_their_two_best() -> None:
    # Expert 0 is the best of all; 3 and 4 are the best two together.
    logits = np.array([[3.0, -9.0, -9.0, 2.0, 1.9, -9.0]], np.float32)
    one = {"num_groups": 2, "top_groups": 1, "scoring": "sigmoid"}
    assert check_routing(logits, RoutingParams(6, 2, group_score="max", **one))[0].tolist() == [[0, 1]]  # type: ignore[arg-type]
    assert check_routing(logits, RoutingParams(6, 2, group_score="top2", **one))[0].tolist() == [[3, 4]]  # type: ignore[arg-type]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_chosen"])
def test_whatever_the_logits_are_ids_are_in_range_and_differ(scoring: str) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0], np.float32)
    logits = np.stack([np.random.default_rng(seed).choice(odd, 6) for seed in range(20)])
    for launcher in LAUNCHERS:
        ids, _ = route(launcher, logits, RoutingParams(6, 4, scoring))  # type: ignore[arg-type]
        assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist())


def test_recorded_routing_follows_its_inputs() -> None:
    logits = np.random.default_rng(0).standard_normal((9, 20)).astype(np.float32)
    with LAUNCHERS[1].record() as made:
        ids, weights = route(LAUNCHERS[1], logits, RoutingParams(20, 4))
    for seed in (1, 2):
        logits[...] = np.random.default_rng(seed).standard_normal(logits.shape)
        made[0].run()
        again = route(LAUNCHERS[0], logits.copy(), RoutingParams(20, 4))
        for recorded, expected in zip((ids, weights), again, strict=True):
            np.testing.assert_array_equal(recorded.view(np.ndarray), expected)
