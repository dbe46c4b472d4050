"""What the tests of bad requests share: the promises of every error, and how to ask."""

from __future__ import annotations

import re
from typing import Any

import httpx

from tests.helpers.live_server import LiveServer

LEAKS = re.compile(r"/(home|tmp|usr|root|var|opt)/|0x[0-9a-f]{6,}|Traceback|site-packages")
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
HI = [{"role": "user", "content": "hi"}]
VOCAB = 268


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """Check everything that is promised of every error; return the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) <= 4096
    assert not LEAKS.search(response.text), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["message"]
    assert (error["code"], error["param"]) == (code, param), error
    return error


def post(server: LiveServer, path: str, body: Any) -> httpx.Response:
    """Post a body, of bytes as they are."""
    if isinstance(body, bytes):
        return server.http.post(path, content=body, headers=JSON)
    return server.http.post(path, json=body)


def nested(levels: int) -> dict[str, Any]:
    """Return a JSON schema so deep."""
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def prompt_of(server: LiveServer) -> str:
    """Return the text of the prompt that the engine was last given."""
    ids = server.do(lambda: server.engine.added[-1]).prompt_token_ids
    assert server.llm.tokenizer is not None
    return server.llm.tokenizer.decode(ids, skip_special_tokens=False)
