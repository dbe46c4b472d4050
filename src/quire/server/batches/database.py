"""`BatchDatabase`: files, batches and results of lines as rows of SQLite, in a file or in memory, and their bounds.

It knows neither asyncio, nor contents of files (`contents.py`), nor what runs a batch. A result is stored once for each
line, by its number: whatever dies between two writes, no line is lost that was counted and none is counted twice.

    files      all but the content
    batches    the record, as JSON; `kept_until` once it has finished; `result_bytes` of its stored results
    results    of the lines of unfinished batches: at the end of a batch they become its files, in one transaction
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConflictError, NotFoundError, RequestError, echo
from quire.server.batches.contents import remove_unknown
from quire.server.batches.records import BatchRecord, FileRecord, LineResult
from quire.server.database import Database
from quire.server.errors import HTTPProblem

MAX_FILES = 10_000  # of a key
MAX_BATCHES = 10_000  # of a key; then those that finished first are forgotten
MAX_UNFINISHED = 100  # of a key

TABLES = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner BLOB NOT NULL, id TEXT NOT NULL UNIQUE, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, kept_until REAL NOT NULL, file BLOB NOT NULL);
CREATE INDEX files_by_owner ON files (owner, purpose, number);
CREATE INDEX files_by_end ON files (kept_until);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner BLOB NOT NULL, id TEXT NOT NULL UNIQUE, api TEXT NOT NULL,
    input TEXT NOT NULL, kept_until REAL, result_bytes INTEGER NOT NULL, batch BLOB NOT NULL);
CREATE INDEX batches_by_owner ON batches (owner, api, number);
CREATE INDEX batches_by_end ON batches (kept_until) WHERE kept_until IS NOT NULL;
CREATE INDEX batches_unfinished ON batches (input) WHERE kept_until IS NULL;
CREATE TABLE results (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (batch, line))
"""

_encode = msgspec.json.Encoder().encode
_file = msgspec.json.Decoder(FileRecord).decode
_batch = msgspec.json.Decoder(BatchRecord).decode


class StoredBatch(msgspec.Struct):
    """An unfinished batch: its number in the database, the digest of its key (b"" for none), and its record."""

    number: int
    owner: bytes
    record: BatchRecord


class Bounds(msgspec.Struct, frozen=True):
    """Most bytes of files and results of one key, and of all keys together (None: no bound but the disk)."""

    of_key: int
    of_all: int | None = None


