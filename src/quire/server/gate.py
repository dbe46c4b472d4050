"""The gate every request passes: request id, size of the head, API key, server state, access log, unexpected errors.

A plain ASGI middleware: Starlette's wrap requests and responses, which costs time per chunk and hides disconnects.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire import logs
from quire.errors import QuireError
from quire.server.access_log import log_access, unlogged_paths
from quire.server.batches.lines import LINE, is_line
from quire.server.context import ServerContext
from quire.server.errors import ErrorResponse, HTTPProblem, retry_headers, shutting_down
from quire.server.limits import ConcurrencySlot, Quota, RateLimitError, set_deadline
from quire.server.paths import ALWAYS_SERVED, CANCEL_PATH, ENGINE_PATHS, UNLIMITED_METHODS, UNLOGGED, route_path
from quire.server.relay import is_relayed

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
MAX_URL = 8192
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32768
HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")  # RFC 3986, section 3.2.2, and a port


class Gate:
    """Wraps an app; `context` is the one that its routes use."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._root_path = context.config.server.path_prefix
        self._unlogged = unlogged_paths(context.config.server.disable_access_log_for, UNLOGGED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        scope["root_path"] = self._root_path
        exchange = _Exchange(scope, send)
        logs.request_id.set(exchange.request_id)
        try:
            await self._admit(scope, receive, exchange)
        except Exception as error:  # the boundary of the request
            if isinstance(error, QuireError):
                problem: QuireError = error
            else:
                logger.exception("request %s failed", exchange.request_id)
                problem = QuireError(str(error))
            if isinstance(problem, RateLimitError):
                self._context.note_rejection("rate_limit")
            if not exchange.status:
                await ErrorResponse(problem)(scope, receive, exchange.send)
        finally:
            if not (exchange.relayed or exchange.is_line):
                self._record(scope, exchange)

    async def _admit(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        context = self._context
        _check_head(scope)
        method, path = scope["method"], route_path(scope)
        if exchange.is_line:  # it counts for the tokens of its key only, and has the time of its batch
            digest = context.keys.check_line(scope["state"][LINE])
        else:
            digest = context.keys_for(method, path).check(method, path, scope["headers"])
        scope["state"]["key_digest"] = digest
        scope["state"]["quota"] = context.keys.quota(digest) if exchange.is_line else None
        if not (exchange.relayed or exchange.is_line):
            exchange.quota = scope["state"]["quota"] = context.keys.quota(digest)
        quota = exchange.quota
        set_deadline(scope, None if exchange.is_line else context.config.server.request_timeout)
        if path in ALWAYS_SERVED:
            await self._app(scope, receive, exchange.send)
            return
        if context.draining:
            context.note_rejection("shutting_down")
            raise shutting_down(close=True)
        await context.models.check_health()
        if context.models.starting:
            context.note_rejection("loading")
            raise HTTPProblem(
                503, "the model is being loaded", code="engine_unavailable", headers=retry_headers(2.0), close=True
            )
        if method == "POST" and path in ENGINE_PATHS:
            context.check_any_room()  # before the body is read: under overload this is what most requests cost
        if quota is None or method in UNLIMITED_METHODS or CANCEL_PATH.fullmatch(path):
            with context.open_request(scope):
                await self._app(scope, receive, exchange.send)
        else:
            async with quota.running() as scope["state"]["slot"]:
                with context.open_request(scope):
                    await self._app(scope, receive, exchange.send)

    def _record(self, scope: Scope, exchange: _Exchange) -> None:
        """Count, log and trace a finished request."""
        seconds = time.perf_counter() - exchange.started
        if self._context.metrics is not None:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
            self._context.metrics.on_http(route, method, exchange.status or 499, seconds)
        if not self._context.config.server.disable_access_log and self._unlogged.isdisjoint(
            (scope["path"], route_path(scope))
        ):
            log_access(self._context.keys, scope, exchange.request_id, exchange.status or 499, seconds)
        if self._context.tracing is not None:
            self._context.tracing.trace(scope, exchange.request_id, exchange.status or 499, seconds)


class _Exchange:
    """One request and its response.

    Attributes:
        request_id: the client's, or a new one. status: once there is one. quota: of its key if it has limits.
        relayed: whether another front has forwarded it, which limits and records it. is_line: whether it is a line of a
            batch, which the batch accounts for.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = time.perf_counter()
        self.status = 0
        self.quota: Quota | None = None
        self.timed = scope["method"] == "POST"
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        valid = len(given) == 1 and REQUEST_ID.fullmatch(given[0])
        self.request_id = given[0].decode() if valid else str(uuid.uuid4())
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = self.request_id
        self.relayed = is_relayed(scope)
        self.is_line = is_line(scope)
        self._send = send

    async def send(self, message: Message) -> None:
        """Pass a message on; the head of the response gets the request id, warnings and the key's limits."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if self.timed and not any(value.startswith(b"text/event-stream") for _, value in message["headers"]):
                milliseconds = 1000 * (time.perf_counter() - self.started)
                message["headers"].append((b"openai-processing-ms", b"%.3f" % milliseconds))
            for field, warning in self._state.get("warnings", {}).items():
                message["headers"].append((b"x-quire-warning", f"{field} {warning}".encode()))
            if self.quota is not None:
                message["headers"] += await self.quota.headers()
        elif not message.get("more_body", False):
            slot: ConcurrencySlot | None = self._state.get("slot")
            if slot is not None and not slot.extended:
                slot.release()  # first: the client may send its next request to another front
        await self._send(message)


def _check_head(scope: Scope) -> None:
    """Raise `HTTPProblem` for another version of HTTP, a bad host, a URL or headers beyond any legitimate size."""
    version = scope["http_version"]
    if version not in ("1.0", "1.1"):
        raise HTTPProblem(400, f"HTTP/{version} is not supported, only 1.0 and 1.1", code="invalid_http", close=True)
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL:
        raise HTTPProblem(414, f"the URL is longer than {MAX_URL} bytes", code="url_too_long", close=True)
    headers = scope["headers"]
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise HTTPProblem(400, "there must be one Host header", code="invalid_http", close=True)
    if hosts and not HOST.fullmatch(hosts[0]):
        raise HTTPProblem(400, "the Host header is not a valid host", code="invalid_http", close=True)
    size = sum([len(name) + len(value) for name, value in headers])
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise HTTPProblem(
            431,
            f"there are more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES} bytes of them",
            code="headers_too_large",
            close=True,
        )
