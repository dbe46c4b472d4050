"""Kernels compiled before they are needed, in parallel: a step that launches nothing says which they are.

Triton compiles a kernel when it is first launched, one to three seconds each, and a model has some twenty. Within
`CompileAhead` nothing is launched: each kernel that is not compiled is submitted to a thread, which does most of the
work without the GIL. Triton caches what was compiled on disk; a small file there says that a backend of these types has
been warmed up on this chip before.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import triton
from triton.errors import TritonError
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

MAX_THREADS = 16


class CompileAhead:
    """A context in which this thread launches no kernel; those that are not compiled yet are compiled in a pool.

    What a step computes meanwhile must not be used: memory that a kernel would have written is uninitialized. Hence no
    kernel runs at all, since one that was compiled before would take such values for addresses. Leaving the context
    waits until all are compiled.

    Attributes:
        num_kernels: how many there were.
    """

    def __init__(self) -> None:
        self.num_kernels = 0
        self._made: dict[str, tuple[Future[Any], Callable[[Any], None]]] = {}
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="compile")
        self._token: Any = None

    def __enter__(self) -> CompileAhead:
        _patch_launches()
        self._token = active_mode.set(self)  # type: ignore[arg-type]
        return self

    def submit(self, key: str, compile_it: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        """Start compiling a kernel; Triton calls this."""
        if key not in self._made:
            self._made[key] = self._pool.submit(_compile_and_load, compile_it), finish

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        active_mode.reset(self._token)
        try:
            for future, finish in self._made.values():
                try:
                    finish(future.result())
                except Exception as failed:  # the boundary of a thread: launching the kernel raises it again
                    logger.debug("a kernel was not compiled ahead: %s", failed)
            self.num_kernels = len(self._made)
        finally:
            self._pool.shutdown()


def _compile_and_load(compile_it: Callable[[], Any]) -> Any:
    """Compile a kernel and its C launcher, and load it onto the device."""
    kernel = compile_it()
    with suppress(TritonError):  # more than the device has: launching it raises this again
        kernel._init_handles()
    return kernel


@cache
def _patch_launches() -> None:
    """Make Triton launch nothing within `CompileAhead`, from now on in this process."""
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(active_mode.get(), CompileAhead):
            kwargs["warmup"] = True
        return original(self, *args, **kwargs)

    JITFunction.run = run  # type: ignore[method-assign]


def marker(*parts: str) -> Path:
    """Return the marker file in Triton's cache that exists once the kernels identified by `parts` are compiled."""
    name = hashlib.sha256("\n".join([triton.__version__, *parts]).encode()).hexdigest()[:32]
    return Path(triton.knobs.cache.dir) / f"quire-{name}"


def mark(file: Path) -> None:
    """Create a marker file; errors are ignored, since an unwritable folder caches no kernels either."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        logger.debug("%s: %s", file, error)
