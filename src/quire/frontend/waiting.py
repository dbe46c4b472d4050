"""Threads in which an event loop has jobs of worker processes done: one `WaitingThreads` for each `WorkerPool`.

So one kind of jobs never delays another, nor the threads that tokenize.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.errors import OverloadedError
from quire.frontend.worker_process import MAX_PROCESSES, QUEUE_TIMEOUT

MAX_WAITING = 1024  # many may want the same grammar, which is compiled once

T = TypeVar("T")


class WaitingThreads:
    """As many threads as the pool has processes, so that jobs begin in the order in which they came.

    A job is given up when it has not begun for `QUEUE_TIMEOUT` seconds, or whoever waits for it is cancelled.

    Args:
        what: the jobs, in the plural, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="quire-waiting")
        self._num_jobs = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises `OverloadedError` if too many jobs wait, or this one for too long."""
        if self._num_jobs >= MAX_WAITING + MAX_PROCESSES:
            raise self._overloaded()
        job = self._threads.submit(work)
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = job.cancel()  # not if it has begun

        alarm = asyncio.get_running_loop().call_later(QUEUE_TIMEOUT, expire)
        self._num_jobs += 1
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if expired:
                raise self._overloaded() from None
            raise
        finally:
            self._num_jobs -= 1
            alarm.cancel()

    def close(self) -> None:
        """Give up what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(f"too many {self._what} wait for a worker process; try again later")
