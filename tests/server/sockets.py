"""HTTP on raw sockets: requests as bytes, and what is read of their answers."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from typing import Any

from tests.helpers.live_server import LiveServer
from tests.server.checks import COMPLETIONS, LEAKS

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"
ENDLESS = {"model": "fake", "prompt": "ab", "max_tokens": 200, "ignore_eos": True}
CANARY = {"model": "fake", "prompt": "canary", "max_tokens": 8, "seed": 7}


def request_bytes(path: str, body: dict[str, Any], headers: str = "") -> bytes:
    """Return a POST of an object."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Return what comes, up to where the mark has been seen."""
    data = b""
    while mark not in data:
        chunk = connection.recv(65536)
        assert chunk, data
        data += chunk
    return data


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


def exchange(server: LiveServer, data: bytes) -> bytes:
    """Send bytes and return what comes back; reads meanwhile, as who sends much else only sees the reset."""
    received: list[bytes] = []
    with server.connect() as connection:
        reader = threading.Thread(target=lambda: received.append(read_all(connection)))
        reader.start()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
        reader.join()
    return received[0]


def status_of(answer: bytes) -> int:
    """Return the status of an answer."""
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer.split()[1])


def check_cut_off(answer: bytes, status: int, code: str) -> None:
    """Check an error behind which the connection was closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(answer) == status, answer[:200]
    lines = head.lower().split(b"\r\n")
    assert b"content-type: application/json" in lines
    assert b"connection: close" in lines
    assert any(re.fullmatch(rb"x-request-id: [a-z0-9-]{36}", line) for line in lines)
    assert len(body) <= 4096
    assert not LEAKS.search(body.decode()), body
    error = json.loads(body)["error"]
    message = error.pop("message")
    assert message and message.isprintable()
    kind = "invalid_request_error" if status < 500 else "server_error"
    assert error == {"type": kind, "param": None, "code": code}


def idle(server: LiveServer) -> bool:
    """Whether nothing is left of any request."""
    return not server.engine.live and server.llm.num_unfinished == 0 and server.context.num_open == 0


def sing(server: LiveServer) -> str:
    """Return the text of a good request, which is the same whatever happened before."""
    response = server.http.post(COMPLETIONS, json=CANARY)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])
