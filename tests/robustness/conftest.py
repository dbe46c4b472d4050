"""Faults under load, with real processes: `pytest tests/robustness -m slow -s`, perhaps with `--repetitions 100`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repetitions", type=int, help="how often each fault is repeated")


@pytest.fixture
def repetitions(request: pytest.FixtureRequest) -> int | None:
    """What was asked for; None: what the test finds reasonable."""
    found = request.config.getoption("--repetitions", default=None)
    return None if found is None else int(found)
