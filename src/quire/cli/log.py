"""Logging of the `quire` command: to standard error, one line per record. Libraries never configure logging."""

from __future__ import annotations

from quire import logs


def setup_logging(level: str, style: str = logs.TEXT) -> None:
    """Send records of at least `level` ("debug", "info", "warning", "error") to standard error, as text or JSON."""
    logs.setup(level, style)
