"""Servers with the fake engine, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer, MakeServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """A server that many tests share; leave it as it was."""
    live = LiveServer(max_body_bytes=2**20)
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
