"""Responses that nobody waits for, streams that are taken up again, and clients that go away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import check_error
from tests.server.responses.asking import PATH, ask, check_story, read_events, refused, text_of
from tests.server.responses.spec import check

LONG = {"max_model_len": 100_000}


@pytest.fixture
def server(make_server: MakeServer) -> Iterator[LiveServer]:
    """A server whose engine makes no step until it is told to."""
    live = make_server(llm={"reply_text": "hello world"})
    live.do(live.fake_client.hold)
    yield live
    live.do(live.fake_client.resume)


def get(server: LiveServer, response_id: str, **query: Any) -> Any:
    """Return a response as it is now, checked, or with `stream` its events."""
    answer = server.http.get(f"{PATH}/{response_id}", params=query)
    assert answer.status_code == 200, answer.text
    if "stream" in query:
        return read_events(answer.text)
    check("Response", answer.json())
    return answer.json()


def resume(server: LiveServer) -> None:
    """Let the engine go on to the end of everything."""
    server.do(server.fake_client.resume)
    server.wait_until(lambda: not server.engine.live and server.context.num_open == 0)


def test_an_answer_is_made_without_its_client(server: LiveServer) -> None:
    made = ask(server, background=True)
    assert (made["status"], made["output"], made["background"]) == ("queued", [], True)
    assert get(server, made["id"])["status"] == "queued"
    server.wait_until(lambda: server.context.num_open == 1)  # a shutdown waits for it
    assert server.do(lambda: server.context.models.first.num_users) == 1
    answer = refused(server, previous_response_id=made["id"])
    check_error(answer, 400, "invalid_value", "previous_response_id")
    resume(server)
    done = get(server, made["id"])
    assert (done["status"], text_of(done)) == ("completed", "hello world")
    assert done["usage"]["output_tokens"] == 4
    assert server.do(lambda: server.context.models.first.num_users) == 0


def test_what_there_is_so_far_can_be_looked_at(make_server: MakeServer) -> None:
    server = make_server(llm=LONG)
    server.do(server.fake_client.hold)
    made = ask(server, background=True, ignore_eos=True, max_output_tokens=50_000)
    server.do(server.fake_client.resume)

    def pause_begun() -> bool:
        if server.engine.num_steps > 20:
            server.fake_client.hold()
        return server.engine.num_steps > 20

    server.wait_until(pause_begun)
    looked = get(server, made["id"])
    assert looked["status"] == "in_progress"
    [message] = looked["output"]
    assert (message["status"], len(message["content"][0]["text"]) > 5) == ("in_progress", True)
    assert server.http.delete(f"{PATH}/{made['id']}").status_code == 200
    server.do(server.fake_client.resume)
    server.wait_until(lambda: not server.engine.live and server.context.num_open == 0)
    assert len(server.engine.aborted) == 1


def test_cancelling(server: LiveServer) -> None:
    made = ask(server, background=True)
    for _ in range(2):  # the second time it changes nothing
        cancelled = server.http.post(f"{PATH}/{made['id']}/cancel")
        assert cancelled.status_code == 200
        check("Response", cancelled.json())
        assert (cancelled.json()["status"], cancelled.json()["error"]) == ("cancelled", None)
    assert server.do(lambda: server.engine.live) == []
    assert get(server, made["id"])["status"] == "cancelled"
    resume(server)
    finished = ask(server)
    answer = server.http.post(f"{PATH}/{finished['id']}/cancel")
    check_error(answer, 400, "invalid_value", "response_id")


def test_a_stream_goes_on_where_it_was_left(server: LiveServer) -> None:
    body = {"model": "fake", "input": "hi", "background": True, "stream": True}
    with server.http.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        first = [next(line for line in lines if line.startswith("data: ")) for _ in range(2)]
    created, queued = [json.loads(line.removeprefix("data: ")) for line in first]
    assert (created["type"], queued["type"]) == ("response.created", "response.queued")
    response_id = created["response"]["id"]
    assert get(server, response_id)["status"] == "queued"  # its client is gone
    resume(server)
    whole = get(server, response_id, stream="true")
    final = check_story(whole)
    assert text_of(final) == "hello world"
    assert get(server, response_id) == final
    for after in (0, 3, len(whole) - 1, 500):
        assert get(server, response_id, stream="true", starting_after=after) == whole[after + 1 :]
    padded = get(server, response_id, stream="true", include_obfuscation="true")
    assert [{key: item for key, item in event.items() if key != "obfuscation"} for event in padded] == whole
    assert [event for event in padded if "obfuscation" in event]


def test_followers_get_what_comes_while_it_is_made(server: LiveServer) -> None:
    made = []
    body = {"model": "fake", "input": "hi", "background": True, "stream": True}
    with server.http.stream("POST", PATH, json=body) as answer:
        text = iter(answer.iter_text())
        made.append(next(text))
        response_id = json.loads(made[0].split("data: ")[1].split("\n")[0])["response"]["id"]
        with server.http.stream("GET", f"{PATH}/{response_id}", params={"stream": "true"}) as second:
            follower = second.iter_text()
            seen = [next(follower)]
            resume(server)
            seen += follower
        made += text
    assert check_story(read_events("".join(made))) == check_story(read_events("".join(seen)))


def test_only_streams_in_the_background_can_be_followed(server: LiveServer) -> None:
    resume(server)
    for body in ({}, {"background": True}):
        made = ask(server, **body)
        answer = server.http.get(f"{PATH}/{made['id']}", params={"stream": "true"})
        check_error(answer, 400, "invalid_value", "stream")
    answer = server.http.get(f"{PATH}/{made['id']}", params={"starting_after": 1})
    check_error(answer, 400, "invalid_value", "starting_after")


def test_a_background_response_that_fails_says_why(server: LiveServer) -> None:
    made = ask(server, background=True)
    server.do(lambda: server.engine.fail_on.update(server.engine.live))
    resume(server)
    failed = get(server, made["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "finite" in failed["error"]["message"]


def test_the_queue_is_bounded_for_them_too(make_server: MakeServer) -> None:
    server = make_server(max_num_queued_reqs=2, llm={"reply_text": "hello"})
    server.do(server.fake_client.hold)
    for _ in range(2):
        ask(server, background=True)
    answer = refused(server, background=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_overloaded")
    assert "retry-after" in answer.headers
    resume(server)


def test_errors_before_it_begins_are_answers(server: LiveServer) -> None:
    check_error(refused(server, background=True, temperature=-1), 400, "decimal_below_min_value", "temperature")
    check_error(refused(server, background=True, input="x" * 900), 400, "context_length_exceeded", "input")
    assert server.call(server.context.responses.totals) == (0, 0)
    server.wait_until(lambda: server.context.num_open == 0)


def test_a_failure_within_a_stream_is_an_event(make_server: MakeServer) -> None:
    server = make_server(llm={"reply_text": "hello"})
    server.do(server.fake_client.hold)
    body = {"model": "fake", "input": "hi", "stream": True}
    with server.http.stream("POST", PATH, json=body) as answer:
        text = answer.iter_text()
        seen = [next(text)]
        server.do(lambda: server.engine.fail_on.update(server.engine.live))
        server.do(server.fake_client.resume)
        seen += text
    events = read_events("".join(seen))
    final = check_story(events)
    assert (final["status"], final["error"]["code"]) == ("failed", "server_error")
    error = events[-2]
    assert error["type"] == "error"
    assert "finite" in error["message"]
    assert get(server, final["id"]) == final
    server.do(lambda: server.engine.fail_on.clear())


def test_the_failure_of_a_whole_answer_is_an_error(make_server: MakeServer) -> None:
    server = make_server(llm={"reply_text": "hello"})
    server.engine.reply = lambda request: server.engine.fail_on.add(request.request_id) or [1]  # type: ignore[func-returns-value]
    answer = refused(server)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_stream_that_is_left_is_kept_as_cancelled(make_server: MakeServer) -> None:
    server = make_server(llm=LONG)
    body = {"model": "fake", "input": "a", "stream": True, "max_output_tokens": 90_000, "ignore_eos": True}
    with server.http.stream("POST", PATH, json=body) as answer:
        first = next(answer.iter_text())
        response_id = json.loads(first.split("data: ")[1].split("\n")[0])["response"]["id"]
    server.wait_until(lambda: server.context.num_open == 0)
    assert get(server, response_id)["status"] == "cancelled"
    stored = server.call(lambda: server.context.responses.find(b"", response_id))
    assert server.call(server.context.responses.totals) == (1, stored.size)  # counted once


def test_shutting_down_ends_what_is_made_in_the_background(server: LiveServer) -> None:
    made = ask(server, background=True)
    stored = server.call(lambda: server.context.responses.find(b"", made["id"]))

    def shut_down() -> None:
        server.context.draining = True
        for job in list(server.context.jobs):
            job.abort()

    server.do(shut_down)
    server.wait_until(lambda: server.context.num_open == 0)
    assert (stored.response["status"], stored.response["error"]["code"]) == ("failed", "server_error")
    assert "shutting down" in stored.response["error"]["message"]
