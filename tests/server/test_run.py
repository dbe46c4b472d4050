"""The life of a server process: what it prints, how it stops, with which exit code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import AddressInUseError, ConfigError
from quire.server.listen import bind, url_of

ROOT = Path(__file__).resolve().parents[2]
BODY = {"model": "fake", "prompt": "ab", "max_tokens": 5}


class Process:
    """A server process; `url` is known once it listens."""

    def __init__(self, mode: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.server.serve_fake", json.dumps({"port": 0, **options}), mode]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        self.url = line.strip().removeprefix("listening url=") if line else ""

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        code = self.process.wait(20)
        self._reader.join(10)
        return code

    def wait_for_status(self, status: str) -> None:
        while httpx.get(f"{self.url}/health", timeout=10).json() != {"status": status}:
            pass

    def wait_for_open(self, count: int) -> None:
        """Wait until so many requests are being worked on."""
        while f"quire:http_requests_open {count:.1f}" not in httpx.get(f"{self.url}/metrics", timeout=10).text:
            pass


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(mode: str = "ok", **options: Any) -> Process:
        made.append(Process(mode, **options))
        return made[-1]

    yield make
    for item in made:
        if item.process.poll() is None:
            item.process.kill()
        item.process.wait(10)
        for pipe in (item.process.stdout, item.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_serves_and_stops_with_0(start: Callable[..., Process], number: int) -> None:
    server = start()
    assert server.url.startswith("http://127.0.0.1:")
    assert server.line() == f"ready url={server.url} model=fake"
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"x-request-id": "mine"}, timeout=20)
    assert answer.status_code == 200
    server.signal(number)
    assert server.end() == 0
    access = [line for line in server.errors if "quire.access" in line]
    assert len(access) == 1
    assert "127.0.0.1 POST /v1/completions 200" in access[0]
    assert "mine" in access[0]
    assert not [line for line in server.errors if "Traceback" in line or "ERROR" in line]


def test_running_requests_end_before_the_server_does(start: Callable[..., Process]) -> None:
    server = start("paced", shutdown_timeout=60)
    server.line()
    body = {**BODY, "max_tokens": 30, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        bodies = (body, {**body, "stream": True})
        answers = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=20) for body in bodies]
        server.wait_for_open(2)
        server.signal(signal.SIGTERM)
        for answer in answers:
            assert answer.result(20).status_code == 200
            assert '"finish_reason":"length"' in answer.result(20).text
    assert server.end() == 0


def test_requests_that_take_too_long_are_aborted(start: Callable[..., Process]) -> None:
    server = start("held", shutdown_timeout=0.1)
    server.line()
    with ThreadPoolExecutor(2) as pool:
        bodies = (BODY, {**BODY, "stream": True})
        waiting = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=20) for body in bodies]
        server.wait_for_open(2)
        server.signal(signal.SIGTERM)
        for item in waiting:
            assert item.result(20).status_code == 503
            assert item.result(20).json()["error"]["code"] == "server_shutting_down"
    assert server.end() == 0


def test_a_second_signal_does_not_wait(start: Callable[..., Process]) -> None:
    server = start("held", shutdown_timeout=3600)
    server.line()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=20)
        server.wait_for_open(1)
        server.signal(signal.SIGTERM)
        server.wait_for_status("draining")
        refused = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
        server.signal(signal.SIGTERM)
        assert waiting.result(20).status_code == 503
    assert server.end() == 0


def test_a_signal_while_loading_ends_it(start: Callable[..., Process]) -> None:
    server = start("slow")
    assert httpx.get(f"{server.url}/health", timeout=20).json() == {"status": "loading"}
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_an_engine_that_cannot_start_is_one_line_and_2(start: Callable[..., Process]) -> None:
    server = start("broken")
    assert server.end() == 2
    assert server.errors[-1] == "error: model.safetensors: tensor lm_head is missing\n"
    assert not [line for line in server.errors if "Traceback" in line]


def test_the_server_goes_with_its_engine(start: Callable[..., Process]) -> None:
    server = start("dying")
    server.line()
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert server.end() == 70
    assert server.errors[-1] == "error: the engine process ended (signal 9)\n"


def test_systemd_hears_of_ready_alive_and_stopping(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "100000")
        server = start()
        heard = []
        while not {b"READY=1", b"WATCHDOG=1"} <= set(heard):
            heard.append(systemd.recv(100))
        server.signal(signal.SIGTERM)
        while b"STOPPING=1" not in heard:
            heard.append(systemd.recv(100))
        assert server.end() == 0
        assert set(heard) == {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"}


def test_a_port_in_use_is_one_line_and_98(start: Callable[..., Process]) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"address already in use: 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
        server = start(port=port)
        assert server.end() == 98
        assert server.errors == [f"error: address already in use: 127.0.0.1:{port}\n"]


def test_addresses_that_are_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="is not an address"):
        bind("no such host", 0)


def test_urls_name_the_port_that_was_found() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener, tls=True) == f"https://127.0.0.1:{listener.getsockname()[1]}"


def test_an_open_server_without_a_key_is_warned_about(start: Callable[..., Process]) -> None:
    server = start(host="0.0.0.0")
    server.line()
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert [line for line in server.errors if "without an API key" in line]


def test_a_bad_certificate_is_one_line_and_2(start: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    server = start(ssl_certfile=str(tmp_path / "bad.pem"), ssl_keyfile=str(tmp_path / "bad.pem"))
    assert server.end() == 2
    assert server.errors[-1].startswith("error: ssl_certfile: no usable certificate and key")
