"""Answers that take a while: server-sent events, and giving up when the client has gone.

A stream's status line is sent with its first event, so whatever fails before that is an ordinary error answer. What
fails later is an event with an error object, after which the stream ends without `data: [DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.frontend.async_llm import RequestStream
from quire.outputs import RequestOutput
from quire.server.errors import error_event, error_response

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
SLOW_CLIENT_SECONDS = 60.0
MERGE_SLOTS = 64
CLIENT_CLOSED = 499  # nginx's number for it; only the log sees it

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client closed its connection; whatever was being made for it is not wanted any more."""


def event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


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
    """Yield (which stream, output) from several streams as they come; an error of any ends all."""
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

    Args:
        events: complete events, `data: ...` with the blank line behind; several may come in one piece.
        close: called at the end, however it came about.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        try:
            await until_disconnect(receive, self._send_all(scope, receive, send))
        except ClientGoneError:
            logger.debug("the client of a stream went away")
        except TimeoutError:  # without an end of the answer, the HTTP layer cuts the connection
            logger.warning("a client read nothing for %g s; its stream is cut off", SLOW_CLIENT_SECONDS)
        finally:
            self._close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with contextlib.aclosing(self._events):
                async for data in self._events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _send_body(send, data)
        except (TimeoutError, OSError):
            raise
        except Exception as error:  # the boundary of the request: the client must hear of it
            if not isinstance(error, QuireError):
                logger.exception("a stream failed")
                error = QuireError(str(error))
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await _send_body(send, error_event(error, scope))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, data: bytes) -> None:
    async with asyncio.timeout(SLOW_CLIENT_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})


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
