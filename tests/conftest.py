"""What holds for every test: commands configure logging for their process, and it is restored afterwards; Triton's
kernels run in its interpreter if there is no GPU; processes that tests start find compiled modules. And the fixture
`demo_server`, one server that all tests share that change nothing in it.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from quire.kernels.gpu.probe import find_gpus
from quire.logs import JsonFormatter, TextFormatter
from tests.helpers.server import Server, serve

if not find_gpus():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

# Engine processes import no module from the current directory; some tests have them run fakes of this folder.
ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), ROOT])

# Images of containers often forbid bytecode files, and each process that a test starts would then compile all of Quire.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from traversing what is imported and collected, which lives until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_is_left() -> None:
    """Keep the garbage collector from traversing, in this module, all that the modules before have imported and cached.

    Engines collect garbage when they sleep or close, which would take half a second each in a process of many modules.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A `quire serve` of the built-in model, started as in the README, for tests that change nothing in it."""
    with serve(tmp_path_factory.mktemp("demo") / "log.txt") as running:
        yield running


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, before = root.level, _own_handlers(root)
    yield
    root.setLevel(level)
    for handler in _own_handlers(root):
        if handler not in before:
            root.removeHandler(handler)


def _own_handlers(root: logging.Logger) -> list[logging.Handler]:
    return [handler for handler in root.handlers if isinstance(handler.formatter, JsonFormatter | TextFormatter)]
