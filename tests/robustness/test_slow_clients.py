"""A real server beside clients that hold connections: heads that never end, streams that nobody reads."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server import Server, serve

pytestmark = pytest.mark.slow

HALF_OPEN, DEAF = 2000, 200
CANARY = {"model": "quire-demo", "prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8192:
        pytest.skip("needs 8192 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8192), hard))
    with serve(
        tmp_path_factory.mktemp("log") / "log", "--max-num-queued-reqs", "512", "--max-connections-per-address", "8192"
    ) as server:
        yield server
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def address(server: Server) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def connect(server: Server, room: int | None = None) -> socket.socket:
    """Return a connection, with little room for what comes if `room` is given."""
    made = socket.socket()
    if room is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    made.settimeout(60)
    made.connect(address(server))
    return made


def memory(server: Server) -> int:
    """Return the server's resident memory [bytes]."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


def canary(server: Server, count: int = 100) -> list[float]:
    """Return how long some small requests take [s], in order of length."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        assert server.post("/v1/completions", CANARY)[0] == 200
        times.append(time.perf_counter() - started)
    return sorted(times)


def stream(max_tokens: int) -> bytes:
    body = {"model": "quire-demo", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "logprobs": 5}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def test_half_open_connections_and_deaf_readers_disturb_nobody(served: Server) -> None:
    canary(served, 20)
    alone = canary(served)
    before = memory(served)
    with contextlib.ExitStack() as stack:
        for _ in range(DEAF):
            stack.enter_context(connect(served, 1024)).sendall(stream(300))
        while served.metric("vllm:num_requests_running") > 0:  # they have all that they will not read
            time.sleep(0.1)
        grown = (memory(served) - before) / DEAF
        half_open = []
        started = time.monotonic()
        for _ in range(HALF_OPEN):
            half_open.append(stack.enter_context(connect(served)))
            half_open[-1].sendall(b"GET /health HTTP/1.1\r\nHo")
        opened = time.monotonic()
        beside = canary(served)
        for connection in half_open:
            assert b" 408 " in connection.recv(4096)
        closed = time.monotonic()
    p99 = [times[-2] for times in (alone, beside)]
    print(f"canary p99 alone {1000 * p99[0]:.1f} ms, beside them {1000 * p99[1]:.1f} ms")
    print(f"half-open ones opened in {opened - started:.1f} s, all closed {closed - opened:.1f} s after that")
    print(f"memory {grown / 1024:.0f} KiB for each deaf stream")
    assert grown < 2**20
    assert served.get("/health")[0] == 200
    while served.metric("quire:http_requests_open") > 0:
        time.sleep(0.1)


def test_no_more_is_read_than_the_limit(served: Server) -> None:
    sent = {}
    for name, head, chunk in (
        ("body", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n", b" " * 65536),
        ("header", b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", b"a" * 65536),
        ("URL", b"GET /", b"a" * 65536),
    ):
        with connect(served) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            if name == "body":
                head += b"Transfer-Encoding: chunked\r\n\r\n7000000\r\n"
            connection.sendall(head)
            sent[name] = 0
            answer = b""
            connection.setblocking(False)
            give_up = time.monotonic() + 30
            while not answer and time.monotonic() < give_up:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    answer = connection.recv(65536)
                with contextlib.suppress(BlockingIOError):
                    try:
                        sent[name] += connection.send(chunk)
                    except ConnectionError:
                        break
            wanted = {"body": b" 413 ", "header": b" 431 ", "URL": b" 414 "}[name]
            assert not answer or wanted in answer[:20], answer[:200]
    print(f"bytes sent before the answer: {sent}")
    for name, most in (("body", 8 * 2**20 + 8 * 2**20), ("header", 2**17), ("URL", 2**17)):
        assert sent[name] < most + 2**22, "what lies in the kernel's buffers is not read by the server"


def test_out_of_files_the_server_recovers(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(serve(tmp_path / "log"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1024), hard))
            with contextlib.ExitStack() as held:
                for _ in range(200):
                    held.enter_context(connect(server))
                answers = 0
                for _ in range(20):
                    with contextlib.suppress(OSError), connect(server) as connection:
                        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                        answers += b" 503 " in connection.recv(4096)
                print(f"{answers} of 20 further connections were told why")
            give_up = time.monotonic() + 30
            while time.monotonic() < give_up:
                with contextlib.suppress(OSError):
                    if server.post("/v1/completions", CANARY)[0] == 200:
                        break
            assert server.post("/v1/completions", CANARY)[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
