"""Small requests that would have to be told of very much."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server import generation
from tests.helpers.live_server import LiveServer, MakeServer


@pytest.fixture
def bounded(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """A server that tells of 10000 tokens and alternatives in one answer at most."""
    monkeypatch.setattr(generation, "MAX_RESPONSE_ENTRIES", 10_000)
    return make_server(llm={"max_model_len": 1000}, max_logprobs=20)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "logprobs": 20, "max_tokens": 300}, "logprobs"),
        ({"n": 100, "logprobs": 1, "max_tokens": 60}, "logprobs"),
        ({"best_of": 30, "temperature": 1.0, "logprobs": 4, "max_tokens": 90}, "logprobs"),
        ({"prompt": "a" * 480, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": "a" * 480, "n": 6, "echo": True, "logprobs": 3, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": "a" * 800, "n": 20, "echo": True, "max_tokens": 1}, "n"),
        ({"prompt": ["a" * 800] * 20, "echo": True, "max_tokens": 1}, "n"),
        ({"prompt": "a" * 800, "n": 20, "return_token_ids": True, "max_tokens": 1}, "n"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_a_bounded_size(bounded: LiveServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    if (stream and "prompt_logprobs" in fields) or (stream and "best_of" in fields):
        pytest.skip("is never streamed")
    body = {"model": "fake", "prompt": "a", "stream": stream, **fields}
    answer = bounded.http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["param"] == param and "10000" in answer.json()["error"]["message"]
    bounded.wait_until(lambda: not bounded.engine.live and not bounded.context.jobs)
    less = {"n": 1, "max_tokens": 1, "prompt": "a", "best_of": None}
    assert bounded.http.post("/v1/completions", json={**body, **less}).status_code == 200


def test_a_default_length_counts_to_the_end_of_the_context(bounded: LiveServer) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    answer = bounded.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]
    assert bounded.http.post("/v1/chat/completions", json={**body, "max_tokens": 400}).status_code == 200
    assert bounded.http.post("/v1/chat/completions", json={**body, "logprobs": False, "top_logprobs": None}).is_success


def test_variables_of_templates_are_bounded(server: LiveServer) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for variables in ({f"k{index}": 1 for index in range(9000)}, {"k": "a" * 70_000}, {"k": [0] * 40_000}):
        answer = server.http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": variables})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"
