"""Where a chat template is rendered: in the front if it is of the core, else in a worker process.

A worker (`main`) renders within limits of time, memory and output, so that what a template does to it costs that
request alone. It is given the template and its variables as JSON, and returns the text or an error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from quire.errors import ErrorData, RequestError
from quire.frontend.chat_bounds import FRONT_SECONDS, BeyondCoreError
from quire.frontend.chat_core import MAX_SOURCE, compile_core, is_core, render_core
from quire.frontend.chat_sandbox import (
    compile_template,
    failed,
    parse_template,
    render_bounded,
    too_complex,
    variables_read,
)
from quire.frontend.worker_process import JobKilledError, WorkerPool, serve

logger = logging.getLogger(__name__)

TIMEOUT = 2.0  # seconds for one rendering
MEMORY = 1 << 29  # bytes of address space
CACHED_TEMPLATES = 8
_TEXT, _ERROR = b"t", b"e"


class MustWaitError(Exception):
    """A rendering would hold up its thread for longer than it may; see `without_waiting`."""


@dataclass(frozen=True, slots=True)
class _Patience:
    deadline: float | None  # of this thread's processor time; None: each rendering has its own
    max_chars: int

    def left(self) -> float:
        return FRONT_SECONDS if self.deadline is None else self.deadline - time.thread_time()


_patience: ContextVar[_Patience | None] = ContextVar("patience", default=None)


@contextlib.contextmanager
def without_waiting(max_chars: int, *, together: bool) -> Iterator[None]:
    """Within it, what would wait for a worker or take long raises `MustWaitError`; for threads that others need.

    Args:
        max_chars: the longest text that may be made there. together: whether all that is done within it, and not each
            rendering, must be done in the time that one may take, as on an event loop.
    """
    token = _patience.set(_Patience(time.thread_time() + FRONT_SECONDS if together else None, max_chars))
    try:
        yield
    finally:
        _patience.reset(token)


class TemplateWorkers:
    """Worker processes for templates. They start when they are needed, or with `prestart`, and end with `close`."""

    def __init__(self) -> None:
        self._pool = WorkerPool(__name__, "chat templates", memory=MEMORY)

    def prestart(self) -> None:
        """Start a process, so that the first rendering need not wait for it."""
        self._pool.prestart()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def variables(self, source: str) -> frozenset[str]:
        """Return the names that a template reads. Raises `TemplateSyntaxError`, also if that takes too much."""
        try:
            names, problem, line = json.loads(self._pool.run(_job(source), TIMEOUT))
        except JobKilledError as error:
            raise TemplateSyntaxError(f"compiling it takes {error}", 1) from None
        if problem is not None:
            raise TemplateSyntaxError(problem, line)
        return frozenset(names)

    def render(self, source: str, context: Mapping[str, Any]) -> str:
        """Render a template. Raises `RequestError`, as `render_bounded`, also if that takes too much."""
        try:
            result = self._pool.run(_job(source, context), TIMEOUT)
        except JobKilledError as error:
            raise too_complex(f"takes {error}") from None
        if result[:1] == _ERROR:
            raise ErrorData(*json.loads(result[1:])).exception()
        return result[1:].decode("utf-8", "surrogatepass")


class CompiledTemplate:
    """A template, compiled where it is rendered. Safe to use from several threads.

    Args:
        trusted: whether it may be rendered in the front, if it is of the core; not a request's.

    Attributes:
        variables: the names that it looks up in what it is given.

    Raises:
        TemplateSyntaxError: it is no template.
    """

    def __init__(self, source: str, workers: TemplateWorkers, *, trusted: bool = True) -> None:
        self._source, self._workers = source, workers
        self._core: Template | None = None
        if trusted and len(source) <= MAX_SOURCE and is_core(source, parse_template(source)):
            self._core, self.variables = compile_core(source)
            return
        self.variables = workers.variables(source)

    @property
    def in_front(self) -> bool:
        """Whether it is rendered in the front, unless a conversation takes too long for that."""
        return self._core is not None

    def render(self, context: Mapping[str, Any]) -> str:
        """Return the text of a conversation.

        Raises:
            RequestError: as `render_bounded`. MustWaitError: see `without_waiting`.
        """
        patience = _patience.get()
        if self._core is not None:
            left = FRONT_SECONDS if patience is None else patience.left()
            with contextlib.suppress(BeyondCoreError):
                text = render_core(self._core, context, left)
                if patience is not None and len(text) > patience.max_chars:
                    raise MustWaitError
                return text
        if patience is not None:
            raise MustWaitError
        return self._workers.render(self._source, context)


def _job(source: str, context: Mapping[str, Any] | None = None) -> bytes:
    return _json([source, context])


def _json(value: Any) -> bytes:
    """Return JSON in ASCII: messages and templates may hold lone surrogates, which UTF-8 does not."""
    return json.dumps(value).encode()


# ---- the child process ----


def _inspect(source: str) -> bytes:
    """Return the names that a template reads, what is wrong with it or None, and in which line."""
    try:
        compiled(source)
        return _json([sorted(variables_read(parse_template(source))), None, 1])
    except TemplateSyntaxError as error:
        return _json([[], (error.message or "")[:1000], error.lineno])


compiled = lru_cache(CACHED_TEMPLATES)(compile_template)


def _render(source: str, context: Mapping[str, Any]) -> bytes:
    try:
        return _TEXT + render_bounded(compiled(source), context).encode("utf-8", "surrogatepass")
    except RequestError as error:
        found = error
    except MemoryError:
        raise
    except Exception as error:  # the boundary of the process: whatever Jinja raises, it is the template's
        found = failed(error)
    data = ErrorData.of(found)
    return _ERROR + _json([data.error_class, data.message, data.param, data.code])


def _work(job: bytes) -> bytes:
    source, context = json.loads(job)
    return _inspect(source) if context is None else _render(source, context)


def main() -> None:
    """Inspect and render templates until the connection is closed."""
    serve("template", _work)
