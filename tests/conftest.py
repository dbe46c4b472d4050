"""What holds for every test: logging is afterwards as it was, although commands configure it for their process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.logs import JsonFormatter, TextFormatter


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    level, ours = root.level, _own_handlers(root)
    yield
    root.setLevel(level)
    for handler in _own_handlers(root):
        if handler not in ours:
            root.removeHandler(handler)


def _own_handlers(root: logging.Logger) -> list[logging.Handler]:
    return [at for at in root.handlers if isinstance(at.formatter, JsonFormatter | TextFormatter)]
