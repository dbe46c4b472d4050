"""`ResponseDatabase`: stored responses and conversations as rows of SQLite, in a file or in memory, and their bounds.

It knows neither asyncio nor what runs a response. Its functions block and are called by one thread at a time
(`store.py`). Any number of processes open the same file: each statement sees what the others have committed, and the
bounds count all of it.

    owners      one row per API key with responses: how many, how many of them have ended, bytes of these
    responses   the resource, without its output; a process (slot, incarnation) while it runs, then `ended`, a number
                that grows, and `expires`, in seconds since 1970
    items       own items and output, one row each, to be found by their ids
    parts       what is only read as a whole: the conversation before, and the events of the stream

A conversation is a row of `responses`, too, so that the same bounds hold for both; its id says which of them a row is.
It has always ended, and is the newest of its key after each change. A process in its row is one that makes a response
in it: nobody else may change its items meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.errors import ConflictError, NotFoundError, echo
from quire.server.data_dir import slot_lives
from quire.server.database import Database
from quire.server.responses.items import Item, check_new
from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

FILE = "responses.sqlite3"
RESTARTED = "the server was restarted before this response had ended"
NOT_KEPT = "the end of this response could not be stored"

TABLES = """
CREATE TABLE owners (
    number INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL UNIQUE,
    responses INTEGER NOT NULL, ended INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner BLOB NOT NULL, id TEXT NOT NULL,
    slot INTEGER, incarnation TEXT, ended INTEGER, expires REAL, size INTEGER NOT NULL, response BLOB NOT NULL,
    UNIQUE (owner, id));
CREATE INDEX responses_by_end ON responses (ended) WHERE ended IS NOT NULL;
CREATE INDEX responses_by_owner_and_end ON responses (owner, ended) WHERE ended IS NOT NULL;
CREATE INDEX responses_by_expiry ON responses (expires) WHERE ended IS NOT NULL;
CREATE INDEX responses_running ON responses (slot) WHERE ended IS NULL;
CREATE TABLE items (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner BLOB NOT NULL, id TEXT NOT NULL,
    response INTEGER NOT NULL, output INTEGER NOT NULL, item BLOB NOT NULL);
CREATE INDEX items_by_id ON items (owner, id);
CREATE INDEX items_by_response ON items (response);
CREATE TABLE parts (
    response INTEGER NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (response, name));
