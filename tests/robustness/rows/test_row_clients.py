"""Table J: clients that behave oddly. Some of its rows have tests elsewhere, which `ELSEWHERE` names."""

from __future__ import annotations

import ast
import json
import re
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.live_server import LiveServer
from tests.robustness.rows.row import canary, check_unharmed
from tests.server.checks import COMPLETIONS
from tests.server.test_lifecycle import idle, read_until, request_bytes

TESTS = Path(__file__).resolve().parents[2]
# What a row is about, and where its test stands.
LIFE, BOUNDS = "server/test_lifecycle.py", "server/test_bounds.py"
ELSEWHERE = {
    "J2 goes away while it waits": (LIFE, "test_a_client_that_goes_away_while_waiting_frees_its_request"),
    "J4 reads slowly": (BOUNDS, "test_a_stream_waits_for_its_reader_and_keeps_little"),
    "J6 half-open": (BOUNDS, "test_1500_half_open_connections_are_closed_and_disturb_nobody"),
    "J9 one connection": (BOUNDS, "test_one_connection_serves_a_thousand_requests"),
    "J11 reads nothing": (BOUNDS, "test_a_client_that_reads_nothing_is_cut_off_and_its_request_ends"),
    "J13 one id for all": (LIFE, "test_many_requests_with_one_id_do_not_meet"),
    "J15 error": (LIFE, "test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_and_without_done"),
}
HERE = ("J1", "J3", "J5", "J7", "J8", "J10", "J12", "J14")  # in the names of the functions
LONG = {"model": "fake", "prompt": "ab", "max_tokens": 3000, "ignore_eos": True, "stream": True}


def test_no_row_is_missing() -> None:
    rows = {name.split()[0] for name in ELSEWHERE} | set(HERE)
    assert rows == {f"J{number}" for number in range(1, 16)}
    words = {word for name in globals() if name.startswith("test_") for word in name.split("_")}
    assert words >= {row.lower() for row in HERE}
    for path, name in ELSEWHERE.values():
        defined = [
            node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert name in defined


def test_j1_120_clients_that_go_away_in_their_streams(server: LiveServer, sung: str) -> None:
    aborted = server.do(lambda: len(server.engine.aborted))
    for _ in range(120):
        with server.connect() as connection:
            connection.sendall(request_bytes(COMPLETIONS, LONG))
            read_until(connection, b"data: ")
        server.wait_until(lambda: idle(server))
    assert server.do(lambda: len(server.engine.aborted)) == aborted + 120
    check_unharmed(server, sung)


FORM = {"structured_outputs": {"regex": "(a|b)*a(a|b){30}"}}


@pytest.mark.parametrize("more", [{}, FORM], ids=["in the queue", "while its grammar is made"])
def test_j3_clients_that_go_away_before_their_first_token(server: LiveServer, sung: str, more: dict[str, Any]) -> None:
    server.do(server.fake_client.hold)
    with server.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, {**LONG, **more}))
        server.wait_until(lambda: server.context.num_open == 1)
    server.wait_until(lambda: idle(server))
    server.do(server.fake_client.resume)
    check_unharmed(server, sung)


def test_j5_peers_that_are_silent_are_probed(server: LiveServer) -> None:
    assert server.listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        waits = [
            server.listener.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{n}"))
            for n in ("IDLE", "INTVL", "CNT")
        ]
        assert waits[0] + waits[1] * waits[2] <= 300


def ask_many(server: LiveServer, count: int, accepted: int) -> list[httpx.Response]:
    """Send so many requests at once to an engine that makes no step until all of them were judged."""
    server.do(server.fake_client.hold)
    refused: list[int] = []

    def ask(_: int) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
            response = client.post(COMPLETIONS, json={"model": "fake", "prompt": "a", "max_tokens": 2})
        if response.status_code != 200:
            refused.append(1)
        return response

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, number) for number in range(count)]
        server.wait_until(lambda: len(refused) == count - accepted)
        server.do(server.fake_client.resume)
        return [future.result() for future in asked]


@pytest.mark.parametrize(
    ("options", "accepted"),
    [({"max_num_queued_reqs": 16}, 16), ({"max_num_seqs": 2}, 8)],
    ids=["J7", "J8 four times those that run"],
)
def test_j7_and_j8_queues_are_bounded(options: dict[str, int], accepted: int) -> None:
    live = LiveServer(**options)
    try:
        sung = canary(live)
        answers = ask_many(live, 100 if accepted == 16 else 20, accepted)
        counted = Counter(answer.status_code for answer in answers)
        assert counted == {200: accepted, 503: len(answers) - accepted}
        for answer in answers:
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) >= 1 and int(answer.headers["retry-after-ms"]) >= 1
                error = answer.json()["error"]
                assert (error["type"], error["code"], error["param"]) == ("server_error", "engine_overloaded", None)
        check_unharmed(live, sung)
    finally:
        live.close()


@pytest.mark.parametrize("stream", [False, True])
def test_j10_who_stops_sending_gets_the_whole_answer_or_none(server: LiveServer, sung: str, stream: bool) -> None:
    """It is taken for a client that has gone away, unless the answer was there already."""
    body = {"model": "fake", "prompt": "canary", "max_tokens": 8, "seed": 7, "stream": stream}
    answer = server.raw(request_bytes(COMPLETIONS, body, "Connection: close\r\n"), shut=True)
    if answer:
        assert answer.startswith(b"HTTP/1.1 200 ")
        text = "".join(re.findall(r'"text":"([^"]*)"', answer.decode()))
        assert text == sung or (stream and sung.startswith(text) and b"[DONE]" not in answer)
    server.wait_until(lambda: idle(server))
    check_unharmed(server, sung)


def test_j12_a_long_prompt_among_short_ones(server: LiveServer, sung: str) -> None:
    """All are answered, each with its own text; that nobody waits for it is measured where steps are simulated."""
    long = {"model": "fake", "prompt": [5] * 4000, "max_tokens": 8}
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(server.http.post, COMPLETIONS, json=long)
        texts = {pool.submit(canary, server) for _ in range(50)}
        assert {future.result() for future in texts} == {sung}
        assert first.result().status_code == 200
    check_unharmed(server, sung)


@pytest.mark.parametrize("stream", [False, True])
def test_j14_http_1_0(server: LiveServer, sung: str, stream: bool) -> None:
    body = json.dumps({"model": "fake", "prompt": "canary", "max_tokens": 8, "seed": 7, "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = server.raw(head.encode() + body)
    assert answer.split()[1] == b"200"
    assert b"transfer-encoding" not in answer.lower()
    assert answer.endswith(b"data: [DONE]\n\n" if stream else b"}")
    assert "".join(re.findall(r'"text":"([^"]*)"', answer.decode())) == sung
    check_unharmed(server, sung)
