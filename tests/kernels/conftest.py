"""Fixtures for kernel tests."""

from __future__ import annotations

import pytest

from quire.kernels.cpu import threads


@pytest.fixture
def always_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU backend share even tiny work among its threads."""
    monkeypatch.setattr(threads, "SMALL_WORK", 0)
