"""API keys: no route but the probes and the page can be reached without one, however its path is spelled."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from quire.server.auth import ApiKeys
from quire.server.paths import OPEN_PATHS, PROBES
from tests.helpers.live_server import LiveServer
from tests.server.sockets import read_until

KEY = {"authorization": "Bearer secret"}
OPTIONS = {"enable_admin_endpoints": True, "enable_debug_endpoints": True, "root_path": "/behind"}
SPELLINGS = ("{}", "/behind{}", "//{}", "{}/", "{}?to=/health", "/health/..{}", "/health{}", "http://health{}", "/.{}")
METHODS = ("GET", "POST", "OPTIONS", "HEAD", "TRACE")
HEADS = (b"", b"Authorization: Bearer one\r\nX-Api-Key: two\r\n", b"Origin: http://page\r\n", b"X-Api-Key: one\x01\r\n")
BODY = {"model": "fake", "prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    live = LiveServer(api_key=["secret", "other"])
    yield live
    live.close()


def check_refusal(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 "), answer[:300]
    assert b"www-authenticate: bearer" in head.lower()
    assert b'"type":"invalid_request_error"' in body
    assert b'"code":"invalid_api_key"' in body


def test_a_key_opens_every_route(locked: LiveServer) -> None:
    for key in ("Bearer secret", "bearer secret", "Bearer  other"):
        assert locked.http.post("/v1/completions", json=BODY, headers={"authorization": key}).status_code == 200
    assert locked.http.get("/v1/models", headers=KEY).status_code == 200


def test_probes_need_none(locked: LiveServer) -> None:
    for path in PROBES:
        assert locked.http.get(path).status_code == 200
        assert locked.http.head(path).status_code == 200
        assert locked.http.post(path).status_code == (200 if path == "/ping" else 401)
        assert locked.http.put(path).status_code == 401


@pytest.mark.parametrize(
    "key",
    [b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"secret", b"Basic secret", b"Bearer \xff\xfe", b"Bearer secret x"],
)
def test_wrong_keys(locked: LiveServer, key: bytes) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + key + b"\r\n\r\n"
    check_refusal(locked.raw(head))


@pytest.mark.parametrize(
    "head",
    [
        b"GET //v1/models HTTP/1.1\r\nHost: x",
        b"GET /%76%31/models HTTP/1.1\r\nHost: x",
        b"GET /health/../v1/models HTTP/1.1\r\nHost: x",
        b"GET /health%2f..%2fv1/models HTTP/1.1\r\nHost: x",
        b"GET /health/ HTTP/1.1\r\nHost: x",
        b"GET /health;x HTTP/1.1\r\nHost: x",
        b"GET http://x/v1/models HTTP/1.1\r\nHost: x",
        b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x",
        b"GET /v1/models/ HTTP/1.1\r\nHost: x",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Original-URL: /health",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-Prefix: /health",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nAuthorization: Bearer secret",
    ],
)
def test_tricks_with_hosts_and_paths(locked: LiveServer, head: bytes) -> None:
    check_refusal(locked.raw(head + b"\r\nConnection: close\r\n\r\n"))


def test_a_body_is_not_read_before_the_key_is_seen(locked: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    with locked.connect() as connection:
        connection.sendall(head)
        answer = read_until(connection, b"}}")  # the end comes two seconds later, for the sake of those who send on
    check_refusal(answer)


def test_preflights_get_nothing(server: LiveServer) -> None:
    response = server.http.options("/v1/completions", headers={"origin": "http://evil"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_keys_share_no_cached_prefixes(locked: LiveServer) -> None:
    def salt(key: str, **body: str) -> str | None:
        headers = {"authorization": f"Bearer {key}"}
        assert locked.http.post("/v1/completions", json={**BODY, **body}, headers=headers).status_code == 200
        return locked.do(lambda: locked.engine.added[-1]).cache_salt

    assert salt("secret") == salt("secret")
    assert len({salt("secret"), salt("other"), salt("secret", cache_salt="x"), salt("other", cache_salt="x")}) == 4
    assert "secret" not in str(salt("secret"))


def test_requests_run_on_the_account_of_their_key_or_else_their_user(locked: LiveServer, server: LiveServer) -> None:
    def tenant(of: LiveServer, key: str | None = None, **body: str) -> str:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert of.http.post("/v1/completions", json={**BODY, **body}, headers=headers).status_code == 200
        return of.do(lambda: of.engine.added[-1]).tenant

    assert [tenant(locked, "secret"), tenant(locked, "other", user="key-0")] == ["key-0", "key-1"]
    assert [tenant(server), tenant(server, user="ann")] == ["", "ann"]


def test_with_one_key_or_none_the_salt_is_the_clients(server: LiveServer) -> None:
    server.http.post("/v1/completions", json={**BODY, "cache_salt": "mine"})
    assert server.do(lambda: server.engine.added[-1]).cache_salt == "mine"
    one = ApiKeys(["k"])
    digest = one.check("GET", "/v1/models", [(b"authorization", b"Bearer k")])
    assert digest is not None
    assert one.salt(digest, "mine") == "mine"
    assert one.salt(digest, None) is None


@pytest.fixture(scope="module")
def all_routes() -> Iterator[LiveServer]:
    """A server with every route there is."""
    live = LiveServer(api_key=["one", "two"], allowed_origins=["http://page"], **OPTIONS)
    yield live
    live.close()


def status(server: LiveServer, method: str, target: str, head: bytes) -> int:
    request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n".encode() + head
    return int(server.raw(request + b"\r\n").split(b" ", 2)[1])


@pytest.mark.parametrize("method", METHODS)
def test_nothing_opens_but_with_one_key(all_routes: LiveServer, method: str) -> None:
    paths = {re.sub(r"{.*?}", "x", path) for path in all_routes.app.openapi()["paths"]}
    paths |= {"/openapi.json", "/docs", "/playground/state"}
    assert len(paths) > 40
    for number, path in enumerate(sorted(paths - OPEN_PATHS)):
        others = SPELLINGS[2:] if method in ("GET", "POST") else [SPELLINGS[2 + number % (len(SPELLINGS) - 2)]]
        for spelling in (*SPELLINGS[:2], *others):
            assert status(all_routes, method, spelling.format(path), b"") in (400, 401), (spelling, path)
        for head in HEADS:
            assert status(all_routes, method, path, head) in (400, 401), (head, path)


def test_one_key_opens(all_routes: LiveServer) -> None:
    for head in (b"Authorization: Bearer one\r\n", b"X-Api-Key: two\r\n"):
        assert status(all_routes, "GET", "/v1/models", head) == 200
    twice = b"Authorization: Bearer one\r\nX-Api-Key: one\r\n"
    assert status(all_routes, "GET", "/v1/models", twice) == 200
