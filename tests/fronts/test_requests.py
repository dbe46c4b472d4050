"""Requests, their timelines, the load and the playground are the same from every front; real processes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.fronts import client_of, stopped, wait_for_fronts
from tests.helpers.server import Server, serve

KEYS = """
- {key: alice-key, name: alice}
- {key: bob-key, name: bob}
"""
BOB = {"Authorization": "Bearer bob-key"}
BODY = {"model": "quire-demo", "prompt": "The king", "max_tokens": 800, "ignore_eos": True, "stream": True}
STATE = "/playground/state"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two fronts and two keys."""
    folder = tmp_path_factory.mktemp("requests")
    (folder / "keys").write_text(KEYS)
    options = ("--api-server-count", "2", "--api-key-file", str(folder / "keys"), "--enable-debug-endpoints")
    with serve(folder / "log", *options) as server:
        server.key = "alice-key"
        wait_for_fronts(server, 2)
        yield server


@contextlib.contextmanager
def generating(client: httpx.Client) -> Iterator[str]:
    """Run a request while the block runs; the block gets its id once it has a token."""
    with client.stream("POST", "/v1/completions", json=BODY) as answer:
        lines = answer.iter_lines()  # without a name for it httpx would close the stream
        line = next(line for line in lines if line.startswith("data: "))
        yield json.loads(line[6:])["id"]


@pytest.mark.slow
def test_running_requests_of_all_fronts_are_listed(clients: tuple[httpx.Client, httpx.Client], server: Server) -> None:
    one, two = clients
    with client_of(server, wait_for_fronts(server, 2)[1]) as third, generating(one) as first, generating(two) as second:
        ids = [first, second]
        listed = third.get("/requests").json()
        assert [entry["id"] for entry in listed["data"]] == ids
        assert listed["has_more"] is False
        assert {entry["state"] for entry in listed["data"]} == {"generating"}
        assert third.get("/requests", headers=BOB).json()["data"] == []
        assert third.get("/load").json() == {"server_load": 2}
        running = third.get(f"/requests/{ids[0]}").json()
        assert (running["id"], running["state"]) == (ids[0], "generating")
        blocks = third.get("/debug/blocks").json()
        assert sum(map(len, blocks["queues"].values())) >= 2


def test_a_timeline_is_the_same_from_every_front(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    body = {**BODY, "max_tokens": 8, "stream": False}
    made = one.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}).json()
    time.sleep(0.1)  # until the engine's part has been fetched
    found = one.get(f"/requests/{made['id']}").json()
    assert found["prompts"][0]["complete"] is True
    assert two.get(f"/requests/{made['id']}").json() == found == two.get("/requests/mine").json()
    assert two.get(f"/requests/{made['id']}", headers=BOB).status_code == 404
    assert two.get("/requests/nobody").json()["error"]["code"] == "request_not_found"
    again = two.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}).json()
    for client in clients:
        assert client.get("/requests/mine").json()["id"] == again["id"]


def test_the_playground_shows_the_work_of_all_fronts(clients: tuple[httpx.Client, httpx.Client]) -> None:
    def seconds(client: httpx.Client) -> tuple[int, dict[int, int]]:
        answer = client.get(STATE).json()
        return answer["picture_number"], {row[0]: row[2] for row in answer["history"]["seconds"]}

    body = {**BODY, "max_tokens": 16, "stream": False}
    before = sum(seconds(clients[0])[1].values())
    for client in clients:
        client.post("/v1/completions", json=body)
    time.sleep(0.3)
    found = [seconds(client) for client in clients]
    assert sum(found[0][1].values()) == before + 32
    assert found[0] == found[1]


def test_a_busy_engine_is_seen_from_an_idle_front(clients: tuple[httpx.Client, httpx.Client]) -> None:
    for busy, idle in (clients, clients[::-1]):
        with generating(busy):
            assert idle.get(STATE).json()["stats"]["num_running"] == 1


def test_a_front_that_does_not_react_delays_answers_for_a_second_at_most(server: Server) -> None:
    one, two = wait_for_fronts(server, 2)
    with client_of(server, two) as client, stopped([one]):
        began = time.monotonic()
        assert client.get("/requests").status_code == 200
        assert time.monotonic() - began < 1.5
    assert os.path.exists(f"/proc/{one}")


@pytest.mark.slow
def test_one_line_of_statistics_for_all_fronts(clients: tuple[httpx.Client, httpx.Client], server: Server) -> None:
    for client in clients:
        client.post("/v1/completions", json={**BODY, "max_tokens": 100, "stream": False})
    time.sleep(10.5)
    lines = [line for line in server.log.read_text().splitlines() if "tokens/s" in line]
    assert lines
    moments = [line.split()[1] for line in lines]
    assert len(set(moments)) == len(moments)
