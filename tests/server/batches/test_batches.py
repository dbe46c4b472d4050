"""Batches of OpenAI's API: their whole life, what is wrong with lines and requests, keys, cancellation, expiry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.server.batches import runner
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.batches.asking import (
    BATCHES,
    CHAT,
    FILES,
    TEXT,
    begun,
    check_batch,
    content_of,
    ended,
    found,
    headers_of,
    line,
    lines_of,
    until,
    uploaded,
)
from tests.server.checks import check_refused
from tests.server.responses.spec import check

LLM = {"reply_text": "hello world"}


@pytest.fixture
def live(make_server: MakeServer, tmp_path: Path) -> LiveServer:
    """A server with a folder, that says hello."""
    return make_server(data_dir=str(tmp_path), llm=LLM, max_body_bytes=2**16)


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_whole_cycle_with_the_client(client: openai.OpenAI, live: LiveServer) -> None:
    lines = [line(str(number), max_tokens=0 if number == 3 else 5) for number in range(6)]
    file = client.files.create(file=("in.jsonl", content_of(lines)), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"name": "nightly"}
    )
    assert (made.status, made.metadata, made.expires_at) == ("validating", {"name": "nightly"}, made.created_at + 86400)
    ended(live.http, made.id)
    batch = client.batches.retrieve(made.id)
    assert batch.status == "completed" and batch.errors is None and batch.usage is not None
    assert batch.usage.output_tokens == 5 * 4 and batch.usage.total_tokens == 5 * 4 + batch.usage.input_tokens
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 6, "completed": 5, "failed": 1}
    assert batch.output_file_id is not None and batch.error_file_id is not None
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2", "4", "5"]
    for answer in answers:
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "hello world"
        check("CreateChatCompletionResponse", answer["response"]["body"])
    [failed] = lines_of(live.http, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"], failed["error"]) == ("3", 400, None)
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"
    assert [item.id for item in client.batches.list()] == [made.id]
    listed = {item.id: (item.purpose, item.filename) for item in client.files.list()}
    assert listed[batch.output_file_id] == ("batch_output", f"{made.id}_output.jsonl")
    assert client.files.delete(file.id).deleted


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        (TEXT, {}, "text_completion"),
        ("/v1/responses", {"prompt": None, "input": "hi"}, "response"),
    ],
)
def test_other_routes(live: LiveServer, url: str, body: dict[str, Any], kind: str) -> None:
    batch = ended(live.http, begun(live.http, [line("a", url, **body)], endpoint=url))
    [answer] = lines_of(live.http, batch["output_file_id"])
    assert answer["response"]["body"]["object"] == kind


BAD: dict[str, tuple[list[Any], list[tuple[str, str | None, int | None]]]] = {
    "nothing": ([], [("empty_file", "input_file_id", None)]),
    "blanks": (["", "  "], [("empty_file", "input_file_id", None)]),
    "json": ([line("a"), "{", "[]"], [("invalid_json_line", None, 2), ("invalid_type", None, 3)]),
    "twice": ([line("a"), "", line("a")], [("duplicate_custom_id", "custom_id", 3)]),
    "url": ([line("a"), line("b", TEXT)], [("url_mismatch", "url", 2)]),
    "method": ([{**line("a"), "method": "GET"}], [("invalid_value", "method", 1)]),
    "model": ([line("a", model="nope")], [("model_not_found", "body.model", 1)]),
    "stream": ([line("a", stream=True)], [("unsupported_parameter", "body.stream", 1)]),
    "no id": ([{**line("a"), "custom_id": None}], [("missing_required_parameter", "custom_id", 1)]),
    "long": ([line("a", user="x" * 200_000)], [("line_too_long", None, 1)]),
    "many": ([line("a")] + ["{"] * 300, [("invalid_json_line", None, number) for number in range(2, 102)]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_fail_the_batch_before_any_is_run(live: LiveServer, name: str) -> None:
    lines, errors = BAD[name]
    batch = ended(live.http, begun(live.http, lines))
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None)
    assert batch["failed_at"] is not None
    assert [(error["code"], error["param"], error["line"]) for error in batch["errors"]["data"]] == errors
    assert live.engine.added == []


def test_too_many_lines(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_LINES", 3)
    batch = ended(live.http, begun(live.http, [line(str(number)) for number in range(5)]))
    [error] = batch["errors"]["data"]
    assert (batch["status"], error["code"], error["line"]) == ("failed", "too_many_tasks", 4)


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"input_file_id": "file-nope"}, 404, "file_not_found", "input_file_id"),
    ({"endpoint": "/v1/nope"}, 400, "invalid_value", "endpoint"),
    ({"endpoint": "/v1/messages"}, 400, "invalid_value", "endpoint"),
    ({"endpoint": None}, 400, "missing_required_parameter", "endpoint"),
    ({"completion_window": "1h"}, 400, "invalid_value", "completion_window"),
    ({"metadata": {"a": 5}}, 400, "invalid_type", "metadata.a"),
    ({"metadata": {"a": "x" * 600}}, 400, "string_above_max_length", "metadata.a"),
    ({"metadata": {str(number): "" for number in range(17)}}, 400, "invalid_value", "metadata"),
    (
        {"output_expires_after": {"anchor": "created_at"}},
        400,
        "missing_required_parameter",
        "output_expires_after.seconds",
    ),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
        400,
        "integer_below_min_value",
        "output_expires_after.seconds",
    ),
    ({"prompt": "x"}, 400, "unknown_parameter", "prompt"),
]


@pytest.mark.parametrize(("changes", "status", "code", "param"), REFUSED)
def test_requests_that_are_refused(
    live: LiveServer, changes: dict[str, Any], status: int, code: str, param: str
) -> None:
    good = {"input_file_id": uploaded(live.http, [line("a")]), "endpoint": CHAT, "completion_window": "24h"}
    answer = live.http.post(BATCHES, json={**good, **changes})
    check_refused(answer, status=status, code=code, param=param)


def test_the_output_of_a_batch_is_no_input(live: LiveServer) -> None:
    output = ended(live.http, begun(live.http, [line("a")]))["output_file_id"]
    body = {"input_file_id": output, "endpoint": CHAT, "completion_window": "24h"}
    check_refused(
        live.http.post(BATCHES, json=body), "batch_output", status=400, code="invalid_purpose", param="input_file_id"
    )


def test_output_may_expire_before_other_files(live: LiveServer) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    batch = ended(live.http, begun(live.http, [line("a")], output_expires_after=expiry))
    file = live.http.get(f"{FILES}/{batch['output_file_id']}").json()
    assert file["expires_at"] == file["created_at"] + 3600


def test_lists(live: LiveServer) -> None:
    names = [begun(live.http, [line("a")]) for _ in range(3)]
    listed = live.http.get(BATCHES, params={"limit": 2}).json()
    assert [batch["id"] for batch in listed["data"]] == names[:0:-1] and listed["has_more"]
    rest = live.http.get(BATCHES, params={"after": listed["last_id"]}).json()
    assert [batch["id"] for batch in rest["data"]] == names[:1] and not rest["has_more"]
    check_batch(rest["data"][0])
    check_refused(live.http.get(BATCHES, params={"after": "x"}), status=400, code="invalid_cursor", param="after")


# ---- what becomes of those that do not run to their end ----


@pytest.fixture
def slow(make_server: MakeServer, tmp_path: Path) -> Iterator[LiveServer]:
    """A server of two keys that runs two lines at a time, whose engine makes no step until it is told to."""
    live = make_server(data_dir=str(tmp_path), llm=LLM, api_key=["one", "two"], max_batch_concurrency=2)
    live.do(live.fake_client.hold)
    yield live
    live.do(live.fake_client.resume)


def check_rest(live: LiveServer, batch: dict[str, Any], code: str) -> None:
    """Check that what has a result is kept, and all the rest has an error."""
    good = lines_of(live.http, batch["output_file_id"], "one")
    bad = lines_of(live.http, batch["error_file_id"], "one")
    assert [item["custom_id"] for item in (*good, *bad)] == [str(number) for number in range(6)]
    assert len(good) >= 2 and bad
    assert {item["error"]["code"] for item in bad} == {code} and not any(item["response"] for item in bad)
    assert batch["request_counts"] == {"total": 6, "completed": len(good), "failed": len(bad)}


def test_cancel(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(
        data_dir=str(tmp_path), llm={"max_model_len": 100_000}, api_key=["one", "two"], max_batch_concurrency=2
    )
    lines = [line(str(number), max_tokens=2 if number < 2 else 90_000, ignore_eos=True) for number in range(6)]
    batch_id = begun(live.http, lines, key="one")
    until(live.http, batch_id, lambda batch: batch["request_counts"]["completed"] == 2, "one")
    check_refused(
        live.http.post(f"{BATCHES}/{batch_id}/cancel", headers=headers_of("two")),
        status=404,
        code="batch_not_found",
        param="batch_id",
    )
    cancelled = live.http.post(f"{BATCHES}/{batch_id}/cancel", headers=headers_of("one")).json()
    check_batch(cancelled)
    assert cancelled["status"] == "cancelling" and cancelled["cancelling_at"] is not None
    batch = ended(live.http, batch_id, "one")
    assert batch["status"] == "cancelled" and batch["cancelled_at"] is not None
    check_rest(live, batch, "batch_cancelled")
    assert live.engine.live == []
    answer = live.http.post(f"{BATCHES}/{batch_id}/cancel", headers=headers_of("one"))
    check_refused(answer, "cancelled", code="batch_ended", param="batch_id")


def test_expiry(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path), llm={"max_model_len": 100_000}, max_batch_concurrency=2, api_key=["one"])
    store = live.context.batches
    now = store.clock()
    store.clock.now = lambda: now
    lines = [line(str(number), max_tokens=2 if number < 2 else 90_000, ignore_eos=True) for number in range(6)]
    batch_id = begun(live.http, lines, key="one")
    until(live.http, batch_id, lambda batch: batch["request_counts"]["completed"] == 2, "one")
    now += 86400
    live.call(live.app.state.batch_runner.tell)
    batch = ended(live.http, batch_id, "one")
    assert (batch["status"], batch["expired_at"]) == ("expired", int(now))
    check_rest(live, batch, "batch_expired")


def test_a_batch_that_waits_can_be_cancelled(slow: LiveServer) -> None:
    """Of one key, batches run one after the other; of several keys, side by side."""
    first = begun(slow.http, [line(str(number)) for number in range(4)], key="one")
    slow.wait_until(lambda: len(slow.engine.added) == 2)
    second = begun(slow.http, [line("a")], key="one")
    until(slow.http, second, lambda batch: batch["status"] == "in_progress", "one")
    slow.http.post(f"{BATCHES}/{second}/cancel", headers=headers_of("one"))
    batch = ended(slow.http, second, "one")
    assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
    assert found(slow.http, first, "one")["status"] == "in_progress"
    third = begun(slow.http, [line("a")], key="two")
    slow.do(slow.fake_client.resume)
    assert {ended(slow.http, first, "one")["status"], ended(slow.http, third, "two")["status"]} == {"completed"}


def test_another_key_sees_nothing(slow: LiveServer) -> None:
    batch_id = begun(slow.http, [line("a")], key="one")
    assert slow.http.get(BATCHES, headers=headers_of("two")).json()["data"] == []
    answer = slow.http.get(f"{BATCHES}/{batch_id}", headers=headers_of("two"))
    check_refused(answer, status=404, code="batch_not_found", param="batch_id")
    name = found(slow.http, batch_id, "one")["input_file_id"]
    body = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"}
    answer = slow.http.post(BATCHES, json=body, headers=headers_of("two"))
    check_refused(answer, status=404, code="file_not_found", param="input_file_id")
    slow.do(slow.fake_client.resume)
    output = ended(slow.http, batch_id, "one")["output_file_id"]
    answer = slow.http.get(f"{FILES}/{output}/content", headers=headers_of("two"))
    check_refused(answer, status=404, code="file_not_found", param="file_id")


def test_results_count_for_the_quota_of_the_key(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path), llm=LLM, max_stored_file_bytes=4000, max_batch_concurrency=1)
    batch = ended(live.http, begun(live.http, [line(str(number)) for number in range(12)]))
    good, bad = lines_of(live.http, batch["output_file_id"]), lines_of(live.http, batch["error_file_id"])
    assert len(good) + len(bad) == 12 and good and bad
    assert {item["error"]["code"] for item in bad} == {"file_storage_exceeded"}


def test_a_key_may_have_so_many_batches_at_a_time(slow: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.batches.database.MAX_UNFINISHED", 1)
    begun(slow.http, [line("a")], key="one")
    begun(slow.http, [line("a")], key="two")
    name = uploaded(slow.http, [line("a")], key="one")
    body = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"}
    answer = slow.http.post(BATCHES, json=body, headers=headers_of("one"))
    assert answer.headers["x-should-retry"] == "false"
    check_refused(answer, status=429, code="rate_limit_exceeded")


# ---- beside interactive requests ----


def test_lines_run_in_the_background_on_the_account_of_their_key(make_server: MakeServer, tmp_path: Path) -> None:
    """They take no place of the key's requests, and what others do with the engine comes first."""
    keys = tmp_path / "keys"
    keys.write_text("- {key: one, name: alice, max_concurrency: 1, requests_per_minute: 4}\n- {key: two, name: bob}\n")
    keys.chmod(0o600)
    live = make_server(api_key_file=str(keys), llm=LLM)
    live.do(live.fake_client.hold)
    batch_id = begun(live.http, [line(str(number)) for number in range(8)], key="one")
    live.wait_until(lambda: len(live.engine.added) == 8)
    assert all(request.background and request.tenant == "alice" for request in live.engine.added)
    live.do(live.fake_client.resume)
    body = line("a")["body"]
    assert live.http.post(CHAT, json=body, headers=headers_of("one")).status_code == 200
    assert not live.engine.added[-1].background
    assert ended(live.http, batch_id, "one")["status"] == "completed"
    live.wait_until(lambda: live.context.num_open == 0)


