"""What holds for every test: logging is afterwards as it was, although commands configure it for their process, and
Triton's kernels run in its interpreter where there is no GPU. And one server for all who only ask it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator

import pytest

from quire.kernels.gpu.probe import find_gpus
from quire.logs import JsonFormatter, TextFormatter
from tests.helpers.server import Server, serve

if not find_gpus():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported and collected, which stays to the end, from being searched for garbage again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A `quire serve` of the built-in model, as README starts it: for tests that change nothing in it."""
    with serve(tmp_path_factory.mktemp("demo") / "log.txt") as running:
        yield running


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
