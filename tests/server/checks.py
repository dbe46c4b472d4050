"""What the tests of bad requests share: the promises of every error, and how to ask."""

from __future__ import annotations

import re
from typing import Any

import httpx

from tests.helpers.live_server import LiveServer

LEAKS = re.compile(r"/(home|tmp|usr|root|var|opt)/|0x[0-9a-f]{6,}|Traceback|site-packages")
PYTHON = re.compile(r"\b(None|True|False|NoneType|bool|dict|int|str|tuple|float)\b(?!')")
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
HI = [{"role": "user", "content": "hi"}]
VOCAB = 268


# Anthropic's type of error for a status; other statuses below 500 are invalid_request_error, others above api_error.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def check_refused(
    response: httpx.Response, *words: str, status: int = 400, code: str | None = None, param: str | None = None
) -> str:
    """Check what is promised of every error, in the shape of the API of its path; return its message.

    Args:
        words: in the message. code, param: of OpenAI's error objects; without a code they are not looked at.
    """
    assert response.status_code == status, response.text[:2000]
    assert response.headers["content-type"] == "application/json"
    request_id = response.headers["x-request-id"]
    assert len(response.content) <= 4096
    assert not LEAKS.search(response.text), response.text
    body, path = response.json(), response.request.url.path
    if path.startswith("/v1/messages"):
        assert response.headers["request-id"] == request_id
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        message = body["error"]["message"]
        assert body == {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    elif path.startswith("/api/"):
        message = body["error"]
        assert body == {"error": message}
    else:
        error = body["error"]
        message, wanted = error["message"], (error["code"], error["param"]) if code is None else (code, param)
        kind = "invalid_request_error" if status < 500 else "server_error"
        assert body == {"error": {"message": message, "type": kind, "code": wanted[0], "param": wanted[1]}}, error
    assert message and message.isprintable()
    assert not PYTHON.search(message), message
    for word in words:
        assert word in message, message
    return str(message)


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """Check an error of OpenAI's API; return the error object."""
    check_refused(response, status=status, code=code, param=param)
    error: dict[str, Any] = response.json()["error"]
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
