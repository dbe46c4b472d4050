"""Probes: the paths that load balancers and supervisors of processes ask for, and answers to them without a front."""

from __future__ import annotations

import json
import re

PROBES = frozenset({"/health", "/healthz", "/livez", "/ping", "/ready", "/readyz"})
RESERVED_PATHS = PROBES | {"/metrics"}  # for which some connections are reserved
EXPLAINED = frozenset({"/livez", "/ready", "/readyz"})

LOADING, STALLED, RESTARTING, DRAINING = "loading", "stalled", "restarting", "draining"
REASONS = {
    LOADING: "the model is being loaded",
    STALLED: "the process that serves HTTP does not react",
    RESTARTING: "the process that serves HTTP has died and is being replaced",
    DRAINING: "the server is shutting down",
}
REQUEST_LINE = re.compile(rb"(GET|HEAD|POST) ([!-~]{1,2048}) HTTP/1\.[01]\r?\n")
MAX_REQUEST_LINE = 4096


def without_root(path: str, root_path: str) -> str:
    """Return a path without `root_path`, which a proxy in front may strip or leave; it has no slash at its end."""
    return path.removeprefix(root_path) if path.startswith(root_path + "/") else path


class ProbeAnswers:
    """Answers requests, by their request lines, while no front can.

    Args:
        root_path: the prefix that a proxy may leave before paths.
    """

    def __init__(self, root_path: str) -> None:
        self._root_path = root_path

    def answer(self, data: bytes, status: str, *, probes_only: bool) -> bytes | None:
        """Return the response to a request of which `data` has arrived, or None if there is nothing to answer yet.

        Args:
            status: why there is no front; a key of `REASONS`. probes_only: whether other requests can wait.
        """
        found = REQUEST_LINE.match(data)
        path = "" if found is None else without_root(found[2].partition(b"?")[0].decode("ascii"), self._root_path)
        if found is not None and path in RESERVED_PATHS:
            alive = path == "/livez" and status in (LOADING, DRAINING)
            body: dict[str, object] = {"status": "ok" if alive else status}
            if path in EXPLAINED and not alive:
                body["reason"] = REASONS[status]
            return _response(200 if alive else 503, body, head=found[1] == b"HEAD")
        if probes_only or not data:
            return None
        error = {"message": REASONS[status], "type": "server_error", "param": None, "code": "engine_unavailable"}
        return _response(503, {"error": error}, head=data.startswith(b"HEAD "))


def _response(status: int, body: dict[str, object], *, head: bool) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    phrase = "OK" if status == 200 else "Service Unavailable"
    retry = "" if status == 200 else "retry-after: 1\r\n"
    lines = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n{retry}content-length: {len(content)}\r\n"
    return f"{lines}connection: close\r\n\r\n".encode() + (b"" if head else content)
