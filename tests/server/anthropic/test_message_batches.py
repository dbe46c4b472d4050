"""Message batches: their whole life with Anthropic's own client, and what is wrong with requests."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.anthropic.wire import HI
from tests.server.checks import check_refused

PATH = "/v1/messages/batches"
SECONDS = 20.0


@pytest.fixture(scope="module")
def sdk() -> ModuleType:
    """The package `anthropic`."""
    return importlib.import_module("anthropic")


@pytest.fixture
def live(make_server: MakeServer, tmp_path: Path) -> LiveServer:
    return make_server(
        data_dir=str(tmp_path),
        api_key=["secret", "other"],
        llm={"reply_text": "hello world", "max_model_len": 100_000},
        max_batch_concurrency=2,
    )


@pytest.fixture
def connect(sdk: ModuleType, live: LiveServer) -> Iterator[Callable[..., Any]]:
    """Makes clients; they are closed at the end."""
    made = []

    def make(api_key: str = "secret") -> Any:
        made.append(sdk.Anthropic(base_url=live.url, api_key=api_key, max_retries=0))
        return made[-1]

    yield make
    for client in made:
        client.close()


def item(custom_id: str, **params: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {"model": "fake", "max_tokens": 20, "messages": HI, **params}}


def ended(client: Any, batch_id: str) -> Any:
    """Return a batch once it has ended."""
    deadline = time.monotonic() + SECONDS
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline
    return batch


def test_the_whole_cycle(connect: Callable[..., Any], sdk: ModuleType, live: LiveServer, tmp_path: Path) -> None:
    client = connect()
    bad = [item("model", model="nope"), item("tokens", max_tokens=0), item("stream", stream=True), item("who", who=1)]
    made = client.messages.batches.create(requests=[item("a"), *bad, item("b", system="be kind")])
    assert (made.processing_status, made.request_counts.processing, made.results_url) == ("in_progress", 6, None)
    assert (made.expires_at - made.created_at).total_seconds() == 86400
    batch = ended(client, made.id)
    counts = batch.request_counts.to_dict()
    assert counts == {"processing": 0, "succeeded": 2, "errored": 4, "canceled": 0, "expired": 0}
    assert batch.ended_at >= batch.created_at and batch.cancel_initiated_at is None
    results = {entry.custom_id: entry.result for entry in client.messages.batches.results(made.id)}
    assert list(results) == ["a", "model", "tokens", "stream", "who", "b"]
    for name in ("a", "b"):
        assert results[name].type == "succeeded"
        assert results[name].message.content[0].text == "hello world"
        assert results[name].message.usage.output_tokens == 4
    errors = {name: result.error.error for name, result in results.items() if result.type == "errored"}
    assert {name: error.type for name, error in errors.items()} == {
        "model": "not_found_error",
        "tokens": "invalid_request_error",
        "stream": "invalid_request_error",
        "who": "invalid_request_error",
    }
    assert "max_tokens" in errors["tokens"].message and "stream" in errors["stream"].message
    assert all(request.background for request in live.engine.added)
    with pytest.raises(sdk.NotFoundError):
        connect("other").messages.batches.retrieve(made.id)
    assert connect("other").messages.batches.list().data == []
    assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(sdk.NotFoundError):
        client.messages.batches.retrieve(made.id)
    assert list((tmp_path / "files").iterdir()) == []


def test_cancel(connect: Callable[..., Any], sdk: ModuleType, live: LiveServer) -> None:
    client = connect()
    live.engine.reply = lambda request: [65] * (2 if request.max_tokens < 3 else 90_000)
    requests = [item(str(number), max_tokens=2 if number < 2 else 90_000) for number in range(5)]
    made = client.messages.batches.create(requests=requests)
    live.wait_until(lambda: len(live.engine.added) == 4 and len(live.engine.live) == 2)
    with pytest.raises(sdk.BadRequestError):
        client.messages.batches.delete(made.id)
    with pytest.raises(sdk.AnthropicError, match="results_url"):
        client.messages.batches.results(made.id)
    cancelled = client.messages.batches.cancel(made.id)
    assert cancelled.processing_status == "canceling" and cancelled.cancel_initiated_at is not None
    batch = ended(client, made.id)
    counts = batch.request_counts.to_dict()
    assert counts == {"processing": 0, "succeeded": 2, "errored": 0, "canceled": 3, "expired": 0}
    kinds = [entry.result.type for entry in client.messages.batches.results(made.id)]
    assert kinds == ["succeeded"] * 2 + ["canceled"] * 3
    assert live.engine.live == []


def test_expiry(connect: Callable[..., Any], live: LiveServer) -> None:
    client = connect()
    store = live.context.batches
    now = store.clock()
    store.clock.now = lambda: now
    live.do(live.fake_client.hold)
    made = client.messages.batches.create(requests=[item("a"), item("b")])
    now += 86400
    live.call(live.app.state.batch_runner.tell)
    batch = ended(client, made.id)
    assert (batch.request_counts.expired, batch.ended_at) == (2, batch.expires_at)
    assert [entry.result.type for entry in client.messages.batches.results(made.id)] == ["expired"] * 2
    live.do(live.fake_client.resume)


def test_lists(connect: Callable[..., Any]) -> None:
    client = connect()
    names = [client.messages.batches.create(requests=[item("a")]).id for _ in range(5)]
    page = client.messages.batches.list(limit=2)
    assert [batch.id for batch in page.data] == names[:2:-1] and page.has_more
    assert [batch.id for batch in client.messages.batches.list(limit=2)] == names[::-1]  # all pages
    before = client.messages.batches.list(limit=2, before_id=names[1])
    assert [batch.id for batch in before.data] == names[3:1:-1] and before.has_more


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "requests is required"),
        ({"requests": []}, "requests must not be empty"),
        ({"requests": {}}, "requests must be a list"),
        ({"requests": [5]}, "requests[0]"),
        ({"requests": [{**item("a"), "custom_id": "a b"}]}, "requests[0].custom_id"),
        ({"requests": [{**item("a"), "custom_id": "x" * 65}]}, "requests[0].custom_id"),
        ({"requests": [item("a"), item("a")]}, "requests[1].custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0].params is required"),
        ({"requests": [{**item("a"), "other": 1}]}, "requests[0].other"),
        ({"requests": [item("a")], "workspace_id": "x"}, "workspace_id"),
    ],
)
def test_requests_that_are_refused(live: LiveServer, body: dict[str, Any], words: str) -> None:
    answer = live.http.post(PATH, json=body, headers={"x-api-key": "secret"})
    assert words in check_refused(answer)


def test_its_files_are_nobody_elses(live: LiveServer) -> None:
    """Files of message batches are no files of OpenAI's API, nor are its batches."""
    headers = {"x-api-key": "secret"}
    made = live.http.post(PATH, json={"requests": [item("a")]}, headers=headers).json()
    deadline = time.monotonic() + SECONDS
    while live.http.get(f"{PATH}/{made['id']}", headers=headers).json()["processing_status"] != "ended":
        assert time.monotonic() < deadline
    answer = live.http.get(f"{PATH}/{made['id']}/results", headers=headers)
    assert answer.headers["content-type"] == "application/x-jsonl" and answer.headers["request-id"]
    assert json.loads(answer.text)["custom_id"] == "a"
    assert live.http.get("/v1/files", headers=headers).json()["data"] == []
    assert live.http.get("/v1/batches", headers=headers).json()["data"] == []
    check_refused(live.http.get(f"/v1/batches/{made['id']}", headers=headers), status=404)
