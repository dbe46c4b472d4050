"""Stored responses and conversations, each for the API key it was made with; bounded in number, bytes and age.

They are rows of a database (`database.py`), in memory or in the folder of `--data-dir`, which a thread reads and
writes: a disk that is slow, or locked by another process, does not block the event loop. A process holds what it runs
here as well. Without room the oldest response of the key that stores the most is evicted, so that no client can evict
others'.

With a folder, several processes may have one store. Each reads what the others have stored. What another process runs
is found as a `RemoteResponse`, which says where: that process knows how far it has come, and can cancel it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from quire.errors import NotFoundError, RequestError
from quire.server.data_dir import prepare_data_dir, take_slot
from quire.server.database import DatabaseThread
from quire.server.responses.database import ResponseDatabase, Row, locked
from quire.server.responses.items import Item
from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

FINISHED = frozenset({"completed", "incomplete", "failed", "cancelled"})
SAID = frozenset({"completed", "incomplete"})  # of these, input and output go into the conversation
UNLOCK_SECONDS = 1.0  # until a conversation that could not be unlocked is tried again
EVENT_END = b"\n\n"

T = TypeVar("T")
decode_items = msgspec.json.Decoder(list[Item]).decode


class StoredResponse:
    """One response, finished, or running in this process.

    Attributes:
        response: the resource. earlier: the conversation before its own `items`. events: of its stream, encoded, if
            they are stored; the index is the sequence number. size: in bytes, once it is stored.
        abort, output: abort it, and return its output so far, while it is running. ended: set once its end is stored.
    """

    def __init__(
        self, owner: bytes, response: dict[str, Any], earlier: Sequence[Item], items: Sequence[Item], *, events: bool
    ) -> None:
        self.owner = owner
        self.response = response
        self.items = items
        self.events: list[bytes] | None = [] if events else None
        self.abort: Callable[[], None] = lambda: None
        self.output: Callable[[], list[Item]] = list
        self.size = 0
        self.ended = asyncio.Event()
        self.number: int | None = None
        self._earlier: Sequence[Item] | bytes = earlier
        self._changed = asyncio.Event()

    @classmethod
    def of_row(cls, owner: bytes, row: Row) -> StoredResponse:
        """Return a finished response."""
        stored = cls(owner, row.response, (), row.items, events=row.events is not None)
        stored.number, stored.size, stored._earlier = row.number, row.size, row.earlier
        if row.events:
            stored.events = [event + EVENT_END for event in row.events.split(EVENT_END)[:-1]]
        stored.ended.set()
        return stored

    @property
    def response_id(self) -> str:
        """The response's id."""
        return str(self.response["id"])

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.response["status"] in FINISHED

    @property
    def earlier(self) -> Sequence[Item]:
        """What was said before its own items. That of a stored response is decoded when it is asked for."""
        if isinstance(self._earlier, bytes):
            self._earlier = decode_items(self._earlier)
        return self._earlier

    @property
    def conversation(self) -> list[Item]:
        """All that was said, the output included."""
        return [*self.earlier, *self.items, *self.response["output"]]

    def resource(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self.response if self.finished else {**self.response, "output": self.output()}

    def mark_ended(self) -> None:
        """Release what ran it, and wake those who wait for its end."""
        self.abort, self.output = lambda: None, list
        self.ended.set()
        self.notify()

    def notify(self) -> None:
        """Wake those who follow the events."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def more(self) -> None:
        """Return at the next `notify`."""
        await self._changed.wait()


class RemoteResponse:
    """A response that another process runs, as it was when it began.

    Attributes:
        slot: of the process. response: the resource, without output. items: of its request.
    """

    def __init__(self, slot: int, response: dict[str, Any], items: Sequence[Item]) -> None:
        self.slot = slot
        self.response = response
        self.items = items

    def resource(self) -> dict[str, Any]:
        """Return the response as far as it is known here."""
        return self.response


class ResponseStore:
    """All stored responses and conversations.

    Args:
        config: bounds, and the folder, if there is one. clock: seconds since 1970.
        slot: number of this process among those that use the folder at a time. incarnation: differs after each start.

    Raises:
        ConfigError: the folder cannot be used, or another process has this slot.
    """

    def __init__(
        self,
        config: ServerConfig,
        clock: Callable[[], float] = time.time,
        *,
        slot: int = 0,
        incarnation: str | None = None,
    ) -> None:
        folder = None if config.data_dir is None else prepare_data_dir(config.data_dir)
        lock = None if folder is None else take_slot(folder, slot)
        incarnation = secrets.token_hex(8) if incarnation is None else incarnation
        self._thread = DatabaseThread(
            ResponseDatabase, lambda: ResponseDatabase(config, folder, slot, incarnation, clock), lock
        )
        self._running: dict[tuple[bytes, str], StoredResponse] = {}
        self._locked: set[tuple[bytes, str]] = set()  # conversations in which this process makes a response
        self._tasks: set[asyncio.Task[None]] = set()
        # It ends with the store, so that what waits in the thread is written, and SQLite's log is folded into its file.
        self.close = weakref.finalize(self, self._thread.close)

    async def run(self, work: Callable[[ResponseDatabase], T]) -> T:
        """Return what `work` does with the database. Raises as `work`, or `StorageError`."""
        return await self._thread.run(work)

    async def totals(self) -> tuple[int, int]:
        """Return how many are stored, unfinished responses included, and the bytes of all but these."""
        return await self.run(ResponseDatabase.totals)

    def add(self, stored: StoredResponse) -> asyncio.Future[None]:
        """Store a response that has begun; it is not evicted before it has ended.

        If that fails the response says so itself: its `store` is false.

        Returns:
            What is done when it is stored; only those who need that have to wait. It may raise `StorageError`.
        """
        place = stored.owner, stored.response_id
        running = self._running
        running[place] = stored

        def insert(database: ResponseDatabase) -> None:
            events = stored.events is not None
            number = database.insert(stored.owner, stored.response, stored.earlier, stored.items, events=events)
            if running.get(place) is stored:
                stored.number = number
            else:  # it has been given up meanwhile, and said that it is not stored
                database.delete(stored.owner, stored.response_id)

        def note(added: asyncio.Future[None]) -> None:
            if added.exception() is not None:
                running.pop(place, None)
                stored.response["store"] = False

        adding = self._thread.submit(insert)
        adding.add_done_callback(note)
        return adding

    def finish(self, stored: StoredResponse, last: Sequence[bytes] = ()) -> None:
        """Note that a response has ended; from now on it may be evicted. `ended` is set once that is stored.

        Of one that has not failed, input and output go into its conversation, if it has one, which is unlocked. What
        could not be stored says so: its `store` is false, and its `conversation` is null.

        Args:
            last: its last events; followers get them once they are stored, so that they may go on from it anywhere.
        """
        response = stored.response
        kept = None if stored.events is None else [*stored.events, *last]
        said = [*stored.items, *response["output"]] if response["status"] in SAID else []
        in_conversation = response.get("conversation") is not None
        if in_conversation:
            self._locked.discard((stored.owner, response["conversation"]["id"]))

        def write(database: ResponseDatabase) -> int | None:
            events = None if kept is None else b"".join(kept)
            if stored.number is None and not in_conversation:
                return None
            size = database.finish(stored.owner, stored.number, response, events, said)
            return None if stored.number is None else size or 0

        def end(written: asyncio.Future[int | None]) -> None:
            failed = written.exception() is not None
            size = None if failed else written.result()
            if size is None:
                response["store"] = False
            if failed and in_conversation:
                self._unlock_later(stored.owner, response["conversation"]["id"])
                response["conversation"] = None
            stored.size = size or 0
            if stored.events is not None:
                stored.events += last
            if self._running.get(place := (stored.owner, stored.response_id)) is stored:
                del self._running[place]
            stored.mark_ended()

        self._thread.submit(write).add_done_callback(end)

    async def find(self, owner: bytes, response_id: str) -> StoredResponse | RemoteResponse:
        """Return a response.

        Raises:
            NotFoundError: this key has none of this id. StorageError: it cannot be read now.
        """
        running = self._running.get((owner, response_id))
        if running is not None:
            return running

        def read(database: ResponseDatabase) -> StoredResponse | RemoteResponse:
            row = database.find(owner, response_id)
            if row.slot is not None:
                return RemoteResponse(row.slot, row.response, row.items)
            return StoredResponse.of_row(owner, row)

        return await self.run(read)

    async def previous(self, owner: bytes, response_id: str) -> StoredResponse:
        """Return a finished response to continue. Raises as `find`, or `RequestError` if it has not finished."""
        name = "previous_response_id"
        try:
            stored = await self.find(owner, response_id)
        except NotFoundError as error:
            raise NotFoundError(f"{name}: {error.message}", param=name, code="previous_response_not_found") from None
        if isinstance(stored, RemoteResponse) or not stored.finished:
            raise RequestError(f"{name}: this response has not ended yet", param=name)
        return stored

    async def items(self, owner: bytes, item_ids: Sequence[str]) -> dict[str, Item]:
        """Return those of these items that any response of this key has. Raises `StorageError`."""
        if not item_ids:
            return {}
        return await self.run(lambda database: database.find_items(owner, item_ids))

    async def lock(self, owner: bytes, conversation_id: str) -> None:
        """Keep a conversation for one response, until `unlock`, or until that has finished.

        Raises:
            NotFoundError: this key has none of this id. ConflictError: it is locked. StorageError: not now.
        """
        self._check_free(owner, conversation_id)
        self._locked.add((owner, conversation_id))
        try:
            await self.run(lambda database: database.lock(owner, conversation_id))
        except BaseException:
            self.unlock(owner, conversation_id)  # it may have been done all the same
            raise

    def unlock(self, owner: bytes, conversation_id: str) -> None:
        """Undo `lock`."""
        self._locked.discard((owner, conversation_id))

        def end(unlocked: asyncio.Future[None]) -> None:
            if unlocked.exception() is not None:
                self._unlock_later(owner, conversation_id)

        self._thread.submit(lambda database: database.unlock(owner, conversation_id)).add_done_callback(end)

    def _unlock_later(self, owner: bytes, conversation_id: str) -> None:
        """Undo `lock` where that has failed: to this process it is unlocked, but not to others."""

        def try_again() -> None:
            if (owner, conversation_id) not in self._locked:
                self.unlock(owner, conversation_id)

        asyncio.get_running_loop().call_later(UNLOCK_SECONDS, try_again)

    async def change_items(self, owner: bytes, conversation_id: str, work: Callable[[ResponseDatabase], T]) -> T:
        """As `run`, for what changes the items of a conversation. Raises `ConflictError` while it is locked."""
        self._check_free(owner, conversation_id)
        return await self.run(work)

    async def delete_conversation(self, owner: bytes, conversation_id: str) -> None:
        """Forget a conversation, locked or not. Raises `NotFoundError`, `StorageError`."""

        def delete(database: ResponseDatabase) -> None:
            database.conversation(owner, conversation_id)  # it is one
            database.delete(owner, conversation_id)

        await self.run(delete)
        self._locked.discard((owner, conversation_id))

    def _check_free(self, owner: bytes, conversation_id: str) -> None:
        if (owner, conversation_id) in self._locked:
            raise locked(conversation_id)

    async def delete(self, stored: StoredResponse) -> None:
        """Forget a response; one on its way is aborted. Raises `StorageError`."""
        await self.run(lambda database: database.delete(stored.owner, stored.response_id))
        self._running.pop((stored.owner, stored.response_id), None)
        if not stored.finished:
            stored.abort()

    def keep_task(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a background task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
