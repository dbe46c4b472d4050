"""Tokens that only the device knows take part in penalties and bars as those of the host do, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.kernels.backend import DeviceTokens, Penalties
from quire.kernels.create import create_backend
from quire.kernels.gpu import sampling
from quire.kernels.gpu.backend import GPUBackend
from tests.kernels.gpu.common import DEVICE
from tests.kernels.scenes import as_lists, normal

SIZE = 90
PENALTIES = [np.array(x, np.float32) for x in ([1.3, 1.0, 0.8, 1.1], [0.0, 0.5, -0.2, 0.3], [0.1, 0.2, 1.5, 0.7])]
ROWS = np.array([4, 1, 2, 0])


@pytest.fixture(params=["cpu", "reference", "cuda"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each backend; on the GPU, lists are longer than what a program looks at together."""
    if request.param != "cuda":
        return create_backend(request.param, "float32", "float32", 2)
    monkeypatch.setattr(sampling, "ENTRIES", 16)
    return GPUBackend("float32", "float32", DEVICE)


def scene() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, and which tokens are in prompts, and how often in outputs; the last row has none so far."""
    rng = np.random.default_rng(8)
    prompt, counts = rng.random((4, SIZE)) < 0.4, rng.integers(-2, 3, (4, SIZE)).clip(0).astype(np.int32)
    prompt[3], counts[3] = False, 0
    return normal(rng, 6, SIZE), prompt, counts


def device_tokens_of(backend: Any, tokens: list[int | None]) -> DeviceTokens:
    """Return the last tokens of rows, None for known ones, which are somewhere among others on the device."""
    places = np.array([-1 if token is None else 2 * index + 1 for index, token in enumerate(tokens)])
    held = np.full(2 * len(tokens) + 2, 7)
    for place, token in zip(places.tolist(), tokens, strict=True):
        if token is not None:
            held[place] = token
    return DeviceTokens(backend.from_numpy(held), places)


def which(prompt: np.ndarray, counts: np.ndarray, kind: str) -> list[int | None]:
    """Return a device token of each row, of one kind: in the output, only in the prompt, new, or known."""
    seen = {"output": counts > 0, "prompt": prompt & (counts == 0), "new": ~prompt & (counts == 0)}
    found: list[int | None] = []
    for row in range(4):
        tokens = [] if kind == "known" else np.flatnonzero(seen[kind][row]).tolist()
        found.append(tokens[len(tokens) // 2] if tokens else None)
    return found


@pytest.mark.parametrize("kind", ["output", "mixed"])
def test_penalties_count_a_device_token_as_one_that_the_host_knows(backend: Any, kind: str) -> None:
    logits, prompt, counts = scene()
    tokens = which(prompt, counts, kind) if kind != "mixed" else []
    if kind == "mixed":
        tokens = [which(prompt, counts, each)[row] for row, each in enumerate(("prompt", "known", "new", "new"))]
    with_it = counts.copy()
    for row, token in enumerate(tokens):
        if token is not None:
            with_it[row, token] += 1
    assert (with_it != counts).any()
    on_device, known, unaware = (backend.from_numpy(logits.copy()) for _ in range(3))
    backend.apply_penalties(
        on_device, Penalties(ROWS, *as_lists(prompt, counts), *PENALTIES), device_tokens_of(backend, tokens)
    )
    backend.apply_penalties(known, Penalties(ROWS, *as_lists(prompt, with_it), *PENALTIES))
    backend.apply_penalties(unaware, Penalties(ROWS, *as_lists(prompt, counts), *PENALTIES))
    on_device, known, unaware = (backend.to_numpy(array) for array in (on_device, known, unaware))
    np.testing.assert_array_equal(on_device, known)
    assert (on_device != unaware).sum() == sum(token is not None for token in tokens)


def test_all_backends_agree() -> None:
    """And with the words of `Backend.apply_penalties`."""
    logits, prompt, counts = scene()
    tokens = [which(prompt, counts, each)[row] for row, each in enumerate(("output", "prompt", "new", "new"))]
    expected = logits.astype(np.float64)
    for p, token in enumerate(tokens):
        assert token is not None
        counts_now = counts[p] + (np.arange(SIZE) == token)
        seen, row = prompt[p] | (counts_now > 0), expected[ROWS[p]]
        row[seen] = np.where(row > 0, row / PENALTIES[0][p], row * PENALTIES[0][p])[seen]
        row -= PENALTIES[2][p] * counts_now + PENALTIES[1][p] * (counts_now > 0)
    for each in (
        create_backend("cpu", "float32", "float32", 1),
        create_backend("reference", "float32", "float32", 1),
        GPUBackend("float32", "float32", DEVICE),
    ):
        target = each.from_numpy(logits.copy())
        each.apply_penalties(
            target, Penalties(ROWS, *as_lists(prompt, counts), *PENALTIES), device_tokens_of(each, tokens)
        )
        np.testing.assert_allclose(each.to_numpy(target), expected, atol=1e-6)


def test_a_token_is_barred_where_the_late_one_calls_for_it(backend: Any) -> None:
    logits = normal(np.random.default_rng(9), 5, SIZE)
    rows, tokens = np.array([3, 3, 0, 1, 3, 3]), np.array([8, 9, 8, 89, 10, 10])
    on_device = device_tokens_of(backend, [40, 40, 41, 0, 40, 40])
    target = backend.from_numpy(logits.copy())
    backend.greedy(target)  # what it knows of the logits holds no longer
    backend.ban_after(target, rows, tokens, on_device, np.array([40, 41, 40, 0, 39, 40]))
    expected = logits.copy()
    expected[[3, 1, 3], [8, 89, 10]] = -np.inf
    np.testing.assert_array_equal(backend.to_numpy(target), expected)
    only = backend.from_numpy(np.array([[0.0, 2.0, 1.0]], np.float32))
    assert backend.to_numpy(backend.greedy(only)).tolist() == [1]
    backend.ban_after(only, np.array([0]), np.array([1]), device_tokens_of(backend, [5]), np.array([5]))
    assert backend.to_numpy(backend.greedy(only)).tolist() == [2]
