"""How many threads a kernel gets, and keeping two callers apart where the threading layer cannot.

Kernels take the number of chunks to cut their work into as their last argument; 1 stays in the calling thread.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba

from quire.errors import ConfigError

# Waking the other threads costs some microseconds, more beside other busy processes: in that time one thread does
# about this many multiply-adds.
SMALL_WORK = 131072

_workqueue_lock = threading.Lock()  # Numba's own pool aborts the process when entered twice at once


class Launcher:
    """Calls kernels with the backend's number of threads, from any Python thread."""

    def __init__(self, num_threads: int | None) -> None:
        """Use `num_threads`, or all cores of this process for None. Raises ConfigError above Numba's limit."""
        limit = numba.config.NUMBA_NUM_THREADS
        if num_threads is not None and not 1 <= num_threads <= limit:
            raise ConfigError(f"num_threads is {num_threads}; allowed: 1 to {limit}", param="num_threads")
        self.num_threads: int = num_threads or limit
        self._guard: AbstractContextManager[Any] | None = None

    def run(self, work: int, kernel: Any, *args: Any) -> None:
        """Call `kernel(*args, chunks)`; `work` is about how many multiply-adds it takes."""
        if self.num_threads == 1 or work < SMALL_WORK:
            kernel(*args, 1)
            return
        with self._guard or self._start():
            if numba.get_num_threads() != self.num_threads:  # a setting of each Python thread
                numba.set_num_threads(self.num_threads)
            kernel(*args, self.num_threads)

    def _start(self) -> AbstractContextManager[Any]:
        """Start Numba's threads, so that it says which layer it chose."""
        numba.set_num_threads(self.num_threads)
        self._guard = _workqueue_lock if numba.threading_layer() == "workqueue" else nullcontext()
        return self._guard
