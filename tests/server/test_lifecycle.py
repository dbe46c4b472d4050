"""Requests that do not end well: clients that go away, engines that die, queues that are full, servers that stop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from quire.engine_request import EngineRequest
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import CHAT, COMPLETIONS, HI
from tests.server.sockets import ENDLESS, idle, read_all, read_until, request_bytes, sing

CHATS: dict[str, Any] = {"messages": HI}


GONE: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": (COMPLETIONS, {}, 1),
    "stream": (COMPLETIONS, {"stream": True}, 1),
    "many": (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
    "beams": (COMPLETIONS, {"n": 2, "use_beam_search": True, "temperature": 0, "ignore_eos": False}, 1),
    "chat": (CHAT, CHATS, 1),
    "message": ("/v1/messages", {"max_tokens": 50, **CHATS}, 1),
    "Ollama": ("/api/chat", CHATS, 1),
    "response": ("/v1/responses", {"input": "hi", "max_tokens": ...}, 1),
}


@pytest.mark.parametrize("name", GONE)
def test_a_client_that_goes_away_while_waiting_frees_its_request(server: LiveServer, name: str) -> None:
    path, changes, jobs = GONE[name]
    base = ENDLESS if path == COMPLETIONS else {"model": "fake"}
    body = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    aborted = server.do(lambda: len(server.engine.aborted))
    server.do(server.fake_client.hold)
    with server.connect() as connection:
        connection.sendall(request_bytes(path, body))
        server.wait_until(lambda: bool(server.engine.live))
    server.wait_until(lambda: idle(server) and not server.context.jobs)
    assert server.do(lambda: len(server.engine.aborted)) == aborted + jobs
    server.do(server.fake_client.resume)


def test_a_client_that_goes_away_while_its_grammar_is_made(server: LiveServer) -> None:
    form = {"structured_outputs": {"regex": "(a|b)*a(a|b){30}"}}
    server.do(server.fake_client.hold)
    with server.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, {**ENDLESS, **form}))
        server.wait_until(lambda: server.context.num_open == 1)
    server.wait_until(lambda: idle(server))
    server.do(server.fake_client.resume)


def test_clients_that_go_away_while_their_templates_wait_for_workers(make_server: MakeServer) -> None:
    server = make_server(trust_request_chat_template=True)
    endless = "{% for i in range(99999999999) %}{% endfor %}"
    with ExitStack() as clients:
        for number in range(20):
            body = {"model": "fake", **CHATS, "chat_template": f"{endless}{{# {number} #}}"}
            clients.enter_context(server.connect()).sendall(request_bytes(CHAT, body))
        server.wait_until(lambda: server.context.num_open == 20)
    server.wait_until(lambda: server.context.num_open == 0)  # long before their jobs would have been done


@pytest.mark.parametrize(("path", "times"), [(COMPLETIONS, 30), (CHAT, 5)])
def test_clients_that_go_away_in_their_streams(make_server: MakeServer, path: str, times: int) -> None:
    server = make_server(llm={"max_model_len": 100_000})
    sung = sing(server)
    body = {"model": "fake", "stream": True, "max_tokens": 90_000, "ignore_eos": True}
    body |= CHATS if path == CHAT else {"prompt": "ab"}
    for _ in range(times):
        with server.connect() as connection:
            connection.sendall(request_bytes(path, body))
            read_until(connection, b"data: ")
        server.wait_until(lambda: idle(server))
    assert server.do(lambda: len(server.engine.aborted)) == times
    assert sing(server) == sung


def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_and_without_done(make_server: MakeServer) -> None:
    server = make_server(llm={"max_model_len": 100_000})
    body = {**ENDLESS, "max_tokens": 90_000, "stream": True}
    with server.connect() as connection:
        connection.sendall(request_bytes("/v1/completions", body, "Connection: close\r\n"))
        read_until(connection, b"data: ")
        server.do(server.fake_client.die)
        rest = read_all(connection)
    assert b'data: {"error":{' in rest
    assert b'"code":"engine_unavailable"' in rest
    assert b"[DONE]" not in rest
    assert rest.endswith(b"0\r\n\r\n")  # the answer is complete as HTTP


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_the_first_token_is_an_error_with_a_status(
    make_server: MakeServer, stream: bool
) -> None:
    server = make_server()
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/v1/completions", json={**ENDLESS, "stream": stream})
        server.wait_until(lambda: bool(server.engine.live))
        server.do(server.fake_client.die)
        response = answer.result(10)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert response.headers["retry-after"] == "1"
    assert server.http.get("/health").json() == {"status": "dead"}
    assert server.http.get("/health").status_code == 503
    assert server.http.post("/v1/completions", json=ENDLESS).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_are_not_finite_are_the_servers_fault(make_server: MakeServer, stream: bool) -> None:

    def fail(request: EngineRequest) -> list[int]:
        server.engine.fail_on.add(request.request_id)
        return [5]

    server: LiveServer = make_server(llm={"reply": fail})
    response = server.http.post("/v1/completions", json={**ENDLESS, "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.json()["error"]["message"] == "logits are not finite"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_can_never_fit_is_told_why(make_server: MakeServer, stream: bool) -> None:

    def refuse(request: EngineRequest) -> list[int]:
        server.engine.refuse_on.add(request.request_id)
        return [5]

    server: LiveServer = make_server(llm={"reply": refuse})
    response = server.http.post("/v1/completions", json={**ENDLESS, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["message"]) == ("request_refused", "it needs 65 blocks, the pool has 64")
    scrape = server.http.get("/metrics").text
    assert 'vllm:corrupted_requests_total{engine="0",model_name="fake"} 0.0' in scrape


def test_all_prompts_of_a_request_are_accepted_or_none(make_server: MakeServer) -> None:
    server = make_server(max_num_queued_reqs=2)
    server.do(server.fake_client.hold)
    response = server.http.post("/v1/completions", json={**ENDLESS, "prompt": ["a", "b", "c"]})
    assert response.status_code == 503
    server.wait_until(lambda: idle(server))


def test_nothing_but_health_is_served_while_the_model_loads(make_server: MakeServer) -> None:
    server = make_server(start=False)
    assert server.http.get("/health").status_code == 503
    assert server.http.get("/health").json() == {"status": "loading"}
    assert server.http.get("/version").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    for response in (server.http.get("/v1/models"), server.http.post("/v1/completions", json=ENDLESS)):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert int(response.headers["retry-after"]) > 0
    server.call(server.llm.start)
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/v1/models").status_code == 200


def test_a_server_that_stops_refuses_new_requests_and_aborts_what_is_left(make_server: MakeServer) -> None:
    server = make_server()
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/v1/completions", json=ENDLESS)
        server.wait_until(lambda: bool(server.engine.live))
        server.context.draining = True
        refused = server.http.post("/v1/completions", json=ENDLESS)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_shutting_down"
        assert "retry-after" in refused.headers
        assert server.http.get("/health").json() == {"status": "draining"}
        server.do(lambda: [job.abort() for job in list(server.context.jobs)])
        assert answer.result(10).json()["error"]["code"] == "server_shutting_down"
    server.wait_until(lambda: idle(server))


def test_many_requests_with_one_id_do_not_meet(make_server: MakeServer) -> None:
    server = make_server(max_num_seqs=32)
    prompts = [f"prompt {index}" for index in range(40)]

    def ask(prompt: str) -> str:
        body = {"model": "fake", "prompt": prompt, "max_tokens": 20, "seed": 1, "request_id": "same"}
        response = server.http.post("/v1/completions", json=body, headers={"x-request-id": "same"})
        assert response.headers["x-request-id"] == "same"
        text: str = response.json()["choices"][0]["text"]
        return text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == alone
    assert len(set(alone)) == len(prompts)
