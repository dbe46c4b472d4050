"""The one place where errors become HTTP answers: status, headers, and `{"error": {message, type, param, code}}`.

Which error has which status stands in `quire.errors`; what only HTTP can get wrong (routes, headers, body sizes) is an
`HTTPProblem`. Bodies stay below 4 KB whatever the client sent, and tell nothing of files, addresses or tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import GenerationError, OverloadedError, QuireError, echo

MAX_MESSAGE = 1000
MAX_PARAM = 200
DRAIN_SECONDS = 2.0
DRAIN_BYTES = 8 * 2**20
JSON = "application/json"


class HTTPProblem(QuireError):
    """A request that fails as HTTP: wrong route, header, key, body, or moment.

    Args:
        status: the HTTP status. headers: to send with it. close: whether the connection must not be used again,
            because the body was not read.
    """

    error_type = "invalid_request_error"
    default_code = "invalid_request"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = dict(headers or {})
        self.close = close


def shutting_down() -> HTTPProblem:
    """Return the error for requests that come, or are cut off, while the server is going away."""
    return HTTPProblem(503, "the server is shutting down", code="server_shutting_down", headers=retry_headers(5.0))


def aborted() -> QuireError:
    """Return the error for a request that was ended from outside."""
    return QuireError("the request was aborted", code="request_aborted")


def retry_headers(seconds: float) -> dict[str, str]:
    """Return the headers that ask a client to wait: whole seconds for everybody, milliseconds for OpenAI's client."""
    return {"Retry-After": str(math.ceil(seconds)), "Retry-After-Ms": str(math.ceil(seconds * 1000))}


def status_of(error: QuireError) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, HTTPProblem) else error.http_status


def headers_of(error: QuireError) -> dict[str, str]:
    """Return the headers an error's answer carries."""
    if isinstance(error, HTTPProblem):
        return {**error.headers, **({"Connection": "close"} if error.close else {})}
    if isinstance(error, OverloadedError):
        return retry_headers(error.retry_after)
    status = status_of(error)
    if status == 500:
        return {"X-Should-Retry": "false"}  # the same request would fail again
    return retry_headers(1.0) if status == 503 else {}


def error_object(error: QuireError) -> dict[str, Any]:
    """Return the OpenAI error object."""
    status = status_of(error)
    known = status != 500 or error.code == "request_aborted" or isinstance(error, GenerationError)
    message = error.message if known else "the server failed on this request; its log has the reason"
    kind = "server_error" if status >= 500 else error.error_type
    param = None if error.param is None else shorten(error.param, MAX_PARAM)
    return {"error": {"message": shorten(message, MAX_MESSAGE), "type": kind, "param": param, "code": error.code}}


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters, printable in every log and encodable in UTF-8."""
    text = text if len(text) <= most else text[:most] + "..."
    return "".join([char if char.isprintable() else char.encode("unicode_escape").decode() for char in text])


class ClosingResponse(Response):
    """An answer given before the request's body was read.

    A connection closed with unread data is reset, and the client may never see the answer. So the rest of the body is
    read and dropped, for a moment and up to a limit, before the answer is declared complete.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, drop what the client still sends, finish."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await _drop_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(receive: Receive) -> None:
    left = DRAIN_BYTES
    more = True
    while more and left > 0:
        message: Message = await receive()
        left -= len(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)


def error_response(error: QuireError) -> Response:
    """Return the whole answer for an error."""
    kind = ClosingResponse if isinstance(error, HTTPProblem) and error.close else Response
    body = msgspec.json.encode(error_object(error))
    return kind(body, status_of(error), headers_of(error), JSON)


def error_event(error: QuireError) -> bytes:
    """Return the server-sent event by which a stream that has begun reports an error."""
    return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n"


async def on_quire_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for every error raised on purpose."""
    assert isinstance(error, QuireError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler of the app for what the router raises: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {echo(request.scope['path'])[1:-1]}"
    if error.status_code == 405:
        problem = HTTPProblem(
            405,
            f"the method {request.method} is not allowed here ({where})",
            code="method_not_supported",
            headers=error.headers,
        )
    elif error.status_code == 404:
        problem = HTTPProblem(404, f"unknown URL ({where})", code="unknown_url")
    else:
        problem = HTTPProblem(error.status_code, f"bad request ({where})", code="invalid_request")
    return error_response(problem)
