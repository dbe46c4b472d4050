"""Errors as HTTP responses: status, headers, and a body in the schema of the route's API.

Three APIs have three schemas of errors. The path alone selects one, so that an error raised before routing has the same
schema as one of the route: OpenAI's `{"error": {message, type, param, code}}`, Anthropic's
`{"type": "error", "error": {type, message}, "request_id"}` and Ollama's `{"error": message}`.

The status of each error is in `quire.errors`; errors of HTTP itself (routes, headers, body sizes) are `HTTPProblem`s.
Bodies stay below 4 KB whatever the client sent, without file names, addresses or tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from quire.errors import GenerationError, OverloadedError, QuireError, echo
from quire.server.json_io import JSON
from quire.server.paths import route_path

MAX_MESSAGE = 1000
MAX_PARAM = 200
DRAIN_SECONDS = 30.0
DRAIN_PAUSE_SECONDS = 2.0
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class HTTPProblem(QuireError):
    """An error of HTTP: a wrong route, header, key, body, or state of the server.

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


def shutting_down(*, close: bool = False) -> HTTPProblem:
    """Return the error for requests that arrive, or are aborted, while the server shuts down."""
    headers = retry_headers(5.0)
    return HTTPProblem(503, "the server is shutting down", code="server_shutting_down", headers=headers, close=close)


def retry_headers(seconds: float) -> dict[str, str]:
    """Return the headers that ask a client to wait: whole seconds, and milliseconds for OpenAI's client."""
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


def problem_data(error: QuireError) -> dict[str, Any]:
    """Return an error as another front gets it, JSON-like."""
    data = {"status": status_of(error), "message": error.message, "code": error.code, "param": error.param}
    retry_after = error.retry_after if isinstance(error, OverloadedError) else None
    return {**data, "headers": headers_of(error), "type": error.error_type, "retry_after": retry_after}


def problem_of(data: Mapping[str, Any]) -> QuireError:
    """Return the error that `problem_data` describes, to be raised here."""
    if data["retry_after"] is not None:
        return OverloadedError(data["message"], retry_after=data["retry_after"])
    problem = HTTPProblem(
        data["status"], data["message"], code=data["code"], param=data["param"], headers=data["headers"]
    )
    problem.error_type = data["type"]  # type: ignore[misc]
    return problem


def error_object(error: QuireError) -> dict[str, Any]:
    """Return the OpenAI error object."""
    kind = "server_error" if status_of(error) >= 500 else error.error_type
    param = None if error.param is None else shorten(error.param, MAX_PARAM)
    return {"error": {"message": _message_of(error), "type": kind, "param": param, "code": error.code}}


def _message_of(error: QuireError) -> str:
    """Return the message for a client; that of an internal error stays in the log."""
    known = status_of(error) != 500 or error.code == "request_aborted" or isinstance(error, GenerationError)
    return shorten(error.message if known else "the server failed on this request; its log has the reason", MAX_MESSAGE)


class Family(Enum):
    """The APIs that routes belong to."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


def family_of(path: str) -> Family:
    """Return the API of a path, whether or not there is such a route."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Family.ANTHROPIC
    return Family.OLLAMA if path.startswith("/api/") else Family.OPENAI


# Anthropic's error type for a status; other statuses below 500 are invalid_request_error, others above api_error.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_OVERLOADED = 529


def family_status(error: QuireError, family: Family) -> int:
    """Return the status of an error in an API: Anthropic has its own for a server with full queues."""
    status = status_of(error)
    if family is Family.ANTHROPIC and status == 503 and error.code == OverloadedError.default_code:
        return ANTHROPIC_OVERLOADED
    return status


