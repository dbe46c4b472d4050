"""Servers with the fake engine, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.process import Process
from tests.server.responses.asking import family_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """A server that many tests share; leave it as it was."""
    live = LiveServer(max_body_bytes=2**20)
    yield live
    live.close()


@pytest.fixture(scope="session")
def family() -> Iterator[LiveServer]:
    """A server of a model with tools and reasoning, that many tests share; what it says is each test's to set."""
    live = family_server()
    yield live
    live.close()


@pytest.fixture(scope="session")
def plain() -> Iterator[LiveServer]:
    """A server that says hello, that many tests share; leave it as it was."""
    live = LiveServer(llm={"reply_text": "hello world"})
    yield live
    live.close()


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """Makes servers of one's own; they are closed at the end."""
    made: list[LiveServer] = []

    def make(**options: Any) -> LiveServer:
        made.append(LiveServer(**options))
        return made[-1]

    yield make
    for live in made:
        live.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts server processes with a fake engine; see `serve_fake` for the modes."""
    made: list[Process] = []

    def make(mode: str = "ok", **options: Any) -> Process:
        made.append(Process(mode, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()
