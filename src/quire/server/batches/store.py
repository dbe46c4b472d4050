"""`BatchStore`: files and batches, each for the API key that it was made with; bounded in number, bytes and age.

Rows are in a database (`database.py`), which a thread reads and writes, and contents beside it (`contents.py`). With a
folder, several processes may have one store: each sees what the others have stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from itertools import islice
from typing import IO, Any, TypeVar

from quire.errors import NotFoundError, QuireError
from quire.server.batches.contents import Contents, DiskContents, MemoryContents
from quire.server.batches.database import BatchDatabase, Bounds, StoredBatch
from quire.server.batches.lines import split_lines
from quire.server.batches.records import BatchRecord, FileRecord, LineResult, new_id
from quire.server.data_dir import StorageError, is_temporary, prepare_data_dir
from quire.server.database import ANSWER_SECONDS, DatabaseThread
from quire.server_config import ServerConfig

WRITE_BYTES = 2**20  # that are written at a time
READ_BYTES = 2**18  # that are read at a time
READ_LINES = 64  # lines that are read at a time, unless they are long
IN_MEMORY = "is not set on this server: what is stored is kept in memory only, and is gone when the server ends"

T = TypeVar("T")


class FileWriter:
    """A file that is being written; see `BatchStore.writing`.

    Attributes:
        file_id: its id. num_bytes: so far.
    """

    def __init__(self, contents: Contents, note: Callable[[int], None]) -> None:
        self.file_id = new_id("file-")
        self.num_bytes = 0
        self.file: IO[bytes] | None = None
        self._contents = contents
        self._note = note
        self._unwritten = bytearray()

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises `StorageError`."""
        self.num_bytes += len(data)
        self._note(len(data))
        self._unwritten += data
        if len(self._unwritten) >= WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what was not written yet. Raises `StorageError`."""
        data, self._unwritten = bytes(self._unwritten), bytearray()

        def write() -> None:
            if self.file is None:
                self.file = self._contents.create(self.file_id)
            self.file.write(data)

        await in_thread(write)


async def in_thread(work: Callable[[], T]) -> T:
    """Return what `work` does with the disk. Raises `StorageError` if that fails, such as for lack of space.

    What has begun is awaited even if this is cancelled, so that nothing is opened behind the back of who cleans up.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working}, timeout=ANSWER_SECONDS)
        raise
    except OSError as error:
        raise StorageError(f"the disk of --data-dir cannot be used ({error.strerror or error})") from None


