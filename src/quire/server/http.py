"""Bounds on connections: their number, what they send beside bodies, and how long a response may stay unread.

Uvicorn's httptools parser has no such bounds: one client could hold any number of connections, or send a header, chunk
extension or trailer of any length, without ever completing a request. Bodies are bounded here in their sum only; the
bound of a single body is in `parsing.py`. The unsent part of a response is bounded by the transport, which pauses its
writers from 64 KB on, and by the kernel's send buffer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.errors import HTTPProblem, error_body, retry_headers, status_of
from quire.server.parsing import BODY_SECONDS
from quire.server.starter import Starter
from quire.supervisor.connections import Admission
from quire.supervisor.probes import RESERVED_PATHS, without_root

logger = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
LEFTOVER_SECONDS = 2.0
SLOW_CLIENT_SECONDS = 60.0
MAX_HEAD_BYTES = 65536
MAX_FRAMING_RATIO = 16  # bytes of chunk headers and extensions for each byte of a body, beyond `MAX_HEAD_BYTES`
MAX_WAITING_BYTES = 2**20  # of the body of a pipelined request; then it is read when its turn comes
MAX_PIPELINED = 128  # requests of a connection that wait for the response to an earlier one
MAX_URL_BYTES = 32768
PROBE_SECONDS = 1.0  # for the head of such a request
CROWDED_IDLE_SECONDS = 5  # that an idle connection may stay while more than half of the connections are in use


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


class ReceivingLimit:
    """The limit of the bytes of bodies that are being received or parsed, over all connections.

    Args:
        share: called with the bytes here, for other fronts to count them; returns those of all fronts.
    """

    def __init__(self, max_bytes: int, share: Callable[[int], int] = lambda num_bytes: num_bytes) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._share = share
        self._incomplete: dict[ReceivedBody, None] = {}  # in the order of their first bytes

    def receive(self, body: ReceivedBody, size: int) -> HTTPProblem | None:
        """Count `size` further bytes of a body; return the error if there is no room for them.

        A body that has been arriving for `BODY_SECONDS` makes room for others.
        """
        if not body.began:
            body.began = time.monotonic()
            self._incomplete[body] = None
        body.size += size
        self.num_bytes += size
        while self._share(self.num_bytes) > self.max_bytes:
            oldest = next(iter(self._incomplete), body)
            if oldest is body or time.monotonic() - oldest.began < BODY_SECONDS:
                return _overload("the bodies that are being received are too large together")
            oldest.cut_off()
        return None

    def complete(self, body: ReceivedBody) -> None:
        """Note that a body has arrived: that it is in memory for long is no fault of its client any more."""
        self._incomplete.pop(body, None)

    def release(self, body: ReceivedBody) -> None:
        """Count the bytes of a body no longer."""
        self.complete(body)
        self.num_bytes -= body.size
        self._share(self.num_bytes)
        body.size = 0


def _overload(message: str) -> HTTPProblem:
    return HTTPProblem(503, message, code="engine_overloaded", headers=retry_headers(1.0))


class ReceivedBody:
    """The body of one request while its bytes are in memory: until it has been parsed, or the request ends."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        # The protocol refers to this too: without cycles a request is freed as it ends, with no garbage collection.
        self._protocol = weakref.ref(protocol)
        self._receiving = protocol.receiving
        self.size = 0
        self.began = 0.0  # when its first bytes arrived

    def release(self) -> None:
        """Note that the bytes are not needed any more."""
        self._receiving.release(self)

    def cut_off(self) -> None:
        """Refuse the rest, because others need the memory."""
        self.release()
        message = f"the body took longer than {BODY_SECONDS:g} s, and others need its memory"
        if (protocol := self._protocol()) is not None:
            protocol.refuse(HTTPProblem(408, message, code="request_timeout"))


