"""Streamed responses (server-sent events), and cancellation when the client disconnects.

A stream's status line is sent with its first event, so an error before that is an ordinary error response. A later one
is an event with an error object, after which the stream ends without `data: [DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.frontend.output_processor import RequestStream
from quire.outputs import RequestOutput
from quire.server.errors import ErrorResponse, HTTPProblem, error_event

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
MERGE_SLOTS = 64
CLIENT_CLOSED = 499  # nginx's number for it; only the log sees it

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class ClientGoneError(HTTPProblem):
    """The client closed its connection before the response was complete. Its response goes to the log only."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED, "the client closed its connection", code="client_closed")


def event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def typed_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event whose event type is the `type` of `value`."""
    return b"event: " + value["type"].encode() + b"\ndata: " + _encode(value) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client goes away first. Raises `ClientGoneError` then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the stream, output) from several streams as they come. Raises the first error of any stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(MERGE_SLOTS)

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:  # task boundary: handed to the reader
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A response of server-sent events.

    A slow client delays its own stream only: while more than a bounded amount is unsent, no further event is taken from
    `events`. A client that reads nothing is disconnected; see `http`.

    Args:
        events: complete events, `data: ...` with the blank line behind; several may come in one piece.
        close: called at the end, also after an error or a disconnect.
    """

    media_type = "text/event-stream"
    keep_alive = KEEP_ALIVE  # sent while there are no events; b"" for kinds of streams without comments

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        try:
            await until_disconnect(receive, self._send_all(scope, receive, send))
        except ClientGoneError:
            logger.debug("the client of a stream went away")
        finally:
            self._close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        pulse = self._pulse(scope, send)
        try:
            async with contextlib.aclosing(self._events):
                async for data in self._events:
                    if pulse is not None and (beating := pulse.pause()) is not None:
                        await beating
                    if not self._started:
                        await self._start(send)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    if pulse is not None:
                        pulse.resume()
        except OSError:
            raise
        except Exception as error:  # the boundary of the request: the client gets it as an error event
            if not isinstance(error, QuireError):
                logger.exception("a stream failed")
                error = QuireError(str(error))
            if pulse is not None and (beating := pulse.pause()) is not None:
                await beating
            if not self._started:
                await ErrorResponse(error)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": error_event(error, scope), "more_body": True})
        finally:
            if pulse is not None:
                pulse.stop()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    def _pulse(self, scope: Scope, send: Send) -> _Pulse | None:
        app = scope.get("app")
        if app is None or not self.keep_alive:
            return None
        seconds = app.state.context.config.server.sse_keep_alive_interval

        async def beat() -> None:
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": self.keep_alive, "more_body": True})

        return _Pulse(seconds, beat) if seconds > 0 else None


class _Pulse:
    """Calls `beat` after `seconds` in which nothing was sent, but never while something is being sent.

    An event costs one read of the clock: the timer is not reset, but compares with the time of the last event when it
    fires.
    """

    def __init__(self, seconds: float, beat: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._seconds = seconds
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._latest = self._loop.time()
        self._busy = False
        self._beating: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(seconds, self._on_time)

    def pause(self) -> asyncio.Task[None] | None:
        """Start no `beat` until `resume`; return the running one, which the caller waits for."""
        self._busy = True
        return self._beating

    def resume(self) -> None:
        """Note that an event was sent now."""
        self._busy = False
        self._latest = self._loop.time()

    def stop(self) -> None:
        """Stop for good."""
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()

    def _on_time(self) -> None:
        now = self._loop.time()
        if not self._busy and self._beating is None and now >= self._latest + self._seconds:
            self._beating = self._loop.create_task(self._beat())
            self._beating.add_done_callback(self._on_beat)
            self._latest = now
        left = self._latest + self._seconds - now
        self._timer = self._loop.call_later(left if left > 0 else self._seconds, self._on_time)

    def _on_beat(self, task: asyncio.Task[None]) -> None:
        self._beating = None
        if not task.cancelled() and task.exception() is not None:
            logger.debug("a comment could not be sent: %s", task.exception())


async def last_outputs(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Return the last output of every stream, in order. Raises what any of them raises."""
    if len(streams) == 1:
        return [await _last(streams[0])]
    tasks = [asyncio.ensure_future(_last(stream)) for stream in streams]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _last(stream: RequestStream) -> RequestOutput:
    last: RequestOutput | None = None
    async for output in stream:
        last = output
    assert last is not None, "a stream ends with an output or an error"
    return last
