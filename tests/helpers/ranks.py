"""Several tensor-parallel ranks as threads of one process, with the sums and joins that layers ask of a RankGroup."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.kernels.backend import Backend
from quire.layers.parallel import ParallelContext

Result = TypeVar("Result")


class _ThreadGroup:
    """One rank's end; `slots` and `barrier` are shared."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier, backend: Backend) -> None:
        self.rank, self.slots, self.barrier, self.backend = rank, slots, barrier, backend

    def _exchange(self, x: Any) -> list[Any]:
        self.slots[self.rank] = x
        self.barrier.wait(timeout=60)
        everybody = list(self.slots)
        self.barrier.wait(timeout=60)
        return everybody

    def all_reduce(self, x: Any) -> Any:
        first, *others = self._exchange(x)
        for other in others:
            first = first + other
        return first

    def all_gather(self, x: Any) -> Any:
        return self.backend.concat(self._exchange(x))


def run_ranks(size: int, backend: Backend, work: Callable[[ParallelContext], Result]) -> list[Result]:
    """Run `work` on every rank at once; return the results in rank order."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> Result:
        try:
            return work(ParallelContext(rank, size, _ThreadGroup(rank, slots, barrier, backend)))
        except BaseException:
            barrier.abort()  # so that the others do not wait for us
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
