"""API keys: nobody gets in by the back door."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.routing import Route

from quire.server.auth import ApiKeys
from quire.server.paths import OPEN_PATHS, PROBES
from tests.helpers.live_server import LiveServer

KEY = {"authorization": "Bearer secret"}
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


def test_only_probes_and_the_page_need_none(locked: LiveServer) -> None:
    for path in PROBES:
        assert locked.http.get(path).status_code == 200
        assert locked.http.head(path).status_code == 200
        assert locked.http.post(path).status_code == (200 if path == "/ping" else 401)
        assert locked.http.put(path).status_code == 401
    paths = {route.path for route in locked.app.routes if isinstance(route, Route)} - OPEN_PATHS
    paths |= {"/v1/completions", "/tokenize", "/metrics", "/version", "/openapi.json", "/docs", "/invocations", "/load"}
    for path in paths:
        for method in ("GET", "POST", "OPTIONS", "HEAD", "TRACE"):
            assert locked.http.request(method, path).status_code == 401, (method, path)


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
        b"GET /v1/models HTTP/1.1\r\nHost: a/health?x=",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost/health?",
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
        answer = b""
        while chunk := connection.recv(65536):  # until the server closes; head and body may come apart
            answer += chunk
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
