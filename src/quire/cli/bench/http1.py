"""A small HTTP/1.1 client on asyncio streams, for load tests: keeps connections open, yields lines as they arrive.

It speaks what OpenAI-compatible servers speak (RFC 9112: content-length, chunked, until close) and nothing more: no
redirects, no compression, no proxies. The load generator shares the machine with the server, and httpx takes three to
five times the CPU for each event of a stream. Times are measured by the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import urllib.parse
from collections.abc import AsyncGenerator
from typing import Any

from quire.errors import ConfigError, QuireError

LINE_LIMIT = 2**22
MAX_ERROR_BYTES = 65536

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(QuireError):
    """The server could not be reached, broke off, or answered with an error status."""


class HttpClient:
    """Requests to one server. Connections are reused once their response was read to its end."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        parts = urllib.parse.urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"base_url: {base_url!r} must look like http://127.0.0.1:8000", param="base_url")
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._headers = {"host": parts.netloc, "accept": "*/*", **headers}
        self._idle: list[Connection] = []

    async def get_json(self, path: str) -> Any:
        """Return the decoded JSON of a GET request."""
        async with contextlib.aclosing(self.lines("GET", path)) as lines:
            body = b"".join([line async for line in lines])
        try:
            return json.loads(body)
        except ValueError:
            raise HttpError(f"{path} did not answer with JSON") from None

    async def lines(self, method: str, path: str, body: bytes | None = None) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the lines of its response as they arrive.

        Raises:
            HttpError: no connection, a status other than 200, or a response that breaks off.
        """
        request = self._request(method, path, body)
        connection = await self._connect()
        complete = False
        try:
            status, headers = await self._send(connection, request)
            if status != 200:
                text = b"".join([line async for line in _body_lines(connection[0], headers)])[:MAX_ERROR_BYTES]
                raise HttpError(f"HTTP {status}: {_error_text(text)}")
            async for line in _body_lines(connection[0], headers):
                yield line
            complete = headers.get("connection", "").lower() != "close" and _has_end(headers)
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            if isinstance(error, QuireError):
                raise
            raise HttpError(f"{self.host}:{self.port} broke off: {error}") from None
        finally:
            if complete:
                self._idle.append(connection)
            else:
                connection[1].close()

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = dict(self._headers)
        if body is not None:
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        head = [f"{method} {self._prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + (body or b"")

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            # An idle connection that the server has closed meanwhile is at its end.
            if not connection[0].at_eof() and not connection[1].is_closing():
                return connection
            connection[1].close()
        try:
            return await asyncio.open_connection(self.host, self.port, ssl=self._tls, limit=LINE_LIMIT)
        except OSError as error:
            raise HttpError(f"cannot connect to {self.host}:{self.port}: {error.strerror or error}") from None

    @staticmethod
    async def _send(connection: Connection, request: bytes) -> tuple[int, dict[str, str]]:
        reader, writer = connection
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(head[0].split(" ")[1]), headers


def _has_end(headers: dict[str, str]) -> bool:
    return "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()


async def _body_lines(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    """Yield the body line by line, including line ends, which the last line need not have."""
    rest = b""
    async for piece in _pieces(reader, headers):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


def _error_text(body: bytes) -> str:
    """Return the message of an OpenAI-style error object, or else the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace")[:200]
