"""What probes are told, in every state of a server."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.errors import EngineDeadError
from quire.frontend import recovery
from quire.supervisor.systemd import notify, watchdog_seconds
from tests.helpers.fake_engine import FakeClient, FakeEngine, fake_front_model
from tests.helpers.live_server import LiveServer, MakeServer

READY = ("/ready", "/readyz", "/health", "/healthz", "/ping")
ENDLESS = {"model": "fake", "prompt": "ab", "max_tokens": 200, "ignore_eos": True}


class Loading(FakeClient):
    """A client that is ready only when `let` is set; `broken`: then it dies."""

    def __init__(self) -> None:
        super().__init__(FakeEngine(vocab_size=fake_front_model().info.vocab_size))
        self.let = threading.Event()
        self.broken = False

    async def start(self) -> Any:
        while not self.let.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.001)
        if self.broken:
            raise EngineDeadError("killed while it loaded")
        return await super().start()


class Replaceable:
    """A server whose engine is replaced, when `later` lets its successor start."""

    def __init__(self, make_server: MakeServer, **options: Any) -> None:
        self.later = Loading()
        self.server: LiveServer = make_server(llm={"make_client": lambda: self.later}, **options)


def probe(server: LiveServer, path: str, method: str = "GET") -> tuple[int, str]:
    response = server.http.request(method, path)
    if method == "HEAD":
        assert response.content == b""
        return response.status_code, ""
    body = response.json()
    assert set(body) <= {"status", "reason"}
    if response.status_code == 503 and path in ("/ready", "/readyz", "/livez"):
        assert body["reason"]
    return response.status_code, body["status"]


def check(server: LiveServer, ready: tuple[int, str], live: tuple[int, str] = (200, "ok")) -> None:
    for path in READY:
        assert probe(server, path) == ready
        assert probe(server, path, "HEAD")[0] == ready[0]
    assert probe(server, "/ping", "POST") == ready
    assert probe(server, "/livez") == live
    assert probe(server, "/livez", "HEAD")[0] == live[0]


def test_from_loading_to_draining(make_server: MakeServer) -> None:
    server = make_server(start=False)
    check(server, (503, "loading"))
    server.call(server.llm.start)
    check(server, (200, "ok"))
    server.context.draining = True
    check(server, (503, "draining"))


def test_an_engine_that_is_not_replaced(make_server: MakeServer) -> None:
    server = make_server()
    server.do(server.fake_client.die)
    server.wait_until(lambda: server.llm.errored)
    check(server, (503, "dead"), (503, "dead"))


def test_an_engine_that_is_replaced_and_what_comes_meanwhile(make_server: MakeServer) -> None:
    rig = Replaceable(make_server, max_num_queued_reqs=3)
    server = rig.server
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor(3) as pool:
        before = pool.submit(server.http.post, "/v1/completions", json=ENDLESS)
        server.wait_until(lambda: bool(server.engine.live))
        server.do(server.fake_client.die)
        server.wait_until(lambda: server.llm.recovering)
        check(server, (503, "restarting"))
        meanwhile = [pool.submit(server.http.post, "/v1/completions", json=ENDLESS) for _ in range(2)]
        server.wait_until(lambda: server.llm.num_unfinished == 3)
        refused = server.http.post("/v1/completions", json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.http.get("/load").json() == {"server_load": 3}
        rig.later.let.set()
        answers = [item.result(20) for item in (before, *meanwhile)]
    assert [answer.status_code for answer in answers] == [200] * 3
    check(server, (200, "ok"))


def test_an_engine_that_cannot_be_replaced_ends_what_is_open(make_server: MakeServer) -> None:
    rig = Replaceable(make_server, max_engine_restarts=1)
    server = rig.server
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(server.http.post, "/v1/completions", json=ENDLESS)
        server.wait_until(lambda: bool(server.engine.live))
        server.do(server.fake_client.die)
        server.wait_until(lambda: server.llm.recovering)
        rig.later.broken = True
        rig.later.let.set()
        answer = before.result(20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    check(server, (503, "dead"), (503, "dead"))


def test_a_silent_engine(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "WATCH_SECONDS", 0.001)
    server = make_server()
    server.fake_client.stalled = 2.5
    server.wait_until(lambda: server.llm.stalled)
    check(server, (503, "stalled"), (503, "stalled"))
    server.fake_client.stalled = 0.0
    server.wait_until(lambda: not server.llm.stalled)
    check(server, (200, "ok"))


def test_a_silent_engine_that_will_be_replaced(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "WATCH_SECONDS", 0.001)
    server = Replaceable(make_server).server
    server.fake_client.stalled = 2.5
    server.wait_until(lambda: server.llm.stalled)
    check(server, (503, "stalled"))


def test_a_request_that_kills_engines_gets_500_and_nobody_else_does(make_server: MakeServer) -> None:
    engines: list[FakeClient] = []

    def make_client() -> FakeClient:
        engines.append(FakeClient(FakeEngine(vocab_size=fake_front_model().info.vocab_size)))
        engines[-1].engine.killers = killers
        return engines[-1]

    killers: dict[str, int] = {}
    server = make_server(llm={"make_client": make_client})
    server.engine.killers = killers
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.http.post, "/v1/completions", json=ENDLESS) for _ in range(4)]
        server.wait_until(lambda: len(server.engine.live) == 4)
        killers[server.do(lambda: server.engine.live[2])] = 9
        server.do(server.fake_client.resume)
        answers = [item.result(20) for item in asked]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 500]
    [guilty] = [answer for answer in answers if answer.status_code == 500]
    assert guilty.json()["error"]["code"] == "request_killed_engine"
    assert guilty.headers["x-should-retry"] == "false"
    assert server.llm.num_restarts == 3


def test_probes_need_no_key_and_the_load_does(make_server: MakeServer) -> None:
    server = make_server(api_key=["secret"])
    check(server, (200, "ok"))
    assert server.http.get("/load").status_code == 401
    assert server.http.get("/load", headers={"authorization": "Bearer secret"}).json() == {"server_load": 0}
    for path in ("/ready", "/livez", "/health"):
        assert server.http.post(path).status_code == 401
    assert server.http.put("/ping").status_code == 401


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    notify("READY=1")  # nobody is there
    assert watchdog_seconds() is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1")
        assert systemd.recv(100) == b"READY=1"
    notify("STOPPING=1")  # it has gone
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert watchdog_seconds() == 3.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_seconds() is None
