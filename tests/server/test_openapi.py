"""The server's description of itself. tests/robustness holds all answers against it, over many random requests."""

from __future__ import annotations

from typing import Any

import jsonschema

from tests.helpers.live_server import LiveServer, MakeServer


def description(server: LiveServer) -> dict[str, Any]:
    answer = server.http.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()  # type: ignore[no-any-return]


def check(server: LiveServer, method: str, path: str, route: str, **options: Any) -> int:
    """Send a request and hold the answer's status and body against the description."""
    answer = server.http.request(method, path, **options)
    found = description(server)
    told = found["paths"][route][method.lower()]["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].split(";")[0]
    if "content" in told:
        schema = told["content"][kind]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": found["components"]})
    return answer.status_code


def test_every_error_is_described_in_the_words_of_its_family(server: LiveServer) -> None:
    of_a_page = {"content-type": "text/plain", "sec-fetch-site": "cross-site"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/tokenize"):
        assert check(server, "POST", path, path, json={"model": 5}) == 400
        assert check(server, "POST", path, path, content=b"x", headers=of_a_page) == 415
    assert check(server, "GET", "/v1/models/none", "/v1/models/{model_id}") == 404
    assert check(server, "GET", "/v1/models/fake", "/v1/models/{model_id}") == 200


def test_what_needs_a_key_says_so_and_what_does_not_does_not(make_server: MakeServer) -> None:
    server = make_server(api_key=["secret"], enable_debug_endpoints=True)
    found = server.http.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if "{" in path or method not in ("get", "post"):
                continue
            status = server.http.request(method, path).status_code
            assert (status == 401) == ("security" in operation), (method, path, status)


def test_there_is_nothing_of_what_does_not_happen(server: LiveServer) -> None:
    for path, operations in description(server)["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path


def test_a_method_that_is_not_allowed_is_told_which_are(server: LiveServer) -> None:
    answer = server.http.request("OPTIONS", "/v1/responses/resp_1")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "DELETE"}
    assert server.http.request("OPTIONS", "/v1/responses/input_tokens").headers["allow"] == "POST"
    assert set(server.http.request("PUT", "/ping").headers["allow"].split(", ")) >= {"GET", "POST"}
