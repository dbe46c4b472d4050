"""Several tensor-parallel ranks as threads of one process: copies of a backend with collectives between them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, TypeVar

from quire.kernels.backend import Backend

Result = TypeVar("Result")


def rank_backends(size: int, backend: Backend) -> tuple[list[Backend], threading.Barrier]:
    """Return a backend for each rank, and the barrier to abort when one of them fails."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def rank_backend(rank: int) -> Backend:
        def exchange(x: Any) -> list[Any]:
            slots[rank] = x
            barrier.wait(timeout=60)
            everybody = list(slots)
            barrier.wait(timeout=60)
            return everybody

        own: Any = copy.copy(backend)
        own.rank, own.world_size = rank, size
        own.all_reduce = lambda x: reduce(lambda total, part: total + part, exchange(x))
        own.all_gather = lambda x: backend.concat(exchange(x))
        return own  # type: ignore[no-any-return]

    return [rank_backend(rank) for rank in range(size)], barrier


def run_ranks(size: int, backend: Backend, work: Callable[[Backend], Result]) -> list[Result]:
    """Run `work` on every rank at once, with the rank's backend; return the results in rank order."""
    backends, barrier = rank_backends(size, backend)

    def run(own: Backend) -> Result:
        try:
            return work(own)
        except BaseException:
            barrier.abort()  # so that the others do not wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, backends))
