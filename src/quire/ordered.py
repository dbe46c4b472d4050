"""`in_order`: concurrent work over many items, with results in the order of the items and bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

WINDOW = 4  # items taken and not yet yielded, for each that may run at a time

T = TypeVar("T")
R = TypeVar("R")


async def in_order(work: Callable[[T], Awaitable[R]], items: Iterable[T], concurrency: int) -> AsyncGenerator[R, None]:
    """Yield `await work(item)` for each item, in order, `concurrency` of them running at a time.

    At most `WINDOW * concurrency` items are taken and not yet yielded: while a slow item holds up as many, no further
    ones are taken. Closing the generator, or an error of `work`, cancels what is running.
    """
    slots = asyncio.Semaphore(concurrency)
    pending: deque[asyncio.Task[R]] = deque()

    async def run(item: T) -> R:
        async with slots:
            return await work(item)

    try:
        for item in items:
            pending.append(asyncio.create_task(run(item)))
            while pending and (pending[0].done() or len(pending) >= WINDOW * concurrency):
                yield await pending.popleft()
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
