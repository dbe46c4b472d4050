"""Arithmetic of recorded arrays: what numpy would compute, later and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from quire.kernels.cpu.arithmetic import ADD, MULTIPLY, SUBTRACT, combine, concat, contiguous
from quire.kernels.cpu.threads import Launcher
from tests.kernels.both_ways import ROWS, Results, both_ways, new_launcher
from tests.kernels.scenes import normal

pytestmark = pytest.mark.usefixtures("always_parallel")
KINDS = {ADD: np.add, SUBTRACT: np.subtract, MULTIPLY: np.multiply}


@pytest.fixture(scope="module")
def launchers() -> list[Launcher]:
    """One thread, and two."""
    return [new_launcher(1), new_launcher(2)]


@pytest.mark.parametrize("count", ROWS)
def test_operands_are_broadcast(launchers: list[Launcher], count: int) -> None:
    width = 1 + 13 * count % 70
    whole, row, column = (count, width), (1, width), (count, 1)
    shapes = (whole, row, column, (width,))
    pairs = [(SUBTRACT, a, b) for a, b in itertools.product(shapes, shapes)]
    for kind, a, b in (*pairs, (ADD, whole, column), (MULTIPLY, row, whole)):
        both_ways(
            launchers[: 2 if a == b == whole else 1],
            lambda launcher, x, y, kind=kind: (combine(launcher, kind, x, y),),
            lambda seed, a=a, b=b: (
                normal(np.random.default_rng(seed), *a),
                normal(np.random.default_rng(~seed & 7), *b),
            ),
            lambda x, y, kind=kind: (KINDS[kind](x, y),),
        )


@pytest.mark.parametrize("number", [3, -0.1, np.float32(1.7), np.float64(0.3), np.array(2.0)])
def test_numbers(launchers: list[Launcher], number: object) -> None:
    for kind in KINDS:
        both_ways(
            launchers,
            lambda launcher, x, kind=kind: (combine(launcher, kind, x, number), combine(launcher, kind, number, x)),
            lambda seed: (normal(np.random.default_rng(seed), 5, 21),),
            lambda x, kind=kind: (KINDS[kind](x, np.float32(number)), KINDS[kind](np.float32(number), x)),
        )


def mixed(x: np.ndarray, y: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Use every operator, on arrays and on views of them."""
    total = (x + y) * 0.5 - c
    total += x
    total[:, 3:8] *= y[:, :5]
    total[:, 1:4] -= c[1:4]
    turned = 1.5 - total[:, 2:].reshape(len(total), 4, 8)
    return (turned * c[:8] + y[:, :4].reshape(len(total), 4, 1)).reshape(-1, 8)


def test_a_formula_of_recorded_arrays(launchers: list[Launcher]) -> None:
    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        return normal(rng, 9, 34), normal(rng, 9, 34), normal(rng, 34)

    def compute(launcher: Launcher, x: np.ndarray, y: np.ndarray, c: np.ndarray) -> Results:
        # numpy computes at once with its own arrays, so each is first copied to one that may be recorded
        copies = [combine(launcher, MULTIPLY, array, 1.0) for array in (x, y, c)]
        return (mixed(*copies),)

    both_ways(launchers, compute, draw, lambda x, y, c: (mixed(x, y, c),))


def test_values_are_read_before_they_are_written_over(launchers: list[Launcher]) -> None:
    def shifted(launcher: Launcher, x: np.ndarray) -> Results:
        total = combine(launcher, MULTIPLY, x, 1.0)
        total[:, 1:] += total[:, :-1]
        return (total,)

    def expect(x: np.ndarray) -> Results:
        x[:, 1:] += x[:, :-1].copy()
        return (x,)

    both_ways(launchers, shifted, lambda seed: (normal(np.random.default_rng(seed), 4, 50),), expect)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[:, 2:],
        lambda x: x[::2],
        lambda x: x[:, ::3],
        lambda x: x.T,
        lambda x: x.reshape(7, 4, 5).transpose(1, 0, 2),
        lambda x: x[:, 4],
    ],
)
def test_copies_of_any_view(launchers: list[Launcher], view: Callable[[np.ndarray], np.ndarray]) -> None:
    def compute(launcher: Launcher, x: np.ndarray) -> Results:
        copy = contiguous(launcher, view(combine(launcher, ADD, x, 0.0)))
        assert copy.flags.c_contiguous
        return (copy,)

    both_ways(launchers, compute, lambda seed: (normal(np.random.default_rng(seed), 7, 20),), lambda x: (view(x),))


def test_concat(launchers: list[Launcher]) -> None:
    def draw(seed: int) -> Results:
        rng = np.random.default_rng(seed)
        return normal(rng, 5, 3), normal(rng, 5, 40), normal(rng, 5, 17)

    both_ways(
        launchers,
        lambda launcher, *parts: (concat(launcher, [parts[0], parts[1][:, 3:], parts[2]]), concat(launcher, parts[:1])),
        draw,
        lambda a, b, c: (np.concatenate([a, b[:, 3:], c], axis=1), a),
    )
    heads = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    joined = concat(launchers[0], [heads, heads[..., :2]])
    np.testing.assert_array_equal(joined, np.concatenate([heads, heads[..., :2]], axis=-1))
    np.testing.assert_array_equal(concat(launchers[0], [heads[0, 0], heads[0, 1]]), heads[0, :2].reshape(-1))


def test_what_cannot_be_recorded_is_refused() -> None:
    launcher = new_launcher(1)
    ids = np.array([1, 0])
    with launcher.record():
        x = launcher.empty((2, 3))
        for attempt, message in (
            (lambda: np.exp(x), "not exp"),
            (lambda: x / 2, "not divide"),
            (lambda: np.concatenate([x, x]), r"numpy\.concatenate"),
            (lambda: x[ids], "take_rows"),
            (lambda: x[x > 0], "not greater"),
            (lambda: x + ids.reshape(2, 1), "int64"),
            (lambda: x + np.ones((4, 3), np.float32), "broadcast"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                attempt()
        with pytest.raises(ValueError, match=r"cannot take float32 \(2, 3\)"):
            x[:1] += x


def test_too_many_dimensions_are_named() -> None:
    x = np.ones((2, 2, 2, 2), np.float32)
    with pytest.raises(ValueError, match="at most 3 dimensions"):
        combine(new_launcher(1), ADD, x, x)
