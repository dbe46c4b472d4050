"""Streams of bytes that are nearly HTTP: whatever arrives, the server lives, answers probes and keeps no memory of it.

    pytest -m slow -s tests/robustness/test_wire_fuzz.py          # QUIRE_FUZZ_STREAMS=20000

Each stream has one to four requests, with trailers, chunk extensions, upgrades and pipelining among them, some of its
bytes changed, and is sent in pieces on a connection of its own, whose sending half may be closed early. Most requests
are refused; those that stay whole are answered. What is measured beside it is printed: it depends on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.helpers.server import Server, serve
from tests.robustness.test_soak import processes

STREAMS = int(os.environ.get("QUIRE_FUZZ_STREAMS", "20000"))
AT_ONCE = 100
MAX_GROWTH = 50 * 2**20
HANGS = 30.0  # seconds after which a connection must have ended; a head may take 10, a body 20 without a byte
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

BODY = json.dumps({"model": "quire-demo", "prompt": "Once", "max_tokens": 2}).encode()
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
CHUNKS = b"".join([b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])]) + b"0\r\n"
REQUESTS = [
    b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    b"DELETE /v1/responses/resp_1 HTTP/1.1\r\n" + HOST + b"X-Request-Id: a\r\n\r\n",
    *[
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + more + body
        for more in (b"", UPGRADE, b"Expect: 100-continue\r\n", b"Connection: close\r\n")
        for body in (
            b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
            b"Content-Length: %d\r\n\r\n" % (len(BODY) + 70_000) + BODY + b" " * 70_000,
            b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS + b"\r\n",
            b"Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n" + CHUNKS + b"X: 1\r\nContent-Length: 5\r\n\r\n",
        )
    ],
]
PIECES = [b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"\xff", b"{", b"[", b'"', b"chunked", b"0"]
PIECES += [b"-1", b"99999999999999999999", b"HTTP/1.1", b"HTTP/0.9", b"\r\n\r\n", b"Host: y\r\n", b"\r\n ", b"%00"]
PIECES += [b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Upgrade: websocket\r\n", b"fffffffe\r\n"]


def stream(rng: random.Random) -> bytes:
    """Return some requests, changed in a few places or none."""
    data = bytearray(b"".join(rng.choices(REQUESTS, k=rng.randint(1, 4))))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 1, 2, 8, 64)))
        change = rng.randrange(5)
        if change == 0:
            data[at:end] = rng.choice(PIECES)
        elif change == 1:
            del data[at:end]
        elif change == 2:
            data[at:at] = data[at:end] * rng.choice((1, 2, 500))
        elif change == 3:
            data[at:end] = rng.randbytes(end - at)
        else:
            other = rng.choice(REQUESTS)
            data[at:at] = other[rng.randrange(len(other)) :]
    return bytes(data)


async def send(address: tuple[str, int], rng: random.Random) -> tuple[float, list[bytes]]:
    """Send one stream, and return how long its connection lived [s] and the statuses that came back."""
    data = stream(rng)
    started = time.monotonic()
    reader, writer = await asyncio.open_connection(*address)
    answer = b""
    with contextlib.suppress(OSError):
        for _ in range(rng.choice((0, 0, 0, 1, 5))):
            cut = rng.randrange(len(data) + 1)
            writer.write(data[:cut])
            data = data[cut:]
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(data)
        await writer.drain()
        if rng.random() < 0.97:  # else the server has to end it
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(2**20), HANGS)
        while more := await asyncio.wait_for(reader.read(2**20), HANGS):
            answer += more
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return time.monotonic() - started, STATUS.findall(answer)


async def probe(address: tuple[str, int], times: list[float], done: asyncio.Event) -> None:
    """Note how long /livez takes [s], again and again."""
    while not done.is_set():
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        times.append(time.perf_counter() - started)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        await asyncio.sleep(0.02)


async def attack(server: Server, count: int, seed: int) -> tuple[list[float], list[bytes]]:
    """Send `count` streams; return the times of probes beside them and the statuses of all responses."""
    url = urlsplit(server.url)
    address = (str(url.hostname), int(url.port or 0))
    statuses: list[bytes] = []
    probes: list[float] = []
    done = asyncio.Event()
    probing = asyncio.create_task(probe(address, probes, done))
    left = iter(range(count))

    async def work() -> None:
        for number in left:
            try:
                seconds, found = await send(address, random.Random(f"{seed} {number}"))
            except Exception as error:
                raise AssertionError(f"stream {number}, seed {seed}") from error
            assert seconds < HANGS, f"stream {number}, seed {seed}"
            statuses.extend(found)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    done.set()
    await probing
    return probes, statuses


def resident(server: Server) -> int:
    """Return the memory of the server's process, without the engine's [bytes]."""
    return int(psutil.Process(server.process.pid).memory_info().rss)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_streams_that_are_nearly_http(tmp_path: Path) -> None:
    with serve(tmp_path / "log", "--num-gpu-blocks-override", "256", "--timeout-keep-alive", "1") as server:
        asyncio.run(attack(server, max(STREAMS // 10, 100), 0))  # caches fill
        alive, before = [item.pid for item in processes(server)], resident(server)
        started = time.monotonic()
        probes, statuses = asyncio.run(attack(server, STREAMS, 1))
        probes.sort()
        counts = {status.decode(): statuses.count(status) for status in sorted(set(statuses))}
        growth, seconds = resident(server) - before, time.monotonic() - started
        median, p99, longest = (1000 * probes[int(part * (len(probes) - 1))] for part in (0.5, 0.99, 1))
        print(f"{STREAMS} streams in {seconds:.0f} s; statuses {counts}; memory {growth / 2**20:+.1f} MiB")
        print(f"/livez beside them: median {median:.1f} ms, p99 {p99:.1f} ms, longest {longest:.1f} ms")
        assert [item.pid for item in processes(server)] == alive
        assert growth < MAX_GROWTH
        assert not [status for status in counts if status[0] == "5"]
        assert server.post("/v1/completions", json.loads(BODY))[0] == 200
        assert "Traceback" not in (tmp_path / "log").read_text()
