"""What a server's log has of what clients send: nothing of prompts, outputs and keys, and no line that is none."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.helpers.server import Server, serve

KEY = "sk-TOPSECRETKEY0123456789"
WRONG = "sk-WRONGSECRETKEY98765"
MARK = "Zanzibarquokka"
HEADERS = {"Authorization": f"Bearer {KEY}"}
FORGED = "2026-11-22 02:00:00 ERROR quire: forged"


@pytest.fixture(
    scope="module", params=[("json", "process"), pytest.param(("text", "inline"), marks=pytest.mark.slow)], ids="-".join
)
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The style of a log, and its lines after all kinds of requests were made."""
    style, engine = request.param
    path = tmp_path_factory.mktemp("log") / "server.log"
    options = ["--engine", engine, "--log-format", style, "--log-level", "info", "--max-model-len", "512"]
    with serve(path, *options, "--api-key", KEY) as server:
        bother(server)
    lines = path.read_text().splitlines()
    yield style, [line for line in lines if not line.startswith(("listening url=", "ready url="))]


def bother(server: Server) -> None:
    """Make requests of all kinds: good, bad, aborted, malformed, forged."""
    with httpx.Client(base_url=server.url, headers=HEADERS, trust_env=False, verify=False, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        message = {"role": "user", "content": f"Say {MARK}!"}
        chat = {"model": model, "messages": [message], "max_tokens": 8}
        text = {"model": model, "prompt": f"{MARK} " * 3, "max_tokens": 8, "user": MARK, "metadata": {"a": MARK}}
        schema = {"type": "object", "properties": {MARK: {"type": "string"}}, "required": [MARK]}
        form = {"type": "json_schema", "json_schema": {"name": MARK, "schema": schema}}
        bodies: list[tuple[str, Any]] = [
            ("/v1/completions", {**text, "logprobs": 2, "echo": True}),
            ("/v1/completions", {**text, "stop": [MARK], "n": 2}),
            ("/v1/completions", {**text, "max_tokens": MARK}),
            ("/v1/completions", {**text, MARK: 1}),
            ("/v1/completions", {**text, "prompt": MARK * 2000}),
            ("/v1/completions", {**text, "structured_outputs": {"regex": f"({MARK}"}}),
            ("/v1/completions", {**text, "model": f"{MARK}\n{FORGED}\x1b[31m"}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "response_format": form, "max_tokens": 40}),
            ("/v1/chat/completions", {**chat, "messages": [{"role": MARK, "content": MARK}]}),
            ("/v1/chat/completions", {**chat, "chat_template": "{{ " + MARK}),
            ("/tokenize", {"model": model, "prompt": MARK}),
            ("/v1/responses", {"model": model, "input": MARK, "max_output_tokens": 8}),
            ("/v1/messages", {"model": model, "messages": [message], "max_tokens": 8}),
        ]
        for route, body in bodies:
            client.post(route, json=body, headers={"x-request-id": f"bother-{len(route)}"})
        client.post(
            "/v1/completions", content=f'{{"prompt": "{MARK}'.encode(), headers={"content-type": "application/json"}
        )
        for headers in ({"x-request-id": f"a {FORGED}"}, {"user-agent": MARK}, {"Authorization": f"Bearer {WRONG}"}):
            client.post("/v1/completions", json=text, headers=headers)
        with client.stream("POST", "/v1/completions", json={**text, "stream": True, "max_tokens": 400}) as stream:
            next(stream.iter_lines())  # then the client goes away
        client.get(f"/v1/models/%0A{FORGED.replace(' ', '%20')}%1B%5B31m%E2%80%AE")
        client.get("/requests/%0Anone")
    raw(server, f"GET /\n{FORGED} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    raw(server, b"\x00\x1b[2J\r\n\r\n")
    raw(server, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: a\x0bb\r\ncontent-length: 0\r\n\r\n")


def raw(server: Server, data: bytes) -> None:
    """Send bytes that are no good HTTP, and wait for what comes of it."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)
        with response:
            try:
                response.begin()
            except (http.client.HTTPException, OSError):
                return


def test_nothing_private_is_written(log: tuple[str, list[str]]) -> None:
    _, lines = log
    text = "\n".join(lines)
    for secret in (MARK, KEY, WRONG, KEY[3:], WRONG[3:]):
        assert secret not in text, next(line for line in lines if secret in line)


def test_every_line_is_a_record(log: tuple[str, list[str]]) -> None:
    style, lines = log
    assert len(lines) > 20
    for line in lines:
        assert line.isprintable(), repr(line)
        if style == "json":
            entry = json.loads(line)
            assert {"time", "level", "logger", "message"} <= entry.keys()
            assert entry["level"] in ("info", "warning", "error")
            if entry["logger"] == "quire.access":
                assert {"request_id", "status", "ms", "method", "path"} <= entry.keys()
        else:
            assert re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING|ERROR) |    \| ", line), repr(line)
            assert "forged" not in line or "quire.access" in line


def test_no_request_failed_in_the_server_itself(log: tuple[str, list[str]]) -> None:
    style, lines = log
    errors = [line for line in lines if ('"level": "error"' if style == "json" else " ERROR ") in line]
    assert [line for line in errors if "quire.access" not in line] == []


def test_access_lines_tell_tokens_and_whose_key(log: tuple[str, list[str]]) -> None:
    style, lines = log
    if style != "json":
        return
    entries = [json.loads(line) for line in lines]
    good = [entry for entry in entries if entry["logger"] == "quire.access" and entry["status"] == 200]
    generated = [entry for entry in good if entry["path"] == "/v1/chat/completions"]
    assert generated and all(entry["completion_tokens"] > 0 and entry["key"] == "key-0" for entry in generated)
    assert any(entry.get("process") == "engine" for entry in entries)
