"""`Database`: a file of SQLite in the folder of `--data-dir`, or a database in memory; `DatabaseThread` uses one.

How a file is opened, checked and moved aside, by one of several processes or by all of them, and what becomes of work
when the disk is slow or full. What the tables hold is in `responses/database.py` and `batches/database.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from quire.errors import QuireError
from quire.server.data_dir import FILE_MODE, FileLock, StorageError, poll

logger = logging.getLogger(__name__)

BUSY_SECONDS = 1.0  # for which a statement waits for other processes
CHECK_SECONDS = 10.0  # for which an opening waits for another process, which checks the file
LOG_BYTES = 2**22  # to which the write-ahead log is cut when it was larger
ANSWER_SECONDS = 4.0  # after which nobody waits for the thread any more: the disk, or a lock, keeps it
LOG_SECONDS = 60.0  # between two warnings
FAILURES = (sqlite3.Error, OSError, msgspec.MsgspecError)  # of disks and locks, and of what damaged rows hold

T = TypeVar("T")


class DamagedError(Exception):
    """A file is no database of this server's, or is damaged; the message says what is wrong with it."""


class Database:
    """A database that any number of processes may have open. One thread at a time may use it.

    Args:
        folder: of the file; None keeps everything in memory.

    Attributes:
        name: of the file and its lock. contents: what it holds, for messages. application_id, version: of its tables.

    Raises:
        sqlite3.Error, OSError: it cannot be opened now.
    """

    name: ClassVar[str]
    contents: ClassVar[str]
    application_id: ClassVar[int]
    version: ClassVar[int] = 1
    tables: ClassVar[str]

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._lock: FileLock | None = None
        self.connection = self._connect(":memory:") if folder is None else self._open(folder)

    def _open(self, folder: Path) -> sqlite3.Connection:
        """Open the file; who is the only one to use it checks it first, and moves it aside if it is damaged."""
        lock = self._lock = FileLock(folder / f"{self.name}.lock")
        path = folder / f"{self.name}.sqlite3"
        alone = False

        def attempt() -> bool:
            nonlocal alone
            alone = lock.acquire()
            return alone or lock.acquire(shared=True)

        try:
            if not poll(attempt, CHECK_SECONDS):
                raise OSError(f"{path} is being checked by another process")
            if not alone:
                return self._opened(path)
            connection = self._checked(path)
            self.clean_up(connection, folder)
            poll(lambda: lock.acquire(shared=True), CHECK_SECONDS)  # another process may be first, and check it again
            return connection
        except DamagedError as error:
            lock.close()
            raise OSError(f"{path} is {error}, and in use") from None
        except BaseException:
            lock.close()
            raise

    def clean_up(self, connection: sqlite3.Connection, folder: Path) -> None:
        """Remove what a crash may have left beside the file; nobody else uses it now."""

    def close(self) -> None:
        """Close it."""
        self.connection.close()
        if self._lock is not None:
            self._lock.close()

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self.connection.execute(begin)
        try:
            yield
            self.connection.execute("COMMIT")
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def _connect(self, path: Path | str) -> sqlite3.Connection:
        """Return a connection whose transactions are explicit; one thread at a time may use it.

        Raises:
            DamagedError: it is no database of this server's.
        """
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._create_tables(connection)  # first: what belongs to others is not changed
            # A commit costs no fsync: what a process has committed survives its death, and nearly all of it that of the
            # machine.
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", f"journal_size_limit = {LOG_BYTES}"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("PRAGMA secure_delete = ON")  # what was deleted is not left in free pages
        except BaseException:
            connection.close()
            raise
        return connection

    def _create_tables(self, connection: sqlite3.Connection) -> None:
        """Create the tables in an empty database. Raises `DamagedError` if something else is in it."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            [application] = connection.execute("PRAGMA application_id").fetchone()
            [version] = connection.execute("PRAGMA user_version").fetchone()
            if not application and connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                for statement in self.tables.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {self.application_id}")
                connection.execute(f"PRAGMA user_version = {self.version}")
            elif application != self.application_id:
                raise DamagedError("another program's")
            elif version != self.version:
                raise DamagedError(f"another version's (its tables are version {version}, not {self.version})")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _opened(self, path: Path) -> sqlite3.Connection:
        """Return a connection to a file, which is created if there is none.

        Raises:
            DamagedError: it is no database of this server's, or damaged. sqlite3.Error, OSError: not now.
        """
        if path.exists() and not path.is_file():
            raise DamagedError("no file")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))  # SQLite gives its other files the same mode
        with _damage():
            return self._connect(path)

    def _checked(self, path: Path) -> sqlite3.Connection:
        """As `_opened`, but reads the whole file, and moves it aside if it is damaged. A gigabyte takes a second."""
        try:
            connection = self._opened(path)
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
            logger.warning("%s is %s; it is kept as %s, and there are no %s now", path, error, kept, self.contents)
            return self._opened(path)
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


D = TypeVar("D", bound=Database)


class DatabaseThread(Generic[D]):
    """The thread that uses a database: it does one thing after the other, in the order in which they are asked for.

    Args:
        kind: of database. connect: opens it; tried again later if it fails. lock: held as long as the database is open.
    """

    def __init__(self, kind: type[D], connect: Callable[[], D], lock: FileLock | None = None) -> None:
        self._kind = kind
        self._connect = connect
        self._lock = lock
        self._database: D | None = None
        self._executor = ThreadPoolExecutor(1, f"quire-{kind.name}")
        self._num_failed = 0
        self._warned = -LOG_SECONDS
        if lock is not None:
            self._executor.submit(self._open_early)

    async def run(self, work: Callable[[D], T]) -> T:
        """Return what `work` does with the database.

        Raises:
            StorageError: it fails, or takes more than `ANSWER_SECONDS`; then it is not begun, if it has not been yet.
        """
        return await self.submit(work)

    def submit(self, work: Callable[[D], T]) -> asyncio.Future[T]:
        """As `run`. The work is done even if nobody waits for it."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        waiting = [work]  # until it is begun

        def report(set_result: Callable[[Any], None], value: Any) -> None:
            def set_it() -> None:
                if not result.done():
                    set_result(value)

            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_it)

        def do() -> None:
            try:
                begun = waiting.pop()
            except IndexError:
                return  # it was given up
            try:
                value = begun(self._open())
            except QuireError as error:
                report(result.set_exception, error)
            except FAILURES as error:
                self._warn(error)
                report(result.set_exception, self._unavailable())
            except BaseException as error:  # thread boundary: it is for the caller, who may not look
                logger.exception("%s: the thread failed", self._kind.contents)
                report(result.set_exception, error)
            else:
                report(result.set_result, value)

        def give_up() -> None:
            if not result.done():
                waiting.clear()  # what it holds is freed, however long the disk hangs
                self._warn(TimeoutError(f"waited for {ANSWER_SECONDS:g} s"))
                result.set_exception(self._unavailable())

        timer = loop.call_later(ANSWER_SECONDS, give_up)
        result.add_done_callback(lambda result: timer.cancel())
        self._executor.submit(do)
        return result

    def _open_early(self) -> None:
        """Open it, so that a damaged file is known from the start."""
        try:
            self._open()
        except FAILURES as error:
            self._warn(error)

    def _open(self) -> D:
        if self._database is None:
            self._database = self._connect()
        return self._database

    def _unavailable(self) -> StorageError:
        return StorageError(f"{self._kind.contents} cannot be read or written at the moment")

    def _warn(self, error: Exception) -> None:
        """Log what failed, but not each time."""
        self._num_failed += 1
        if time.monotonic() - self._warned > LOG_SECONDS:
            logger.warning(
                "%s cannot be read or written: %s (failures: %d)", self._kind.contents, error, self._num_failed
            )
            self._warned, self._num_failed = time.monotonic(), 0

    def close(self) -> None:
        """Do what was asked for, and close the database."""
        with contextlib.suppress(RuntimeError):  # the garbage collector calls this, in the thread itself
            self._executor.shutdown()
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock is not None:
            self._lock.close()
