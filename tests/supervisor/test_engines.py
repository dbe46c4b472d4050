"""Engines that the supervisor starts: it never waits for them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from quire.child_process import start_module_here
from quire.supervisor import engines as engines_module
from quire.supervisor.engines import Engines


def test_an_engine_that_does_not_read_its_options_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(module: str, **options: Any) -> Any:
        return start_module_here("tests.supervisor.fake_front", "child", **options)  # sleeps

    monkeypatch.setattr(engines_module, "start_module_here", start)
    engines = Engines()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(engines.find, "demo", {"key_weights": "x" * (1 << 20)})
        try:
            engine = started.result(10.0)
        finally:
            for child in psutil.Process().children():
                child.kill()
    engines.kill(engine)
    deadline = time.monotonic() + 10.0
    while not engines.reap():
        assert time.monotonic() < deadline
        time.sleep(0.01)
