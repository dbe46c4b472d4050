"""An engine process without a model that dies, or gets stuck, of certain prompts. Run as `ProcessClient(module=...)`.

The first token of a prompt says what happens when it is computed; every other one is harmless.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

from quire.config import EngineConfig
from quire.engine import process
from quire.engine.core import EngineCore
from quire.executor.null import NullExecutor
from quire.step import PendingOutput, SchedulerOutput

MODULE = "tests.helpers.faulty_engine"
SEGFAULT, KILL, RAISE, HANG, SLOW, PACED = 990, 991, 992, 993, 994, 995
SLOW_SECONDS = 0.002
PACED_SECONDS = 0.01


class FaultyExecutor(NullExecutor):
    """Does to itself what prompts say. After a `PACED` one each step takes 10 ms, so that requests last for seconds."""

    pause = 0.0

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Run a step, unless a prompt in it is a bad one."""
        for new in plan.new_sequences:
            match new.token_ids[0]:
                case 990:
                    ctypes.string_at(0)
                case 991:
                    os.kill(os.getpid(), signal.SIGKILL)
                case 992:
                    raise ArithmeticError("as asked")
                case 993:
                    threading.Event().wait()
                case 994:
                    time.sleep(SLOW_SECONDS)
                case 995:
                    self.pause = PACED_SECONDS
        time.sleep(self.pause)
        return super().submit(plan)


def make_core(config: EngineConfig) -> EngineCore:
    """Return an engine with such an executor."""
    return EngineCore(config, executor=FaultyExecutor())


def main() -> int:
    """Entry point of the child."""
    return process.main(make_core)