class Clock:
    """Seconds since 1970, as a function has them, in the place of which another one may be put."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now()


class BatchStore:
    """All files and batches.

    Args:
        config: bounds, and the folder, if there is one: this process is known to be one of those that may use it.
        clock: seconds since 1970.

    Attributes:
        in_memory: whether nothing outlives the server. max_file_bytes: most bytes of a file.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        folder = None if config.data_dir is None else prepare_data_dir(config.data_dir)
        self.clock = Clock(clock)
        self.in_memory = folder is None or is_temporary(folder)
        self.max_file_bytes = config.max_body_bytes if self.in_memory else config.max_file_bytes
        self.ttl = config.stored_file_ttl
        self._contents: Contents = MemoryContents() if folder is None else DiskContents(folder)
        bounds = Bounds(config.max_stored_file_bytes, config.memory_file_bytes if self.in_memory else None)
        connect = partial(BatchDatabase, folder, bounds, self.clock, config.stored_file_ttl)
        self._thread = DatabaseThread(BatchDatabase, connect)
        self._writing: Counter[bytes] = Counter()  # bytes of files that are being written, by key
        self.close = weakref.finalize(self, self._thread.close)

    async def run(self, work: Callable[[BatchDatabase], T]) -> T:
        """Return what `work` does with the database. Raises as that, and `StorageError`."""
        return await self._thread.run(work)

    # ---- files ----

    @contextlib.asynccontextmanager
    async def writing(self, owner: bytes) -> AsyncIterator[FileWriter]:
        """Yield a new file of a key. It is dropped at the end of the block, unless it was kept by `keep`.

        Raises:
            HTTPProblem: the key has no room for one.
        """
        await self.check_room(owner)  # and opens the database, which removes contents that it does not know
        num_noted = 0

        def note(num_bytes: int) -> None:
            nonlocal num_noted
            num_noted += num_bytes
            self._writing[owner] += num_bytes

        try:
            async with self.writing_output(note) as writer:
                yield writer
        finally:
            self._writing[owner] -= num_noted
            if not self._writing[owner]:
                del self._writing[owner]

    @contextlib.asynccontextmanager
    async def writing_output(self, note: Callable[[int], None] = lambda num_bytes: None) -> AsyncIterator[FileWriter]:
        """Yield a new file, as `writing`, of results that are counted already."""
        writer = FileWriter(self._contents, note)
        try:
            yield writer
        finally:
            if (file := writer.file) is not None:
                await asyncio.shield(asyncio.to_thread(self._contents.drop, writer.file_id, file))

    async def check_room(self, owner: bytes) -> None:
        """Raise `HTTPProblem` if what the key is writing now does not fit beside what it has stored."""
        writing = self._writing[owner]
        await self.run(lambda database: database.check_room(owner, writing))

    async def complete(self, writer: FileWriter) -> None:
        """Complete the content of a file; it still needs a row. Raises `StorageError`."""
        await writer.flush()
        file, writer.file = writer.file, None
        assert file is not None

        def keep() -> None:
            try:
                self._contents.keep(writer.file_id, file)
            except BaseException:
                self._contents.drop(writer.file_id, file)
                raise

        await in_thread(keep)

    async def keep(self, owner: bytes, writer: FileWriter, file: FileRecord) -> None:
        """Keep a file that was written. Raises `HTTPProblem` if the key has no room for it, and `StorageError`."""
        await self.complete(writer)
        try:
            await self.run(lambda database: database.insert_file(owner, file))
        except QuireError:
            await self.remove([file.file_id])
            raise

    def record(self, writer: FileWriter, purpose: str, filename: str, seconds: float | None = None) -> FileRecord:
        """Return the record of a file that was written; it is kept for so long, or as long as any."""
        now = self.clock()
        return FileRecord(
            file_id=writer.file_id,
            purpose=purpose,
            filename=filename,
            num_bytes=writer.num_bytes,
            created_at=int(now),
            expires_at=int(now + (self.ttl if seconds is None else min(seconds, self.ttl))),
        )

    async def remove(self, file_ids: Sequence[str]) -> None:
        """Remove the contents of files that have no row any more."""

        def remove() -> None:
            for file_id in file_ids:
                self._contents.remove(file_id)

        await asyncio.to_thread(remove)

    async def read(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file, beginning with an empty part once it is open.

        Raises:
            NotFoundError: it is lost. StorageError: it cannot be read now.
        """
        async with self._opened(file_id) as file:
            yield b""
            while data := await in_thread(lambda: file.read(READ_BYTES)):
                yield data

    async def lines(self, file_id: str, longest: int) -> AsyncGenerator[list[tuple[int, bytes]], None]:
        """Yield the lines of a file that are not blank, with their numbers from 1, some at a time.

        Raises:
            NotFoundError: the file is lost. StorageError: it cannot be read now.
        """

        def some() -> list[tuple[int, bytes]]:
            found: list[tuple[int, bytes]] = []
            size = 0
            for number, line in islice(lines, READ_LINES):
                found.append((number, line))
                size += len(line)
                if size > READ_BYTES:
                    break
            return found

        async with self._opened(file_id) as file:
            lines = enumerate(split_lines(file, longest), 1)
            while found := await in_thread(some):
                yield [(number, line) for number, line in found if line.strip()]

    @contextlib.asynccontextmanager
    async def _opened(self, file_id: str) -> AsyncIterator[IO[bytes]]:
        opened: list[IO[bytes]] = []

        def open_it() -> None:
            try:
                opened.append(self._contents.open(file_id))
            except FileNotFoundError:
                message = f"the content of the file {file_id} is lost"
                raise NotFoundError(message, param="file_id", code="file_not_found") from None

        try:
            await in_thread(open_it)
            yield opened[0]
        finally:
            for file in opened:
                file.close()

    # ---- batches ----

    async def unfinished(self) -> list[StoredBatch]:
        """As `BatchDatabase.unfinished`."""
        return await self.run(BatchDatabase.unfinished)

    async def change(self, batch: StoredBatch, **fields: Any) -> BatchRecord | None:
        """As `BatchDatabase.change`."""
        return await self.run(lambda database: database.change(batch.number, **fields))

    async def add_result(self, batch: StoredBatch, result: LineResult, usage: dict[str, int]) -> bool:
        """As `BatchDatabase.add_result`."""
        return await self.run(lambda database: database.add_result(batch.number, result, usage))

    async def expire(self) -> None:
        """Forget what is too old."""
        await self.remove(await self.run(BatchDatabase.expire))
