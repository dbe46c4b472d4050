"""Requests that are nearly HTTP: whatever arrives, the server lives, answers probes and keeps no memory of it.

    pytest -m slow -s tests/robustness/test_wire_fuzz.py          # QUIRE_FUZZ_REQUESTS=1000000

The streams of `tests/helpers/wire.py`, each a function of its number and the seed; over TLS a twentieth of them. Most
requests are refused; those that stay whole are answered. Times need a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import shutil
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.helpers.faults import show
from tests.helpers.prober import probing
from tests.helpers.server import Server, serve
from tests.helpers.wire import BODY, Outcome, send
from tests.robustness.test_soak import processes
from tests.server.test_tls import certify

REQUESTS = int(os.environ.get("QUIRE_FUZZ_REQUESTS", "100000"))
AT_ONCE = 64
MAX_GROWTH = 50 * 2**20
MAX_SECONDS = 1.0  # from the end of what a client sends to the end of its connection
# Until the server ends a connection whose client does not: a head may take 10 s, a body 20 s without a byte.
PATIENCE = 40.0
REFUSED = {b"503"}  # more than 128 requests wait on a connection, or there are too many


async def attack(server: Server, count: int, seed: int) -> tuple[Outcome, float]:
    """Send streams until `count` changed requests are among them; return the seconds until they were, too."""
    url = urlsplit(server.url)
    address = (str(url.hostname), int(url.port or 0))
    tls = ssl._create_unverified_context() if url.scheme == "https" else None
    total = Outcome()
    number = 0
    started = time.monotonic()
    seconds = 0.0

    async def work() -> None:
        nonlocal number, seconds
        while total.num_changed < count:
            number, mine = number + 1, number
            try:
                found = await send(address, random.Random(f"{seed} {mine}"), tls, PATIENCE)
            except Exception as error:
                raise AssertionError(f"stream {mine}, seed {seed}") from error
            assert found.longest < MAX_SECONDS, f"stream {mine}, seed {seed}: no end for {found.longest:.1f} s"
            total.num_changed += found.num_changed
            total.longest = max(total.longest, found.longest)
            total.statuses += found.statuses
        seconds = seconds or time.monotonic() - started  # not until the last connection has been closed

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work())
    return total, seconds


def attack_aside(server: Server, count: int, seed: int) -> tuple[Outcome, float]:
    """Return `attack()`, which runs in a thread that lets other threads and processes go first."""
    outcomes: list[tuple[Outcome, float]] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        outcomes.append(asyncio.run(attack(server, count, seed)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcomes, "the attack failed"
    return outcomes[0]


def resident(server: Server) -> int:
    """Return the memory of all processes of a server [bytes]."""
    return sum(process.memory_info().rss for process in processes(server))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_requests_that_are_nearly_http(tmp_path: Path, scheme: str) -> None:
    count = REQUESTS
    options = ["--num-gpu-blocks-override", "256", "--timeout-keep-alive", "1", "--disable-access-log"]
    if scheme == "https":
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made by openssl")
        cert, key = certify(tmp_path / "tls", "localhost")
        options += ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
        count //= 20
    with serve(tmp_path / "log", *options) as server:
        attack_aside(server, max(count // 20, 500), 0)  # caches fill
        alive, before = [item.pid for item in processes(server)], resident(server)
        with probing(server.url) as probes:
            outcome, seconds = attack_aside(server, count, 1)
        growth = resident(server) - before
        statuses = collections.Counter(outcome.statuses)
        rows = [
            ("changed requests", "seconds", "responses", "longest end [s]", "memory [MiB]"),
            (outcome.num_changed, seconds, len(outcome.statuses), outcome.longest, growth / 2**20),
        ]
        show("", [(*rows[0], "/livez [ms] median", "p99", "longest"), (*rows[1], *probes)])
        print("  statuses:", {status.decode(): number for status, number in sorted(statuses.items())})
        assert [item.pid for item in processes(server)] == alive
        assert growth < MAX_GROWTH
        assert not [status for status in statuses if status[:1] == b"5" and status not in REFUSED]
        assert server.post("/v1/completions", json.loads(BODY))[0] == 200
        assert "Traceback" not in (tmp_path / "log").read_text()