def error_body(error: QuireError, path: str = "", request_id: str | None = None) -> bytes:
    """Return an error as the JSON body of a response to a request to `path`."""
    body: dict[str, Any]
    match family_of(path):
        case Family.ANTHROPIC:
            status = status_of(error)
            kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
            body = {"type": "error", "error": {"type": kind, "message": _message_of(error)}, "request_id": request_id}
        case Family.OLLAMA:
            body = {"error": _message_of(error)}
        case Family.OPENAI:
            body = error_object(error)
    return msgspec.json.encode(body)


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters, printable in every log and encodable in UTF-8."""
    text = text if len(text) <= most else text[:most] + "..."
    return "".join([char if char.isprintable() else char.encode("unicode_escape").decode() for char in text])


class ClosingResponse(Response):
    """A response sent before the request's body was read.

    A connection closed with unread data is reset, and the client may never see the response. So the rest of the body is
    read and dropped before the response ends, for up to `DRAIN_SECONDS` and until `DRAIN_PAUSE_SECONDS` without data.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, drop what the client still sends, finish."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await _drop_body(scope, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(scope: Scope, receive: Receive) -> None:
    more = True
    while more:
        async with asyncio.timeout(DRAIN_PAUSE_SECONDS):
            message: Message = await receive()
        release_body(scope)
        more = message["type"] == "http.request" and message.get("more_body", False)


def release_body(scope: Scope) -> None:
    """Note that a request's body is not in memory any more, for the bound on all bodies together (`http.py`)."""
    if (body := scope["state"].get("received_body")) is not None:
        body.release()


class ErrorResponse(Response):
    """The response for an error, in the schema of the API that the request's path belongs to."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(None, status_of(error))
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        error, path = self._error, route_path(scope)
        request_id = _request_id(scope)
        family = family_of(path)
        headers = headers_of(error)
        if family is Family.ANTHROPIC and request_id is not None:
            headers["request-id"] = request_id
        kind = ClosingResponse if isinstance(error, HTTPProblem) and error.close else Response
        answer = kind(error_body(error, path, request_id), family_status(error, family), headers, JSON)
        await answer(scope, receive, send)


def _request_id(scope: Scope) -> str | None:
    return scope.get("state", {}).get("request_id")


def error_event(error: QuireError, scope: Scope | None = None) -> bytes:
    """Return the event, or for Ollama the line, by which a stream that has begun reports an error.

    Args:
        scope: of the request that is answered.
    """
    path = "" if scope is None else route_path(scope)
    body = error_body(error, path, None if scope is None else _request_id(scope))
    match family_of(path):
        case Family.OLLAMA:
            return body + b"\n"
        case Family.ANTHROPIC:
            return b"event: error\ndata: " + body + b"\n\n"
        case Family.OPENAI:
            return b"data: " + body + b"\n\n"


async def on_quire_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for every error raised on purpose."""
    assert isinstance(error, QuireError)
    return ErrorResponse(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler of the app for what the router raises: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {echo(request.scope['path'])[1:-1]}"
    flag = _flag_of_route(request)
    if flag is not None:
        problem = HTTPProblem(404, f"this server has no {where}; it needs {flag}", code="unknown_url")
    elif error.status_code == 405:
        problem = HTTPProblem(
            405,
            f"the method {request.method} is not allowed here ({where})",
            code="method_not_supported",
            headers={"Allow": ", ".join(_methods_of(request))},
        )
    elif error.status_code == 404:
        problem = HTTPProblem(404, f"unknown URL ({where})", code="unknown_url")
    else:
        problem = HTTPProblem(error.status_code, f"bad request ({where})", code="invalid_request")
    return ErrorResponse(problem)


def _flag_of_route(request: Request) -> str | None:
    """Return the flag without which the server does not have the route of a request."""
    disabled: Mapping[str, Sequence[BaseRoute]] = request.app.state.disabled_routes
    for flag, routes in disabled.items():
        if any(route.matches(request.scope)[0] is Match.FULL for route in routes):
            return flag
    return None


def _methods_of(request: Request) -> list[str]:
    """Return the methods that the routes of a request's path accept.

    A route with exactly this path takes precedence over one with a parameter in it.
    """
    scope = {**request.scope, "path_params": {}}
    # FastAPI keeps the routes of an included router below it, or, in earlier versions, beside the others.
    routes: list[BaseRoute] = []
    for route in request.app.routes:
        routes += route.original_router.routes if hasattr(route, "original_router") else [route]
    found: dict[bool, list[str]] = {False: [], True: []}
    for method in METHODS:
        scope["method"] = method
        matches = [route.matches(scope) for route in routes]
        for named in {bool(child.get("path_params")) for match, child in matches if match is Match.FULL}:
            found[named].append(method)
    return found[False] or found[True]
