"""The life of a server process: what it prints, how it stops, with which exit code."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from quire.errors import AddressInUseError, ConfigError
from quire.supervisor.listen import bind, url_of
from tests.server.process import Process
from tests.server.responses.asking import check_story, read_events

BODY = {"model": "fake", "prompt": "ab", "max_tokens": 5}


def test_it_says_when_it_is_ready_serves_and_stops_with_0(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "100000")
        server = start(host="0.0.0.0")
        assert server.url.startswith("http://0.0.0.0:")
        assert server.line() == f"ready url={server.url} model=fake"
        answer = server.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        notified: list[bytes] = []
        while not {b"READY=1", b"WATCHDOG=1"} <= set(notified):
            notified.append(systemd.recv(100))
        server.signal(signal.SIGTERM)
        while b"STOPPING=1" not in notified:
            notified.append(systemd.recv(100))
        assert server.end() == 0
        assert set(notified) == {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"}
    access = [line for line in server.errors if "quire.access" in line]
    assert len(access) == 1
    assert "127.0.0.1 POST /v1/completions 200" in access[0]
    assert "mine" in access[0]
    assert [line for line in server.errors if "without an API key" in line], "everybody may reach this address"
    assert not [line for line in server.errors if "Traceback" in line or "ERROR" in line]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_front_starts_inherits_none_of_its_descriptors(start: Callable[..., Process]) -> None:
    server = start()
    server.line()
    with server.http.stream("GET", "/health"):
        [front] = psutil.Process(server.process.pid).children()
        infos = Path(f"/proc/{front.pid}/fdinfo")
        flags = {fd.name: int(re.findall(r"flags:\s*(\d+)", fd.read_text())[0], 8) for fd in infos.iterdir()}
        left = [name for name, value in flags.items() if not value & os.O_CLOEXEC and int(name) > 2]
        assert [os.readlink(f"/proc/{front.pid}/fd/{name}") for name in left] == []


def test_running_requests_end_before_the_server_does(start: Callable[..., Process]) -> None:
    server = start("paced", shutdown_timeout=60)
    server.line()
    body = {**BODY, "max_tokens": 30, "ignore_eos": True}
    background = {"model": "fake", "input": "The king", "background": True, "stream": True, "max_output_tokens": 30}
    with ThreadPoolExecutor(3) as pool:
        bodies = (body, {**body, "stream": True})
        answers = [pool.submit(server.http.post, "/v1/completions", json=body) for body in bodies]
        follower = pool.submit(server.http.post, "/v1/responses", json=background)
        server.wait_for_open(4)  # a response in the background, and its follower
        server.signal(signal.SIGTERM)
        for answer in answers:
            assert answer.result(20).status_code == 200
            assert '"finish_reason":"length"' in answer.result(20).text
        assert check_story(read_events(follower.result(20).text))["status"] in ("completed", "incomplete")
    assert server.end() == 0


def test_requests_that_take_too_long_are_aborted(start: Callable[..., Process]) -> None:
    server = start("held", shutdown_timeout=0.1)
    server.line()
    background = {"model": "fake", "input": "The king", "background": True, "stream": True}
    with ThreadPoolExecutor(3) as pool:
        bodies = (BODY, {**BODY, "stream": True})
        waiting = [pool.submit(server.http.post, "/v1/completions", json=body) for body in bodies]
        follower = pool.submit(server.http.post, "/v1/responses", json=background)
        server.wait_for_open(4)  # a response in the background, and its follower
        server.signal(signal.SIGTERM)
        for item in waiting:
            assert item.result(20).status_code == 503
            assert item.result(20).json()["error"]["code"] == "server_shutting_down"
        events = read_events(follower.result(20).text)
        final = check_story(events)
        assert (final["status"], final["error"]["code"], events[-2]["type"]) == ("failed", "server_error", "error")
        assert "shutting down" in final["error"]["message"]
    assert server.end() == 0


def test_a_second_signal_does_not_wait(start: Callable[..., Process]) -> None:
    server = start("held", shutdown_timeout=3600)
    server.line()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.http.post, "/v1/completions", json=BODY)
        server.wait_for_open(1)
        server.signal(signal.SIGINT)
        server.wait_for_status("draining")
        refused = server.http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
        server.signal(signal.SIGTERM)
        assert waiting.result(20).status_code == 503
    assert server.end() == 0


def test_a_signal_while_loading_ends_it(start: Callable[..., Process]) -> None:
    server = start("slow")
    assert server.http.get("/health").json() == {"status": "loading"}
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
    answer = server.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert server.end() == 70
    assert server.errors[-1] == "error: the engine process ended (signal 9)\n"


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


def test_a_bad_certificate_is_one_line_and_2(start: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    server = start(ssl_certfile=str(tmp_path / "bad.pem"), ssl_keyfile=str(tmp_path / "bad.pem"))
    assert server.end() == 2
    assert server.errors[-1].startswith("error: ssl_certfile: no usable certificate and key")
