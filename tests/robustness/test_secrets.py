"""What a server writes into its log by default: lines of JSON, each with its request, and no prompts, texts or keys."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.background import in_background
from tests.helpers.faults import engine_pid, is_ready, seconds_until
from tests.helpers.server import Server, serve

KEY = "sk-" + "c0ffee" * 8
SECRET = "xyzzyplugh"
WORTH_HIDING = 12  # characters of a generated text; shorter ones are found in any log


def bodies() -> list[tuple[str, Any]]:
    """Return requests that have a secret wherever a client may put one, right ones and wrong ones."""
    messages = [{"role": "user", "content": SECRET}]
    chat = {"model": "quire-demo", "messages": messages, "max_tokens": 30}
    completion = {"model": "quire-demo", "prompt": SECRET, "max_tokens": 30}
    schema = {"type": "object", "properties": {SECRET: {"const": SECRET}}, "required": [SECRET]}
    tool = {"type": "function", "function": {"name": SECRET, "description": SECRET, "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": SECRET, "schema": schema}}
    return [
        ("/v1/completions", completion),
        ("/v1/completions", {**completion, "stream": True, "logprobs": 3, "user": "a", "stop": [SECRET]}),
        ("/v1/completions", {**completion, "prompt": [SECRET] * 3, "n": 2, "echo": True}),
        ("/v1/completions", {**completion, "prompt": SECRET * 10000}),
        ("/v1/completions", {**completion, SECRET: SECRET}),
        ("/v1/completions", {**completion, "temperature": SECRET}),
        ("/v1/completions", {**completion, "structured_outputs": {"regex": f"({SECRET}"}}),
        ("/v1/completions", {**completion, "structured_outputs": {"grammar": f"start: /{SECRET}"}}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}),
        ("/v1/chat/completions", {**chat, "response_format": form}),
        ("/v1/chat/completions", {**chat, "model": SECRET}),
        ("/v1/chat/completions", {**chat, "chat_template": "{{ '" + SECRET + "' | nothing }}{{ 1 / 0 }}"}),
        ("/v1/chat/completions", {**chat, "chat_template": "{% for a in range(10 ** 9) %}" + SECRET + "{% endfor %}"}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": SECRET, "content": SECRET}]}),
        ("/v1/responses", {"model": "quire-demo", "input": SECRET, "instructions": SECRET, "max_output_tokens": 20}),
        ("/v1/messages", {**chat, "system": SECRET}),
        ("/api/chat", {"model": "quire-demo", "messages": messages, "options": {"num_predict": 10}}),
        ("/tokenize", {"model": "quire-demo", "prompt": SECRET}),
        ("/v1/embeddings", {"model": "quire-demo", "input": SECRET}),
        ("/v1/completions", f'{{"prompt": "{SECRET}", '),
        ("/v1/completions", f'{{"prompt": "{SECRET}\\ud800"}}'),
    ]


def ask(http: httpx.Client) -> list[str]:
    """Send all of them, also with wrong keys; return what was generated."""
    texts = []
    for path, body in bodies():
        content = body if isinstance(body, str) else json.dumps(body)
        for key in (KEY, KEY[:-1], SECRET):
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            answer = http.post(f"{path}?key={KEY}&q={SECRET}", content=content, headers={**headers, "x-secret": SECRET})
            assert answer.status_code < 500, answer.text
            texts += re.findall(r'"(?:text|content)": ?("(?:[^"\\]|\\.)*")', answer.text)
    return [text for text in map(json.loads, texts) if len(text) >= WORTH_HIDING]


def kill_engine(server: Server) -> None:
    """Kill the engine and wait for another one."""
    os.kill(engine_pid(server), signal.SIGKILL)
    seconds_until(lambda: not is_ready(server), most=5)
    seconds_until(lambda: is_ready(server), most=60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_secret_is_in_the_log(tmp_path: Path) -> None:
    options = ["--log-format", "json", "--api-key", KEY, "--trust-request-chat-template"]
    with (
        serve(tmp_path / "log", *options) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
    ):
        texts = ask(http)
        with in_background("tests.helpers.hostile", server.url, KEY, "1", "20"):
            kill_engine(server)
            texts += ask(http)
    log = (tmp_path / "log").read_text()
    assert texts and not [text for text in texts if text in log]
    assert KEY not in log and KEY[:-1] not in log
    assert SECRET not in log
    lines = [json.loads(line) for line in log.splitlines() if not re.match(r"(listening|ready) url=", line)]
    access = [line for line in lines if line.get("logger") == "quire.access"]
    assert len(access) > 100 and all(line["request_id"] for line in access)
    print(f"{len(lines)} lines, {len(access)} of them of requests")