"""
EXPIRED = "ended IS NOT NULL AND expires <= ?"
LATEST = "(SELECT IFNULL(MAX(ended), 0) + 1 FROM responses WHERE ended IS NOT NULL)"
RESPONSE, CONVERSATION, ITEM = "response", "conversation", "item"
ID_PREFIXES = {RESPONSE: "resp", CONVERSATION: "conv"}

EncodedItem = tuple[str, bytes]  # its id and its JSON

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Row:
    """A response as it is stored.

    Attributes:
        slot: of the process that runs it; None if it has ended. response: the resource. earlier: the conversation
            before its own `items`, as JSON. events: of its stream, one after the other; None if they are not kept.
    """

    number: int
    slot: int | None
    size: int
    response: dict[str, Any]
    earlier: bytes
    items: list[Item]
    events: bytes | None


class _Found(NamedTuple):
    """A row of `responses`."""

    number: int
    slot: int | None
    incarnation: str | None
    size: int
    resource: bytes


def not_found(kind: str, name: str) -> NotFoundError:
    """Return the error for a response, conversation or item that this key does not have."""
    message = f"there is no {kind} {echo(name)}, or it is not stored any more"
    return NotFoundError(message, param=f"{kind}_id", code=f"{kind}_not_found")


def locked(conversation_id: str) -> ConflictError:
    """Return the error for a conversation in which a response is being made."""
    message = f"a response is being made in the conversation {echo(conversation_id)}; try again once it has ended"
    return ConflictError(message, param="conversation_id", code="conversation_locked")


class ResponseDatabase(Database):
    """All stored responses, those of other processes included.

    Args:
        config: of which the bounds count. folder: of the file; None keeps everything in memory.
        slot, incarnation: name this process; the incarnation differs after each start. clock: seconds since 1970.

    Raises:
        sqlite3.Error, OSError: it cannot be opened now.
    """

    name = "responses"
    contents = "stored responses"
    application_id = 0x51755265
    tables = TABLES

    def __init__(
        self, config: ServerConfig, folder: Path | None, slot: int, incarnation: str, clock: Callable[[], float]
    ) -> None:
        self._most = config.max_stored_responses
        self._most_bytes = config.max_stored_response_bytes
        self._seconds = config.stored_response_ttl
        self._slot = slot
        self._incarnation = incarnation
        self._clock = clock
        super().__init__(folder)
        try:
            with self._writing():
                self._end_lost()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that begins with what has expired, and ends within the bounds."""
        with self._transaction("BEGIN IMMEDIATE"):
            self._expire()
            yield
            self._make_room()

    def insert(
        self, owner: bytes, response: dict[str, Any], earlier: Sequence[Item], items: Sequence[Item], *, events: bool
    ) -> int:
        """Store a response that this process runs; return its number."""
        encoded, before = _without_output(response), b"[%b]" % b",".join(map(_encode, earlier))
        own = _encoded(items)
        with self._writing():
            size = len(before) + _num_bytes(own)
            holder = self._slot, self._incarnation
            number = self._insert(owner, response["id"], holder, size, encoded)
            self._insert_items(number, owner, own, output=False)
            parts = [(number, "earlier", before), *([(number, "events", b"")] if events else [])]
            self.connection.executemany("INSERT INTO parts VALUES (?, ?, ?)", parts)
        return number

    def _insert(self, owner: bytes, name: str, holder: tuple[int | None, str | None], size: int, encoded: bytes) -> int:
        """Insert a row of something that has not ended; return its number."""
        number = self.connection.execute(
            "INSERT INTO responses (owner, id, slot, incarnation, size, response) VALUES (?, ?, ?, ?, ?, ?)",
            (owner, name, *holder, size, encoded),
        ).lastrowid
        assert number is not None
        self.connection.execute(
            "INSERT INTO owners (digest, responses, ended, bytes) VALUES (?, 1, 0, 0) "
            "ON CONFLICT (digest) DO UPDATE SET responses = responses + 1",
            (owner,),
        )
        return number

    def finish(
        self, owner: bytes, number: int | None, response: dict[str, Any], events: bytes | None, said: Sequence[Item]
    ) -> int | None:
        """Store the end of a response, and unlock its conversation, if it has one.

        Args:
            number: None if the response is not stored. said: what is added to the conversation.

        Returns:
            The bytes that the response takes; None if it is not stored, or was deleted meanwhile.
        """
        with self._writing():
            size = None if number is None else self._end(number, response, events)
            if response.get("conversation") is not None:
                self._unlock(owner, response["conversation"]["id"], said)
            return size

    def _end(self, number: int, response: dict[str, Any], events: bytes | None) -> int | None:
        encoded, output = _without_output(response), _encoded(response["output"])
        found = self.connection.execute(
            "SELECT owner, size FROM responses WHERE number = ? AND ended IS NULL", (number,)
        ).fetchone()
        if found is None:
            return None
        owner, input_size = found
        size: int = input_size + len(encoded) + _num_bytes(output) + len(events or b"")
        self._insert_items(number, owner, output, output=True)
        if events:
            self.connection.execute(
                "UPDATE parts SET data = ? WHERE response = ? AND name = 'events'", (events, number)
            )
        self._settle(owner, _Found(number, None, None, size, encoded))
        return size

    def _settle(self, owner: bytes, row: _Found) -> None:
        """Write a row of something that has ended now, and count it."""
        self.connection.execute(
            "UPDATE responses SET slot = ?, incarnation = ?, size = ?, response = ?, expires = ?, "
            f"ended = {LATEST} WHERE number = ?",
            (*row[1:], self._clock() + self._seconds, row.number),
        )
        self.connection.execute(
            "UPDATE owners SET ended = ended + 1, bytes = bytes + ? WHERE digest = ?", (row.size, owner)
        )

    def _insert_items(self, number: int, owner: bytes, items: Sequence[EncodedItem], *, output: bool) -> None:
        rows = [(owner, item_id, number, output, item) for item_id, item in items]
        self.connection.executemany(
            "INSERT INTO items (owner, id, response, output, item) VALUES (?, ?, ?, ?, ?)", rows
        )

    def find(self, owner: bytes, response_id: str) -> Row:
        """Return a response; one whose process is gone has failed. Raises `NotFoundError`."""
        self._drop_expired()
        with self._transaction("BEGIN"):
            row, incarnation = self._read(owner, response_id)
        if row.slot is None or self._lives(row.slot, incarnation, mine=False):
            return row
        mine = row.slot == self._slot and incarnation == self._incarnation
        row.response, row.slot = failed(row.response, NOT_KEPT if mine else RESTARTED), None
        with contextlib.suppress(sqlite3.Error), self._writing():  # what is shown does not depend on it
            self._end(row.number, row.response, None)
        return row

    def _find(self, owner: bytes, kind: str, name: str) -> _Found:
        """Return the row of a response or conversation. Raises `NotFoundError`."""
        found = self.connection.execute(
            "SELECT number, slot, incarnation, size, response FROM responses WHERE owner = ? AND id = ? "
            f"AND NOT ({EXPIRED})",
            (owner, name, self._clock()),
        ).fetchone()
        if found is None or not name.startswith(f"{ID_PREFIXES[kind]}_"):
            raise not_found(kind, name)
        return _Found(*found)

    def _read(self, owner: bytes, response_id: str) -> tuple[Row, str]:
        """Return a response, and the incarnation of the process that runs it. Raises `NotFoundError`."""
        number, slot, incarnation, size, encoded = self._find(owner, RESPONSE, response_id)
        response = _decode(encoded)
        items: list[Item] = []
        for output, item in self.connection.execute(
            "SELECT output, item FROM items WHERE response = ? ORDER BY number", (number,)
        ):
            (response["output"] if output else items).append(_decode(item))
        parts = dict(self.connection.execute("SELECT name, data FROM parts WHERE response = ?", (number,)).fetchall())
        row = Row(number, slot, size, response, parts["earlier"], items, parts.get("events"))
        return row, incarnation or ""

    def find_items(self, owner: bytes, item_ids: Sequence[str]) -> dict[str, Item]:
        """Return those of these items that any response of a key has; of several with one id the newest."""
        self._drop_expired()
        found = {}
        for item_id in item_ids:
            row = self.connection.execute(
                "SELECT item FROM items WHERE owner = ? AND id = ? AND response NOT IN "
                f"(SELECT number FROM responses WHERE {EXPIRED}) ORDER BY number DESC LIMIT 1",
                (owner, item_id, self._clock()),
            ).fetchone()
            if row is not None:
                found[item_id] = _decode(row[0])
        return found

    def list_items(
        self, owner: bytes, kind: str, name: str, limit: int, order: str, after: str | None
    ) -> tuple[list[EncodedItem], bool]:
        """Return items of a response's request, or of a conversation, and whether there are more of them.

        Args:
            order: asc or desc. after: the id of the item before.

        Raises:
            NotFoundError: there is no such response, conversation, or item.
        """
        self._drop_expired()
        number = self._find(owner, kind, name).number
        bound: tuple[int, ...] = ()
        if after is not None:
            try:
                bound = (self._find_item(owner, number, after)[0],)
            except NotFoundError as error:
                raise NotFoundError(f"after: {error.message}", param="after", code=error.code) from None
        beyond = "" if after is None else f"AND number {'>' if order == 'asc' else '<'} ? "
        rows = self.connection.execute(
            f"SELECT id, item FROM items WHERE response = ? AND NOT output {beyond}ORDER BY number {order} LIMIT ?",
            (number, *bound, limit + 1),
        ).fetchall()
        return rows[:limit], len(rows) > limit

    def _find_item(self, owner: bytes, number: int, item_id: str) -> tuple[int, bytes]:
        """Return number and JSON of an item, not of output, of a row; of several the newest. Raises `NotFoundError`."""
        found: tuple[int, bytes] | None = self.connection.execute(
            "SELECT number, item FROM items WHERE owner = ? AND id = ? AND response = ? AND NOT output "
            "ORDER BY number DESC LIMIT 1",
            (owner, item_id, number),
        ).fetchone()
        if found is None:
            raise not_found(ITEM, item_id)
        return found

    def insert_conversation(self, owner: bytes, conversation: dict[str, Any], items: Sequence[Item]) -> None:
        """Store a new conversation."""
        encoded, own = _encode(conversation), _encoded(items)
        with self._writing():
            number = self._insert(owner, conversation["id"], (None, None), 0, encoded)
            self._insert_items(number, owner, own, output=False)
            self._settle(owner, _Found(number, None, None, len(encoded) + _num_bytes(own), encoded))

    def conversation(self, owner: bytes, conversation_id: str) -> dict[str, Any]:
        """Return a conversation. Raises `NotFoundError`."""
        self._drop_expired()
        found: dict[str, Any] = _decode(self._find(owner, CONVERSATION, conversation_id).resource)
        return found

    def said(self, owner: bytes, conversation_id: str) -> bytes:
        """Return all items of a conversation, as JSON. Raises `NotFoundError`."""
        self._drop_expired()
        with self._transaction("BEGIN"):
            number = self._find(owner, CONVERSATION, conversation_id).number
            rows = self.connection.execute("SELECT item FROM items WHERE response = ? ORDER BY number", (number,))
            return b"[%b]" % b",".join([item for (item,) in rows])

    def conversation_item(self, owner: bytes, conversation_id: str, item_id: str) -> bytes:
        """Return an item of a conversation, as JSON. Raises `NotFoundError`."""
        self._drop_expired()
        return self._find_item(owner, self._find(owner, CONVERSATION, conversation_id).number, item_id)[1]

    def update_conversation(self, owner: bytes, conversation_id: str, **fields: Any) -> dict[str, Any]:
        """Change fields of a conversation, which may be locked; return it. Raises `NotFoundError`."""
        with self._writing():
            found = self._find(owner, CONVERSATION, conversation_id)
            conversation: dict[str, Any] = {**_decode(found.resource), **fields}
            encoded = _encode(conversation)
            size = found.size - len(found.resource) + len(encoded)
            self._change(owner, found, size=size, resource=encoded)
        return conversation

    def lock(self, owner: bytes, conversation_id: str) -> None:
        """Let only this process change the items of a conversation. Raises `NotFoundError`, `ConflictError`."""
        with self._writing():
            found = self._find_free(owner, conversation_id)
            self._change(owner, found, slot=self._slot, incarnation=self._incarnation)

    def unlock(self, owner: bytes, conversation_id: str) -> None:
        """Undo `lock`, if this process has done it."""
        with self._writing():
            self._unlock(owner, conversation_id, ())

    def _unlock(self, owner: bytes, conversation_id: str, said: Sequence[Item]) -> None:
        with contextlib.suppress(NotFoundError):  # it was deleted meanwhile
            found = self._find(owner, CONVERSATION, conversation_id)
            if (found.slot, found.incarnation) == (self._slot, self._incarnation):
                self._extend(owner, found._replace(slot=None, incarnation=None), said)

    def add_items(self, owner: bytes, conversation_id: str, items: Sequence[Item]) -> list[EncodedItem]:
        """Add items to a conversation; return them.

        Raises:
            NotFoundError: there is no such conversation. ConflictError: it is locked.
            RequestError: it has one of the items already.
        """
        with self._writing():
            found = self._find_free(owner, conversation_id)
            same = self.connection.execute(
                f"SELECT id FROM items WHERE owner = ? AND id IN ({', '.join('?' * len(items))}) AND response = ?",
                (owner, *[item["id"] for item in items], found.number),
            )
            check_new(items, {item_id for (item_id,) in same}, "items")
            return self._extend(owner, found, items)

    def delete_item(self, owner: bytes, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Delete an item of a conversation, which is returned. Raises `NotFoundError`, `ConflictError`."""
        with self._writing():
            found = self._find_free(owner, conversation_id)
            number, item = self._find_item(owner, found.number, item_id)
            self.connection.execute("DELETE FROM items WHERE number = ?", (number,))
            self._change(owner, found, size=found.size - len(item))
        self._fold_log()
        conversation: dict[str, Any] = _decode(found.resource)
        return conversation

    def _find_free(self, owner: bytes, conversation_id: str) -> _Found:
        """Return a conversation that no other process has locked, nor a dead one."""
        found = self._find(owner, CONVERSATION, conversation_id)
        if found.slot is not None and self._lives(found.slot, found.incarnation or "", mine=False):
            raise locked(conversation_id)
        return found

    def _extend(self, owner: bytes, found: _Found, items: Sequence[Item]) -> list[EncodedItem]:
        own = _encoded(items)
        self._insert_items(found.number, owner, own, output=False)
        self._change(owner, found, size=found.size + _num_bytes(own))
        return own

    def _change(self, owner: bytes, found: _Found, **fields: Any) -> None:
        """Replace fields of a conversation's row; it counts as new."""
        self._discount(owner, 0, 1, found.size)
        self._settle(owner, found._replace(**fields))

    def delete(self, owner: bytes, name: str) -> None:
        """Forget a response or conversation, and the log that has it, too."""
        with self._writing():
            row = self.connection.execute(
                "SELECT number FROM responses WHERE owner = ? AND id = ?", (owner, name)
            ).fetchone()
            if row is not None:
                self._remove(row[0])
        self._fold_log()

    def _fold_log(self) -> None:
        """Fold the log into the file, so that it has nothing any more of what was deleted."""
        with contextlib.suppress(sqlite3.Error):  # another process reads just now; the next one that is deleted will do
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def totals(self) -> tuple[int, int]:
        """Return how many responses are stored, and the bytes of those that have ended."""
        self._drop_expired()
        return self._sums()[::2]

    def _sums(self) -> tuple[int, int, int]:
        """Return how many responses there are, how many of them have ended, and the bytes of these."""
        sums: tuple[int, int, int] = self.connection.execute(
            "SELECT IFNULL(SUM(responses), 0), IFNULL(SUM(ended), 0), IFNULL(SUM(bytes), 0) FROM owners"
        ).fetchone()
        return sums

    def _remove(self, number: int) -> None:
        owner, size, ended = self.connection.execute(
            "SELECT owner, size, ended IS NOT NULL FROM responses WHERE number = ?", (number,)
        ).fetchone()
        self._remove_all("number = ?", (number,))
        self._discount(owner, 1, ended, size if ended else 0)

    def _remove_all(self, which: str, values: Sequence[Any]) -> None:
        for table in ("items", "parts"):
            self.connection.execute(
                f"DELETE FROM {table} WHERE response IN (SELECT number FROM responses WHERE {which})", values
            )
        self.connection.execute(f"DELETE FROM responses WHERE {which}", values)

    def _discount(self, owner: bytes, responses: int, ended: int, size: int) -> None:
        self.connection.execute(
            "UPDATE owners SET responses = responses - ?, ended = ended - ?, bytes = bytes - ? WHERE digest = ?",
            (responses, ended, size, owner),
        )
        self.connection.execute("DELETE FROM owners WHERE digest = ? AND responses = 0", (owner,))

    def _drop_expired(self) -> None:
        """Forget what has expired, if it can be done; reading leaves it out in any case."""
        found = self.connection.execute(f"SELECT 1 FROM responses WHERE {EXPIRED} LIMIT 1", (self._clock(),))
        if found.fetchone() is not None:
            with contextlib.suppress(sqlite3.Error), self._writing():
                pass

    def _expire(self) -> None:
        now = (self._clock(),)
        counts = self.connection.execute(
            f"SELECT owner, COUNT(*), SUM(size) FROM responses WHERE {EXPIRED} GROUP BY owner", now
        ).fetchall()
        if counts:
            self._remove_all(EXPIRED, now)
        for owner, count, size in counts:
            self._discount(owner, count, count, size)

    def _make_room(self) -> None:
        """Evict the oldest response of the key that stores the most, as long as there are too many or too large."""
        responses, ended, size = self._sums()
        while ended and (responses > self._most or size > self._most_bytes):
            weight = "responses" if responses > self._most else "bytes"
            [number] = self.connection.execute(
                "SELECT number FROM responses WHERE ended IS NOT NULL AND owner = "
                f"(SELECT digest FROM owners WHERE ended > 0 ORDER BY {weight} DESC, number LIMIT 1) "
                "ORDER BY ended LIMIT 1"
            ).fetchone()
            self._remove(number)
            responses, ended, size = self._sums()

    def _end_lost(self) -> None:
        """Note that responses whose processes are gone have failed, and unlock what this one's predecessor locked."""
        self.connection.execute(
            "UPDATE responses SET slot = NULL, incarnation = NULL WHERE ended IS NOT NULL AND slot = ? "
            "AND incarnation != ?",
            (self._slot, self._incarnation),
        )
        running = self.connection.execute(
            "SELECT number, owner, id, slot, incarnation FROM responses WHERE ended IS NULL"
        ).fetchall()
        for number, owner, response_id, slot, incarnation in running:
            if self._lives(slot, incarnation, mine=True):
                continue
            try:
                row, _ = self._read(owner, response_id)
            except msgspec.DecodeError:
                logger.warning("the stored response %s is damaged and is deleted", response_id)
                self._remove(number)
            else:
                self._end(number, failed(row.response, RESTARTED), None)

    def _lives(self, slot: int, incarnation: str, *, mine: bool) -> bool:
        """Whether the process that runs a response is there; this one (`mine`) may not know the response any more."""
        if slot == self._slot or self.folder is None:
            return mine and incarnation == self._incarnation
        return slot_lives(self.folder, slot)


def _without_output(response: dict[str, Any]) -> bytes:
    return _encode({**response, "output": []})


def _encoded(items: Sequence[Item]) -> list[EncodedItem]:
    return [(item["id"], _encode(item)) for item in items]


def _num_bytes(items: Sequence[EncodedItem]) -> int:
    return sum([len(item) for _, item in items])


def failed(response: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return a response whose end nobody has noted."""
    return {**response, "status": "failed", "error": {"code": "server_error", "message": reason}}
