"""An engine process is killed under its server: nobody's text is lost, and the server stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.faults import body_of, engine_pid, is_ready, load, read, seconds_until
from tests.helpers.server import Server, serve

KILLER = "killer=tests.helpers.logits_processors:killer"


@pytest.fixture(
    scope="module",
    params=["--no-async-scheduling", pytest.param("--async-scheduling", marks=pytest.mark.slow)],
    ids=["in-turn", "ahead"],
)
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serve(log, "--logits-processors", KILLER, "--max-engine-restarts", "10", request.param) as running:
        yield running


def test_streams_go_on_when_engines_are_killed_and_the_request_that_does_it_is_found(server: Server) -> None:
    bodies = [body_of(number, max_tokens=60) for number in range(3)]
    bodies += [
        body_of(3, max_tokens=60, stream=False, n=2, logprobs=2),
        body_of(4, max_tokens=60, temperature=1, seed=5, mirostat=2, mirostat_tau=4.0),
        body_of(5, max_tokens=60, ignore_eos=False, structured_outputs={"regex": "([a-z]{3,8} ){8}"}),
        body_of(6, max_tokens=60, temperature=0.7, seed=6, repetition_penalty=1.2, dry_multiplier=0.8),
    ]
    with load(server, bodies) as undisturbed:
        expected = undisturbed.answers()
    engine = engine_pid(server)
    poison = body_of(7, max_tokens=60, logits_processors=[{"name": "killer", "args": {"after": 20}}])
    with load(server, [poison, *bodies]) as disturbed:
        seconds_until(lambda: not is_ready(server), most=30)
        assert server.get("/livez")[0] == 200
        late = read(server, body_of(9, max_tokens=5))  # comes while there is no engine
        guilty, *answers = disturbed.answers()
    assert {item.reason for item in expected} == {"length", "stop"}
    assert [(item.status, item.text, item.reason, item.done) for item in answers] == [
        (200, item.text, item.reason, True) for item in expected
    ]
    assert (late.status, late.reason) == (200, "length")
    assert guilty.error is not None
    assert guilty.error["code"] == "request_killed_engine"
    assert guilty.text and not guilty.done
    assert is_ready(server)
    assert engine_pid(server) != engine
    assert server.process.poll() is None


@pytest.mark.slow  # the same as above, but no request is to blame
def test_streams_go_on_when_the_engine_is_killed_from_outside(server: Server) -> None:
    bodies = [body_of(number, max_tokens=150) for number in range(3)]
    bodies.append(body_of(3, max_tokens=150, stream=False, n=2, logprobs=2))
    with load(server, bodies) as undisturbed:
        expected = undisturbed.answers()
    engine = engine_pid(server)
    with load(server, bodies) as disturbed:
        disturbed.wait_for_events(20)
        os.kill(engine, signal.SIGKILL)
        answers = disturbed.answers()
    assert [(item.status, item.text, item.reason, item.done) for item in answers] == [
        (200, item.text, item.reason, True) for item in expected
    ]
    assert is_ready(server)
    assert engine_pid(server) != engine


@pytest.mark.slow  # in pieces: tests/server/test_run.py and tests/frontend/test_recovery.py
def test_an_engine_that_dies_too_often_ends_the_server(tmp_path: Path) -> None:
    with serve(tmp_path / "log.txt", "--max-engine-restarts", "0") as server:
        with load(server, [body_of(0, max_tokens=900), body_of(1, max_tokens=900, stream=False)]) as requests:
            requests.wait_for_events(5)
            os.kill(engine_pid(server), signal.SIGKILL)
            stream, whole = requests.answers()
        assert stream.error is not None and stream.error["code"] == "engine_unavailable"
        assert (whole.status, (whole.error or {})["code"]) == (503, "engine_unavailable")
        assert server.process.wait(20) == 70
