"""Lines of batch files in OpenAI's format, answered by an app without a socket.

A line of input has `custom_id`, `method`, `url` and `body`; its line of output has the same `custom_id` and either a
`response` (status, id and body, as over HTTP) or an `error`, for lines that are no requests. `Batch`, which is for
`quire run-batch`, answers all lines of a file in order; what the server does with them is in `runner.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.checks import Fields, check_length, check_unicode, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.ordered import in_order
from quire.server.parsing import parse_json

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
FIELDS = ("custom_id", "method", "url", "body")
UNSUPPORTED = ("stream", "background")  # a batch has no client to send partial responses to
MAX_ID_LENGTH = 512
MAX_LINE_EXTRA = 65536  # bytes of a line besides its body
LINE = "line_of"  # in the state of a request that is a line: the owner of its batch
TRIES = 10
LONGEST_WAIT = 5.0
READ_BYTES = 64 * 2**20
BUSY = (429, 503, 529)
HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of input."""

    custom_id: str
    url: str
    body: bytes


class Reader:
    """Reads lines of input; no two may have the same `custom_id`.

    Args:
        urls: that lines may have.

    Attributes:
        longest: most bytes of a line.
    """

    def __init__(self, max_body_bytes: int, urls: Sequence[str] = URLS) -> None:
        self.longest = max_body_bytes + MAX_LINE_EXTRA
        self._urls = urls
        self._seen: dict[str, int] = {}

    def read(self, number: int, line: bytes) -> BatchRequest:
        """Return the request in line `number` (from 1). Raises `RequestError` with the number in its message."""
        try:
            return self._read(number, line)
        except RequestError as error:
            error.message = f"line {number}: {error.message}"
            raise

    def _read(self, number: int, line: bytes) -> BatchRequest:
        if len(line) > self.longest:
            raise RequestError(f"it has more than {self.longest} bytes", code="request_too_large")
        try:
            value = parse_json(line)
        except RequestError as error:
            error.message = error.message.replace("the body", "it", 1)
            raise
        fields = Fields(value, "")
        custom_id = check_length(_text(fields, "custom_id"), "custom_id", MAX_ID_LENGTH)
        first = self._seen.setdefault(custom_id, number)
        if first != number:
            raise RequestError(
                f"custom_id: line {first} has {echo(custom_id)}, too", param="custom_id", code="duplicate_custom_id"
            )
        Fields(value, "line").only(FIELDS)
        if _text(fields, "method") != "POST":
            raise wrong_value("method", "POST", fields.get("method"))
        url = _text(fields, "url")
        if url not in self._urls:
            expected = self._urls[0] if len(self._urls) == 1 else f"one of {', '.join(self._urls)}"
            raise wrong_value("url", expected, url, "unknown_url")
        body = fields.object("body")
        for name in UNSUPPORTED:
            if body.get(name, False) is not False:
                where = body.place(name)
                raise UnsupportedError(f"{where} has no place in a batch; leave it out", param=where)
        return BatchRequest(custom_id, url, json.dumps(body.given).encode())


def split_lines(source: IO[bytes], longest: int) -> Iterator[bytes]:
    """Yield lines; one that is too long is cut off behind the first byte too many."""
    while line := source.readline(longest + 2):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = source.readline(READ_BYTES)
        yield line


def custom_id_of(line: bytes) -> str | None:
    """Return the `custom_id` of an invalid line, None if it has none."""
    try:
        custom_id = parse_json(line).get("custom_id")
        check_unicode(custom_id, "custom_id")
    except RequestError:
        return None
    return custom_id if isinstance(custom_id, str) and len(custom_id) <= MAX_ID_LENGTH else None


def _text(fields: Fields, name: str) -> str:
    text = fields.string(name)
    check_unicode(text, name)  # it could not be written into a result
    return text


def is_line(scope: Scope) -> bool:
    """Whether a request is a line of a batch on this server, for which nobody waits."""
    return LINE in scope["state"]


class LineClient:
    """Sends the requests of lines to an app.

    Args:
        owner: of the batch, whose API key the app takes for that of the request; None without keys.
        tries: how often a request is sent that the server has no room for; None as often as it takes.
        check: raises an error that ends the batch, such as a dead engine.
    """

    def __init__(
        self, app: ASGIApp, *, owner: bytes | None, tries: int | None, check: Callable[[], Awaitable[None]]
    ) -> None:
        async def as_line(scope: Scope, receive: Receive, send: Send) -> None:
            if owner is not None:
                scope["state"] = {LINE: owner}
            await app(scope, receive, send)

        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(as_line), base_url="http://batch", timeout=None)
        self._tries = tries
        self._check = check

    async def post(self, request: BatchRequest) -> httpx.Response:
        """Return the response to a request, which is tried again while the server is overloaded."""
        for number in itertools.count(1):
            reply = await self._http.post(request.url, content=request.body, headers=HEADERS)
            if reply.status_code not in BUSY or reply.headers.get("x-should-retry") == "false" or number == self._tries:
                break
            await self._check()
            await asyncio.sleep(min(float(reply.headers.get("retry-after", 1)), LONGEST_WAIT))
        return reply


def response_of(reply: httpx.Response) -> dict[str, Any]:
    """Return a response as a line of output has it."""
    return {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id"),
        "body": msgspec.Raw(reply.content or b"null"),
    }


def error_of(error: RequestError, number: int) -> dict[str, Any]:
    """Return the error of a line that is no request."""
    return {"code": error.code, "message": error.message, "param": error.param, "line": number}


def result_id() -> str:
    """Return a new id of a line of output."""
    return f"batch_req_{uuid.uuid4().hex}"


class Batch:
    """Requests on their way through an app.

    Args:
        concurrency: requests at a time. check: raises an error that ends the batch, such as a dead engine.

    Attributes:
        num_done, num_failed: lines that were answered, and of these the ones with an error or a status of 400 or more.
    """

    def __init__(
        self, app: ASGIApp, *, concurrency: int, max_body_bytes: int, check: Callable[[], Awaitable[None]]
    ) -> None:
        self.reader = Reader(max_body_bytes)
        self.num_done = 0
        self.num_failed = 0
        self._client = LineClient(app, owner=None, tries=TRIES, check=check)
        self._concurrency = concurrency

    async def run(self, lines: Iterable[bytes], write: Callable[[bytes], None]) -> None:
        """Answer all lines, and write the results in order; blank lines have none."""
        requests = (self._read(number, line) for number, line in enumerate(lines, 1) if line.strip())
        async with contextlib.aclosing(in_order(self._answer, requests, self._concurrency)) as results:
            async for result in results:
                write(result)

    def _read(self, number: int, line: bytes) -> BatchRequest | dict[str, Any]:
        """Return the request in a line, or the result of one that has none."""
        try:
            return self.reader.read(number, line)
        except RequestError as error:
            return {"custom_id": custom_id_of(line), "response": None, "error": error_of(error, number)}

    async def _answer(self, request: BatchRequest | dict[str, Any]) -> bytes:
        """Return the result of a line."""
        result: dict[str, Any] = {"id": result_id()}
        failed = True
        if isinstance(request, BatchRequest):
            reply = await self._client.post(request)
            failed = reply.status_code >= 400
            result |= {"custom_id": request.custom_id, "response": response_of(reply), "error": None}
        else:
            result |= request
        self.num_done += 1
        self.num_failed += failed
        return msgspec.json.encode(result)