class BoundedHttpProtocol(HttpToolsProtocol):
    """Serves one connection. A head must be complete within `HEAD_SECONDS` of its first byte and `MAX_HEAD_BYTES`.

    A request to upgrade the protocol is served as if it did not ask for that. Trailers are dropped. uvicorn parses
    pipelined requests ahead: `cycle` is the request parsed last, `_running` the one that is being answered.

    Args:
        receiving: the limit of bodies. starter: starts requests, except those to `RESERVED_PATHS`.
        root_path: the prefix that a proxy may leave before paths. admit: counts the connection by its peer.
        release: counts it no longer. is_crowded: whether connections are scarce, so that idle ones must go.
    """

    parser: httptools.HttpRequestParser

    def __init__(
        self,
        *args: Any,
        receiving: ReceivingLimit,
        starter: Starter,
        admit: Callable[[object], Admission],
        release: Callable[[Admission], None],
        is_crowded: Callable[[], bool],
        root_path: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.receiving = receiving
        self._starter = starter
        self._admit, self._release, self._is_crowded = admit, release, is_crowded
        self._root_path = root_path
        self._excess: HTTPProblem | None = None  # the error if this connection is one too many and may only probe
        self._refused = False
        self._refusal: HTTPProblem | None = None  # to be sent behind the responses to the requests before
        self._num_requests = 0
        self._head_bytes = 0
        self._in_head = True
        self._body_bytes = 0  # of all requests
        # Of the body being received: its first byte's place in these, what else came since, and since its last byte.
        self._body_start = self._framing_bytes = self._bytes_since_body = 0
        self._body = ReceivedBody(self)
        self._running: RequestResponseCycle | None = None
        self.url = b""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock: a connection that sends nothing is closed too."""
        super().connection_made(transport)
        self._admission = self._admit(self.client)
        if self._admission.excess:
            self._excess = _overload(self._admission.excess)
            if not self._admission.may_probe:
                self.refuse(self._excess)
                return
        self._start_head_timer()

    def _start_head_timer(self) -> None:
        seconds = HEAD_SECONDS if self._excess is None else PROBE_SECONDS
        self._head_timer = self.loop.call_later(seconds, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._release(self._admission)
        self._leave()
        for body in (self._body, *(cycle.scope["state"]["received_body"] for cycle, _ in self.pipeline)):
            body.release()
        self._stop_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Note at once that the client has gone: the connection is closed next, and what was not started never is."""
        self._leave()

    def _leave(self) -> None:
        if self._running is not None:  # uvicorn marks `cycle`, which may wait behind it
            self._running.disconnected = True
            self._running.message_event.set()

    def pause_writing(self) -> None:
        """Let writers wait, and watch whether the client reads at all."""
        super().pause_writing()
        self._watch_writes()

    def on_response_complete(self) -> None:
        """Be ready for the next request, unless this one's answer is not read, or its body does not end."""
        ended = self._running
        most = self.config.timeout_keep_alive
        self.timeout_keep_alive = min(most, CROWDED_IDLE_SECONDS) if self._is_crowded() else most
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writes()
        if self.transport.is_closing():
            return
        if self._refusal is not None:
            if self._running is ended:  # no other waits
                self._send_refusal(self._refusal)
        elif ended is not None and ended is self.cycle and ended.more_body and self._head_timer is None:
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

    def data_received(self, data: bytes) -> None:
        """Parse, and count what is no body."""
        if self._refused:
            return
        in_head, body_bytes, num_requests = self._in_head, self._body_bytes, self._num_requests
        if in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start_head_timer()
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                # The codes are those of heads that come in one piece and are refused by the gate.
                status, code = (414, "url_too_long") if len(self.url) > MAX_URL_BYTES else (431, "headers_too_large")
                self.refuse(HTTPProblem(status, f"the head is larger than {MAX_HEAD_BYTES} bytes", code=code))
        elif not in_head and self._num_requests == num_requests:
            received = self._body_bytes - body_bytes
            self._framing_bytes += len(data) - received
            self._bytes_since_body = 0 if received else self._bytes_since_body + len(data)
            most = MAX_HEAD_BYTES + MAX_FRAMING_RATIO * (self._body_bytes - self._body_start)
            if self._framing_bytes > most or self._bytes_since_body > MAX_HEAD_BYTES:
                message = f"the body has more than {MAX_HEAD_BYTES} bytes of chunk extensions or trailers"
                self.refuse(HTTPProblem(400, message, code="invalid_http"))

    def _parse(self, data: bytes) -> None:
        """Parse what arrived. Raises `HttpParserError`.

        Where a request asks for an upgrade the parser skips the body and stops. Then a new one is given the same head
        without that header, and what follows it.
        """
        rest = memoryview(data)
        while rest and not self._refused:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method, version = self.parser.get_method(), self.parser.get_http_version()
                if method == b"CONNECT":  # has no other meaning
                    raise httptools.HttpParserError("this is no proxy") from None
                rest = rest[upgrade.args[0] :]
                lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
                lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; a trailer, which comes after the app got the headers, is dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body, if there is room for it."""
        self._body_bytes += len(body)
        if self._refused or self.cycle.response_complete:
            return
        problem = self.receiving.receive(self._body, len(body))
        if problem is not None:
            self._body.release()
            self.refuse(problem)
            return
        super().on_body(body)
        self._read_on()

    def _read_on(self) -> None:
        """Read on behind a pipelined request, where uvicorn pauses: else it is not seen that the client has gone."""
        if self.pipeline and len(self.cycle.body) < MAX_WAITING_BYTES:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        served = _without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                if not cycle.disconnected:  # else who asked has gone before its turn came
                    await served(scope, receive, send)
            finally:
                scope["state"]["received_body"].release()

        self._running = cycle
        start_task = functools.partial(super()._start_asgi_task, cycle, serve)

        def start() -> None:
            try:
                start_task()
            except BaseException:  # there is no task that would answer
                self.transport.abort()
                raise

        if without_root(cycle.scope["path"], self._root_path) in RESERVED_PATHS:
            start()
        else:
            self._starter.start(self.loop, start)

    def on_headers_complete(self) -> None:
        """End a head: what follows is the body, which has limits of its own."""
        if self.parser.should_upgrade() or self._refused:
            return
        self._in_head = False
        self._num_requests += 1
        self._head_bytes = self._framing_bytes = self._bytes_since_body = 0
        self._body_start = self._body_bytes
        self._stop_timer()
        if self._excess is not None and self._path() not in RESERVED_PATHS:
            self.refuse(self._excess)
            return
        self._body = self.scope["state"]["received_body"] = ReceivedBody(self)
        self.scope["state"]["relayed"] = self._admission.relayed
        super().on_headers_complete()
        if self._excess is not None:
            self.cycle.keep_alive = False
        self._read_on()
        if len(self.pipeline) > MAX_PIPELINED:
            self.refuse(HTTPProblem(503, f"more than {MAX_PIPELINED} requests wait", code="engine_overloaded"))

    def on_message_complete(self) -> None:
        """Be ready for the next head."""
        if self.parser.should_upgrade() or self._refused:
            return
        self.receiving.complete(self._body)
        super().on_message_complete()
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._stop_timer()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the same form as all other errors."""
        if len(self.url) > MAX_URL_BYTES:  # the parser itself cannot take such a URL apart
            self.refuse(HTTPProblem(414, f"the URL is longer than {MAX_URL_BYTES} bytes", code="url_too_long"))
        else:
            self.refuse(HTTPProblem(400, "this is not a valid HTTP request", code="invalid_http"))

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the running response is finished first, then the connection closes
        elif self._excess is not None:
            self.refuse(self._excess)
        elif self._head_bytes:
            problem = HTTPProblem(408, f"no complete request within {HEAD_SECONDS:g} s", code="request_timeout")
            self.refuse(problem)
        else:
            self.transport.close()

    def refuse(self, problem: HTTPProblem) -> None:
        """Take no more requests, answer with an error behind the responses to those that are complete, and close.

        If the response to the request that is refused has begun it is cut off, for a second one cannot be put into it.
        """
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        if self.pipeline and self.pipeline[0][0].more_body:
            cycle, _ = self.pipeline.popleft()
            cycle.scope["state"]["received_body"].release()
        running = self._running
        if running is None or running.response_complete:
            self._send_refusal(problem)
        elif not running.more_body:
            self._refusal = problem
        elif running.response_started:
            self.transport.close()
        else:
            # For the app the client has disconnected; nothing more is sent.
            running.disconnected = True
            running.waiting_for_100_continue = False
            running.message_event.set()
            self._send_refusal(problem)

    def _send_refusal(self, problem: HTTPProblem) -> None:
        """Answer, and close. What the client still sends is dropped for a while first.

        A connection closed with unread data is reset, and the client may never see the answer. Connections beyond the
        limits are not kept for that.
        """
        status = status_of(problem)
        request_id = str(uuid.uuid4())
        body = error_body(problem, self._path(), request_id)
        more = "".join([f"{name.lower()}: {value}\r\n" for name, value in problem.headers.items()])
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{more}"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self._excess is not None:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._head_timer = self.loop.call_later(LEFTOVER_SECONDS, self._on_leftover)

    def _path(self) -> str:
        return without_root(self.url.partition(b"?")[0].decode("latin-1"), self._root_path)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
