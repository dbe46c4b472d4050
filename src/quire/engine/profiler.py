"""The profiler of one engine: it begins and ends traces, and writes them into the folder of `--profiler-dir`.

The core traces its own phases (`core.py`), the backend its instructions or kernels.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.chrome_trace import ChromeTrace
from quire.config import ProfilerConfig
from quire.errors import ConfigError, ConflictError, QuireError, UnsupportedError
from quire.executor.base import Executor

logger = logging.getLogger(__name__)


def check_profiler_dir(folder: str | None) -> None:
    """Make the folder if there is none. Raises `ConfigError` if nothing can be written into it."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"profiler_dir: cannot write into {folder!r}: {error.strerror}"
        raise ConfigError(message, param="profiler_dir") from None


class Profiler:
    """Traces of one engine, one at a time.

    Attributes:
        trace: what is being traced into; None while nothing is.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._count = 0
        self.trace: ChromeTrace | None = None

    def start(self, executor: Executor) -> dict[str, Any]:
        """Begin a trace. Raises `UnsupportedError` without a folder, `ConflictError` while there is one."""
        if self._config.profiler_dir is None:
            raise UnsupportedError("the profiler needs the option --profiler-dir (profiler_dir)", param="profiler_dir")
        if self.trace is not None:
            raise ConflictError("the profiler is running already; stop it first", code="profiler_running")
        check_profiler_dir(self._config.profiler_dir)
        trace = ChromeTrace(self._config.profiler_max_bytes)
        trace.name_thread(0, "engine")
        executor.start_profile(trace)
        self.trace = trace
        return {"profiling": True}

    def stop(self, executor: Executor) -> dict[str, Any]:
        """End the trace and write it; return the paths. Raises `ConflictError` if there is none."""
        if self.trace is None:
            raise ConflictError("the profiler is not running; start it first", code="profiler_not_running")
        trace, self.trace = self.trace, None
        assert self._config.profiler_dir is not None
        self._count += 1
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._count}.trace.json"
        path = Path(self._config.profiler_dir).absolute() / name
        others = executor.stop_profile(path)
        try:
            trace.write(path)
        except OSError as error:
            raise QuireError(f"the trace cannot be written to {path}: {error.strerror}", code="storage_error") from None
        logger.info("profile written to %s", path)
        return {"paths": [str(path), *map(str, others)]}

    def close(self, executor: Executor) -> None:
        """Write a trace that nobody has ended."""
        if self.trace is not None:
            try:
                self.stop(executor)
            except QuireError as error:
                logger.error("%s", error.message)
