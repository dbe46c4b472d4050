"""`ResponseDatabase`: stored responses as rows of SQLite, in a file or in memory, and the bounds on them.

It knows neither asyncio nor what runs a response. Its functions block and are called by one thread at a time
(`store.py`). Any number of processes open the same file: each statement sees what the others have committed, and the
bounds count all of it.

    owners      one row per API key with responses: how many, how many of them have ended, bytes of these
    responses   the resource, without its output; a process (slot, incarnation) while it runs, then `ended`, a number
                that grows, and `expires`, in seconds since 1970
    items       own items and output, one row each, to be found by their ids
    parts       what is only read as a whole: the conversation before, and the events of the stream
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.server.data_dir import FILE_MODE, FileLock, poll, slot_lives
from quire.server.responses.items import Item
from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

FILE = "responses.sqlite3"
LOCK = "responses.lock"
APPLICATION_ID = 0x51755265
VERSION = 1  # of the tables
BUSY_SECONDS = 1.0  # for which a statement waits for other processes
CHECK_SECONDS = 10.0  # for which an opening waits for another process, which checks the file
LOG_BYTES = 2**22  # to which the write-ahead log is cut when it was larger
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


class DamagedError(Exception):
    """A file is no database of this server's, or is damaged; the message says what is wrong with it."""


class ResponseDatabase:
    """All stored responses, those of other processes included.

    Args:
        config: of which the bounds count. folder: of the file; None keeps everything in memory.
        slot, incarnation: name this process; the incarnation differs after each start. clock: seconds since 1970.

    Raises:
        sqlite3.Error, OSError: it cannot be opened now.
    """

    def __init__(
        self, config: ServerConfig, folder: Path | None, slot: int, incarnation: str, clock: Callable[[], float]
    ) -> None:
        self._most = config.max_stored_responses
        self._most_bytes = config.max_stored_response_bytes
        self._seconds = config.stored_response_ttl
        self._folder = folder
        self._slot = slot
        self._incarnation = incarnation
        self._clock = clock
        self._lock: FileLock | None = None
        self.connection = connect(":memory:") if folder is None else self._open(folder)
        try:
            with self._writing():
                self._end_lost()
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path) -> sqlite3.Connection:
        """Open the file; who is the only one to use it checks it first, and moves it aside if it is damaged."""
        lock = self._lock = FileLock(folder / LOCK)
        path = folder / FILE
        alone = False

        def attempt() -> bool:
            nonlocal alone
            alone = lock.acquire()
            return alone or lock.acquire(shared=True)

        try:
            if not poll(attempt, CHECK_SECONDS):
                raise OSError(f"{path} is being checked by another process")
            if not alone:
                return opened(path)
            connection = _checked(path)
            poll(lambda: lock.acquire(shared=True), CHECK_SECONDS)  # another process may be first, and check it again
            return connection
        except DamagedError as error:
            lock.close()
            raise OSError(f"{path} is {error}, and in use") from None
        except BaseException:
            lock.close()
            raise

    def close(self) -> None:
        """Close it."""
        self.connection.close()
        if self._lock is not None:
            self._lock.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that begins with what has expired, and ends within the bounds."""
        with self._transaction("BEGIN IMMEDIATE"):
            self._expire()
            yield
            self._make_room()

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self.connection.execute(begin)
        try:
            yield
            self.connection.execute("COMMIT")
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def insert(
        self, owner: bytes, response: dict[str, Any], earlier: Sequence[Item], items: Sequence[Item], *, events: bool
    ) -> int:
        """Store a response that this process runs; return its number."""
        encoded, before = _without_output(response), b"[%b]" % b",".join(map(_encode, earlier))
        own = [(item["id"], _encode(item)) for item in items]
        with self._writing():
            size = len(before) + sum([len(item) for _, item in own])
            number = self.connection.execute(
                "INSERT INTO responses (owner, id, slot, incarnation, size, response) VALUES (?, ?, ?, ?, ?, ?)",
                (owner, response["id"], self._slot, self._incarnation, size, encoded),
            ).lastrowid
            assert number is not None
            self._insert_items(number, owner, own, output=False)
            parts = [(number, "earlier", before), *([(number, "events", b"")] if events else [])]
            self.connection.executemany("INSERT INTO parts VALUES (?, ?, ?)", parts)
            self.connection.execute(
                "INSERT INTO owners (digest, responses, ended, bytes) VALUES (?, 1, 0, 0) "
                "ON CONFLICT (digest) DO UPDATE SET responses = responses + 1",
                (owner,),
            )
        return number

    def finish(self, number: int, response: dict[str, Any], events: bytes | None) -> int | None:
        """Store the end of a response; return the bytes that it takes, None if it was deleted meanwhile."""
        with self._writing():
            return self._end(number, response, events)

    def _end(self, number: int, response: dict[str, Any], events: bytes | None) -> int | None:
        encoded = _without_output(response)
        output = [(item["id"], _encode(item)) for item in response["output"]]
        found = self.connection.execute(
            "SELECT owner, size FROM responses WHERE number = ? AND ended IS NULL", (number,)
        ).fetchone()
        if found is None:
            return None
        owner, input_size = found
        size: int = input_size + len(encoded) + sum([len(item) for _, item in output]) + len(events or b"")
        self.connection.execute(
            "UPDATE responses SET slot = NULL, incarnation = NULL, expires = ?, size = ?, response = ?, "
            "ended = (SELECT IFNULL(MAX(ended), 0) + 1 FROM responses WHERE ended IS NOT NULL) WHERE number = ?",
            (self._clock() + self._seconds, size, encoded, number),
        )
        self._insert_items(number, owner, output, output=True)
        if events:
            self.connection.execute(
                "UPDATE parts SET data = ? WHERE response = ? AND name = 'events'", (events, number)
            )
        self.connection.execute(
            "UPDATE owners SET ended = ended + 1, bytes = bytes + ? WHERE digest = ?", (size, owner)
        )
        return size

    def _insert_items(self, number: int, owner: bytes, items: Sequence[tuple[str, bytes]], *, output: bool) -> None:
        rows = [(owner, item_id, number, output, item) for item_id, item in items]
        self.connection.executemany(
            "INSERT INTO items (owner, id, response, output, item) VALUES (?, ?, ?, ?, ?)", rows
        )

    def find(self, owner: bytes, response_id: str) -> Row | None:
        """Return a response; one whose process is gone has failed."""
        self._drop_expired()
        with self._transaction("BEGIN"):
            row, incarnation = self._read(owner, response_id)
        if row is None or row.slot is None or self._lives(row.slot, incarnation, mine=False):
            return row
        mine = row.slot == self._slot and incarnation == self._incarnation
        row.response, row.slot = failed(row.response, NOT_KEPT if mine else RESTARTED), None
        with contextlib.suppress(sqlite3.Error), self._writing():  # what is shown does not depend on it
            self._end(row.number, row.response, None)
        return row

    def _read(self, owner: bytes, response_id: str) -> tuple[Row | None, str]:
        """Return a response, and the incarnation of the process that runs it."""
        found = self.connection.execute(
            "SELECT number, slot, incarnation, size, response FROM responses WHERE owner = ? AND id = ? "
            f"AND NOT ({EXPIRED})",
            (owner, response_id, self._clock()),
        ).fetchone()
        if found is None:
            return None, ""
        number, slot, incarnation, size, encoded = found
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

    def delete(self, owner: bytes, response_id: str) -> None:
        """Forget a response, and the log that has it, too."""
        with self._writing():
            row = self.connection.execute(
                "SELECT number FROM responses WHERE owner = ? AND id = ?", (owner, response_id)
            ).fetchone()
            if row is not None:
                self._remove(row[0])
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
        """Note that responses whose processes are gone have failed."""
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
                assert row is not None
                self._end(number, failed(row.response, RESTARTED), None)

    def _lives(self, slot: int, incarnation: str, *, mine: bool) -> bool:
        """Whether the process that runs a response is there; this one (`mine`) may not know the response any more."""
        if slot == self._slot or self._folder is None:
            return mine and incarnation == self._incarnation
        return slot_lives(self._folder, slot)


def _without_output(response: dict[str, Any]) -> bytes:
    return _encode({**response, "output": []})


def failed(response: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return a response whose end nobody has noted."""
    return {**response, "status": "failed", "error": {"code": "server_error", "message": reason}}


