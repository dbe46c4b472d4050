"""Bounds on connections: their number, size and time of a head, and how long a response may stay unread.

Uvicorn's httptools parser has no such bounds: one client could hold any number of connections, or send a header of any
length, without ever completing a request. The unsent part of a response is bounded by the transport, which pauses its
writers from 64 KB on, and by the kernel's send buffer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.errors import HTTPProblem, error_body, retry_headers, status_of
from quire.server.paths import without_root

logger = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
LEFTOVER_SECONDS = 2.0
SLOW_CLIENT_SECONDS = 60.0
SEND_BUFFER = 2**17
LONG_SILENCE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
LOG_SECONDS = 10.0
MAX_HEAD_BYTES = 65536
MAX_URL_BYTES = 32768
MAX_CONNECTIONS = 65536
MIN_CONNECTIONS = 8


def default_connections() -> int:
    """Return how many connections the limit of open files leaves, with some files for everything else."""
    try:
        import resource
    except ImportError:  # not on every platform
        return MAX_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, files - max(files // 8, 40)))


def tune_listener(listener: socket.socket) -> None:
    """Set what all connections of a listening socket inherit: a bounded buffer, and probes of silent peers."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in LONG_SILENCE.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _without_chunks(cycle: Any, app: ASGIApp) -> ASGIApp:
    """Return the app with responses that end with the connection: HTTP/1.0 has no chunks, which uvicorn ignores.

    Args:
        cycle: uvicorn's state of the request; without chunks it counts the bytes down to the announced length.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head must be complete within `HEAD_SECONDS` of its first byte and `MAX_HEAD_BYTES`.

    Args:
        max_connections: a connection beyond it gets a 503 and is closed without a task.
        root_path: the prefix that a proxy may leave before paths.
    """

    last_complaint = -LOG_SECONDS  # of too many connections, by all of them

    def __init__(self, *args: Any, max_connections: int | None = None, root_path: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._root_path = root_path
        self._head_bytes = 0
        self._in_head = True
        self.url = b""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock: a connection that sends nothing is closed too."""
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            self._complain()
            self._refuse(
                HTTPProblem(503, "there are too many connections", code="engine_overloaded", headers=retry_headers(1.0))
            )
            return
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._stop_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Let writers wait, and watch whether the client reads at all."""
        super().pause_writing()
        self._watch_writes()

    def on_response_complete(self) -> None:
        """Be ready for the next request, unless this one's answer is not read, or its body does not end."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writes()
        if self.cycle.more_body and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(LEFTOVER_SECONDS, self._on_leftover)

    def _watch_writes(self) -> None:
        if self._write_timer is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(SLOW_CLIENT_SECONDS, self._on_slow_client)

    def _on_slow_client(self) -> None:
        """Cut off a client that has read nothing, and watch on while it reads."""
        self._write_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= self._unsent:
            logger.warning("a client read nothing for %g s; it is cut off", SLOW_CLIENT_SECONDS)
            self.transport.abort()
        elif unsent:
            self._watch_writes()

    def _on_leftover(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _complain(self) -> None:
        now = time.monotonic()
        if now - BoundedHttpProtocol.last_complaint >= LOG_SECONDS:
            BoundedHttpProtocol.last_complaint = now
            logger.warning("there are more than %d connections; new ones are refused", self._max_connections)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head, then parse."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            # The codes are those of heads that come in one piece and are refused by the gate.
            status, code = (414, "url_too_long") if len(self.url) > MAX_URL_BYTES else (431, "headers_too_large")
            self._refuse(HTTPProblem(status, f"the head is larger than {MAX_HEAD_BYTES} bytes", code=code))

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_headers_complete(self) -> None:
        """End a head: what follows is the body, which has limits of its own."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Be ready for the next head."""
        super().on_message_complete()
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._stop_timer()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the same form as all other errors."""
        if len(self.url) > MAX_URL_BYTES:  # the parser itself cannot take such a URL apart
            self._refuse(HTTPProblem(414, f"the URL is longer than {MAX_URL_BYTES} bytes", code="url_too_long"))
        else:
            self._refuse(HTTPProblem(400, "this is not a valid HTTP request", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: any client could fill the log with it."""

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the running response is finished first, then the connection closes
        elif self._head_bytes:
            problem = HTTPProblem(408, f"no complete request within {HEAD_SECONDS:g} s", code="request_timeout")
            self._refuse(problem)
        else:
            self.transport.close()

    def _refuse(self, problem: HTTPProblem) -> None:
        """Answer and close; an answer that has begun is cut off, because a second one cannot be put into it."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_started and not self.pipeline:
            # For the app the client has disconnected; nothing more is sent.
            cycle.disconnected = True
            cycle.message_event.set()
        elif cycle is not None and not cycle.response_complete:
            self.transport.close()
            return
        status = status_of(problem)
        request_id = str(uuid.uuid4())
        path = without_root(self.url.partition(b"?")[0].decode("latin-1"), self._root_path)
        body = error_body(problem, path, request_id)
        more = "".join([f"{name.lower()}: {value}\r\n" for name, value in problem.headers.items()])
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{more}"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
