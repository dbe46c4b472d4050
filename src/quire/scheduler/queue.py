"""`RequestQueue`: the waiting requests, in the order that the scheduling policy gives them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from quire.scheduler.request import Request, RequestStatus

BY_ORDER = attrgetter("order_key")


class RequestQueue:
    """Requests sorted by their `order_key`, which no two share.

    Attributes:
        num_swapped: how many of them have their KV in the host's pool.
        num_changes: how often a request was added or removed.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_swapped = self.num_changes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order."""
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Add a request whose `order_key` is set."""
        insort(self._requests, request, key=BY_ORDER)
        self.num_swapped += request.status is RequestStatus.SWAPPED
        self.num_changes += 1

    def first(self, count: int) -> list[Request]:
        """Return the first `count` requests."""
        return self._requests[:count]

    def peek(self) -> Request | None:
        """Return the first request, or None."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Take out a request, whose status is still what it was when it came."""
        index = bisect_left(self._requests, request.order_key, key=BY_ORDER)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_swapped -= request.status is RequestStatus.SWAPPED
        self.num_changes += 1
