"""LoRA ops: every row gets what its adapter's matrices make of it, and nothing of any other's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import Backend
from quire.kernels.cpu import lora
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.lora import LoRAChange, LoRARows
from quire.kernels.reference.backend import ReferenceBackend
from tests.kernels.both_ways import T_SIZES, both_ways, new_launcher
from tests.kernels.scenes import normal

SLOTS, DEPTH, SIZES = 3, 37, [40, 8, 19]
Parts = list[LoRAChange | None]


def rows_of(slots: np.ndarray, num_slots: int = SLOTS) -> LoRARows:
    """Return the rows of these slots, int64 [T], on the host."""
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    starts = np.searchsorted(slots[order], np.arange(num_slots + 1))
    return LoRARows(
        slots, np.concatenate([order, np.zeros(len(slots) - len(order), np.int64)]), starts.astype(np.int64)
    )


def adapters(seed: int) -> list[Parts]:
    """Return what is in each slot: all parts, some, and none."""
    rng = np.random.default_rng(seed)

    def change(size: int, rank: int) -> LoRAChange:
        return LoRAChange(normal(rng, rank, DEPTH), normal(rng, size, rank))

    return [[change(40, 16), change(8, 3), change(19, 1)], [None, change(8, 5), None], [None, None, None]]


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values as a backend of this dtype holds them."""
    if dtype == "bfloat16":
        return HostTensor(lora._stored(values, dtype).reshape(values.shape), dtype).to_float32()
    return values


def expected(y: np.ndarray, x: np.ndarray, slots: np.ndarray, held: list[Parts], dtype: str) -> np.ndarray:
    """Return the same in numpy, row by row, in float64."""
    y = y.astype(np.float64)
    for row, slot in enumerate(slots):
        column = 0
        for size, change in zip(SIZES, held[slot] if slot >= 0 else [None] * len(SIZES)):
            if change is not None and change.a is not None and change.b is not None:
                a, b = (rounded(factor, dtype).astype(np.float64) for factor in (change.a, change.b))
                y[row, column : column + size] += b @ (a @ x[row])
            column += size
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_get_what_their_adapters_make_of_them(dtype: str, always_parallel: None) -> None:
    launchers = [new_launcher(1), new_launcher(2)]
    held = adapters(0)
    table = lora.new_slots(SLOTS, 16, SIZES, 0, dtype)
    for slot, parts in enumerate(held):
        lora.set_slot(table, slot, [None if c is None else lora.pack(c, dtype, lookup=False) for c in parts])
    for count in T_SIZES:

        def draw(seed: int, count: int = count) -> tuple[np.ndarray, ...]:
            rng = np.random.default_rng(1000 * count + seed)
            slots = rng.integers(-1, SLOTS, count)
            return normal(rng, count, 80)[:, 2 : 2 + sum(SIZES)], normal(rng, count, DEPTH), *rows_of(slots)

        def compute(launcher: lora.Launcher, y: np.ndarray, x: np.ndarray, *rows: np.ndarray) -> tuple[np.ndarray, ...]:
            out = launcher.recorder.combine(0, y, 0.0, None)  # type: ignore[union-attr]
            lora.lora(launcher, out, x, table, LoRARows(*rows))
            return (out,)

        def check(got: np.ndarray, want: np.ndarray) -> None:
            np.testing.assert_allclose(got, want, atol=5e-5)

        both_ways(launchers, compute, draw, lambda y, x, slots, *_: (expected(y, x, slots, held, dtype),), check)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    backend, rng = CPUBackend(num_threads=2), np.random.default_rng(0)
    slots = backend.new_lora_slots(SLOTS, 16, SIZES)
    for slot, parts in enumerate(adapters(1)):
        backend.set_lora(slots, slot, [None if c is None else backend.pack_lora(c) for c in parts])
    x, own = normal(rng, 130, DEPTH), rng.integers(-1, SLOTS, 130)
    together = np.zeros((130, sum(SIZES)), np.float32)
    backend.lora(together, x, slots, rows_of(own))
    for row in (0, 1, 7, 63, 64, 129):
        alone = np.zeros((1, sum(SIZES)), np.float32)
        backend.lora(alone, x[row : row + 1], slots, rows_of(own[row : row + 1]))
        np.testing.assert_array_equal(alone[0], together[row])


