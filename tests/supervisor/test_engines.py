"""Engines that the supervisor starts: it never waits for them."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from quire.child_process import start_module_here
from quire.server_config import ServerConfig
from quire.supervisor import engines as engines_module
from quire.supervisor.channel import Channel, Message
from quire.supervisor.engines import Engines
from quire.supervisor.front import Front
from quire.supervisor.supervisor import Supervisor


def start_sleeping(module: str, **options: Any) -> Any:
    """Start a process that reads nothing."""
    return start_module_here("tests.supervisor.fake_front", "child", **options)


def wait_for_the_end_of(engines: Engines) -> None:
    """Wait until the only engine has ended."""
    deadline = time.monotonic() + 10.0
    while not engines.reap():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_that_does_not_read_its_options_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "start_module_here", start_sleeping)
    engines = Engines()
    of_others = psutil.Process().children()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(engines.find, "demo", {"key_weights": "x" * (1 << 20)})
        try:
            engine = started.result(10.0)
        finally:
            for child in set(psutil.Process().children()).difference(of_others):
                child.kill()
    engines.kill(engine)
    wait_for_the_end_of(engines)


def test_a_front_gives_back_by_name_what_it_has_asked_for_and_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Supervisor, "_reap_orphans", lambda self: None)  # there are children of other tests
    monkeypatch.setattr(engines_module, "start_module_here", start_sleeping)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor(ServerConfig(), {}, listener)
        ends = [socket.socketpair() for _ in range(2)]
        fronts = [SimpleNamespace(row=row, channel=Channel(ends[row][0]), exiting=False) for row in range(2)]
        for front in fronts:
            front.process = SimpleNamespace(poll=lambda: None)
        asked = {"type": "engine", "call": 1, "name": "m", "options": {}, "replaced": None}
        released = {"type": "release", "call": 2, "name": "m", "reacts": False}

        def send(row: int, message: Message) -> None:
            Channel(ends[row][1]).send(message)
            supervisor._serve(cast(Front, fronts[row]))

        send(0, asked)
        send(1, released)  # it has asked for none
        [engine] = supervisor.engines
        assert engine.process.poll() is None
        send(0, released)
        wait_for_the_end_of(supervisor.engines)
        supervisor._close()
        for pair in ends:
            for end in pair:
                end.close()
