"""`CrossOrigin`: lets web pages of certain origins use the server from a browser. There only where the options say so.

Around the gate, so that a preflight, which browsers send without a key, is answered here; nothing else is.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import ErrorResponse, HTTPProblem
from quire.server_config import ServerConfig

METHODS = ("GET", "POST", "DELETE")
MAX_AGE = "600"
# What scripts may read of an answer, besides what they may read of any.
EXPOSED = ", ".join(
    [
        "X-Request-Id",
        "Retry-After",
        "Retry-After-Ms",
        *[f"X-RateLimit-{part}-{what}" for part in ("Limit", "Remaining", "Reset") for what in ("Requests", "Tokens")],
    ]
)


class CrossOrigin:
    """Wraps an app; `server` has the options."""

    def __init__(self, app: ASGIApp, server: ServerConfig) -> None:
        self._app = app
        self._root_path = server.path_prefix
        self._origins = frozenset(server.allowed_origins)
        self._methods = tuple(method.upper() for method in server.allowed_methods) or METHODS
        self._headers = frozenset(header.lower() for header in server.allowed_headers)
        self._credentials = server.allow_credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            scope["root_path"] = self._root_path
            await self._preflight(origin, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, self._with_headers(origin, send))

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _preflight(self, origin: str, headers: Headers) -> Response:
        method = headers["access-control-request-method"]
        requested = headers.get("access-control-request-headers", "")
        names = [name.strip().lower() for name in requested.split(",") if name.strip()]
        refused = None
        if not self._allows(origin):
            refused = "this origin"
        elif "*" not in self._methods and method.upper() not in self._methods:
            refused = "this method"
        elif self._headers and "*" not in self._headers and not self._headers.issuperset(names):
            refused = "one of these headers"
        if refused is not None:
            return ErrorResponse(HTTPProblem(403, f"{refused} may not be used from a browser", code="not_allowed"))
        answer = {
            **self._common(origin),
            "Access-Control-Allow-Methods": method if "*" in self._methods else ", ".join(self._methods),
            "Access-Control-Max-Age": MAX_AGE,
        }
        if names:
            answer["Access-Control-Allow-Headers"] = ", ".join(names)
        return Response(status_code=204, headers=answer)

    def _common(self, origin: str) -> dict[str, str]:
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*"}
        answer = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        return {**answer, "Access-Control-Allow-Credentials": "true"} if self._credentials else answer

    def _with_headers(self, origin: str, send: Send) -> Send:
        if not self._allows(origin):
            return send
        common = {**self._common(origin), "Access-Control-Expose-Headers": EXPOSED}
        added = [(name.lower().encode(), value.encode("latin-1")) for name, value in common.items()]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        return sending
