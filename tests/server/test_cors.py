"""Browsers: which origins may use the server, what a preflight gets, and that nothing else gets by without a key."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.errors import ConfigError
from tests.helpers.live_server import LiveServer, MakeServer, server_config

GOOD, EVIL = "https://app.example", "https://evil.example"
BODY = {"model": "fake", "prompt": "a", "max_tokens": 2}
KEY = {"authorization": "Bearer k"}


@pytest.fixture(scope="module")
def opened() -> Iterator[LiveServer]:
    live = LiveServer(allowed_origins=[GOOD, "http://localhost:3000"], api_key="k", allow_credentials=True)
    yield live
    live.close()


def preflight(server: LiveServer, origin: str, method: str = "POST", headers: str | None = None) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": method}
    if headers is not None:
        asked["access-control-request-headers"] = headers
    return server.http.options("/v1/completions", headers=asked)


def granted(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


def test_a_preflight_of_a_named_origin_needs_no_key(opened: LiveServer) -> None:
    response = preflight(opened, GOOD, headers="Authorization, Content-Type")
    assert (response.status_code, response.content) == (204, b"")
    assert granted(response) == {
        "access-control-allow-origin": GOOD,
        "access-control-allow-credentials": "true",
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": "authorization, content-type",
        "access-control-max-age": "600",
    }
    assert response.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", [EVIL, "null", "https://app.example.evil", "http://app.example", GOOD + ":8443", ""])
def test_other_origins_are_granted_nothing(opened: LiveServer, origin: str) -> None:
    response = preflight(opened, origin)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "not_allowed"
    assert not granted(response)
    answer = opened.http.post("/v1/completions", json=BODY, headers={**KEY, "origin": origin})
    assert answer.status_code == 200
    assert not granted(answer), "the browser keeps the answer from the page"


def test_answers_and_errors_can_be_read_by_named_origins(opened: LiveServer) -> None:
    for headers, status in ((KEY, 200), ({}, 401)):
        answer = opened.http.post("/v1/completions", json=BODY, headers={**headers, "origin": GOOD})
        assert answer.status_code == status
        assert granted(answer)["access-control-allow-origin"] == GOOD
        assert "X-Request-Id" in granted(answer)["access-control-expose-headers"]
    stream = opened.http.post("/v1/completions", json={**BODY, "stream": True}, headers={**KEY, "origin": GOOD})
    assert granted(stream)["access-control-allow-origin"] == GOOD


def test_only_preflights_go_without_a_key(opened: LiveServer) -> None:
    assert opened.http.options("/v1/completions", headers={"origin": GOOD}).status_code == 401
    assert opened.http.options("/v1/completions").status_code == 401
    for method in ("GET", "POST", "TRACE", "HEAD", "PUT"):
        headers = {"origin": GOOD, "access-control-request-method": "POST"}
        assert opened.http.request(method, "/v1/models", headers=headers).status_code == 401


def test_methods_and_headers_that_are_not_named(make_server: MakeServer) -> None:
    server = make_server(allowed_origins=["*"], allowed_methods=["post"], allowed_headers=["Content-Type"])
    assert preflight(server, EVIL).headers["access-control-allow-origin"] == "*"
    assert preflight(server, EVIL, "DELETE").status_code == 403
    assert preflight(server, EVIL, headers="content-type").status_code == 204
    assert preflight(server, EVIL, headers="content-type, x-other").status_code == 403
    free = make_server(allowed_origins=["*"], allowed_methods=["*"])
    assert preflight(free, EVIL, "PUT").headers["access-control-allow-methods"] == "PUT"


def test_without_the_option_there_is_nothing_of_it(server: LiveServer) -> None:
    assert not granted(preflight(server, GOOD))
    assert preflight(server, GOOD).status_code == 405
    assert not granted(server.http.get("/health", headers={"origin": GOOD}))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"allowed_origins": ["*"], "allow_credentials": True}, ("allow_credentials", "allowed_origins")),
        ({"allowed_methods": ["GET"]}, ("allowed_methods", "allowed_origins")),
        ({"allowed_headers": ["X"]}, ("allowed_headers", "allowed_origins")),
        ({"allow_credentials": True}, ("allow_credentials", "allowed_origins")),
        ({"allowed_origins": ["https://a.example/path"]}, ("allowed_origins",)),
        ({"allowed_origins": ["a.example"]}, ("allowed_origins",)),
        ({"allowed_origins": ["https://a.example, https://b.example"]}, ("allowed_origins",)),
        ({"allowed_origins": ["*"], "allowed_headers": ["a\r\nb"]}, ("allowed_headers",)),
        ({"uds": "/s", "port": 9000}, ("uds", "port")),
        ({"uds": "/s", "host": "0.0.0.0"}, ("uds", "host")),
        ({"uds": "/s", "ssl_certfile": "a", "ssl_keyfile": "b"}, ("uds", "ssl_certfile")),
        ({"ssl_ca_certs": "a", "ssl_cert_reqs": "required"}, ("ssl_ca_certs", "ssl_certfile")),
        ({"ssl_certfile": "a", "ssl_keyfile": "b", "ssl_ca_certs": "c"}, ("ssl_ca_certs", "ssl_cert_reqs")),
        ({"ssl_certfile": "a", "ssl_keyfile": "b", "ssl_cert_reqs": "optional"}, ("ssl_ca_certs", "ssl_cert_reqs")),
        ({"engine": "inline", "api_server_count": 2}, ("api_server_count", "engine")),
        ({"root_path": "llm"}, ("root_path",)),
        ({"root_path": "//x"}, ("root_path",)),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, object], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        server_config(**options)
    assert caught.value.param in names
    assert all(name in caught.value.message for name in names)


def test_a_proxys_prefix(make_server: MakeServer) -> None:
    server = make_server(root_path="/llm", api_key="k")
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get("/llm/v1/models").status_code == 401
    assert server.http.get("/v1/models", headers=KEY).status_code == 200
    assert server.http.get("/openapi.json", headers=KEY).json()["servers"] == [{"url": "/llm"}]


def test_a_path_with_a_proxys_prefix_is_treated_as_without(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    server = make_server(root_path="/llm/", api_key="k", allowed_origins=["http://page"], start=False)
    for path, headers, status in (("/", {}, 200), ("/metrics", KEY, 200), ("/v1/models", KEY, 503)):
        assert [server.http.get(prefix + path, headers=headers).status_code for prefix in ("", "/llm")] == [status] * 2
    server.call(server.llm.start)
    assert server.http.get("/llm/health").status_code == 200
    server.close()
    assert [record.message.split()[2] for record in caplog.records] == ["/", "/llm/", "/v1/models", "/llm/v1/models"]


def test_errors_below_a_proxys_prefix_have_the_schema_of_their_api(make_server: MakeServer) -> None:
    server = make_server(root_path="/llm", api_key="k", allowed_origins=["http://page"])
    preflight = {"origin": "http://other", "access-control-request-method": "POST"}
    for path in ("/v1/messages", "/llm/v1/messages"):
        answers = [
            server.http.post(path, json={}),  # of the gate
            server.http.post(path, json={}, headers=KEY),  # of the route
            server.http.options(path, headers=preflight),  # before the gate
            server.http.post(path, headers={"x-long": "a" * 70000}),  # before the application
        ]
        assert [answer.status_code for answer in answers] == [401, 400, 403, 431]
        assert [answer.json()["type"] for answer in answers] == ["error"] * 4


def test_cancelling_below_a_proxys_prefix_needs_no_slot(make_server: MakeServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: k, requests_per_minute: 1}\n")
    keys.chmod(0o600)
    server = make_server(root_path="/llm", api_key_file=str(keys))
    for prefix in ("", "/llm", "/other"):
        answer = server.http.post(f"{prefix}/v1/responses/resp_1/cancel", headers=KEY)
        assert answer.status_code == 404
    assert server.http.post("/v1/completions", json={}, headers=KEY).status_code == 429
