"""Table G: what is wrong with the bytes of a connection. On raw sockets; each answer is followed by the canary."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from dataclasses import dataclass

import pytest

from quire.server import http, parsing
from tests.helpers.live_server import LiveServer
from tests.robustness.rows.row import CANARY, check_discreet, check_unharmed

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What is sent and what must come back: a status and a code, and then the end of the connection."""

    name: str
    what: str
    data: bytes
    status: int = 400
    code: str = "invalid_http"


ROWS = [
    Bytes(name="G1a", what="garbage", data=b"\x00\x01\x02garbage\r\n\r\n"),
    Bytes(name="G1b", what="the first bytes of TLS", data=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    Bytes(name="G2", what="no Host", data=b"GET /health HTTP/1.1\r\n\r\n"),
    Bytes(
        name="G3",
        what="a length and chunks",
        data=POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    Bytes(name="G4", what="two lengths", data=POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    Bytes(name="G5", what="a negative length", data=POST + b"Content-Length: -1\r\n\r\n"),
    Bytes(name="G6", what="a chunk of size ZZ", data=POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n"),
    Bytes(
        name="G9",
        what="a header of 100 KB",
        data=GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        status=431,
        code="headers_too_large",
    ),
    Bytes(
        name="G9b",
        what="a header of 40 KB",
        data=GET + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
        status=431,
        code="headers_too_large",
    ),
    Bytes(
        name="G10", what="1000 headers", data=GET + b"X: 1\r\n" * 1000 + b"\r\n", status=431, code="headers_too_large"
    ),
    Bytes(
        name="G11",
        what="a header of 8 MB without an end",
        data=GET + b"X: " + b"a" * (8 << 20),
        status=431,
        code="headers_too_large",
    ),
    Bytes(
        name="G12a",
        what="a URL of 100 KB",
        data=b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        status=414,
        code="url_too_long",
    ),
    Bytes(
        name="G12b",
        what="a URL of 9 KB",
        data=b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        status=414,
        code="url_too_long",
    ),
    Bytes(name="G16", what="the beginning of HTTP/2", data=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Bytes(name="G17", what="a header in a header", data=GET + b"X: a\nEvil: 1\x00\r\n\r\n"),
    Bytes(name="G17b", what="a blank in a header's name", data=GET + b"Evil : 1\r\n\r\n"),
]
OTHERS = {"G7", "G8", "G13", "G14", "G15"}  # below, one by one


def exchange(server: LiveServer, data: bytes) -> bytes:
    """Send bytes and return what comes back; who sends much must read meanwhile, or only sees the reset."""
    with server.connect() as connection:
        received: list[bytes] = []

        def read() -> None:
            with contextlib.suppress(ConnectionResetError):
                while chunk := connection.recv(65536):
                    received.append(chunk)

        reader = threading.Thread(target=read)
        reader.start()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
        reader.join()
    return b"".join(received)


def check_refused(answer: bytes, status: int, code: str) -> None:
    """Check an error, of which the connection has been closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    lines = head.lower().split(b"\r\n")
    assert b"content-type: application/json" in lines
    assert b"connection: close" in lines
    assert any(re.fullmatch(rb"x-request-id: [a-z0-9-]{36}", line) for line in lines)
    check_discreet(body)
    error = json.loads(body)["error"]
    message = error.pop("message")
    assert message and message.isprintable()
    assert error == {"type": "invalid_request_error", "param": None, "code": code}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.what}")
def test_table_g_connections(server: LiveServer, sung: str, row: Bytes) -> None:
    check_refused(exchange(server, row.data), row.status, row.code)
    check_unharmed(server, sung)


def test_no_row_is_missing() -> None:
    numbers = {row.name.rstrip("ab") for row in ROWS} | OTHERS
    assert numbers == {f"G{number}" for number in range(1, 18)}


def test_g7_a_body_that_never_comes(server: LiveServer, sung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsing.BODY_SECONDS <= 20
    monkeypatch.setattr(parsing, "BODY_SECONDS", 0.05)
    check_refused(server.raw(POST + b"Content-Length: 100\r\n\r\n{}"), 408, "request_timeout")
    check_unharmed(server, sung)


def test_g8_a_client_that_stops_sending_in_its_body(server: LiveServer, sung: str) -> None:
    assert server.raw(POST + b"Content-Length: 100\r\n\r\n{}", shut=True) == b""
    check_unharmed(server, sung)


def test_g13_a_head_that_never_ends(server: LiveServer, sung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.HEAD_SECONDS <= 10
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    check_refused(server.raw(GET), 408, "request_timeout")
    check_unharmed(server, sung)


def test_g14_three_requests_at_once_are_answered_in_order(server: LiveServer, sung: str) -> None:
    heads = [GET + b"X-Request-Id: r%d\r\n" % number for number in range(3)]
    answer = server.raw(b"\r\n".join(heads) + b"Connection: close\r\n\r\n")
    assert re.findall(rb"x-request-id: (r\d)", answer) == [b"r0", b"r1", b"r2"]
    assert answer.count(b"HTTP/1.1 200 ") == 3
    check_unharmed(server, sung)


@pytest.mark.parametrize("sends", [True, False], ids=["and sends it", "and does not"])
def test_g15_who_waits_to_be_asked_for_the_body(
    server: LiveServer, sung: str, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    body = json.dumps(CANARY).encode()
    head = POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    if not sends:
        monkeypatch.setattr(parsing, "BODY_SECONDS", 0.05)
    with server.connect() as connection:
        connection.sendall(head)
        asked = connection.recv(25)
        assert asked == b"HTTP/1.1 100 Continue\r\n\r\n"
        if sends:
            connection.sendall(body)
        answer = read_all(connection)
    if sends:
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == sung
    else:
        check_refused(answer, 408, "request_timeout")
    check_unharmed(server, sung)


def read_all(connection: socket.socket) -> bytes:
    chunks = []
    while chunk := connection.recv(65536):
        chunks.append(chunk)
    return b"".join(chunks)
