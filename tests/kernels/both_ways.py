"""Runs an op of the CPU kernels at once and recorded, on one thread and on two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.kernels.cpu.arithmetic import Arithmetic
from quire.kernels.cpu.threads import Launcher

T_SIZES = (1, 2, 5, 8, 9, 65, 130)  # for ops with tiles of rows: either side of every edge of a tile or an item
ROWS = (1, 9, 65)  # for ops that do each row by itself
Results = tuple[np.ndarray, ...]


def new_launcher(num_threads: int) -> Launcher:
    """Return a launcher that can record arithmetic."""
    launcher = Launcher(num_threads)
    launcher.recorder = Arithmetic(launcher)
    return launcher


def both_ways(
    launchers: list[Launcher],
    compute: Callable[..., Results],
    draw: Callable[[int], Results],
    expect: Callable[..., Results],
    check: Callable[[np.ndarray, np.ndarray], None] = np.testing.assert_array_equal,
) -> None:
    """Check that compute(launcher, *inputs) gives expect(*inputs), at once and recorded and run with other inputs.

    `draw` makes inputs from a seed, always of the same shapes. The results of all launchers are equal bit for bit.
    """
    seen: list[Results] = []
    for launcher in launchers:
        own: list[np.ndarray] = []
        inputs = draw(0)
        wanted = [expect(*(x.copy() for x in draw(seed))) for seed in (0, 1)]
        own.extend(np.array(x) for x in compute(launcher, *inputs))
        with launcher.record() as made:
            inputs = draw(2)
            results = compute(launcher, *inputs)
        for seed in (0, 1):
            for target, values in zip(inputs, draw(seed), strict=True):
                target[...] = values
            made[0].run()
            own.extend(np.array(x.view(np.ndarray)) for x in results)
        for got, want in zip(own, [*wanted[0], *wanted[0], *wanted[1]], strict=True):
            check(got, want)
        seen.append(tuple(own))
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
