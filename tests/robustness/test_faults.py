"""Engines and servers are killed, stopped and told to end while many requests are under way. Times are printed."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.faults import (
    Answer,
    Load,
    alive,
    body_of,
    engine_pid,
    is_ready,
    leftovers,
    load,
    num_connections,
    read,
    seconds_until,
    show,
)
from tests.helpers.fronts import fronts_of, wait_for_fronts
from tests.helpers.server import Server, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STREAMS = 32


def bodies(max_tokens: int, *, count: int = STREAMS, whole_every: int = 0) -> list[dict[str, object]]:
    """So many requests, every `whole_every`-th of them not streamed."""
    return [
        body_of(number, max_tokens=max_tokens, stream=not whole_every or bool(number % whole_every))
        for number in range(count)
    ]


def undisturbed(server: Server, asked: list[dict[str, object]]) -> list[Answer]:
    with load(server, asked) as requests:
        return requests.answers()


def check(answers: list[Answer], expected: list[Answer]) -> None:
    """All complete, with the text of a run without faults."""
    for answer, right in zip(answers, expected, strict=True):
        assert (answer.status, answer.error, answer.done, answer.reason) == (200, None, True, "length")
        assert answer.text == right.text


def test_all_streams_complete_when_the_engine_is_killed(tmp_path: Path, repetitions: int | None) -> None:
    """G7, and more: not an end within a quarter of a second, but no end at all."""
    rng = random.Random(7)
    asked = bodies(120, whole_every=8)
    rows: list[tuple[object, ...]] = [("no.", "tokens before", "not ready", "ready", "all complete", "canary")]
    with serve(tmp_path / "log.txt", "--max-engine-restarts", "1000") as server:
        expected = undisturbed(server, asked)
        server_pid = server.process.pid
        for number in range(repetitions or 20):
            with load(server, asked) as requests:
                requests.wait_for_events(rng.randint(0, STREAMS * 80))
                before = requests.num_events
                engine = engine_pid(server)
                killed = time.monotonic()
                os.kill(engine, signal.SIGKILL)
                unready = seconds_until(lambda: not is_ready(server), most=5, since=killed)
                canary = read(server, body_of(99, max_tokens=3))
                ready = seconds_until(lambda: is_ready(server), most=60, since=killed)
                check(requests.answers(), expected)
                complete = max(answer.at for answer in requests.answers()) - killed
            assert (canary.status, canary.reason) == (200, "length")
            rows.append((number, before, unready, ready, complete, canary.at - killed))
        assert server.process.poll() is None and server.process.pid == server_pid
        assert engine_pid(server) != engine
    show(f"kill -9 of the engine under {STREAMS} requests: seconds after the kill", rows)


def test_an_engine_that_is_stopped_is_replaced(tmp_path: Path, repetitions: int | None) -> None:
    """G9: a hang that no exit code tells of."""
    asked = bodies(150, count=12, whole_every=4)
    rows: list[tuple[object, ...]] = [("no.", "not ready", "replaced", "all complete")]
    with serve(tmp_path / "log.txt", "--max-engine-restarts", "1000") as server:
        expected = undisturbed(server, asked)
        for number in range(repetitions or 2):
            engine = engine_pid(server)
            with load(server, asked) as requests:
                requests.wait_for_events(100)
                stopped = time.monotonic()
                os.kill(engine, signal.SIGSTOP)
                unready = seconds_until(lambda: not is_ready(server), most=60, since=stopped)
                assert server.get("/livez")[0] == 200
                replaced = seconds_until(lambda: is_ready(server), most=60, since=stopped)
                check(requests.answers(), expected)
                complete = max(answer.at for answer in requests.answers()) - stopped
            assert not alive(engine)
            rows.append((number, unready, replaced, complete))
    show("SIGSTOP of the engine under 12 requests: seconds after it", rows)


def test_an_engine_that_goes_on_soon_is_left_alone(tmp_path: Path, repetitions: int | None) -> None:
    asked = bodies(150, count=12, whole_every=4)
    with serve(tmp_path / "log.txt") as server:
        expected = undisturbed(server, asked)
        engine = engine_pid(server)
        for _ in range(repetitions or 3):
            with load(server, asked) as requests:
                requests.wait_for_events(100)
                os.kill(engine, signal.SIGSTOP)
                time.sleep(1.8)
                os.kill(engine, signal.SIGCONT)
                check(requests.answers(), expected)
        assert engine_pid(server) == engine


def test_nothing_is_left_of_a_server_that_is_killed(tmp_path: Path, repetitions: int | None) -> None:
    """G10."""
    rows: list[tuple[object, ...]] = [("no.", "processes", "gone")]
    for number in range(repetitions or 3):
        before = leftovers()
        with serve(tmp_path / f"log{number}.txt") as server, load(server, bodies(300)) as requests:
            requests.wait_for_events(50)
            family = server.children()
            assert engine_pid(server) in family
            server.process.kill()
            gone = seconds_until(lambda family=family: not any(map(alive, family)), most=2)  # type: ignore[misc]
            requests.answers()
        assert leftovers() <= before
        rows.append((number, len(family), gone))
    show("kill -9 of the server: seconds until its processes are gone", rows)


def num_open(server: Server) -> int:
    """Return how many requests the server has taken that have no complete response."""
    return int(json.loads(server.get("/load")[1])["server_load"])


def drain(server: Server, requests: Load) -> tuple[float, float, float]:
    """Send SIGTERM and try the door; return seconds: to not ready, to the last token, from there to the exit."""
    told = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    unready = seconds_until(lambda: not is_ready(server), most=5, since=told)
    refused = read(server, body_of(99, max_tokens=3))
    assert (refused.status, (refused.error or {}).get("code")) == (503, "server_shutting_down")
    last = max(answer.at for answer in requests.answers())
    assert server.process.wait(30) == 0
    return unready, last - told, time.monotonic() - last


def test_a_server_that_gets_sigterm_finishes_its_requests(tmp_path: Path, repetitions: int | None) -> None:
    """G11."""
    rng = random.Random(11)
    asked = bodies(200, whole_every=4)
    expected: list[Answer] = []
    rows: list[tuple[object, ...]] = [("no.", "not ready", "last token", "exit after it")]
    for number in range(repetitions or 3):
        with serve(tmp_path / f"log{number}.txt") as server:
            expected = expected or undisturbed(server, asked)
            with load(server, asked) as requests:
                seconds_until(lambda server=server: num_open(server) == STREAMS, most=30)  # type: ignore[misc]
                requests.wait_for_events(rng.randint(1, STREAMS * 60))
                rows.append((number, *drain(server, requests)))
                check(requests.answers(), expected)
    show(f"SIGTERM under {STREAMS} requests: seconds", rows)


def test_an_engine_that_dies_while_the_server_ends_is_replaced(tmp_path: Path) -> None:
    asked = bodies(200, count=8, whole_every=4)
    with serve(tmp_path / "log.txt") as server:
        expected = undisturbed(server, asked)
        with load(server, asked) as requests:
            requests.wait_for_events(30)
            server.process.send_signal(signal.SIGTERM)
            os.kill(engine_pid(server), signal.SIGKILL)
            check(requests.answers(), expected)
        assert server.process.wait(30) == 0


def test_a_server_ends_at_once_while_it_loads_and_while_it_replaces_its_engine(tmp_path: Path) -> None:
    rows: list[tuple[object, ...]] = [("while", "exit")]
    with serve(tmp_path / "log.txt") as server:
        os.kill(engine_pid(server), signal.SIGKILL)
        seconds_until(lambda: not is_ready(server), most=5)
        engine = engine_pid(server)
        server.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        assert server.process.wait(30) == 0
        rows.append(("restarting", time.monotonic() - told))
        assert not alive(engine)
    with serve(tmp_path / "log2.txt", until="listening") as server:
        seconds_until(lambda: server.get("/readyz")[0] == 503, most=30)
        engine = engine_pid(server)
        server.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        assert server.process.wait(30) == 0
        rows.append(("loading", time.monotonic() - told))
        assert not alive(engine)
    show("SIGTERM: seconds", rows)


def test_a_poisonous_request_is_found_among_many(tmp_path: Path, repetitions: int | None) -> None:
    rows: list[tuple[object, ...]] = [("no.", "deaths", "seconds")]
    asked = bodies(150, count=16, whole_every=4)
    plugin = ("--logits-processors", "killer=tests.helpers.logits_processors:killer")
    with serve(tmp_path / "log.txt", *plugin) as server:
        expected = undisturbed(server, asked)
        for number in range(repetitions or 2):
            before = server.log.read_text().count("the engine died:")
            args = {"after": 10 + 20 * number}
            poison = body_of(50, max_tokens=150, logits_processors=[{"name": "killer", "args": args}])
            began = time.monotonic()
            with load(server, [*asked, poison]) as requests:
                *innocent, guilty = requests.answers()
            check(innocent, expected)
            assert (guilty.error or {}).get("code") == "request_killed_engine"
            deaths = server.log.read_text().count("the engine died:") - before
            assert deaths <= 3
            rows.append((number, deaths, time.monotonic() - began))
    show("one request that kills its engine, among 16 others", rows)


PROMPT = {"prompt": "To be, or not to be, that is the question: " * 8, "stream": False}


def lose_front(
    server: Server, asked: list[dict[str, object]], expected: list[Answer], number: signal.Signals
) -> tuple[int, dict[str, float]]:
    """Send a signal to the busiest front under load; return how many streams it had, and seconds from the signal."""
    seconds = {}
    fronts = fronts_of(server)
    with load(server, asked) as requests:
        requests.wait_for_events(STREAMS * 20)
        victim = max(fronts, key=lambda pid: num_connections(server, pid))
        lost = num_connections(server, victim)
        os.kill(victim, number)
        killed = time.monotonic()
        seconds["answer"] = seconds_until(lambda: server.get("/livez", 5.0)[0] in (200, 503), most=5, since=killed)
        seconds["gone"] = seconds_until(lambda: victim not in fronts_of(server), most=10, since=killed)
        canary = read(server, body_of(99, max_tokens=3, **PROMPT))
        seconds["canary"] = canary.at - killed
        seconds["blocks free"] = seconds_until(
            lambda: server.metric("vllm:num_requests_running") <= STREAMS - lost, most=60, since=killed
        )
        answers = requests.answers()
    replaced = lambda: len(set(fronts_of(server)) - {victim}) == len(fronts)  # noqa: E731
    seconds["new front"] = seconds_until(replaced, most=60, since=killed)
    assert (canary.status, canary.reason) == (200, "length")
    assert sum(not answer.done for answer in answers) == lost
    whole = [answer.done for answer in answers]
    check(list(itertools.compress(answers, whole)), list(itertools.compress(expected, whole)))
    for answer, right in zip(answers, expected, strict=True):
        assert right.text.startswith(answer.text), "what was cut was right as far as it came"
    return lost, seconds


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("num_fronts", [1, 2])
def test_a_front_that_dies_or_freezes_takes_nothing_but_its_own_streams(
    tmp_path: Path, num_fronts: int, number: signal.Signals, repetitions: int | None
) -> None:
    """The engine goes on, with its cache; the streams of another front do not notice; the port answers at once."""
    asked = bodies(120)
    rows: list[tuple[object, ...]] = []
    with serve(tmp_path / "log.txt", "--api-server-count", str(num_fronts), "--disable-access-log") as server:
        wait_for_fronts(server, num_fronts)
        expected = undisturbed(server, asked)
        read(server, body_of(99, max_tokens=1, **PROMPT))
        engine = engine_pid(server)
        for turn in range(repetitions or 3):
            lost, seconds = lose_front(server, asked, expected, number)
            wait_for_fronts(server, num_fronts)
            assert seconds["answer"] < 1.0
            assert engine_pid(server) == engine and server.process.poll() is None
            assert server.metric("vllm:prefix_cache_hits_total") > 0
            rows += [] if rows else [("no.", "streams cut", *seconds)]
            rows.append((turn, lost, *seconds.values()))
    show(f"{number.name} to one of {num_fronts} fronts under {STREAMS} streams: seconds after it", rows)


def test_streams_go_on_while_the_supervisor_is_frozen(tmp_path: Path) -> None:
    asked = bodies(120)
    with serve(tmp_path / "log.txt", "--disable-access-log") as server:
        expected = undisturbed(server, asked)
        with load(server, asked) as requests:
            requests.wait_for_events(STREAMS * 10)
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                answers = requests.answers()
                check(answers, expected)
                with ThreadPoolExecutor(1) as pool:
                    waiting = pool.submit(read, server, body_of(99, max_tokens=3, stream=False))
                    assert not waiting.done()
                    os.kill(server.process.pid, signal.SIGCONT)
                    assert waiting.result(30).status == 200
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
