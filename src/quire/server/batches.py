"""Batch files in OpenAI's format, answered by an app without a socket.

A line of input has `custom_id`, `method`, `url` and `body`; its line of output has the same `custom_id` and either a
`response` (status, id and body, as over HTTP) or an `error`, for lines that are no requests. Output has the order of
input. Where lines come from and go to is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp

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
TRIES = 10
LONGEST_WAIT = 5.0
BUSY = (429, 503, 529)
HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of input."""

    custom_id: str
    url: str
    body: bytes


class Reader:
    """Reads lines of input; no two may have the same `custom_id`."""

    def __init__(self, max_body_bytes: int) -> None:
        self.longest = max_body_bytes + MAX_LINE_EXTRA
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
        if url not in URLS:
            raise wrong_value("url", f"one of {', '.join(URLS)}", url, "unknown_url")
        body = fields.object("body")
        for name in UNSUPPORTED:
            if body.get(name, False) is not False:
                where = body.place(name)
                raise UnsupportedError(f"{where} has no place in a batch; leave it out", param=where)
        return BatchRequest(custom_id, url, json.dumps(body.given).encode())


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
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://batch", timeout=None)
        self._check = check
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
            details = {"code": error.code, "message": error.message, "param": error.param, "line": number}
            return {"custom_id": custom_id_of(line), "response": None, "error": details}

    async def _answer(self, request: BatchRequest | dict[str, Any]) -> bytes:
        """Return the result of a line."""
        result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}"}
        failed = True
        if isinstance(request, BatchRequest):
            reply = await self._post(request)
            failed = reply.status_code >= 400
            response = {
                "status_code": reply.status_code,
                "request_id": reply.headers.get("x-request-id"),
                "body": msgspec.Raw(reply.content or b"null"),
            }
            result |= {"custom_id": request.custom_id, "response": response, "error": None}
        else:
            result |= request
        self.num_done += 1
        self.num_failed += failed
        return msgspec.json.encode(result)

    async def _post(self, request: BatchRequest) -> httpx.Response:
        """Return the response to a request, which is tried again while the server is overloaded."""
        for _ in range(TRIES):
            reply = await self._http.post(request.url, content=request.body, headers=HEADERS)
            if reply.status_code not in BUSY:
                break
            await self._check()
            await asyncio.sleep(min(float(reply.headers.get("retry-after", 1)), LONGEST_WAIT))
        return reply
