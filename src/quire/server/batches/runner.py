"""`BatchRunner`: runs the lines of batches behind interactive requests, from their validation to their files.

One front runs them, the leader: batches of all keys side by side, of each key one after the other, a bounded number of
lines at a time. What it knows is in the store. So another process goes on where it has ended, and any front can cancel
a batch. A line is answered by the routes, as a request of the key that owns the batch; the scheduler serves it behind
all requests that are none. One that finds the server overloaded, or its engine gone, waits and is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
from starlette.types import ASGIApp

from quire.errors import NotFoundError, RequestError
from quire.server.batches.database import StoredBatch
from quire.server.batches.lines import BatchRequest, LineClient, Reader, custom_id_of, error_of
from quire.server.batches.records import BatchRecord, FileRecord, LineResult
from quire.server.batches.store import BatchStore, FileWriter
from quire.server.data_dir import StorageError
from quire.server.fronts import FrontGoneError, Fronts
from quire.server.json_io import is_simple, run_in_thread_if
from quire.server.shared_models import SharedModels

logger = logging.getLogger(__name__)

ASK = "batches"  # what other fronts ask the leader: to look for new batches
POLL_SECONDS = 5.0
RETRY_SECONDS = 1.0  # after which a disk that failed is tried again
MAX_LINES = 50_000  # of a batch
MAX_ERRORS = 100  # that a failed batch shows
CONCURRENCY_SHARE = 4
PAUSE = 0.005  # seconds between two lines
BUSY_PAUSE = 0.05  # the same while there are other requests
BUSY_SECONDS = 10.0  # for which one that has begun counts

CANCELLED, EXPIRED, NO_ROOM = "batch_cancelled", "batch_expired", "file_storage_exceeded"
REASONS = {
    CANCELLED: "This request was not executed before the batch was cancelled.",
    EXPIRED: "This request could not be executed before the completion window expired.",
    NO_ROOM: "This request was not executed: the files of this key have no more room for its result.",
}

# Our codes -> those that OpenAI has for the errors of lines.
ERROR_CODES = {"invalid_json": "invalid_json_line", "unknown_url": "url_mismatch", "request_too_large": "line_too_long"}

T = TypeVar("T")


class Format(Protocol):
    """How an API has its results."""

    def result(self, custom_id: str, reply: httpx.Response) -> bytes:
        """Return the line of output of an answered request, without the newline."""

    def error(self, custom_id: str | None, code: str, message: str, number: int) -> bytes:
        """Return that of a line that was not run."""

    def usage(self, content: bytes) -> dict[str, int]:
        """Return the tokens that an answer counts, by `COUNTS`."""

    def files(self, batch: BatchRecord) -> tuple[tuple[str, str], tuple[str, str] | None]:
        """Return purpose and name of the files of results and of errors; None: these are in the first, too."""


@dataclass(eq=False, slots=True)
class _RunningBatch:
    """A batch that is being run here. `reason`: why it is to stop, once `stopped` is set."""

    batch: StoredBatch
    reason: str | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def stop(self, reason: str) -> None:
        """Have it end."""
        if self.reason is None:
            self.reason = reason
            self.stopped.set()


class BatchRunner:
    """Runs all batches of a store, as long as this front is the leader.

    Args:
        app: answers the lines. concurrency: most lines at a time. formats: by the names of APIs.
        seconds_idle: the time since the last request of this front that is no line.
    """

    def __init__(
        self,
        app: ASGIApp,
        store: BatchStore,
        models: SharedModels,
        fronts: Fronts,
        *,
        formats: dict[str, Format],
        concurrency: int,
        max_body_bytes: int,
        seconds_idle: Callable[[], float],
    ) -> None:
        self._app = app
        self._store = store
        self._models = models
        self._fronts = fronts
        self._formats = formats
        self._max_body_bytes = max_body_bytes
        self._seconds_idle = seconds_idle
        self._beginning = asyncio.Lock()
        self._running: dict[int, _RunningBatch] = {}
        self._slots = asyncio.Semaphore(concurrency)
        self._validating = asyncio.Lock()
        self._turns: dict[bytes, asyncio.Lock] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        fronts.on_change.append(self._changed.set)
        fronts.handlers[ASK] = self._answer

    def start(self) -> None:
        """Begin to run what there is; nothing happens before. It may be called again."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="quire-batches")

    async def stop(self) -> None:
        """Leave all batches as they are: they go on with the next start."""
        tasks = [task for task in (self._task, *[each.task for each in self._running.values()]) if task is not None]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def tell(self) -> None:
        """Say that a batch was made or is to be cancelled, to whoever runs it."""
        self._changed.set()
        if self._fronts.leader != self._fronts.row:
            with contextlib.suppress(FrontGoneError):  # the next leader looks for itself
                await self._fronts.ask(self._fronts.leader, ASK)

    async def _answer(self, value: None) -> None:
        self._changed.set()

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            if self._fronts.rows and self._fronts.leader == self._fronts.row:
                try:
                    await self._look()
                except StorageError as error:
                    logger.debug("batches cannot be looked up: %s", error.message)
                except Exception:  # task boundary: others are still to be run
                    logger.exception("batches cannot be looked up")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()

    async def _look(self) -> None:
        """Start, or stop, what the store says; forget what is too old."""
        # What ends while the store is asked stays here, for the answer may have it as unfinished still.
        self._running = {
            number: running for number, running in self._running.items() if running.task and not running.task.done()
        }
        for batch in await self._store.unfinished():
            running = self._running.get(batch.number)
            if running is None:
                running = self._running[batch.number] = _RunningBatch(batch)
                running.task = asyncio.create_task(self._run(running), name=f"quire-{batch.record.batch_id}")
            if batch.record.status == "cancelling":
                running.stop(CANCELLED)
            elif self._store.clock() >= batch.record.expires_at:
                running.stop(EXPIRED)
        await self._store.expire()

    # ---- a batch ----

    async def _run(self, running: _RunningBatch) -> None:
        """Run a batch to its end, or until it is to stop; then write its files."""
        try:
            advancing = asyncio.create_task(self._advance(running))
            stopped = asyncio.create_task(running.stopped.wait())
            try:
                await asyncio.wait({advancing, stopped}, return_when=asyncio.FIRST_COMPLETED)
                failed = advancing.done() and advancing.result()
            finally:
                for task in (advancing, stopped):
                    task.cancel()
                await asyncio.gather(advancing, stopped, return_exceptions=True)
            if not failed:
                await self._finish(running)
        except Exception as error:  # task boundary: this batch ends, no other
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            code, message = "server_error", "the server failed on this batch"
            if isinstance(cause, NotFoundError):  # the disk has lost the input
                code, message = cause.code, cause.message
            else:
                logger.exception("the batch %s failed", running.batch.record.batch_id)
            await self._fail(running, [{"code": code, "message": message, "param": None, "line": None}])
        finally:
            self._changed.set()

    async def _advance(self, running: _RunningBatch) -> bool:
        """Validate a batch and run its lines; return whether it has failed."""
        batch = running.batch
        if batch.record.status == "validating":
            async with self._validating:
                errors, count = await self._persist(lambda: self._validate(batch))
            if errors:
                await self._fail(running, errors)
                return True
            changes = {"status": "in_progress", "in_progress_at": self._now(), "num_lines": count}
            await self._persist(lambda: self._store.change(batch, **changes))
        turn = self._turns.setdefault(batch.owner, asyncio.Lock())
        async with turn:
            await self._run_lines(running)
        return False

    async def _fail(self, running: _RunningBatch, errors: list[dict[str, Any]]) -> None:
        changes = {"status": "failed", "failed_at": self._now(), "errors": errors}
        await self._persist(lambda: self._store.change(running.batch, **changes))

    def _now(self) -> int:
        return int(self._store.clock())

    async def _persist(self, write: Callable[[], Awaitable[T]]) -> T:
        """Return what `write` returns, as soon as the disk can be used."""
        while True:
            try:
                return await write()
            except StorageError:
                await asyncio.sleep(RETRY_SECONDS)

    def _reader(self, batch: StoredBatch) -> Reader:
        return Reader(self._max_body_bytes, (batch.record.endpoint,))

    async def _validate(self, batch: StoredBatch) -> tuple[list[dict[str, Any]], int]:
        """Return what is wrong with the lines of a batch, and how many there are. Raises `StorageError`."""
        reader = self._reader(batch)
        errors: list[dict[str, Any]] = []
        count = 0
        async with contextlib.aclosing(self._store.lines(batch.record.input_file_id, reader.longest)) as parts:
            async for part in parts:
                for number, line in part:
                    count += 1
                    check = partial(self._check_line, reader, number, line)
                    error = await _parsed(line, check)
                    if error is not None:
                        errors.append(error)
                    if count > MAX_LINES:
                        message = f"a batch may have at most {MAX_LINES} requests"
                        return [{"code": "too_many_tasks", "message": message, "param": None, "line": number}], count
                    if len(errors) >= MAX_ERRORS:
                        return errors, count
        if not count:
            message = "the input file has no requests"
            errors.append({"code": "empty_file", "message": message, "param": "input_file_id", "line": None})
        return errors, count

    def _check_line(self, reader: Reader, number: int, line: bytes) -> dict[str, Any] | None:
        """Return what is wrong with a line, as a batch shows it."""
        try:
            self._check_model(reader.read(number, line))
        except RequestError as error:
            found = error_of(error, number)
            return {**found, "code": ERROR_CODES.get(error.code, error.code)}
        return None

    def _check_model(self, request: BatchRequest) -> None:
        name = msgspec.json.decode(request.body).get("model")
        if isinstance(name, str):
            try:
                self._models.find(name)
            except NotFoundError as error:
                raise NotFoundError(f"body.model: {error.message}", param="body.model", code=error.code) from None

    # ---- its lines ----

    @property
    def pause(self) -> float:
        """Seconds between the beginnings of two lines: each takes some milliseconds of the event loop."""
        return PAUSE if self._seconds_idle() > BUSY_SECONDS else BUSY_PAUSE

    async def _run_lines(self, running: _RunningBatch) -> None:
        """Run the lines that have no result."""
        batch = running.batch
        done = await self._persist(lambda: self._store.run(lambda database: database.lines_done(batch.number)))
        reader = self._reader(batch)
        client = LineClient(self._app, owner=batch.owner, tries=None, check=_go_on)
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    lines = self._store.lines(batch.record.input_file_id, reader.longest)
                    async with contextlib.aclosing(lines) as parts:
                        async for part in parts:
                            for number, line in part:
                                if number in done:
                                    continue
                                async with self._beginning:
                                    await asyncio.sleep(self.pause)
                                await self._slots.acquire()
                                done.add(number)
                                task = group.create_task(self._run_line(running, client, reader, number, line))
                                task.add_done_callback(lambda task: self._slots.release())
                    return
                except StorageError:  # it cannot be read now
                    await asyncio.sleep(RETRY_SECONDS)

    async def _run_line(
        self, running: _RunningBatch, client: LineClient, reader: Reader, number: int, line: bytes
    ) -> None:
        form = self._formats[running.batch.record.api]
        usage: dict[str, int] = {}
        try:
            request = await run_in_thread_if(not is_simple(line), partial(reader.read, number, line))
        except RequestError as error:  # it was right when the batch was validated
            data, failed = form.error(custom_id_of(line), error.code, error.message, number), True
        else:
            reply = await client.post(request)
            data, failed = form.result(request.custom_id, reply), reply.status_code >= 400
            usage = {} if failed else form.usage(reply.content)
        result = LineResult(number=number, failed=failed, data=data)
        if not await self._persist(lambda: self._store.add_result(running.batch, result, usage)):
            running.stop(NO_ROOM)

    # ---- its end ----

    async def _finish(self, running: _RunningBatch) -> None:
        """Write the files of a batch; lines without a result have the reason for it in the place of one."""
        batch = running.batch
        record = await self._persist(lambda: self._store.change(batch, status="finalizing", finalizing_at=self._now()))
        if record is None or record.finished:
            return
        if await self._persist(lambda: self._write_files(running, record)):
            logger.info("the batch %s has ended", record.batch_id)

    async def _write_files(self, running: _RunningBatch, record: BatchRecord) -> bool:
        """Write the files of a batch, and note its end with them; return whether nobody has before."""
        form = self._formats[record.api]
        output, errors = form.files(record)
        files: list[FileRecord] = []
        kept = False
        try:
            async with contextlib.AsyncExitStack() as stack:
                good = await stack.enter_async_context(self._store.writing_output())
                bad = good if errors is None else await stack.enter_async_context(self._store.writing_output())
                num_left = await self._write_results(running, form, good, bad)
                for writer, kind in ((good, output), (bad, errors)):
                    if kind is not None and writer.num_bytes:
                        files.append(self._store.record(writer, *kind, record.output_seconds))
                        await self._store.complete(writer)
            names = [file.file_id for file in files]
            ended = msgspec.structs.replace(
                record,
                output_file_id=good.file_id if good.file_id in names else None,
                error_file_id=bad.file_id if bad is not good and bad.file_id in names else None,
                num_unrun=num_left,
                num_lines=record.num_completed + record.num_failed + num_left,
                **_end(None if running.reason == EXPIRED and not num_left else running.reason, self._now()),
            )
            kept = await self._store.run(lambda database: database.finish(running.batch.number, ended, files))
        finally:
            if not kept:
                await self._store.remove([file.file_id for file in files])
        return kept

    async def _write_results(self, running: _RunningBatch, form: Format, good: FileWriter, bad: FileWriter) -> int:
        """Write all results in the order of the lines; return how many lines have none."""
        batch, reader = running.batch, self._reader(running.batch)
        code = running.reason or EXPIRED
        num_left = 0
        async with contextlib.aclosing(self._store.lines(batch.record.input_file_id, reader.longest)) as parts:
            async for part in parts:
                if not part:
                    continue
                results = await self._results(batch, part)
                for number, line in part:
                    result = results.get(number)
                    if result is None:
                        num_left += 1
                        custom_id = await _parsed(line, partial(custom_id_of, line))
                        await bad.write(form.error(custom_id, code, REASONS[code], number) + b"\n")
                    else:
                        await (bad if result.failed else good).write(result.data + b"\n")
        return num_left

    async def _results(self, batch: StoredBatch, part: Sequence[tuple[int, bytes]]) -> dict[int, LineResult]:
        first, last = part[0][0], part[-1][0]
        return await self._store.run(lambda database: database.results(batch.number, first, last))


async def _go_on() -> None:
    """An engine that is gone is replaced, or the server ends: the line waits for either."""


async def _parsed(line: bytes, parse: Callable[[], T]) -> T:
    """Return `parse()`, which reads a line, and give interactive requests their turn before the next one."""
    result = await run_in_thread_if(not is_simple(line), parse)
    await asyncio.sleep(0)
    return result


def _end(reason: str | None, now: int) -> dict[str, Any]:
    """Return what a record says of its end."""
    if reason == CANCELLED:
        return {"status": "cancelled", "cancelled_at": now}
    if reason == EXPIRED:
        return {"status": "expired", "expired_at": now}
    return {"status": "completed", "completed_at": now}
