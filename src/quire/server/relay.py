"""Requests that only another front can answer are forwarded to it, over a connection that the supervisor passes on.

The other front checks the API key again; it does not count, limit or log the request, which this front does. It knows
such a request by its connection (`Admission.relayed`), not by anything that a client could send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import HTTPProblem, error_event
from quire.server.fronts import FrontGoneError, Fronts
from quire.server.streaming import ClientGoneError, until_disconnect

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # until the head of a response, and the whole of one that is no stream
READ_BYTES = 1 << 16
CONNECTION_HEADERS = frozenset(
    {b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
# The front that the client has reached decides about CORS, and names the request.
NOT_FORWARDED = CONNECTION_HEADERS | {b"origin", b"x-request-id"}
NOT_RETURNED = CONNECTION_HEADERS | {b"date", b"openai-processing-ms", b"x-request-id"}

Headers = list[tuple[bytes, bytes]]


def is_relayed(scope: Scope) -> bool:
    """Whether another front has forwarded this request."""
    return bool(scope["state"].get("relayed"))


def answer_fronts(fronts: Fronts) -> None:
    """Answer other fronts that are about to forward a request."""

    async def alive(value: None) -> None:
        pass

    fronts.handlers["alive"] = alive


async def forward(request: Request, row: int, body: bytes = b"") -> Response:
    """Return another front's response to a request; what is streamed is passed on as it comes.

    If the client disconnects, the other front sees that, too.

    Args:
        row: of the other front. body: of the request, all of it.

    Raises:
        FrontGoneError: the other front does not react, or ends before it has answered.
    """
    if is_relayed(request.scope):
        raise FrontGoneError("this front was asked for what it does not have")
    connection = await _Connection.open(request, row)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            head = await until_disconnect(request.receive, connection.ask(request, body))
            headers = [(name, value) for name, value in head.headers.raw_items() if name.lower() not in NOT_RETURNED]
            if not any(name == b"content-length" for name, _ in head.headers):
                return _RelayedStream(head.status_code, headers, connection)
            content = await until_disconnect(request.receive, connection.rest())
    except TimeoutError:
        connection.close()
        raise FrontGoneError(f"front {row} does not answer") from None
    except BaseException:
        connection.close()
        raise
    connection.close()
    return _with_headers(Response(content, head.status_code), headers)


def _with_headers(response: Response, headers: Headers) -> Response:
    response.raw_headers += headers
    return response


class _Connection:
    """A connection to another front's HTTP server, for one request."""

    def __init__(self, row: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._row = row
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, request: Request, row: int) -> _Connection:
        """Return a connection. Raises `FrontGoneError`."""
        fronts: Fronts = request.app.state.context.fronts
        await fronts.ask(row, "alive")  # of one that hangs this is known sooner than of its answer
        return cls(row, *await asyncio.open_unix_connection(sock=fronts.connect(row)))

    async def ask(self, request: Request, body: bytes) -> h11.Response:
        """Send a request, and return the head of the response. Raises `FrontGoneError`."""
        for data in _encoded(self._http, request, body):
            self._writer.write(data)
        with self._other_end():
            await self._writer.drain()
        head = await self._next()
        assert isinstance(head, h11.Response)  # nothing here asks for informational ones
        return head

    async def rest(self) -> bytes:
        """Return the whole body of the response. Raises `FrontGoneError`."""
        return b"".join([data async for data in self.parts()])

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of the response as it comes. Raises `FrontGoneError`."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _next(self) -> h11.Event:
        with self._other_end():
            while not isinstance(event := self._http.next_event(), h11.Event):
                self._http.receive_data(await self._reader.read(READ_BYTES))
        return event

    @contextlib.contextmanager
    def _other_end(self) -> Iterator[None]:
        try:
            yield
        except (OSError, h11.RemoteProtocolError) as error:  # it ended, perhaps in the middle
            raise FrontGoneError(f"front {self._row} has ended before it had answered") from error

    def close(self) -> None:
        """Close it."""
        self._writer.close()


def _encoded(http: h11.Connection, request: Request, body: bytes) -> Sequence[bytes]:
    """Return a request as it is to be sent. Raises `HTTPProblem` if it is none that can be passed on."""
    scope = request.scope
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers: Headers = [(name, value) for name, value in scope["headers"] if name not in NOT_FORWARDED]
    headers += [(b"content-length", b"%d" % len(body)), (b"x-request-id", scope["state"]["request_id"].encode())]
    if not any(name == b"host" for name, _ in headers):  # HTTP/1.0
        headers.append((b"host", b"-"))
    try:
        parts = [http.send(h11.Request(method=scope["method"], target=target, headers=headers))]
        if body:
            parts.append(http.send(h11.Data(data=body)))
        parts.append(http.send(h11.EndOfMessage()))
    except h11.LocalProtocolError as error:
        raise HTTPProblem(400, f"this request cannot be passed on: {error}", code="invalid_http") from None
    return [part for part in parts if part]


class _RelayedStream(Response):
    """The rest of another front's response, which ends with an error event if that front does not complete it."""

    def __init__(self, status: int, headers: Headers, connection: _Connection) -> None:
        super().__init__(None, status)
        self.raw_headers = headers
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on until it ends or the client goes away."""
        try:
            await until_disconnect(receive, self._pass_on(scope, send))
        except ClientGoneError:
            logger.debug("the client of a forwarded stream went away")
        finally:
            self._connection.close()

    async def _pass_on(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._connection.parts()) as parts:
                async for data in parts:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except FrontGoneError as error:
            logger.warning("%s; its stream ends with an error", error.message)
            await send({"type": "http.response.body", "body": error_event(error, scope), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
