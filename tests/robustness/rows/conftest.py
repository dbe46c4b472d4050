"""The server that all tables of bad requests are sent to: of a model with tools and reasoning, on a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.live_server import LiveServer
from tests.robustness.rows.row import MOST_BODY, canary
from tests.server.families import MAX_MODEL_LEN, front_of


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """The server; at the end nothing is left in it."""
    live = LiveServer(
        llm={"front_model": front_of("hermes", "qwen3")}, max_body_bytes=MOST_BODY, max_model_len=MAX_MODEL_LEN
    )
    yield live
    live.wait_until(lambda: not live.engine.live and live.llm.num_unfinished == 0 and live.context.num_open == 0)
    live.close()


@pytest.fixture(scope="session")
def sung(server: LiveServer) -> str:
    """What the canary says before anything bad was sent."""
    return canary(server)
