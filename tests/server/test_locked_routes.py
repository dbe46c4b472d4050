"""Every route there is, asked without a key, or with two, in all the ways to write a path."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from quire.server.paths import OPEN_PATHS
from tests.helpers.live_server import LiveServer

OPTIONS = {"enable_admin_endpoints": True, "enable_debug_endpoints": True, "root_path": "/behind"}
SPELLINGS = ("{}", "/behind{}", "//{}", "{}/", "{}?to=/health", "/health/..{}", "/health{}", "http://health{}", "/.{}")
METHODS = ("GET", "POST", "OPTIONS")
HEADS = (b"", b"Authorization: Bearer one\r\nX-Api-Key: two\r\n", b"Origin: http://page\r\n", b"X-Api-Key: one\x01\r\n")


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    live = LiveServer(api_key=["one", "two"], allowed_origins=["http://page"], **OPTIONS)
    yield live
    live.close()


def status(server: LiveServer, method: str, target: str, head: bytes) -> int:
    request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n".encode() + head
    return int(server.raw(request + b"\r\n").split(b" ", 2)[1])


@pytest.mark.parametrize("method", METHODS)
def test_nothing_opens_but_with_one_key(locked: LiveServer, method: str) -> None:
    paths = {re.sub(r"{.*?}", "x", path) for path in locked.app.openapi()["paths"]}
    paths |= {"/openapi.json", "/docs", "/playground/state"}
    assert len(paths) > 40
    for path in sorted(paths - OPEN_PATHS):
        for spelling in SPELLINGS:
            assert status(locked, method, spelling.format(path), b"") in (400, 401), (spelling, path)
        for head in HEADS:
            assert status(locked, method, path, head) in (400, 401), (head, path)


def test_one_key_opens(locked: LiveServer) -> None:
    for head in (b"Authorization: Bearer one\r\n", b"X-Api-Key: two\r\n"):
        assert status(locked, "GET", "/v1/models", head) == 200
    twice = b"Authorization: Bearer one\r\nX-Api-Key: one\r\n"
    assert status(locked, "GET", "/v1/models", twice) == 200