class BatchDatabase(Database):
    """All files and batches.

    Args:
        folder: of the file, and of `files`; None keeps everything in memory.
        clock: seconds since 1970. seconds: for which a finished batch is kept.
    """

    name = "batches"
    contents = "files and batches"
    application_id = 0x51754261
    tables = TABLES

    def __init__(self, folder: Path | None, bounds: Bounds, clock: Callable[[], float], seconds: float) -> None:
        self._bounds = bounds
        self._clock = clock
        self._seconds = seconds
        super().__init__(folder)

    def clean_up(self, connection: sqlite3.Connection, folder: Path) -> None:
        """As `Database.clean_up`: contents without a row, of uploads and outputs that were not completed."""
        remove_unknown(folder, {name for (name,) in connection.execute("SELECT id FROM files")})

    # ---- files ----

    def check_room(self, owner: bytes, num_bytes: int) -> None:
        """Raise `HTTPProblem` if so many further bytes, in one file more, are more than the key may have."""
        [count] = self._row("SELECT COUNT(*) FROM files WHERE owner = ?", owner)
        if count >= MAX_FILES:
            raise _no_room(f"this key has {count} files; delete some")
        if self._num_bytes(owner) + num_bytes > self._bounds.of_key:
            raise _no_room(f"the files of this key may have {self._bounds.of_key} bytes together; delete some")
        if self._bounds.of_all is not None and self._num_bytes(None) + num_bytes > self._bounds.of_all:
            raise _no_room(f"without --data-dir all files may have {self._bounds.of_all} bytes together")

    def _num_bytes(self, owner: bytes | None) -> int:
        where, values = ("", ()) if owner is None else (" WHERE owner = ?", (owner,))
        [files] = self._row(f"SELECT IFNULL(SUM(bytes), 0) FROM files{where}", *values)
        [results] = self._row(f"SELECT IFNULL(SUM(result_bytes), 0) FROM batches{where}", *values)
        return int(files + results)

    def _row(self, statement: str, *values: Any) -> Any:
        return self.connection.execute(statement, values).fetchone()

    def insert_file(self, owner: bytes, file: FileRecord) -> None:
        """Add a file whose content is there. Raises as `check_room`."""
        with self._transaction("BEGIN IMMEDIATE"):
            self.check_room(owner, file.num_bytes)
            self._insert_file(owner, file)

    def _insert_file(self, owner: bytes, file: FileRecord) -> None:
        self.connection.execute(
            "INSERT INTO files (owner, id, purpose, bytes, kept_until, file) VALUES (?, ?, ?, ?, ?, ?)",
            (owner, file.file_id, file.purpose, file.num_bytes, file.expires_at, _encode(file)),
        )

    def find_file(self, owner: bytes, file_id: str, purposes: Sequence[str]) -> FileRecord:
        """Return a file. Raises `NotFoundError` unless the key has one of these purposes that has not expired."""
        marks = ", ".join("?" * len(purposes))
        found = self._row(
            f"SELECT file FROM files WHERE owner = ? AND id = ? AND kept_until > ? AND purpose IN ({marks})",
            *(owner, file_id, self._clock(), *purposes),
        )
        if found is None:
            message = f"there is no file {echo(file_id)}, or it is not stored any more"
            raise NotFoundError(message, param="file_id", code="file_not_found")
        return _file(found[0])

    def list_files(
        self, owner: bytes, purposes: Sequence[str], *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """Return files, and whether there are more. Raises `NotFoundError` for an unknown `after`."""
        start = None if after is None else self._place("files", "owner = ?", (owner,), after, "after")
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        marks = ", ".join("?" * len(purposes))
        values: list[Any] = [owner, self._clock(), *purposes]
        where = "owner = ? AND kept_until > ?" + f" AND purpose IN ({marks})"
        if start is not None:
            where, values = f"{where} AND number {sign} ?", [*values, start]
        rows = self.connection.execute(
            f"SELECT file FROM files WHERE {where} ORDER BY number {order} LIMIT ?", (*values, limit + 1)
        ).fetchall()
        return [_file(encoded) for (encoded,) in rows[:limit]], len(rows) > limit

    def _place(self, table: str, where: str, values: Sequence[Any], name: str, param: str) -> int:
        found = self._row(f"SELECT number FROM {table} WHERE {where} AND id = ?", *values, name)
        if found is None:
            raise RequestError(f"{param}: there is no {echo(name)}", param=param, code="invalid_cursor")
        return int(found[0])

    def delete_file(self, owner: bytes, file_id: str, purposes: Sequence[str]) -> None:
        """Forget a file. Raises as `find_file`, or `ConflictError` while an unfinished batch reads it."""
        with self._transaction("BEGIN IMMEDIATE"):
            self.find_file(owner, file_id, purposes)
            if self._row("SELECT 1 FROM batches WHERE input = ? AND kept_until IS NULL", file_id) is not None:
                message = "a batch that has not ended reads this file; cancel it first"
                raise ConflictError(message, param="file_id", code="file_in_use")
            self.connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # ---- batches ----

    def insert_batch(self, owner: bytes, batch: BatchRecord, purposes: Sequence[str]) -> None:
        """Add a batch that is to run. Raises as `find_file` for its input, `HTTPProblem` if the key has too many."""
        with self._transaction("BEGIN IMMEDIATE"):
            self.find_file(owner, batch.input_file_id, purposes)
            unfinished = "SELECT COUNT(*) FROM batches WHERE owner = ? AND kept_until IS NULL"
            if self._row(unfinished, owner)[0] >= MAX_UNFINISHED:
                message = f"this key has {MAX_UNFINISHED} batches that have not ended"
                raise HTTPProblem(429, message, code="rate_limit_exceeded", headers={"X-Should-Retry": "false"})
            self.connection.execute(
                "INSERT INTO batches (owner, id, api, input, kept_until, result_bytes, batch) "
                "VALUES (?, ?, ?, ?, NULL, 0, ?)",
                (owner, batch.batch_id, batch.api, batch.input_file_id, _encode(batch)),
            )
            self.connection.execute(
                "DELETE FROM batches WHERE kept_until IS NOT NULL AND number IN "
                "(SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT -1 OFFSET ?)",
                (owner, MAX_BATCHES),
            )

    def find_batch(self, owner: bytes, api: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises `NotFoundError`."""
        return self._find(owner, api, batch_id).record

    def _find(self, owner: bytes, api: str, batch_id: str) -> StoredBatch:
        found = self._row(
            "SELECT number, batch FROM batches WHERE owner = ? AND api = ? AND id = ? AND IFNULL(kept_until > ?, 1)",
            *(owner, api, batch_id, self._clock()),
        )
        if found is None:
            message = f"there is no batch {echo(batch_id)}, or it is not stored any more"
            raise NotFoundError(message, param="batch_id", code="batch_not_found")
        return StoredBatch(found[0], owner, _batch(found[1]))

    def list_batches(
        self, owner: bytes, api: str, *, limit: int, after: str | None = None, before: str | None = None
    ) -> tuple[list[BatchRecord], bool]:
        """Return batches, the newest first, and whether there are more in that direction; `after`, `before`: an id."""
        values: list[Any] = [owner, api, self._clock()]
        where, order = "owner = ? AND api = ? AND IFNULL(kept_until > ?, 1)", "DESC"
        if after is not None:
            values.append(self._place("batches", "owner = ? AND api = ?", (owner, api), after, "after"))
            where += " AND number < ?"
        if before is not None:
            values.append(self._place("batches", "owner = ? AND api = ?", (owner, api), before, "before"))
            where, order = where + " AND number > ?", "ASC"
        rows = self.connection.execute(
            f"SELECT batch FROM batches WHERE {where} ORDER BY number {order} LIMIT ?", (*values, limit + 1)
        ).fetchall()
        found = [_batch(encoded) for (encoded,) in rows[:limit]]
        return found if before is None else found[::-1], len(rows) > limit

    def cancel(self, owner: bytes, api: str, batch_id: str) -> BatchRecord:
        """Note that a batch is to end, unless it has ended; return it as it is then. Raises `NotFoundError`."""
        with self._transaction("BEGIN IMMEDIATE"):
            found = self._find(owner, api, batch_id)
            if not found.record.finished and found.record.status != "cancelling":
                found.record.status, found.record.cancelling_at = "cancelling", int(self._clock())
                self._save(found.number, found.record)
        return found.record

    def _save(self, number: int, batch: BatchRecord) -> None:
        kept_until = self._clock() + self._seconds if batch.finished else None
        self.connection.execute(
            "UPDATE batches SET batch = ?, kept_until = ? WHERE number = ?", (_encode(batch), kept_until, number)
        )

    def delete_batch(self, owner: bytes, api: str, batch_id: str) -> list[str]:
        """Forget a batch that has ended, and its files, whose ids are returned.

        Raises:
            NotFoundError: there is none. RequestError: it has not ended.
        """
        with self._transaction("BEGIN IMMEDIATE"):
            found = self._find(owner, api, batch_id)
            if not found.record.finished:
                raise RequestError("this batch has not ended; cancel it first", param="batch_id", code="batch_running")
            names = [found.record.input_file_id, *filter(None, [found.record.output_file_id])]
            self.connection.execute("DELETE FROM batches WHERE number = ?", (found.number,))
            self.connection.executemany("DELETE FROM files WHERE id = ?", [(name,) for name in names])
        return names

    # ---- what runs them ----

    def unfinished(self) -> list[StoredBatch]:
        """Return all batches that have not ended, the oldest first."""
        rows = self.connection.execute(
            "SELECT number, owner, batch FROM batches WHERE kept_until IS NULL ORDER BY number"
        ).fetchall()
        return [StoredBatch(number, owner, _batch(encoded)) for number, owner, encoded in rows]

    def change(self, number: int, **fields: Any) -> BatchRecord | None:
        """Change fields of an unfinished batch, and return it; one that is being cancelled keeps that status.

        One that has finished is returned as it is; None if it was forgotten.
        """
        with self._transaction("BEGIN IMMEDIATE"):
            found = self._row("SELECT batch FROM batches WHERE number = ?", number)
            if found is None:
                return None
            batch = _batch(found[0])
            if batch.finished:
                return batch
            if batch.status == "cancelling" and fields.get("status") in ("in_progress", "finalizing"):
                del fields["status"]
            batch = msgspec.structs.replace(batch, **fields)
            self._save(number, batch)
            if batch.finished:
                self._forget_results(number)
        return batch

    def lines_done(self, number: int) -> set[int]:
        """Return the numbers of the lines that have a result."""
        return {line for (line,) in self.connection.execute("SELECT line FROM results WHERE batch = ?", (number,))}

    def add_result(self, number: int, result: LineResult, usage: dict[str, int]) -> bool:
        """Store the result of a line, unless it has one; return whether its key may store more."""
        with self._transaction("BEGIN IMMEDIATE"):
            found = self._row("SELECT owner, batch FROM batches WHERE number = ? AND kept_until IS NULL", number)
            if found is None:
                return True  # it has ended
            [owner, encoded] = found
            added = self.connection.execute(
                "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", (number, result.number, result.failed, result.data)
            ).rowcount
            if added:
                batch = _batch(encoded)
                batch.count(failed=result.failed, usage=usage)
                self.connection.execute(
                    "UPDATE batches SET batch = ?, result_bytes = result_bytes + ? WHERE number = ?",
                    (_encode(batch), len(result.data), number),
                )
        if self._bounds.of_all is not None and self._num_bytes(None) >= self._bounds.of_all:
            return False
        return self._num_bytes(owner) < self._bounds.of_key

    def results(self, number: int, first: int, last: int) -> dict[int, LineResult]:
        """Return the results of these lines that have one, by the number of the line."""
        rows = self.connection.execute(
            "SELECT line, failed, data FROM results WHERE batch = ? AND line BETWEEN ? AND ?", (number, first, last)
        )
        return {line: LineResult(number=line, failed=bool(failed), data=data) for line, failed, data in rows}

    def finish(self, number: int, batch: BatchRecord, files: Sequence[FileRecord]) -> bool:
        """Note the end of a batch, whose output is in these files; return whether that was not noted before."""
        with self._transaction("BEGIN IMMEDIATE"):
            found = self._row("SELECT owner FROM batches WHERE number = ? AND kept_until IS NULL", number)
            if found is None:
                return False
            for file in files:
                self._insert_file(found[0], file)
            self._save(number, batch)
            self._forget_results(number)
        return True

    def _forget_results(self, number: int) -> None:
        self.connection.execute("DELETE FROM results WHERE batch = ?", (number,))
        self.connection.execute("UPDATE batches SET result_bytes = 0 WHERE number = ?", (number,))

    def expire(self) -> list[str]:
        """Forget files and batches that are too old, but no input that is still read; return the ids of the files."""
        now = (self._clock(),)
        old = "kept_until <= ? AND id NOT IN (SELECT input FROM batches WHERE kept_until IS NULL)"
        names = [name for (name,) in self.connection.execute(f"SELECT id FROM files WHERE {old}", now)]
        has_batches = self._row("SELECT 1 FROM batches WHERE kept_until <= ? LIMIT 1", *now) is not None
        if names or has_batches:
            with self._transaction("BEGIN IMMEDIATE"):
                self.connection.executemany("DELETE FROM files WHERE id = ?", [(name,) for name in names])
                self.connection.execute("DELETE FROM batches WHERE kept_until <= ?", now)
            with contextlib.suppress(sqlite3.Error):  # so that the log does not keep what was deleted
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return names


def _no_room(reason: str) -> HTTPProblem:
    return HTTPProblem(400, f"there is no room for this file: {reason}", code="file_storage_exceeded", param="file")
