"""Short convolutions and the gated delta rule: what they compute, and what they leave for the next step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.kernels.backend import AttentionMetadata
from quire.kernels.cpu.states import causal_conv, gated_delta
from quire.kernels.cpu.threads import Launcher
from quire.kernels.create import create_backend
from quire.kernels.reference.backend import InvariantReferenceBackend, ReferenceBackend
from tests.kernels.both_ways import both_ways, new_launcher

pytestmark = pytest.mark.usefixtures("always_parallel")

ROWS = 7  # of the states
LAUNCHERS = [new_launcher(1), new_launcher(2)]
Step = tuple[np.ndarray, np.ndarray, np.ndarray]  # cu_query_lens, seq_lens, state_rows


def draw_step(rng: np.random.Generator, tokens: int) -> Step:
    """Return a step of up to four sequences, some of which begin in it."""
    sequences = min(tokens, 4)
    starts = np.sort(rng.choice(np.arange(1, tokens), sequences - 1, replace=False))
    bounds = np.array([0, *starts, tokens], np.int32)
    lengths = (np.diff(bounds) + rng.integers(0, 2, sequences) * rng.integers(1, 9, sequences)).astype(np.int32)
    return bounds, lengths, rng.choice(ROWS, sequences, replace=False).astype(np.int64)


def metadata_of(step: Step, put: Any = lambda x: x) -> AttentionMetadata:
    bounds, lengths, rows = (put(x) for x in step)
    return AttentionMetadata(bounds, lengths, block_tables=None, slot_mapping=None, state_rows=rows)


def parts(step: Step) -> list[tuple[slice, int, bool]]:
    """Return each sequence's tokens, its row, and whether it begins."""
    bounds, lengths, rows = (x.tolist() for x in step)
    return [(slice(a, b), row, length == b - a) for a, b, length, row in zip(bounds, bounds[1:], lengths, rows)]


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


# Convolutions


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, state: np.ndarray, *step: np.ndarray) -> Any:
    """silu of the convolution, and the state after it, in float64."""
    state, out, taps = state.astype(float), np.zeros(x.shape), weight.shape[0]
    for tokens, row, begins in parts(step):
        if begins:
            state[row] = 0
        inputs = np.concatenate([state[row], x[tokens]])
        for t in range(len(inputs) - taps + 1):
            out[tokens.start + t] = (inputs[t : t + taps] * weight).sum(0) + bias
        state[row] = inputs[len(inputs) - taps + 1 :]
    return (out / (1 + np.exp(-out))).astype(np.float32), state.astype(np.float32)


