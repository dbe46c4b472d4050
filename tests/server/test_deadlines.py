"""Time: deadlines of answers, queues that would take too long, keep-alives of streams."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from quire.server.supervisor_client import SupervisorClient
from quire.supervisor.board import create_board
from quire.supervisor.channel import Channel, ConnectionQueue
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import check_error
from tests.server.sockets import ENDLESS, idle, read_until, request_bytes

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
SOON = 0.05


@pytest.fixture
def held(make_server: MakeServer) -> LiveServer:
    """A server whose engine never gives a token."""
    server = make_server(request_timeout=30.0)
    server.do(server.fake_client.hold)
    return server


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    live = LiveServer(request_timeout=30.0)
    yield live
    live.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["field", "header", "server"])
def test_an_answer_that_is_not_complete_in_time(make_server: MakeServer, path: str, stream: bool, how: str) -> None:
    server = make_server(request_timeout=SOON if how == "server" else 30.0)
    server.do(server.fake_client.hold)
    body = {**(CHAT if "chat" in path else ENDLESS), "stream": stream, **({"timeout": SOON} if how == "field" else {})}
    headers = {"X-Request-Timeout": str(SOON)} if how == "header" else {}
    response = server.http.post(path, json=body, headers=headers)
    check_error(response, 504, "request_timeout")
    assert "0.05 s" in response.text
    server.wait_until(lambda: idle(server))
    assert server.do(lambda: len(server.engine.aborted)) == 1, "the engine does not go on with it"


def test_the_rest_of_a_stream_is_an_error_event(make_server: MakeServer) -> None:
    server = make_server(llm={"max_model_len": 100_000})
    body = {**ENDLESS, "max_tokens": 90_000, "stream": True, "timeout": 0.3}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200
    last = response.text.rstrip().rpartition("\n\n")[2]
    assert last.startswith('data: {"error":{')
    assert '"code":"request_timeout"' in last
    assert "[DONE]" not in response.text
    server.wait_until(lambda: idle(server))


def test_all_prompts_of_a_request_end_together(held: LiveServer) -> None:
    response = held.http.post("/v1/completions", json={**ENDLESS, "prompt": ["a", "b"], "n": 2, "timeout": SOON})
    check_error(response, 504, "request_timeout")
    held.wait_until(lambda: idle(held))


def test_what_ends_in_time_is_as_ever(shared: LiveServer) -> None:
    body = {"model": "fake", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    whole = shared.http.post("/v1/completions", json={**body, "timeout": 30}, headers={"X-Request-Timeout": "29.5"})
    assert whole.status_code == 200
    assert whole.json()["usage"]["completion_tokens"] == 3
    stream = shared.http.post("/v1/completions", json={**body, "stream": True, "timeout": 30})
    assert stream.text.endswith("data: [DONE]\n\n")


def test_the_shorter_time_counts(held: LiveServer) -> None:
    for timeout, header in ((SOON, "30"), (30, str(SOON))):
        response = held.http.post(
            "/v1/completions", json={**ENDLESS, "timeout": timeout}, headers={"X-Request-Timeout": header}
        )
        check_error(response, 504, "request_timeout")
        assert "0.05 s" in response.text


@pytest.mark.parametrize(
    ("timeout", "code"),
    [
        (0, "decimal_below_min_value"),
        (-1, "decimal_below_min_value"),
        (30.5, "decimal_above_max_value"),
        ("5", "invalid_type"),
        (True, "invalid_type"),
        ([1], "invalid_type"),
    ],
)
def test_fields_that_are_no_time(shared: LiveServer, timeout: Any, code: str) -> None:
    check_error(shared.http.post("/v1/completions", json={**ENDLESS, "timeout": timeout}), 400, code, "timeout")


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e3", "5s", "1_0", "31", "9" * 30])
def test_headers_that_are_no_time(shared: LiveServer, value: str) -> None:
    response = shared.http.post("/v1/completions", json=ENDLESS, headers={"X-Request-Timeout": value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "X-Request-Timeout"
    assert shared.http.get("/health").status_code == 200


def test_a_queue_of_prompt_tokens_is_bounded(make_server: MakeServer) -> None:
    server = make_server(max_num_queued_tokens=30)
    server.do(server.fake_client.hold)
    body = {**ENDLESS, "max_tokens": 2}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.http.post, "/v1/completions", json={**body, "prompt": [5] * 40})
        server.wait_until(lambda: server.llm.ttft.num_queued_tokens == 40)
        refused = server.http.post("/v1/completions", json={**body, "prompt": [5]})
        check_error(refused, 503, "engine_overloaded")
        assert "40 prompt tokens are waiting" in refused.text
        assert refused.headers["retry-after"] == "1"
        server.do(server.fake_client.resume)
        assert first.result(10).status_code == 200, "who finds nobody waiting may be longer"
    assert server.do(lambda: server.llm.ttft.num_queued_tokens) == 0


def test_whose_first_token_would_come_too_late_is_told_at_once(make_server: MakeServer) -> None:
    server = make_server(max_ttft=5.0)
    body = {**ENDLESS, "max_tokens": 2}

    def refused(prompt: list[int], **extra: Any) -> httpx.Response:
        response: httpx.Response = server.http.post("/v1/completions", json={**body, "prompt": prompt, **extra})
        check_error(response, 503, "engine_overloaded")
        assert "the first token is expected in" in response.text
        return response

    assert server.http.post("/v1/completions", json={**body, "prompt": [5] * 10}).status_code == 200
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.http.post, "/v1/completions", json={**body, "prompt": [5] * 100})
        server.wait_until(lambda: server.llm.ttft.num_queued_tokens == 100)
        server.do(lambda: set_rate(server, 50.0))
        assert refused([5] * 200).headers["retry-after"] == "2"
        server.do(lambda: set_rate(server, 10.0))
        assert refused([5]).headers["retry-after"] == "6"
        server.do(lambda: set_rate(server, 50.0))
        refused([5], timeout=1.5)
        server.do(server.fake_client.resume)
        assert first.result(10).status_code == 200
    scrape = server.http.get("/metrics").text
    assert 'vllm:admission_rejections_total{engine="0",model_name="fake",reason="queue_full"} 3.0' in scrape


@pytest.fixture
def two_fronts(make_server: MakeServer) -> Iterator[Callable[..., list[LiveServer]]]:
    """Makes two servers that share their queues as the fronts of one do; the engine of the first one begins nothing."""
    channel, queue = socket.socketpair()

    def make(**options: Any) -> list[LiveServer]:
        servers = [make_server(**options) for _ in range(2)]
        fd, board = create_board(2)
        os.close(fd)
        for row, server in enumerate(servers):
            front = SupervisorClient(Channel(channel), ConnectionQueue(queue), board, row, {})
            server.llm.share_load = partial(front.share_load, 0)
        servers[0].do(servers[0].fake_client.hold)
        return servers

    with channel, queue:
        yield make


def test_queues_of_fronts_add_up(two_fronts: Callable[..., list[LiveServer]]) -> None:
    first, second = two_fronts(max_num_queued_tokens=30, max_num_queued_reqs=2)
    body = {**ENDLESS, "max_tokens": 2}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(first.http.post, "/v1/completions", json={**body, "prompt": [5] * 40})]
        first.wait_until(lambda: first.llm.ttft.num_queued_tokens == 40)
        refused = second.http.post("/v1/completions", json={**body, "prompt": [5]})
        check_error(refused, 503, "engine_overloaded")
        assert "40 prompt tokens are waiting" in refused.text
        first.do(first.fake_client.resume)
        assert answers[0].result(10).status_code == 200
        first.do(first.fake_client.hold)
        answers = [pool.submit(first.http.post, "/v1/completions", json={**body, "prompt": [5]}) for _ in range(2)]
        first.wait_until(lambda: first.llm.num_unfinished == 2)
        refused = second.http.post("/v1/completions", json={**body, "prompt": [5]})
        check_error(refused, 503, "engine_overloaded")
        assert "2 requests are waiting or running" in refused.text
        first.do(first.fake_client.resume)
        assert [answer.result(10).status_code for answer in answers] == [200, 200]
    assert second.http.post("/v1/completions", json={**body, "prompt": [5] * 40}).status_code == 200


@pytest.mark.parametrize("way", ["aborted", "refused", "dead"])
def test_what_does_not_queue_any_more_counts_for_no_front(
    two_fronts: Callable[..., list[LiveServer]], way: str
) -> None:
    first, second = two_fronts(max_num_queued_reqs=1)
    if way == "refused":
        assert first.http.post("/v1/completions", json={**ENDLESS, "prompt": [5] * 10**5}).status_code == 400
    else:
        with first.connect() as connection:
            connection.sendall(request_bytes("/v1/completions", {**ENDLESS, "prompt": [5] * 40}))
            first.wait_until(lambda: first.llm.ttft.num_queued_tokens == 40)
            if way == "dead":
                first.call(first.llm.close)
        first.wait_until(lambda: first.llm.num_unfinished == 0)
    assert second.http.post("/v1/completions", json={**ENDLESS, "max_tokens": 2}).status_code == 200


def test_the_time_to_the_first_token_counts_what_other_fronts_have(
    two_fronts: Callable[..., list[LiveServer]],
) -> None:
    first, second = two_fronts(max_ttft=5.0)
    body = {**ENDLESS, "max_tokens": 2}
    first.do(lambda: set_rate(first, 10.0))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(first.http.post, "/v1/completions", json={**body, "prompt": [5] * 100})
        first.wait_until(lambda: first.llm.ttft.num_queued_tokens == 100)
        second.do(lambda: set_rate(second, 50.0))
        refused = second.http.post("/v1/completions", json={**body, "prompt": [5]})
        check_error(refused, 503, "engine_overloaded")
        assert "the first token is expected in 10 s" in refused.text, "the rate of who has nothing queued is an old one"
        first.do(first.fake_client.resume)
        assert answer.result(10).status_code == 200


def set_rate(server: LiveServer, rate: float) -> None:
    """Have the estimator believe that so many prompt tokens begin per second."""
    ttft = server.llm.ttft
    ttft._clock = lambda: 1000.0
    ttft._latest = 1000.0
    ttft._done, ttft._seconds = rate, 1.0


def test_aborted_requests_leave_the_queue(make_server: MakeServer) -> None:
    server = make_server()
    server.do(server.fake_client.hold)
    with server.connect() as connection:
        connection.sendall(request_bytes("/v1/completions", {**ENDLESS, "prompt": [5] * 40}))
        server.wait_until(lambda: server.llm.ttft.num_queued_tokens == 40)
    server.wait_until(lambda: server.llm.ttft.num_queued_tokens == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_streams_get_comments_while_nothing_comes(make_server: MakeServer, path: str) -> None:
    server = make_server(sse_keep_alive_interval=0.02)
    server.do(server.fake_client.hold)
    body = {**ENDLESS, "stream": True} if path == "/v1/completions" else {**CHAT, "stream": True, "max_tokens": 5}
    if path == "/v1/messages":
        del body["ignore_eos"]
    with server.connect() as connection:
        connection.sendall(request_bytes(path, body, "Connection: close\r\n"))
        answer = read_until(connection, b": keep-alive\n\n")
        assert answer.startswith(b"HTTP/1.1 200 "), "the status line goes out with the first comment"
        rest = read_until(connection, b": keep-alive\n\n")
        assert b"data:" not in answer + rest
        server.do(server.fake_client.resume)
        rest = b""
        while chunk := connection.recv(65536):
            rest += chunk
    assert b"data: " in rest
    assert b"[DONE]" in rest or b"message_stop" in rest
    assert rest.endswith(b"0\r\n\r\n")


def test_what_fails_after_a_comment_is_an_event(make_server: MakeServer) -> None:
    server = make_server(sse_keep_alive_interval=0.02)
    server.do(server.fake_client.hold)
    with server.connect() as connection:
        connection.sendall(request_bytes("/v1/completions", {**ENDLESS, "stream": True}, "Connection: close\r\n"))
        read_until(connection, b": keep-alive\n\n")
        server.do(lambda: server.engine.fail_on.update(server.engine.live))
        server.do(server.fake_client.resume)
        rest = b""
        while chunk := connection.recv(65536):
            rest += chunk
    assert b'data: {"error":{' in rest


def test_no_comments_if_not_wanted_and_none_while_events_come(make_server: MakeServer) -> None:
    server = make_server(sse_keep_alive_interval=0)
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/v1/completions", json={**ENDLESS, "stream": True})
        server.wait_until(lambda: bool(server.engine.live))
        server.call(lambda: asyncio.sleep(0.05))
        server.do(server.fake_client.resume)
        assert ": keep-alive" not in answer.result(10).text
    busy = make_server()
    assert ": keep-alive" not in busy.http.post("/v1/completions", json={**ENDLESS, "stream": True}).text
