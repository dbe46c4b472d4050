"""What tests of several fronts share; each module has a `server` of its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.fronts import client_of, wait_for_fronts
from tests.helpers.server import Server


@pytest.fixture
def clients(server: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A client of each front."""
    one, two = wait_for_fronts(server, 2)
    with client_of(server, one) as first, client_of(server, two) as second:
        yield first, second