def draw_conv(tokens: int, channels: int, taps: int) -> Any:
    def draw(seed: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        shapes = ((tokens, channels), (taps, channels), (channels,), (ROWS, taps - 1, channels))
        return (*(rng.standard_normal(shape).astype(np.float32) for shape in shapes), *draw_step(rng, tokens))

    return draw


@pytest.mark.parametrize(("tokens", "channels", "taps"), [(1, 16, 4), (2, 5, 2), (9, 70, 3), (33, 131, 4), (5, 64, 7)])
def test_each_channel_is_convolved_with_its_last_inputs(tokens: int, channels: int, taps: int) -> None:
    def compute(launcher: Launcher, x: Any, weight: Any, bias: Any, state: Any, *step: Any) -> Any:
        return (
            causal_conv(launcher, x, weight, bias, state, metadata_of(step), "silu"),
            state,
        )

    both_ways(LAUNCHERS, compute, draw_conv(tokens, channels, taps), convolved, close)


@pytest.mark.parametrize("kind", [ReferenceBackend, InvariantReferenceBackend])
def test_so_it_is_by_the_reference(kind: Any) -> None:
    inputs = draw_conv(33, 10, 4)(0)
    want = convolved(*(x.copy() for x in inputs))
    backend = kind()
    x, weight, bias, state = (backend.from_numpy(array) for array in inputs[:4])
    metadata = metadata_of(inputs[4:], backend.from_numpy)
    close(backend.to_numpy(backend.causal_conv(x, weight, bias, state, metadata, "silu")), want[0])
    close(backend.to_numpy(state), want[1])


def test_rows_may_have_something_between_them_and_there_need_be_no_bias_or_activation() -> None:
    x, weight, bias, state, *step = draw_conv(17, 20, 3)(0)
    wide = np.concatenate([bias[None].repeat(17, 0), x, x], axis=1)
    results = [
        causal_conv(LAUNCHERS[1], rows, weight, None, state.copy(), metadata_of(tuple(step)), None)
        for rows in (x, wide[:, 20:40])
    ]
    np.testing.assert_array_equal(*results)
    silu, _ = convolved(x, weight, np.zeros(20), state, *step)
    close(results[0] / (1 + np.exp(-results[0])), silu)


# The delta rule


def delta(*inputs: np.ndarray) -> Any:
    """The recurrence as the paper writes it, in float64."""
    q, k, v, decay, beta, state, *step = inputs
    _, heads, depth, width = state.shape
    shared = heads // (k.shape[1] // depth)
    state, out = state.astype(float), np.zeros((len(q), heads, width))
    for tokens, row, begins in parts(tuple(step)):
        for h in range(heads):
            matrix = np.zeros((depth, width)) if begins else state[row, h]
            key = slice(h // shared * depth, (h // shared + 1) * depth)
            for t in range(tokens.start, tokens.stop):
                kept, column = matrix * np.exp(float(decay[t, h])), k[t, key, None].astype(float)
                erased = (np.eye(depth) - beta[t, h] * column @ column.T) @ kept
                matrix = erased + beta[t, h] * column * v[t, h * width : (h + 1) * width]
                out[t, h] = q[t, key] @ matrix
            state[row, h] = matrix
    return out.reshape(len(q), -1).astype(np.float32), state.astype(np.float32)


def draw_delta(tokens: int, key_heads: int, heads: int, depth: int, width: int) -> Any:
    def draw(seed: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((tokens, key_heads * depth)).astype(np.float32) / depth**0.5 for _ in range(2))
        v = rng.standard_normal((tokens, heads * width)).astype(np.float32)
        decay, beta = -rng.random((tokens, heads), np.float32), rng.random((tokens, heads), np.float32)
        state = rng.standard_normal((ROWS, heads, depth, width)).astype(np.float32)
        return q, k, v, decay, beta, state, *draw_step(rng, tokens)

    return draw


@pytest.mark.parametrize(
    ("tokens", "key_heads", "heads", "depth", "width"),
    [(1, 1, 1, 8, 16), (2, 2, 4, 5, 3), (9, 1, 3, 16, 70), (33, 2, 2, 7, 64), (17, 1, 2, 32, 144)],
)
def test_matrices_follow_the_delta_rule(tokens: int, key_heads: int, heads: int, depth: int, width: int) -> None:
    def compute(launcher: Launcher, *inputs: Any) -> Any:
        *arrays, state, bounds, lengths, rows = inputs
        return gated_delta(launcher, *arrays, state, metadata_of((bounds, lengths, rows))), state

    both_ways(LAUNCHERS, compute, draw_delta(tokens, key_heads, heads, depth, width), delta, close)


@pytest.mark.parametrize("kind", [ReferenceBackend, InvariantReferenceBackend])
def test_so_they_do_by_the_reference(kind: Any) -> None:
    inputs = draw_delta(33, 2, 4, 8, 12)(0)
    want = delta(*(x.copy() for x in inputs))
    backend = kind()
    *arrays, state = (backend.from_numpy(array) for array in inputs[:6])
    close(backend.to_numpy(backend.gated_delta(*arrays, state, metadata_of(inputs[6:], backend.from_numpy))), want[0])
    close(backend.to_numpy(state), want[1])


@pytest.mark.parametrize("width", [12, 64])
def test_a_prompt_in_pieces_beside_others_gives_the_same_bits(width: int) -> None:
    """One sequence of 30 tokens in row 3, alone and whole, or in four steps with another sequence before it."""
    launcher = LAUNCHERS[1]
    q, k, v, decay, beta, state, *_ = draw_delta(30, 1, 2, 16, width)(0)
    weight = np.random.default_rng(1).standard_normal((4, v.shape[1])).astype(np.float32)
    window = np.ones((ROWS, 3, v.shape[1]), np.float32)

    def run(own: list[Any], bounds: list[int], lengths: list[int], rows: list[int], states: Any) -> Any:
        step = np.array(bounds, np.int32), np.array(lengths, np.int32), np.array(rows, np.int64)
        values = causal_conv(launcher, own[2], weight, None, states[1], metadata_of(step), None)
        return gated_delta(launcher, own[0], own[1], values, own[3], own[4], states[0], metadata_of(step))

    inputs = [q, k, v, decay, beta]
    whole = run(inputs, [0, 30], [30], [3], (state.copy(), window.copy()))
    kept, pieces = (state.copy(), window.copy()), []
    for start, stop in ((0, 1), (1, 8), (8, 9), (9, 30)):
        size = stop - start
        both = [np.concatenate([x[5:7], x[start:stop]]) for x in inputs]
        pieces.append(run(both, [0, 2, 2 + size], [7, stop], [1, 3], kept)[2:])
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_states_are_copied_one_after_the_other(device: str) -> None:
    backend = create_backend(device, "float32", "float32", 1)
    state = backend.from_numpy(np.arange(4, dtype=np.float32)[:, None] * np.ones((4, 3), np.float32))
    backend.copy_states(state, np.array([[0, 2], [2, 1]]))
    assert backend.to_numpy(state)[:, 0].tolist() == [0, 0, 0, 3]
