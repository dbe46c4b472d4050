"""Stored responses, in memory, each for the API key it was made with; bounded in number, bytes and age.

Without room the oldest response of the key that stores the most is evicted, so that no client can evict others'.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.errors import NotFoundError, RequestError, echo
from quire.frontend.prompts import text_size
from quire.server.responses.items import Item
from quire.server_config import ServerConfig

FINISHED = frozenset({"completed", "incomplete", "failed", "cancelled"})


class StoredResponse:
    """One response, finished or running.

    Attributes:
        response: the resource. earlier: the conversation before its own `items`. events: of its stream, encoded, if
            they are stored; the index is the sequence number. input_size: of `earlier` and `items`, if it is known.
        abort, output: abort it, and return its output so far, while it is running.
    """

    def __init__(
        self,
        owner: bytes,
        response: dict[str, Any],
        earlier: Sequence[Item],
        items: Sequence[Item],
        *,
        events: bool,
        input_size: int | None = None,
    ) -> None:
        self.owner = owner
        self._input_size = input_size
        self.response = response
        self.earlier = earlier
        self.items = items
        self.events: list[bytes] | None = [] if events else None
        self.abort: Callable[[], None] = lambda: None
        self.output: Callable[[], list[Item]] = list
        self.expires = 0.0
        self.size = 0
        self.ended = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def response_id(self) -> str:
        """The response's id."""
        return str(self.response["id"])

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.response["status"] in FINISHED

    @property
    def conversation(self) -> list[Item]:
        """All that was said, the output included."""
        return [*self.earlier, *self.items, *self.response["output"]]

    def resource(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self.response if self.finished else {**self.response, "output": self.output()}

    def measure(self) -> int:
        """Return about how many bytes it takes. What it shares with others counts for each of them."""
        events = sum([len(event) for event in self.events or ()])
        given = text_size([self.earlier, self.items]) if self._input_size is None else self._input_size
        return given + len(msgspec.json.encode(self.response)) + events

    def mark_ended(self) -> None:
        """Release what ran it, and wake those who wait for its end."""
        self.abort, self.output = lambda: None, list
        self.notify()
        self.ended.set()

    def notify(self) -> None:
        """Wake those who follow the events."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def more(self) -> None:
        """Return at the next `notify`."""
        await self._changed.wait()


class _OwnerResponses:
    """The responses of one key: all, the finished ones by age, and items by their ids and responses."""

    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self.finished: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, dict[str, Item]] = {}
        self.size = 0


class ResponseStore:
    """All stored responses.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = config.max_stored_responses
        self._most_bytes = config.max_stored_response_bytes
        self._seconds = config.stored_response_ttl
        self._clock = clock
        self._by_owner: dict[bytes, _OwnerResponses] = {}
        self._finished: OrderedDict[str, StoredResponse] = OrderedDict()  # of all keys, by age
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_stored(self) -> int:
        """Stored responses, unfinished ones included."""
        return sum([len(own.responses) for own in self._by_owner.values()])

    @property
    def size(self) -> int:
        """Bytes that finished ones take."""
        return sum([own.size for own in self._by_owner.values()])

    def add(self, stored: StoredResponse) -> None:
        """Store a response that has begun; it is not evicted before it has ended."""
        own = self._by_owner.setdefault(stored.owner, _OwnerResponses())
        own.responses[stored.response_id] = stored
        for item in stored.items:
            own.items.setdefault(item["id"], {})[stored.response_id] = item
        self._make_room()

    def finish(self, stored: StoredResponse) -> None:
        """Note that a response has ended; from now on it may be evicted."""
        stored.mark_ended()
        own = self._by_owner.get(stored.owner)
        if own is None or own.responses.get(stored.response_id) is not stored:
            return  # deleted meanwhile
        stored.expires = self._clock() + self._seconds
        stored.size = stored.measure()
        own.size += stored.size
        own.finished[stored.response_id] = self._finished[stored.response_id] = stored
        for item in stored.response["output"]:
            own.items.setdefault(item["id"], {})[stored.response_id] = item
        self._make_room()

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Return a response. Raises `NotFoundError` if this key has none of this id."""
        self._expire()
        own = self._by_owner.get(owner)
        stored = None if own is None else own.responses.get(response_id)
        if stored is None:
            raise NotFoundError(
                f"there is no response {echo(response_id)}, or it is not stored any more",
                param="response_id",
                code="response_not_found",
            )
        return stored

    def previous(self, owner: bytes, response_id: str) -> StoredResponse:
        """Return a finished response to continue. Raises `NotFoundError`, or `RequestError` if it has not finished."""
        name = "previous_response_id"
        try:
            stored = self.get(owner, response_id)
        except NotFoundError as error:
            raise NotFoundError(f"{name}: {error.message}", param=name, code="previous_response_not_found") from None
        if not stored.finished:
            raise RequestError(f"{name}: this response has not ended yet", param=name)
        return stored

    def item(self, owner: bytes, item_id: str) -> Item | None:
        """Return an item of any response of this key, None if there is none of this id."""
        self._expire()
        own = self._by_owner.get(owner)
        found = {} if own is None else own.items.get(item_id, {})
        return next(reversed(found.values()), None)

    def delete(self, stored: StoredResponse) -> None:
        """Forget a response; one on its way is aborted."""
        self._remove(stored)
        if not stored.finished:
            stored.abort()

    def keep_task(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a background task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _remove(self, stored: StoredResponse) -> None:
        own = self._by_owner[stored.owner]
        del own.responses[stored.response_id]
        own.finished.pop(stored.response_id, None)
        self._finished.pop(stored.response_id, None)
        own.size -= stored.size
        for item in (*stored.items, *stored.response["output"]):
            places = own.items.get(item["id"], {})
            places.pop(stored.response_id, None)
            if not places:
                own.items.pop(item["id"], None)
        if not own.responses:
            del self._by_owner[stored.owner]

    def _expire(self) -> None:
        now = self._clock()
        while self._finished and next(iter(self._finished.values())).expires <= now:
            self._remove(next(iter(self._finished.values())))

    def _make_room(self) -> None:
        self._expire()
        while self._finished and self.num_stored > self._most:
            self._drop(lambda own: len(own.responses))
        while self._finished and self.size > self._most_bytes:
            self._drop(lambda own: own.size)

    def _drop(self, weight: Callable[[_OwnerResponses], int]) -> None:
        """Evict the oldest finished response of the heaviest key, among those that have one."""
        heaviest = max([own for own in self._by_owner.values() if own.finished], key=weight)
        self._remove(next(iter(heaviest.finished.values())))