def connect(path: Path | str) -> sqlite3.Connection:
    """Return a connection whose transactions are explicit; one thread at a time may use it.

    Raises:
        DamagedError: it is no database of this server's.
    """
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _create_tables(connection)  # first: what belongs to others is not changed
        # A commit costs no fsync: what a process has committed survives its death, and nearly all of it the machine's.
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", f"journal_size_limit = {LOG_BYTES}"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA secure_delete = ON")  # what was deleted is not left in free pages
    except BaseException:
        connection.close()
        raise
    return connection


def _create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty database. Raises `DamagedError` if something else is in it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        [application] = connection.execute("PRAGMA application_id").fetchone()
        [version] = connection.execute("PRAGMA user_version").fetchone()
        if not application and connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        elif application != APPLICATION_ID:
            raise DamagedError("another program's")
        elif version != VERSION:
            raise DamagedError(f"another version's (its tables are version {version}, not {VERSION})")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def opened(path: Path) -> sqlite3.Connection:
    """Return a connection to a file, which is created if there is none.

    Raises:
        DamagedError: it is no database of this server's, or damaged. sqlite3.Error, OSError: not now.
    """
    if path.exists() and not path.is_file():
        raise DamagedError("no file")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))  # SQLite gives its other files the same mode
    with _damage():
        return connect(path)


def _checked(path: Path) -> sqlite3.Connection:
    """As `opened`, but reads the whole file, and moves it aside if it is damaged. A gigabyte takes a second."""
    try:
        connection = opened(path)
        try:
            with _damage():
                [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise DamagedError(f"damaged ({found})")
        except BaseException:
            connection.close()
            raise
    except DamagedError as error:
        kept = moved_aside(path)
        logger.warning("%s is %s; it is kept as %s, and no responses are stored now", path, error, kept)
        return opened(path)
    return connection


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Raise `DamagedError` for errors of SQLite that mean it."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise DamagedError(f"damaged ({error})") from None
        raise


def moved_aside(path: Path) -> Path:
    """Rename a database, with the log that belongs to it; return its new path."""
    number = 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    path.rename(kept)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    return kept
