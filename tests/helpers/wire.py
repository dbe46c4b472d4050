"""Streams of bytes that are nearly HTTP, and a client that sends them over sockets of its own and waits for the end.

Each stream has some requests, with trailers, chunk extensions, upgrades and other oddities among them, most of them
changed in a few bytes. They are pipelined, sent in pieces, and the connection ends in one of the ways of `ENDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import re
import ssl
import time
from dataclasses import dataclass, field

QUIET = 0.15  # seconds without a byte after which a client that waits for answers ends its half
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
# How a connection ends, and how often: the client waits for answers first, ends its half at once, breaks off, or leaves
# the end to the server, whose limits of time apply then.
ENDS = {"waits": 70, "half-closes": 22, "aborts": 6, "stays": 2}

BODY = json.dumps({"model": "quire-demo", "prompt": "Once", "max_tokens": 1}).encode()
CHAT = json.dumps(
    {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": "a \\u00e9"}, {"role": "assistant", "content": None}],
        "temperature": 1e400,
        "logit_bias": {"5": -1.5},
        "stop": ["a", "b"],
    }
).encode()
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
CHUNKS = b"".join([b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])]) + b"0\r\n"
# What ends a connection, so that nothing behind it is read.
LAST = [
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\n"
    + HOST
    + JSON
    + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    + BODY,
]
# Refused or answered without the engine, most of them.
CHEAP = [
    b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET http://localhost/v1/models/none?a=%00 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"HEAD /health HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"Origin: http://a\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    b"DELETE /v1/responses/resp_1 HTTP/1.1\r\n" + HOST + b"X-Request-Id: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n"
    + HOST
    + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: a\r\n\r\n",
    b"POST /ping HTTP/1.1\r\n" + HOST + b"Authorization: Bearer a\r\nContent-Length: 0\r\n\r\n",
    *[
        b"POST %b HTTP/1.1\r\n" % path + HOST + JSON + b"Content-Length: %d\r\n\r\n" % len(CHAT) + CHAT
        for path in (b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/api/chat", b"/tokenize")
    ],
]
COMPLETIONS = [
    POST + more + body
    for more in (b"", UPGRADE, b"Expect: 100-continue\r\n", b"X-Request-Timeout: 9\r\n")
    for body in (
        b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
        b"Content-Length: %d\r\n\r\n" % (len(BODY) + 9_000) + BODY + b" " * 9_000,
        b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS + b"\r\n",
        b"Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n" + CHUNKS + b"X: 1\r\nContent-Length: 5\r\n\r\n",
    )
]
PIECES = [b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"\xff", b"{", b"[", b'"', b"chunked", b"0"]
PIECES += [b"-1", b"99999999999999999999", b"HTTP/1.1", b"HTTP/0.9", b"\r\n\r\n", b"Host: y\r\n", b"\r\n ", b"%00"]
PIECES += [b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Upgrade: websocket\r\n", b"fffffffe\r\n"]
VISIBLE = bytes(range(33, 127))
VALUES = re.compile(rb"(?<= )\S+(?= HTTP/)|(?<=: )(?!\d+\r|chunked)[^\r]+")


@dataclass
class Outcome:
    """What became of streams: requests that were changed, statuses, and the longest wait for an end that is due [s]."""

    num_changed: int = 0
    longest: float = 0.0
    statuses: list[bytes] = field(default_factory=list)


def change(rng: random.Random, request: bytes) -> bytes:
    """Return a request with some bytes changed, anywhere."""
    data = bytearray(request)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 1, 2, 8, 64)))
        kind = rng.randrange(5)
        if kind == 0:
            data[at:end] = rng.choice(PIECES)
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end] * rng.choice((1, 2, 2, 500))
        elif kind == 3:
            data[at:end] = rng.randbytes(end - at)
        else:
            other = rng.choice(COMPLETIONS)
            data[at:at] = other[rng.randrange(len(other)) :]
    return bytes(data)


@functools.cache
def values_in(request: bytes) -> list[int]:
    """Return the places of a request's URL, of its headers' values, lengths aside, and of its body."""
    head, _, _ = request.partition(b"\r\n\r\n")
    found = [place for match in VALUES.finditer(head) for place in range(*match.span())]
    return found + list(range(len(head) + 4, len(request)))


def change_mildly(rng: random.Random, request: bytes) -> bytes:
    """Return a request with some visible bytes of values replaced: mostly the next one is still read."""
    data = bytearray(request)
    places = values_in(request)
    for at in rng.choices(places, k=rng.choice((1, 1, 2, 4))) if places else ():
        if data[at] in VISIBLE:
            data[at] = rng.choice(VISIBLE)
    return bytes(data)


def stream(rng: random.Random) -> tuple[bytes, int]:
    """Return one to eight requests, and how many of them have been changed. Most of those before the last mildly."""
    parts, num_changed = [], 0
    count = rng.randint(1, 8)
    for number in range(count):
        last = number == count - 1
        request = rng.choice(CHEAP if rng.random() < 0.7 else [*COMPLETIONS, *LAST] if last else COMPLETIONS)
        if rng.random() < 0.95:
            wild = last or rng.random() < 0.1
            changed = (change if wild else change_mildly)(rng, request)
            num_changed += changed != request
            request = changed
        parts.append(request)
    return b"".join(parts), num_changed


async def send(address: tuple[str, int], rng: random.Random, tls: ssl.SSLContext | None, patience: float) -> Outcome:
    """Send one stream and wait for the end of its connection.

    Args:
        patience: seconds that the server may take to end a connection if the client does not.

    Raises:
        TimeoutError: it did not end by then.
    """
    data, num_changed = stream(rng)
    outcome = Outcome(num_changed)
    [end] = rng.choices(list(ENDS), list(ENDS.values()))
    reader, writer = await asyncio.open_connection(*address, ssl=tls)
    answer = b""
    ended = 0.0
    with contextlib.suppress(OSError):
        async with asyncio.timeout(patience):
            for _ in range(rng.choice((0, 0, 0, 1, 5))):
                cut = rng.randrange(len(data) + 1)
                writer.write(data[:cut])
                data = data[cut:]
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(data)
            await writer.drain()
            if end == "waits":
                with contextlib.suppress(TimeoutError):
                    while more := await asyncio.wait_for(reader.read(2**20), QUIET):
                        answer += more
            if end == "aborts" or (end != "stays" and not writer.can_write_eof()):
                writer.transport.abort()
            elif end != "stays" and not reader.at_eof():
                ended = time.monotonic()
                writer.write_eof()
            while more := await reader.read(2**20):
                answer += more
    if ended:
        outcome.longest = time.monotonic() - ended
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    outcome.statuses = STATUS.findall(answer)
    return outcome
