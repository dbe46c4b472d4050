"""How far loading is: a bar on a terminal, lines in the log elsewhere; nothing for loads that are over in a moment."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

BAR_AFTER = 1.0  # seconds
LINE_EVERY = 5.0
MB = 10**6


class LoadProgress:
    """Counts bytes of weights that were read; a context manager, after which the bar is gone.

    Args:
        name: of the model, as it is shown. total: bytes there are. clock: seconds, for tests.
    """

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._started = self._line_at = clock()
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def add(self, num_bytes: int) -> None:
        """Count what is about to be read."""
        self._done += num_bytes
        now = self._clock()
        if sys.stderr.isatty():
            if self._bar is None and now - self._started >= BAR_AFTER:
                self._start_bar()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=min(self._done, self._total))
        elif now - self._line_at >= LINE_EVERY:
            self._line_at = now
            logger.info(
                "loading %s: %d of %d MB (%d %%) after %.0f s",
                self._name,
                self._done // MB,
                self._total // MB,
                100 * self._done // max(1, self._total),
                now - self._started,
            )

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.add_task(self._name, total=self._total)
        self._bar.start()
