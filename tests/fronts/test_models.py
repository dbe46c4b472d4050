"""The models of a server with one front or two: loaded, asleep, with adapters, while fronts and engines die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.checkpoint.folder import resolve_model
from tests.helpers.adapters import factors, read_tensors, write_adapter
from tests.helpers.faults import Answer, Load, body_of, engine_pid, load
from tests.helpers.fronts import client_of, fronts_of, stopped, wait_for_fronts
from tests.helpers.server import Server, serve

MODELS = """
- {model: quire-demo, served_model_name: a, num_gpu_blocks_override: 200}
- {model: quire-demo, served_model_name: b, num_gpu_blocks_override: 200, pinned: true}
- {model: quire-demo, served_model_name: c, num_gpu_blocks_override: 200}
"""
State = list[dict[str, Any]]


def engines_of(server: Server) -> list[int]:
    """Return the process ids of a server's engines."""
    return [pid for pid in server.children() if b"quire.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def text_of(client: httpx.Client, model: str) -> str:
    """Return what a model generates."""
    body = {"model": model, "prompt": "The king said to the queen", "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def operate(client: httpx.Client, path: str, **body: Any) -> httpx.Response:
    """Send an operator's request, which must be carried out."""
    answer = client.post(path, json=body or None)
    assert answer.status_code == 200, answer.text
    return answer


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that several processes have a part in."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def clients_of(server: Server, count: int) -> Iterator[list[httpx.Client]]:
    """A client of each front."""
    with ExitStack() as stack:
        yield [stack.enter_context(client_of(server, pid)) for pid in wait_for_fronts(server, count)]


def models_of(clients: list[httpx.Client]) -> State:
    """Return what all fronts say of the models, which must be the same."""
    found = [client.get("/v1/models").json()["data"] for client in clients]
    assert all(other == found[0] for other in found)
    return list(found[0])


def states_of(clients: list[httpx.Client]) -> dict[str, str]:
    """Return the state of each model."""
    return {model["id"]: model["status"]["value"] for model in models_of(clients)}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the built-in model."""
    weights = read_tensors(resolve_model("quire-demo"))
    factored = factors(weights, ("q_proj", "down_proj"), rank=4, seed=1)
    return write_adapter(tmp_path_factory.mktemp("adapter"), factored, lora_alpha=1)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def count(request: pytest.FixtureRequest) -> int:
    """How many fronts there are."""
    return int(request.param)


@pytest.fixture(scope="module")
def server(count: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with several models, and so many fronts."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.yaml").write_text(MODELS)
    options = ("--models", str(folder / "models.yaml"), "--enable-admin-endpoints", "--enable-lora")
    with serve(folder / "log", *options, "--api-server-count", str(count)) as server:
        yield server


def kill_fronts(server: Server, count: int, *, which: int = 0) -> None:
    """Kill a front, the oldest by default, and wait for the next one."""
    pid = wait_for_fronts(server, count)[which]
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in fronts_of(server) and len(fronts_of(server)) == count)
    wait_for_fronts(server, count)


@pytest.mark.slow
def test_models_are_the_same_at_every_front_and_after_each_has_died(server: Server, count: int) -> None:
    with clients_of(server, count) as clients:
        expected = text_of(clients[0], "b")
        operate(clients[-1], "/v1/models/a/load")
        assert states_of(clients) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert [text_of(client, "a") for client in clients] == [expected] * count
        operate(clients[-1], "/sleep?model=a&level=2")
        operate(clients[0], "/sleep?model=b&level=1")
        before, engines = models_of(clients), engines_of(server)
    assert {model["id"]: model["status"]["value"] for model in before} == {
        "a": "sleeping",
        "b": "sleeping",
        "c": "unloaded",
    }
    for _ in range(count):
        kill_fronts(server, count)
        with clients_of(server, count) as clients:
            assert models_of(clients) == before
            assert engines_of(server) == engines
    with clients_of(server, count) as clients:
        assert all(client.get("/is_sleeping?model=a").json() == {"is_sleeping": True} for client in clients)
        assert [text_of(client, name) for client in clients for name in "ab"] == [expected] * 2 * count
        assert states_of(clients) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        operate(clients[0], "/v1/models/a/unload")
        assert states_of(clients) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        until(lambda: len(engines_of(server)) == 1)
    kill_fronts(server, count)
    with clients_of(server, count) as clients:
        assert states_of(clients) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        assert text_of(clients[-1], "a") == expected
        operate(clients[-1], "/v1/models/a/unload")


def test_a_model_goes_on_loading_when_the_front_dies_that_has_it_loaded(server: Server, count: int) -> None:
    number = len(engines_of(server))
    with client_of(server, wait_for_fronts(server, count)[0]) as client, pytest.raises(httpx.TransportError):
        client.post("/v1/models/c/load", timeout=0.3)
    kill_fronts(server, count)
    assert len(engines_of(server)) == number + 1
    with clients_of(server, count) as clients:
        text_of(clients[-1], "c")
        assert states_of(clients)["c"] == "loaded"
        operate(clients[0], "/v1/models/c/unload")
        assert len(engines_of(server)) == number


@pytest.mark.slow
def test_a_model_that_is_used_at_another_front_is_left_alone(server: Server, count: int) -> None:
    body = {"model": "b", "prompt": "The king", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with clients_of(server, count) as clients:
        for user in range(count):
            client_of_user = client_of(server, fronts_of(server)[user])
            with client_of_user as client, client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                for other in clients:
                    for path in ("/v1/models/b/unload", "/sleep?model=b"):
                        refused = other.post(path)
                        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
                assert [line for line in lines if line][-1] == "data: [DONE]"
            until(lambda: clients[-1].post("/sleep?model=b").status_code == 200)  # the server sees the end a bit later
            assert states_of(clients)["b"] == "sleeping"
            text_of(clients[0], "b")


@pytest.mark.slow
def test_adapters_are_the_same_at_every_front_and_after_one_has_died(server: Server, count: int, adapter: Path) -> None:
    with clients_of(server, count) as clients:
        operate(clients[-1], "/v1/load_lora_adapter", lora_name="pirate", lora_path=str(adapter), model="b")
        before = models_of(clients)
        assert before[-1]["id"] == "pirate"
        expected = text_of(clients[0], "pirate")
    kill_fronts(server, count)
    with clients_of(server, count) as clients:
        assert models_of(clients) == before
        assert [text_of(client, "pirate") for client in clients] == [expected] * count
        operate(clients[0], "/v1/unload_lora_adapter", lora_name="pirate")
        assert [client.get("/v1/models/pirate").status_code for client in clients] == [404] * count


# ---- one model, two fronts ----

STREAMS = 16  # of each front
TWO_FRONTS = ("--api-server-count", "2", "--front-stall-timeout", "30")  # each is stopped for a while


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one model and two fronts."""
    folder = tmp_path_factory.mktemp("shared")
    with serve(folder / "log", *TWO_FRONTS, "--max-engine-restarts", "100") as server:
        wait_for_fronts(server, 2)
        yield server


@contextmanager
def streams(server: Server, max_tokens: int) -> Iterator[list[Load]]:
    """Have streams served by both fronts, as many by each."""
    one, two = wait_for_fronts(server, 2)
    bodies = [body_of(number, max_tokens=max_tokens) for number in range(2 * STREAMS)]
    with stopped([two]), load(server, bodies[:STREAMS]) as first:
        first.wait_for_events(STREAMS)
        os.kill(two, signal.SIGCONT)
        with stopped([one]), load(server, bodies[STREAMS:]) as second:
            second.wait_for_events(STREAMS)
            os.kill(one, signal.SIGCONT)
            yield [first, second]


def answers_of(loads: list[Load]) -> list[Answer]:
    """Wait for the answers of all streams."""
    return [answer for item in loads for answer in item.answers()]


def check(answers: list[Answer], expected: list[Answer]) -> None:
    """All are complete, with the text of a run without faults."""
    for answer, right in zip(answers, expected, strict=True):
        assert (answer.status, answer.error, answer.done, answer.reason) == (200, None, True, "length")
        assert answer.text == right.text


def test_the_streams_of_both_fronts_complete_when_the_engine_is_killed(shared: Server) -> None:
    with streams(shared, 60) as loads:
        expected = answers_of(loads)
    fronts = fronts_of(shared)
    for num_kills in (1, 2):
        with streams(shared, 60) as loads:
            for _ in range(num_kills):
                engine, events = engine_pid(shared), loads[0].num_events
                os.kill(engine, signal.SIGKILL)
                until(lambda engine=engine, events=events: loads[0].num_events > events)  # type: ignore[misc]
                assert engine_pid(shared) != engine
            check(answers_of(loads), expected)
        assert len(engines_of(shared)) == 1
    assert fronts_of(shared) == fronts


@pytest.mark.slow
def test_the_streams_of_both_fronts_complete_when_the_server_gets_sigterm(tmp_path: Path) -> None:
    with serve(tmp_path / "log", *TWO_FRONTS) as server:
        wait_for_fronts(server, 2)
        with streams(server, 60) as loads:
            server.process.send_signal(signal.SIGTERM)
            answers = answers_of(loads)
        assert all((answer.error, answer.reason) == (None, "length") for answer in answers)
        assert server.process.wait(20) == 0


@pytest.mark.slow
def test_the_server_ends_with_an_engine_that_is_not_replaced(tmp_path: Path) -> None:
    with serve(tmp_path / "log", *TWO_FRONTS, "--max-engine-restarts", "0") as server:
        wait_for_fronts(server, 2)
        os.kill(engine_pid(server), signal.SIGKILL)
        assert server.process.wait(20) == 70