def test_lines_begin_more_slowly_beside_other_requests(live: LiveServer) -> None:
    batch_runner = live.app.state.batch_runner
    ended(live.http, begun(live.http, [line("a")]))
    assert batch_runner.pause == runner.PAUSE
    live.http.post(CHAT, json=line("a")["body"])
    assert batch_runner.pause == runner.BUSY_PAUSE


def test_a_line_that_its_key_may_never_run_is_not_tried_for_ever(make_server: MakeServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("- {key: one, tokens_per_minute: 20}\n")
    keys.chmod(0o600)
    live = make_server(api_key_file=str(keys), llm=LLM)
    batch = ended(live.http, begun(live.http, [line("a")], key="one"), "one")
    [failed] = lines_of(live.http, batch["error_file_id"], "one")
    assert (failed["response"]["status_code"], failed["error"]) == (429, None)


def test_a_line_that_finds_no_room_is_sent_again(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.batches.lines.LONGEST_WAIT", 0.0)
    live = make_server(max_num_queued_reqs=1, llm=LLM)
    batch = ended(live.http, begun(live.http, [line(str(number)) for number in range(8)]))
    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}


def test_a_client_cannot_say_that_its_request_is_a_line(server: LiveServer) -> None:
    number = len(server.engine.added)
    answer = server.http.post(CHAT, json=line("a")["body"], headers={"line_of": "x", "x-line-of": "x"})
    assert answer.status_code == 200 and not server.engine.added[number].background
