"""The supervisor with fronts that import no server: deaths, freezes, signals, probes, and who gets a connection."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.certificates import certify
from tests.supervisor import fake_front

ROOT = Path(__file__).resolve().parents[2]
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
SECONDS = 20.0


class Supervised:
    """A supervisor process, started for a test."""

    def __init__(self, folder: Path, modes: str, num_files: int = 1024, **options: Any) -> None:
        file = folder / "modes"
        file.write_text(modes)
        self.tls = options.get("ssl_certfile") is not None
        self.uds: str | None = options.get("uds")
        self.process = subprocess.Popen(
            [sys.executable, "-m", fake_front.__name__, json.dumps({"port": 0, **options})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files)),
            env={**os.environ, fake_front.MODES: str(file), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )
        self.errors: list[str] = []
        assert self.process.stdout is not None and self.process.stderr is not None
        errors = self.process.stderr
        self._reader = threading.Thread(target=lambda: self.errors.extend(errors), daemon=True)
        self._reader.start()
        self.url = self.process.stdout.readline().strip().removeprefix("listening url=")

    def line(self) -> str:
        """Return the next line of standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def connect(self) -> socket.socket:
        """Return a connection."""
        if self.uds is not None:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(SECONDS)
            connection.connect(self.uds)
            return connection
        host, port = self.url.rpartition("/")[2].split(":")
        connection = socket.create_connection((host, int(port)), SECONDS)
        if not self.tls:
            return connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(connection)

    def get(self, path: bytes = b"/v1/models") -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a response."""
        with self.connect() as connection:
            connection.sendall(GET % path)
            return read(connection)

    def fronts(self) -> list[int]:
        """Return the ids of the fronts' processes."""
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return code

    def close(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.end()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def read(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a response that ends with its connection."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    with contextlib.ExitStack() as stack:

        def make(modes: str = "serve", **options: Any) -> Supervised:
            made = Supervised(tmp_path, modes, **options)
            stack.callback(made.close)
            return made

        yield make


def test_it_serves_and_ends_with_0(start: Callable[..., Supervised]) -> None:
    server = start()
    assert server.line() == f"ready url={server.url} model=fake"
    assert server.get()[1]["front"] in server.fronts()
    [front] = server.fronts()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert not psutil.pid_exists(front)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_front_that_dies_or_freezes_is_replaced(start: Callable[..., Supervised], number: int) -> None:
    server = start(front_stall_timeout=2.0)
    server.line()
    [front] = server.fronts()
    os.kill(front, number)
    status, body = server.get()
    assert status == 200 and body["front"] != front, "the connection has waited for the next one"
    assert not psutil.pid_exists(front)
    assert server.process.poll() is None


def test_a_front_that_dies_at_every_start_ends_the_server(start: Callable[..., Supervised]) -> None:
    server = start("die")
    assert server.end() == 1
    assert [line for line in server.errors if line.startswith("error")] == [
        "error: the process that serves HTTP dies at every start: exit code 3\n"
    ]


def test_a_first_front_that_cannot_start_ends_the_server_with_its_reason(start: Callable[..., Supervised]) -> None:
    server = start("refuse")
    assert server.end() == 2
    assert server.errors[-1] == "error: there is no certificate\n"


@pytest.mark.slow
def test_a_later_front_that_cannot_start_is_tried_again(start: Callable[..., Supervised]) -> None:
    server = start("serve refuse refuse serve refuse")
    server.line()
    os.kill(server.get()[1]["front"], signal.SIGKILL)
    os.kill(server.get()[1]["front"], signal.SIGKILL)
    assert server.end() == 2
    assert "there is no certificate" in server.errors[-1]


@pytest.mark.slow
def test_a_front_that_dies_at_every_start_does_not_end_others(start: Callable[..., Supervised]) -> None:
    server = start("serve die", api_server_count=2)
    server.line()
    until(lambda: len([line for line in server.errors if "is replaced" in line]) > 2)
    assert server.get()[0] == 200 and server.process.poll() is None


@pytest.mark.slow
def test_starts_that_failed_are_forgotten_with_one_that_did_not(start: Callable[..., Supervised]) -> None:
    server = start("die die serve die die serve")
    server.line()
    os.kill(server.get()[1]["front"], signal.SIGKILL)
    assert server.get()[0] == 200


def test_a_frozen_front_takes_no_connections_from_another(start: Callable[..., Supervised]) -> None:
    server = start(api_server_count=2, front_stall_timeout=60.0)
    until(lambda: len({server.get()[1]["front"] for _ in range(20)}) == 2)
    frozen, _ = server.fronts()
    os.kill(frozen, signal.SIGSTOP)
    for _ in range(50):
        began = time.monotonic()
        assert server.get()[1]["front"] != frozen
        assert time.monotonic() - began < 1.0
    os.kill(frozen, signal.SIGCONT)
    until(lambda: server.get()[1]["front"] == frozen)


@pytest.mark.parametrize("kind", ["tcp", "uds", "tls"])
def test_probes_are_answered_while_there_is_no_front(
    start: Callable[..., Supervised], tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {"uds": {"uds": str(tmp_path / "socket")}, "tcp": {}}.get(kind, {})
    if kind == "tls":
        options = dict(zip(("ssl_certfile", "ssl_keyfile"), map(str, certify(tmp_path, "localhost")), strict=True))
    server = start("deaf", root_path="/llm", **options)
    assert server.get(b"/livez") == (200, {"status": "ok"}), "a server that loads is alive"
    status, body = server.get(b"/llm/readyz?verbose")
    assert (status, body["status"]) == (503, "loading") and "loaded" in body["reason"]
    assert server.get(b"/health") == (503, {"status": "loading"})
    with server.connect() as connection:
        connection.sendall(b"HEAD /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).endswith(b"connection: close\r\n\r\n")
    if kind == "tls":  # nothing else can be answered there later
        status, body = server.get()
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")


@pytest.mark.slow
def test_probes_are_truthful_while_a_front_is_frozen_and_replaced(start: Callable[..., Supervised]) -> None:
    server = start("freeze deaf", front_stall_timeout=2.0)
    server.line()
    with server.connect():
        until(lambda: server.get(b"/livez")[0] == 503)
        status, body = server.get(b"/readyz")
        assert (status, body["status"]) == (503, "stalled")
        until(lambda: server.get(b"/readyz")[1]["status"] == "restarting")
        assert server.get(b"/livez")[0] == 503


@pytest.mark.slow
def test_a_client_that_begins_no_handshake_does_not_stop_the_supervisor(
    start: Callable[..., Supervised], tmp_path: Path
) -> None:
    cert, key = map(str, certify(tmp_path, "localhost"))
    server = start("serve", ssl_certfile=cert, ssl_keyfile=key, front_stall_timeout=2.0)
    server.line()
    [front] = server.fronts()
    os.kill(front, signal.SIGSTOP)
    host, port = server.url.rpartition("/")[2].split(":")
    with socket.create_connection((host, int(port)), SECONDS):  # it waits for the front first
        until(lambda: not psutil.pid_exists(front))
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_a_burst_of_connections_is_no_stall(start: Callable[..., Supervised]) -> None:
    server = start(num_files=4096)
    server.line()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(800)]
        for connection in connections:
            connection.sendall(GET % b"/livez")
        assert {read(connection)[0] for connection in connections} == {200}


@pytest.mark.slow
def test_more_connections_than_files_end_nothing(start: Callable[..., Supervised]) -> None:
    server = start("freeze serve", num_files=128, max_connections=1000, front_stall_timeout=2.0)
    server.line()
    [front] = server.fronts()
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(server.connect())
        until(lambda: not psutil.pid_exists(front))
        until(lambda: len(server.fronts()) == 1)
    assert server.get()[0] == 200 and server.process.poll() is None


def test_clients_that_send_nothing_or_go_away_do_not_disturb(start: Callable[..., Supervised]) -> None:
    server = start("deaf")
    silent = [server.connect() for _ in range(20)]
    for connection in silent[:10]:
        connection.close()
    assert server.get(b"/livez")[0] == 200
    silent[10].sendall(b"GE")  # the rest comes later
    assert server.get(b"/livez")[0] == 200
    silent[10].sendall(b"T /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read(silent[10])[0] == 200
    for connection in silent[10:]:
        connection.close()


@pytest.mark.slow
def test_one_connection_too_many_is_said_to_be_so(start: Callable[..., Supervised]) -> None:
    server = start("freeze serve", max_connections=2, max_connections_per_address=100, front_stall_timeout=2.0)
    server.line()
    with server.connect(), server.connect(), server.connect() as third:
        third.sendall(GET % b"/")
        assert read(third)[1]["excess"] == "there are too many connections"
    until(lambda: not server.get()[1]["excess"])


@pytest.mark.slow
def test_the_connections_of_a_dead_front_count_no_longer(start: Callable[..., Supervised]) -> None:
    server = start("freeze serve", max_connections=3, max_connections_per_address=100, front_stall_timeout=2.0)
    server.line()
    with server.connect(), server.connect() as second, server.connect() as third:  # the front takes only the first one
        for connection in (second, third):
            connection.sendall(GET % b"/")
            assert read(connection)[1]["excess"] == "", "it has waited for the next front"
        assert server.get()[1]["excess"] == ""


SLOW_MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("serve", "freeze")]


@pytest.mark.parametrize("mode", [*SLOW_MODES, "deaf"])
def test_a_signal_ends_it_in_time_whatever_the_front_does(start: Callable[..., Supervised], mode: str) -> None:
    server = start(mode, front_stall_timeout=2.0)
    if mode != "deaf":
        server.line()
    with server.connect() as connection:
        if mode == "freeze":
            connection.sendall(GET % b"/")
            time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 10.0


def test_a_frozen_front_does_not_delay_the_end_of_the_others(start: Callable[..., Supervised]) -> None:
    server = start(api_server_count=2, front_stall_timeout=60.0)
    until(lambda: len({server.get()[1]["front"] for _ in range(20)}) == 2)
    os.kill(server.fronts()[0], signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert server.end() == 0
    assert time.monotonic() - began < 5.0


def test_a_front_that_dies_of_a_signal_without_a_name(start: Callable[..., Supervised]) -> None:
    server = start()
    server.line()
    os.kill(server.fronts()[0], signal.SIGRTMIN + 6)
    assert server.get()[0] == 200


@pytest.mark.slow
def test_a_front_that_does_not_stop_is_killed(start: Callable[..., Supervised], tmp_path: Path) -> None:
    server = start("stubborn", shutdown_timeout=0.0)
    server.line()
    [front] = server.fronts()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert not psutil.pid_exists(front)


def test_nothing_is_left_of_a_supervisor_that_is_killed(start: Callable[..., Supervised]) -> None:
    server = start(api_server_count=2)
    server.line()
    fronts = server.fronts()
    server.process.kill()
    until(lambda: not any(psutil.pid_exists(front) for front in fronts))


def test_orphans_are_reaped(start: Callable[..., Supervised]) -> None:
    server = start("parent serve")
    server.line()
    [front] = server.fronts()
    until(lambda: bool(psutil.Process(front).children()))
    [child] = psutil.Process(front).children()
    os.kill(front, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(child.pid))
    assert server.get()[0] == 200


def test_it_imports_nothing_of_others() -> None:
    program = (
        "import sys; import quire.cli.serve\n"
        "print(sorted(name for name, module in sys.modules.items()"
        " if 'site-packages' in (getattr(module, '__file__', '') or '') and '_distutils_hack' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert done.stdout.strip() == "[]"
