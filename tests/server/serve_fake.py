"""A server process with a fake engine, for tests that need a real process: signals, standard output, exit codes.

Its mode is "ok", "paced" (a step takes 20 ms), "held" (no token ever comes), "broken" (the engine cannot start), "slow"
(it never gets ready) or "dying" (with its first request).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from quire.config import EngineConfig
from quire.engine.messages import CallResult, EngineOutputs, Ready, ToEngine
from quire.engine_request import EngineRequest
from quire.errors import ModelError, QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.run import run_server
from tests.helpers.fake_engine import FakeClient, FakeEngine, fake_front_model
from tests.helpers.live_server import server_config


class Client(FakeClient):
    """A fake engine with a temper."""

    mode = "ok"

    async def start(self) -> Ready:
        if self.mode == "broken":
            raise ModelError("model.safetensors: tensor lm_head is missing")
        if self.mode == "slow":
            await asyncio.Event().wait()
        if self.mode == "held":
            self.hold()
        return await super().start()

    async def receive(self) -> EngineOutputs | CallResult:
        if self.mode == "paced":
            await asyncio.sleep(0.02)
        return await super().receive()

    def send(self, message: ToEngine) -> None:
        super().send(message)
        if self.mode == "dying" and isinstance(message, EngineRequest):
            self.die()


def make_llm(config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
    """Return an engine for `run_server`."""
    front = fake_front_model()
    engine = FakeEngine(vocab_size=front.info.vocab_size)
    return AsyncLLM(config, client=Client(engine), front_model=front, listeners=listeners)


def run(options: dict[str, Any], mode: str, environment: dict[str, str], out: Connection, err: Connection) -> None:
    """Run a server in a forked process, with these streams as its standard ones, and exit with its code."""
    os.environ.update(environment)
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    Client.mode = mode
    try:
        code = run_server(server_config(**options), make_llm)
    except QuireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        code = error.exit_code
    atexit._run_exitfuncs()  # a forked process ends without them
    sys.exit(code)
