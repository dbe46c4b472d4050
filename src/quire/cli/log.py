"""Logging of the `quire` command: to standard error, one line per record. Libraries never configure logging."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def setup_logging(level: str) -> None:
    """Send records of at least `level` ("debug", "info", "warning", "error") to standard error."""
    logging.basicConfig(level=level.upper(), format=FORMAT, datefmt=DATE_FORMAT)
    if level != "debug":
        # They tell of every HTTP request and compiled function; of interest only to who asked for everything.
        for name in ("numba", "httpcore", "httpx", "urllib3", "filelock", "asyncio"):
            logging.getLogger(name).setLevel(logging.WARNING)
