"""Backends for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.lang import LocalBackend
from tests.lang.endpoint import ScriptedEndpoint


@pytest.fixture(scope="session")
def backend() -> Iterator[LocalBackend]:
    """The demo model in this process; leave it idle."""
    with LocalBackend(max_model_len=512) as local:
        yield local


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    """An endpoint that continues a script."""
    with ScriptedEndpoint() as served:
        yield served
