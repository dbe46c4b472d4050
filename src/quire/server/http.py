"""Bounds on what a connection may do before a request is complete: size of its head, and time to send it.

Uvicorn's fast parser knows neither, so that one client could hold any number of connections, or send a header of any
length, without ever making a request.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.errors import HTTPProblem, error_body, status_of

HEAD_SECONDS = 10.0
MAX_HEAD_BYTES = 65536
MAX_URL_BYTES = 32768
REASONS = {400: "Bad Request", 408: "Request Timeout", 414: "URI Too Long", 431: "Request Header Fields Too Large"}


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head must be complete within `HEAD_SECONDS` of its first byte and `MAX_HEAD_BYTES`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self.url = b""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock: a connection that sends nothing is closed too."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head, then parse."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            status = 414 if len(self.url) > MAX_URL_BYTES else 431
            self._refuse(HTTPProblem(status, f"the head is larger than {MAX_HEAD_BYTES} bytes", code="head_too_large"))

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """End a head: what follows is the body, which has limits of its own."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Be ready for the next head."""
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the same form as all other errors."""
        if len(self.url) > MAX_URL_BYTES:  # the parser itself cannot take such a URL apart
            self._refuse(HTTPProblem(414, f"the URL is longer than {MAX_URL_BYTES} bytes", code="url_too_long"))
        else:
            self._refuse(HTTPProblem(400, "this is not a valid HTTP request", code="invalid_http"))

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the answer under way comes first; the connection closes behind it
        elif self._head_bytes:
            problem = HTTPProblem(408, f"no complete request within {HEAD_SECONDS:g} s", code="request_timeout")
            self._refuse(problem)
        else:
            self.transport.close()

    def _refuse(self, problem: HTTPProblem) -> None:
        """Answer and close; an answer under way is cut off, because a second one cannot be put into it."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            status = status_of(problem)
            request_id = str(uuid.uuid4())
            path = self.url.partition(b"?")[0].decode("latin-1")
            body = error_body(problem, path, request_id)
            head = (
                f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
