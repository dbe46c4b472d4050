"""Unix sockets, and files that are read again while the server runs."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.errors import AddressInUseError, ConfigError
from quire.server.run import FileWatch
from quire.server_config import ServerConfig
from quire.supervisor.listen import bind_unix, listening
from tests.server.process import Process

BODY = {"model": "fake", "prompt": "a", "max_tokens": 2}


def test_only_the_owner_may_connect_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(ServerConfig(uds=str(path))) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(AddressInUseError, match="already in use"):
            bind_unix(str(path))
        assert path.exists(), "a socket that is served stays"
        listener.close()
    assert not path.exists()


def test_a_socket_that_nobody_serves_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with bind_unix(str(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="exists and is no socket"):
        bind_unix(str(path))
    assert path.read_text() == "data"
    (tmp_path / "link").symlink_to(path)
    for bad in (tmp_path / "link", tmp_path, tmp_path / "no" / "folder", tmp_path / ("a" * 120)):
        with pytest.raises(ConfigError, match="uds"):
            bind_unix(str(bad))


def test_the_socket_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(ServerConfig(uds=str(path))) as listener:
        listener.close()
        successor = bind_unix(str(path))
    assert path.exists()
    successor.close()


def test_files_are_read_again_when_they_change_or_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "f"
    read: list[str] = []

    def reload() -> None:
        if not path.exists():
            raise ConfigError("gone")
        if path.read_text() == "bad":
            raise KeyError("bad")
        read.append(path.read_text())

    path.write_text("a")
    watch = FileWatch()
    watch.add([str(path)], reload)
    watch.poll()
    assert read == []
    path.write_text("bc")
    watch.poll()
    watch.poll()
    assert read == ["bc"]
    replaced = tmp_path / "g"
    replaced.write_text("de")
    os.utime(replaced, ns=(0, path.stat().st_mtime_ns))
    replaced.rename(path)
    watch.poll()
    assert read == ["bc", "de"], "the same size and time, but another file"
    watch.poll(force=True)
    assert read == ["bc", "de", "de"]
    path.unlink()
    watch.poll()
    path.write_text("bad")
    watch.poll()
    path.write_text("f")
    watch.poll()
    assert read[-1] == "f"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with one key, "one"."""
    path = tmp_path / "keys"
    path.write_text("one")
    return path


@pytest.fixture
def server(tmp_path: Path, keys: Path) -> Iterator[Process]:
    """A server process on the socket `s` with the keys of the file."""
    made = Process("ok", uds=str(tmp_path / "s"), port=8000, api_key_file=str(keys))
    yield made
    made.close()


def test_a_server_on_a_unix_socket(server: Process, tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "s"
    assert server.url == f"unix:{path}"
    assert server.line().startswith("ready url=unix:")
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://x", trust_env=False, timeout=20) as client:
        assert client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer one"}).status_code == 200
        assert client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer two"}).status_code == 401
        keys.write_text("two")
        server.signal(signal.SIGHUP)
        for _ in range(200):  # the signal is handled between two turns of the loop
            if client.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200:
                break
        assert client.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200
        assert client.get("/v1/models", headers={"authorization": "Bearer one"}).status_code == 401
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert not path.exists()
