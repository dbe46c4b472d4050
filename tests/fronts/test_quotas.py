"""Two fronts: the limits of a key are those of the server, whichever front its requests reach, and whichever dies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.fronts import client_of, fronts_of, stopped, wait_for_fronts
from tests.helpers.server import Server, serve

KEYS = """
- {key: rated, requests_per_minute: 3}
- {key: changed, requests_per_minute: 2}
- {key: counted, tokens_per_minute: 600}
- {key: alone, max_concurrency: 1}
- {key: background, max_concurrency: 1}
- {key: killed, max_concurrency: 1, requests_per_minute: 4, tokens_per_minute: 1000}
- {key: stormy, max_concurrency: 3, tokens_per_minute: 100000}
- {key: stuck, max_concurrency: 1, requests_per_minute: 100}
"""
SHORT = {"model": "quire-demo", "prompt": "a", "max_tokens": 1}
LONG = {"model": "quire-demo", "prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
SECONDS = 20.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(keys: Path) -> Iterator[Server]:
    options = ("--api-server-count", "2", "--api-key-file", str(keys), "--disable-access-log")
    with serve(keys.with_name("log"), *options, key="free") as running:
        wait_for_fronts(running, 2)
        yield running


def ask(client: httpx.Client, key: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={**SHORT, **fields}, headers={"authorization": f"Bearer {key}"})


@contextlib.contextmanager
def streaming(client: httpx.Client, key: str) -> Iterator[None]:
    """Have a request running while the block does."""
    headers = {"authorization": f"Bearer {key}"}
    with client.stream("POST", "/v1/completions", json=LONG, headers=headers) as response:
        assert response.status_code == 200
        chunks = response.iter_bytes()  # httpx ends the response with its iterator
        next(chunks)
        yield


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def test_so_many_requests_per_minute_over_both(clients: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = clients
    answers = [ask(client, "rated") for client in (first, second, first, second, first, second)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429, 429]
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert left == ["2", "1", "0", "0", "0", "0"]
    assert 0 < int(answers[-1].headers["retry-after-ms"]) <= 20000


def test_so_many_tokens_per_minute_over_both(clients: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = clients
    answer = ask(first, "counted", prompt=[5] * 10, max_tokens=490, stop=["e", "a", " "])
    used = answer.json()["usage"]["total_tokens"]
    assert used < 300, "what is reserved is not what is charged"
    refused = ask(second, "counted", prompt=[5] * 10, max_tokens=590)
    assert refused.status_code == 429
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(600 - used, abs=100)


def test_so_many_requests_at_a_time_over_both(clients: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = clients
    with streaming(first, "alone"):
        refused = ask(second, "alone")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "1 requests at a time" in refused.json()["error"]["message"]
        assert ask(second, "free").status_code == 200
    wait_until(lambda: ask(second, "alone").status_code == 200)


def test_a_response_in_the_background_counts_until_it_ends(clients: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = clients
    headers = {"authorization": "Bearer background"}
    body = {"model": "quire-demo", "input": "hello", "background": True, "max_output_tokens": 800}
    response = first.post("/v1/responses", json=body, headers=headers)
    assert response.status_code == 200, response.text
    path = f"/v1/responses/{response.json()['id']}"
    assert ask(second, "background").status_code == 429
    while ask(second, "background").status_code == 429:
        assert first.get(path, headers=headers).json()["status"] in ("queued", "in_progress", "completed", "incomplete")
        time.sleep(0.01)
    assert first.get(path, headers=headers).json()["status"] in ("completed", "incomplete")


def test_limits_that_change_hold_in_both(keys: Path, clients: tuple[httpx.Client, httpx.Client]) -> None:
    assert [ask(client, "changed").status_code for client in [*clients, *clients]] == [200, 200, 429, 429]
    keys.write_text(KEYS.replace("{key: changed, requests_per_minute: 2}", "{key: changed, requests_per_minute: 5}"))
    wait_until(lambda: all(limit_of(client) == "5" for client in clients))
    assert [ask(client, "changed").status_code for client in [*clients, *clients]] == [200, 200, 200, 429]


def limit_of(client: httpx.Client) -> str:
    return client.get("/v1/models", headers={"authorization": "Bearer changed"}).headers["x-ratelimit-limit-requests"]


@pytest.mark.slow
def test_a_front_that_dies_gives_back_its_requests_but_no_rate(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    with client_of(server, pids[0]) as first, client_of(server, pids[1]) as second:
        with contextlib.suppress(httpx.TransportError), streaming(first, "killed"):
            assert ask(second, "killed").status_code == 429
            os.kill(pids[0], signal.SIGKILL)
            killed = time.monotonic()
            wait_until(lambda: ask(second, "killed").status_code == 200)
            assert time.monotonic() - killed < 3.0
        [new] = set(wait_for_fronts(server, 2)) - set(pids)
        with client_of(server, new) as third:
            answers = [ask(client, "killed") for client in (third, second, third)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]


@pytest.mark.slow
def test_a_front_that_starts_while_the_file_of_keys_is_broken_has_the_keys_as_they_were(
    keys: Path, server: Server
) -> None:
    text = keys.read_text()
    pids = wait_for_fronts(server, 2)
    keys.write_text("- {")
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: pids[0] not in fronts_of(server))
    [new] = set(wait_for_fronts(server, 2)) - set(pids)
    with client_of(server, new) as client:
        assert ask(client, "stuck").headers["x-ratelimit-limit-requests"] == "100"
        assert ask(client, "nobody").status_code == 401
        keys.write_text(text.replace("requests_per_minute: 100}", "requests_per_minute: 200}"))
        wait_until(lambda: ask(client, "stuck").headers["x-ratelimit-limit-requests"] == "200")


@pytest.mark.slow
def test_a_storm_of_requests_that_break_off_and_fronts_that_die_stays_within_limits_and_leaves_nothing(
    server: Server,
) -> None:
    chooser, running, seen, lock = random.Random(3), set[int](), list[int](), threading.Lock()
    started = killed_at = time.monotonic()
    end_at = started + 15

    def one(number: int) -> None:
        headers = {"authorization": "Bearer stormy"}
        mine = random.Random(number)
        while time.monotonic() < end_at:
            body = {**LONG, "max_tokens": mine.choice([1, 30, 100])}
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.stream(
                    "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=30
                ) as response,
            ):
                if response.status_code != 200:
                    assert response.status_code in (429, 503)
                    time.sleep(0.01)
                    continue
                try:
                    with lock:
                        running.add(number)
                        if time.monotonic() > killed_at + 1:  # by then clients have noticed that their front has died
                            seen.append(len(running))
                    for _ in response.iter_bytes():
                        if mine.random() < 0.05:
                            break  # the client goes away
                finally:
                    with lock:
                        running.discard(number)

    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(one, number) for number in range(12)]
        while time.monotonic() < end_at - 3:
            time.sleep(2)
            os.kill(chooser.choice(wait_for_fronts(server, 2)), signal.SIGKILL)
            killed_at = time.monotonic()
        for client in clients:
            client.result(60)
    assert max(seen) == 3
    assert len(seen) > 10
    for pid in wait_for_fronts(server, 2):
        with client_of(server, pid) as client:
            wait_until(lambda client=client: len(ask_many(client, "stormy", 3)) == 3)


def ask_many(client: httpx.Client, key: str, count: int) -> list[int]:
    """Return which of so many requests at a time were served."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(httpx.Client(base_url=client.base_url, timeout=30)) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(lambda one: ask(one, key, max_tokens=100, ignore_eos=True), made))
    return [answer.status_code for answer in answers if answer.status_code == 200]


@pytest.mark.slow
def test_a_supervisor_that_does_not_answer_ends_no_request_but_those_with_limits(
    server: Server, clients: tuple[httpx.Client, httpx.Client]
) -> None:
    client = clients[0]
    assert ask(client, "stuck").status_code == 200
    with stopped([server.process.pid]):
        assert ask(client, "free").status_code == 200
        refused = ask(client, "stuck")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "limits of this key" in refused.json()["error"]["message"]
    assert ask(client, "stuck").status_code == 200, "the one that nobody waited for is not counted"
