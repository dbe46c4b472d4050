"""Who comes first: scheduling policies, and the queue of waiting requests that they order.

A policy is a function from a request and its number of arrival to a sort key. The same key orders the waiting queue and
the running sequences, and the last running sequence is the one that is preempted; so a preempted request returns to
where it belongs without being remembered as a special case.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from quire.scheduler.request import Request

Policy = Callable[[Request, int], tuple[float, ...]]


def fcfs(request: Request, number: int) -> tuple[float, ...]:
    """First come, first served."""
    return (request.arrival_time, number)


def priority(request: Request, number: int) -> tuple[float, ...]:
    """Lower `priority` first; among equals, first come, first served."""
    return (request.priority, request.arrival_time, number)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


class WaitingQueue:
    """Requests in the order of their `order_key`; O(log n) to push and pop, O(1) to remove.

    A removed request stays in the heap, marked dead by its finished status, until it surfaces or the dead outnumber
    the living.
    """

    __slots__ = ("_heap", "_num_dead")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Request]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def __iter__(self) -> Iterator[Request]:
        """Yield the waiting requests, in no particular order."""
        return (request for _, request in self._heap if not request.status.finished)

    def push(self, request: Request) -> None:
        """Add a request whose `order_key` is set."""
        heapq.heappush(self._heap, (request.order_key, request))

    def peek(self) -> Request | None:
        """Return the first request, or None."""
        while self._heap:
            request = self._heap[0][1]
            if not request.status.finished:
                return request
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return None

    def pop(self) -> Request | None:
        """Remove and return the first request, or None."""
        request = self.peek()
        if request is not None:
            heapq.heappop(self._heap)
        return request

    def discard(self, request: Request) -> None:
        """Take out a request of this queue whose status is a finished one already."""
        assert request.status.finished
        self._num_dead += 1
        if self._num_dead > 16 and 2 * self._num_dead > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].status.finished]
            heapq.heapify(self._heap)
            self._num_dead = 0
