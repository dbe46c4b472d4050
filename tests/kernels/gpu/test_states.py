"""Layers with states on the GPU against the reference, in steps that are cut anywhere and padded."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu import states
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference.backend import ReferenceBackend
from tests.kernels.gpu.common import ACTS, DEVICE, mostly_slow

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
ROWS = 7  # of the states
REFERENCE = ReferenceBackend()
MIXED = [(5, 5), (1, 9), (17, 20), (1, 1)]  # tokens of the step, and of the context, of each sequence
SINGLE = [(1, 1), (1, 30), (1, 2)]


class Step(NamedTuple):
    metadata: AttentionMetadata
    plain: AttentionMetadata
    tokens: int


def step_of(chunks: list[tuple[int, int]], *, single: bool = False, padded: int = 0, rows: int = 0) -> Step:
    """Lay a step out with `padded` sequences that are not there, all of them in row 0 of the states, and `rows` more
    rows of tokens.
    """
    generator = torch.Generator().manual_seed(len(chunks))
    counts = torch.tensor([0] + [count for count, _ in chunks] + [int(single)] * padded).cumsum(0).int()
    lengths = torch.tensor([length for _, length in chunks] + [0] * padded, dtype=torch.int32)
    places = 1 + torch.randperm(ROWS - 1, generator=generator)[: len(chunks)]
    places = torch.cat([places, torch.zeros(padded, dtype=torch.int64)])
    none, known = torch.zeros(0), len(chunks)
    real = sum(count for count, _ in chunks)
    metadata = AttentionMetadata(
        counts.to(DEVICE), lengths.to(DEVICE), none, none, state_rows=places.to(DEVICE), single=single
    )
    plain = AttentionMetadata(counts[: known + 1], lengths[:known], none, none, state_rows=places[:known])
    assert not (single and rows)
    return Step(metadata, plain, real + (padded if single else rows))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    got = got.float().cpu()
    assert torch.isfinite(got).all()
    assert float((got - want).norm()) <= tolerance * float(want.norm())


# Convolutions


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        product(ACTS, [(16, 4, True), (70, 2, False), (530, 3, True), (5, 1, False)]),
        ("float32", (16, 4, True)),
        ("bfloat16", (70, 2, False)),
        ("float32", (5, 1, False)),
    ),
)
@pytest.mark.parametrize("single", [False, True])
def test_channels_are_convolved_with_their_last_inputs(case: tuple[str, tuple[int, int, bool]], single: bool) -> None:
    act, (channels, taps, biased) = case
    backend = GPUBackend(act, act, DEVICE)
    step = step_of(SINGLE, single=True, padded=2) if single else step_of(MIXED, padded=2, rows=3)
    real = int(step.plain.cu_query_lens[-1])
    wide = normal(step.tokens, channels + 6).to(backend.act)
    wide[real:] = math.nan
    weight, bias = normal(taps, channels, seed=1), normal(channels, seed=2) if biased else None
    state = normal(ROWS, taps - 1, channels, seed=3)
    state[step.plain.state_rows[step.plain.seq_lens == 1]] = math.nan  # starts from zeros, whatever is there
    ours = state.clone().to(DEVICE)
    on_device = None if bias is None else bias.to(DEVICE)
    x = wide.to(DEVICE)[:, 3 : 3 + channels]
    got = backend.causal_conv(x, weight.to(DEVICE), on_device, ours, step.metadata, "silu")
    assert got.dtype == backend.act
    want = REFERENCE.causal_conv(wide[:real, 3 : 3 + channels].float(), weight, bias, state, step.plain, "silu")
    close(got[:real], want, TOLERANCE[act])
    torch.testing.assert_close(ours.cpu(), state, rtol=0, atol=0)


def test_a_convolution_may_be_cut_anywhere() -> None:
    backend = GPUBackend("float32", "float32", DEVICE)
    x, weight = normal(12, 8).to(DEVICE), normal(4, 8, seed=1).to(DEVICE)
    states = [torch.full((ROWS, 3, 8), math.nan, device=DEVICE) for _ in range(2)]
    whole = backend.causal_conv(x, weight, None, states[0], step_of([(12, 12)]).metadata, None)
    parts = []
    for start, stop in ((0, 1), (1, 3), (3, 4), (4, 12)):
        metadata = step_of([(stop - start, stop)], single=stop == start + 1).metadata
        parts.append(backend.causal_conv(x[start:stop], weight, None, states[1], metadata, None))
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0, equal_nan=True)


# The delta rule

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw_delta(tokens: int, key_heads: int, heads: int, depth: int, width: int, *, alike: float = 0.0) -> Inputs:
    """Draw q, k, v, decay, beta; the more `alike`, the more keys repeat themselves. Queries and keys have length 1."""
    unit = [normal(tokens, key_heads, depth, seed=seed) for seed in (1, 2)]
    unit[1] = (1 - alike) * unit[1] + alike * normal(1, key_heads, depth, seed=6)
    q, k = ((x / x.norm(dim=-1, keepdim=True)).flatten(1) for x in unit)
    gates = torch.rand((2, tokens, heads), generator=torch.Generator().manual_seed(4))
    return q, k, normal(tokens, heads * width, seed=3), -gates[0] * (1 - alike), gates[1]


def check_delta(backend: GPUBackend, step: Step, inputs: Inputs, shape: tuple[int, int, int], compute: object) -> None:
    real = int(step.plain.cu_query_lens[-1])
    state = normal(ROWS, *shape, seed=5)
    state[step.plain.state_rows[step.plain.seq_lens == step.plain.cu_query_lens.diff()]] = math.nan
    ours = state.clone().to(DEVICE)
    mine = [x.to(backend.act) if i < 3 else x.clone() for i, x in enumerate(inputs)]
    for x in mine:
        x[real:] = math.nan
    arguments = [x.to(DEVICE) for x in mine]
    if compute is None:
        got = backend.gated_delta(*arguments, ours, step.metadata)
    else:
        got = torch.full((step.tokens, shape[0] * shape[2]), math.nan, dtype=backend.act, device=DEVICE)
        compute(states.delta_inputs(*arguments), ours, step.metadata, got)  # type: ignore[operator]
    want = REFERENCE.gated_delta(*(x[:real].float() for x in mine), state, step.plain)
    close(got[:real], want, TOLERANCE[backend.dtype])
    close(ours, state, 1e-5)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        product(ACTS, [(1, 1, 8, 16), (2, 4, 5, 3), (1, 3, 16, 70)]),
        ("bfloat16", (2, 4, 5, 3)),
        ("float32", (1, 1, 8, 16)),
        ("float16", (1, 3, 16, 70)),
    ),
)
def test_single_tokens_change_their_matrices(case: tuple[str, tuple[int, int, int, int]]) -> None:
    act, shape = case
    step = step_of(SINGLE, single=True, padded=2)
    check_delta(GPUBackend(act, act, DEVICE), step, draw_delta(step.tokens, *shape), shape[1:], None)


@pytest.mark.parametrize("compute", [states.scan, states.advance], ids=["scan", "chunks"])
@pytest.mark.parametrize("shape", [(1, 2, 5, 3), pytest.param((2, 4, 8, 40), marks=pytest.mark.slow)])
def test_prompts_and_tokens_go_together(shape: tuple[int, int, int, int], compute: object) -> None:
    step = step_of(MIXED, padded=2, rows=3)
    check_delta(GPUBackend("float32", "float32", DEVICE), step, draw_delta(step.tokens, *shape), shape[1:], compute)


@pytest.mark.parametrize("act", mostly_slow(ACTS, "bfloat16"))
@pytest.mark.parametrize("alike", mostly_slow([0.0, 0.9, 1.0], 1.0))
def test_chunks_are_as_good_as_tokens_one_by_one_even_where_keys_repeat(alike: float, act: str) -> None:
    step = step_of([(70, 70), (66, 80)])
    inputs = draw_delta(step.tokens, 1, 1, 16, 16, alike=alike)
    check_delta(GPUBackend(act, act, DEVICE), step, inputs, (1, 16, 16), None)


def test_a_token_that_forgets_nearly_all_does_not_blur_those_after_it() -> None:
    """Differences of sums of decays are as good as the decays, however long the sums are."""
    step = step_of([(40, 40)])
    q, k, v, decay, beta = draw_delta(step.tokens, 1, 1, 8, 8)
    decay[:] = -0.01
    decay[3::8] = -3000.3
    GPUBackend("float32", "float32", DEVICE)  # mends the interpreter, if this test is the first
    outs = []
    for compute in (states.scan, states.advance):
        outs.append(torch.empty(step.tokens, 8, device=DEVICE))
        state = torch.zeros(ROWS, 1, 8, 8, device=DEVICE)
        inputs = states.delta_inputs(*(x.to(DEVICE) for x in (q, k, v, decay, beta)))
        compute(inputs, state, step.metadata, outs[-1])
        outs[-1] = torch.cat([outs[-1].flatten(), state[step.metadata.state_rows].flatten()])
    assert float((outs[1] - outs[0]).norm()) <= 2e-6 * float(outs[0].norm())


def test_a_prompt_is_the_same_however_it_is_cut_if_so_asked() -> None:
    backend = GPUBackend("float32", "float32", DEVICE, batch_invariant=True)
    inputs = [x.to(DEVICE) for x in draw_delta(40, 1, 2, 8, 8)]
    states = [torch.full((ROWS, 2, 8, 8), math.nan, device=DEVICE) for _ in range(2)]
    whole = backend.gated_delta(*inputs, states[0], step_of([(40, 40)]).metadata)
    parts = []
    for start, stop in ((0, 34), (34, 35), (35, 40)):
        metadata = step_of([(stop - start, stop)], single=stop == start + 1).metadata
        parts.append(backend.gated_delta(*(x[start:stop] for x in inputs), states[1], metadata))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0, equal_nan=True)


def test_a_convolution_is_the_same_however_it_is_cut_if_so_asked() -> None:
    backend = GPUBackend("float32", "float32", DEVICE, batch_invariant=True)
    x, weight, bias = (normal(*shape).to(DEVICE) for shape in ((40, 8), (4, 8), (8,)))
    states = [torch.full((ROWS, 3, 8), math.nan, device=DEVICE) for _ in range(2)]
    whole = backend.causal_conv(x, weight, bias, states[0], step_of([(40, 40)]).metadata)
    parts = []
    for start, stop in ((0, 1), (1, 2), (2, 34), (34, 35), (35, 40)):
        metadata = step_of([(stop - start, stop)], single=stop == start + 1).metadata
        parts.append(backend.causal_conv(x[start:stop], weight, bias, states[1], metadata))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0, equal_nan=True)


def test_states_are_copied_one_after_the_other() -> None:
    backend = GPUBackend("float32", "float32", DEVICE)
    for pairs in ([[0, 2], [2, 1]], [[1, 0], [2, 0], [0, 3], [3, 1]], np.zeros((0, 2))):
        state = normal(4, 3)
        want = state.clone()
        REFERENCE.copy_states(want, np.array(pairs, np.int64))
        ours = state.to(DEVICE)
        backend.copy_states(ours, np.array(pairs, np.int64))
        torch.testing.assert_close(ours.cpu(), want, rtol=0, atol=0)
