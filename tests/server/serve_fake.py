"""A server process with a fake engine, for tests that need a real process: signals, standard output, exit codes.

Its mode is "ok", "paced" (a step takes 20 ms), "held" (no token ever comes), "broken" (the engine cannot start), "slow"
(it never gets ready) or "dying" (with its first request).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from quire import logs
from quire.config import EngineConfig
from quire.engine.messages import Ready, Received, ToEngine
from quire.engine_request import EngineRequest
from quire.errors import ModelError, QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.run import main as run_front
from quire.supervisor.listen import listening
from quire.supervisor.supervisor import Supervisor
from tests.helpers.fake_engine import FakeClient, FakeEngine, fake_front_model
from tests.helpers.live_server import server_config

MODE = "QUIRE_TEST_MODE"


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

    async def receive(self) -> Received:
        if self.mode == "paced":
            await asyncio.sleep(0.02)
        return await super().receive()

    def send(self, message: ToEngine) -> None:
        super().send(message)
        if self.mode == "dying" and isinstance(message, EngineRequest):
            self.die()


def make_llm(config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
    """Return an engine for a front."""
    front = fake_front_model()
    engine = FakeEngine(vocab_size=front.info.vocab_size)
    return AsyncLLM(config, client=Client(engine), front_model=front, listeners=listeners)


def run(options: dict[str, Any], mode: str, environment: dict[str, str], out: Connection, err: Connection) -> None:
    """Run a server in a forked process, with these streams as its standard ones, and exit with its code."""
    os.environ.update(environment)
    os.environ[MODE] = mode
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    logs.setup("info")
    config = server_config(**options)
    started = {"options": config.to_kwargs(), "entries": None}
    try:
        with listening(config.server) as listener:
            code = Supervisor(config.server, started, listener, module=__name__).run()
    except QuireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        code = error.exit_code
    atexit._run_exitfuncs()  # a forked process ends without them
    sys.exit(code)


def main() -> int:
    """Entry point of the front."""
    Client.mode = os.environ[MODE]
    return run_front(make_llm)