def both_backends() -> list[Backend]:
    return [CPUBackend(num_threads=2), ReferenceBackend()]


def test_backends_agree_on_linear_layers_and_on_what_takes_their_place() -> None:
    rng = np.random.default_rng(2)
    x, y, own = normal(rng, 9, 24), normal(rng, 9, 50), np.array([0, -1, 1, 1, 2, 0, 0, 1, -1])
    factors = LoRAChange(normal(rng, 4, 24), normal(rng, 47, 4))
    whole = LoRAChange(factors.a, factors.b, whole=normal(rng, 50, 24))
    results = []
    for backend in both_backends():
        slots = backend.new_lora_slots(SLOTS, 4, [47], widest=50)
        backend.set_lora(slots, 0, [backend.pack_lora(factors)])
        backend.set_lora(slots, 1, [backend.pack_lora(whole)])
        out = backend.from_numpy(y.copy())
        backend.lora(out, backend.from_numpy(x), slots, on(backend, own))
        results.append(backend.to_numpy(out))
    want = y.astype(np.float64)
    assert factors.a is not None and factors.b is not None and whole.whole is not None
    change = x @ (factors.b @ factors.a).T
    want[own == 1] = x[own == 1] @ whole.whole.T
    want[own >= 0, :47] += change[own >= 0] * (own[own >= 0, None] < 2)
    for got in results:
        np.testing.assert_allclose(got, want, atol=1e-4)


def on(backend: Backend, slots: np.ndarray) -> LoRARows:
    return LoRARows(*map(backend.from_numpy, rows_of(slots)))


def test_backends_agree_on_tables() -> None:
    rng = np.random.default_rng(3)
    ids, own = np.array([3, 0, 11, 3, 7]), np.array([0, -1, 1, 1, 2])
    y = normal(rng, 5, 21)
    factors = LoRAChange(normal(rng, 4, 10), normal(rng, 21, 4))
    whole = LoRAChange(whole=normal(rng, 12, 21))
    assert factors.a is not None and factors.b is not None and whole.whole is not None
    want = y.copy()
    want[0] += factors.b @ factors.a[:, 3]
    want[2:4] = whole.whole[[11, 3]]
    for backend in both_backends():
        slots = backend.new_lora_slots(SLOTS, 4, [21])
        backend.set_lora(slots, 0, [backend.pack_lora(factors, lookup=True)])
        backend.set_lora(slots, 1, [backend.pack_lora(whole, lookup=True)])
        out = backend.from_numpy(y.copy())
        backend.lora_embedding(out, backend.from_numpy(ids), slots, on(backend, own))
        np.testing.assert_allclose(backend.to_numpy(out), want, atol=1e-5)


def test_an_emptied_slot_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    for backend in both_backends():
        slots = backend.new_lora_slots(1, 4, [21])
        backend.set_lora(slots, 0, [backend.pack_lora(LoRAChange(normal(rng, 4, 8), normal(rng, 21, 4)))])
        backend.set_lora(slots, 0, [None])
        out = backend.from_numpy(np.ones((2, 21), np.float32))
        x = backend.from_numpy(normal(rng, 2, 8))
        backend.lora(out, x, slots, LoRARows(*map(backend.from_numpy, rows_of(np.array([0, 0]), 1))))
        np.testing.assert_array_equal(backend.to_numpy(out), 1.0)


@pytest.mark.parametrize("make", [CPUBackend, ReferenceBackend])
def test_columns_beyond_the_limit_can_never_be_chosen(make: Callable[[], Backend]) -> None:
    backend = make()
    out = backend.from_numpy(np.ones((3, 5), np.float32))
    backend.limit_columns(out, backend.from_numpy(np.array([5, 3, 4])))
    got = backend.to_numpy(out)
    assert np.isinf(got).sum(axis=1).tolist() == [0, 2, 1]
    assert got[1, 3] == got[2, 4] == -np.inf
