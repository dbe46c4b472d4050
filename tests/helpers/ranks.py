"""Several tensor-parallel ranks as threads of one process: copies of a backend with collectives between them."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from quire.kernels.backend import Backend

Result = TypeVar("Result")


def rank_backends(backends: Sequence[Backend]) -> threading.Barrier:
    """Make each a rank of one group; return the barrier to abort when one of them fails."""
    size = len(backends)
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def join(rank: int, own: Any) -> None:
        def exchange(x: Any) -> list[Any]:
            slots[rank] = x
            barrier.wait(timeout=60)
            everybody = list(slots)
            barrier.wait(timeout=60)
            return everybody

        def add(x: np.ndarray, out: np.ndarray) -> None:
            out[...] = reduce(operator.add, exchange(x.copy()))  # memory of a recording is used again at once

        def join_columns(x: np.ndarray, out: np.ndarray) -> None:
            out[...] = np.concatenate(exchange(x.copy()), axis=-1)

        own.rank, own.world_size = rank, size
        if own.name == "cpu":  # whose steps are recorded
            own.all_reduce = lambda x: own.collective(add, x, x.shape)
            own.all_gather = lambda x: own.collective(join_columns, x, (*x.shape[:-1], size * x.shape[-1]))
        else:
            own.all_reduce = lambda x: reduce(operator.add, exchange(x))
            own.all_gather = lambda x: own.concat(exchange(x))

    for rank, own in enumerate(backends):
        join(rank, own)
    return barrier


def run_ranks(size: int, backend: Backend, work: Callable[[Backend], Result]) -> list[Result]:
    """Run `work` on every rank at once, with the rank's backend; return the results in rank order."""
    backends = [copy.copy(backend) for _ in range(size)]
    barrier = rank_backends(backends)

    def run(own: Backend) -> Result:
        try:
            return work(own)
        except BaseException:
            barrier.abort()  # so that the others do not wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, backends))
