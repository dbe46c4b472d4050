"""How log records are written: as text or as JSON, one record no matter what is in it, at a bounded rate.

Every process of ours uses it, so it imports nothing above it; commands have options for it. Fields besides the message
come with the record: `logger.info("...", extra={"fields": {"status": 200}})`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

TEXT, JSON = "text", "json"
LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
CONTINUED = "\n    | "
MAX_UNWRITTEN = 10_000
FLUSH_SECONDS = 1.0
SECONDS_APART = 1.0  # between two warnings of a kind
MAX_KINDS = 1000
# They log every HTTP request and compiled function, which is of interest at the level debug only.
TALKATIVE = ("numba", "httpcore", "httpx", "urllib3", "filelock", "asyncio")

# Control characters, separators of lines and paragraphs, and marks that turn the direction of writing.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request that is being worked on; every record made meanwhile has it."""


def setup(
    level: str, style: str = TEXT, *, process: str = "", stream: TextIO | None = None, in_thread: bool = False
) -> None:
    """Send records of at least `level` ("debug", "info", "warning", "error") to standard error, in the given style.

    Args:
        process: which one it is, where a command has several. stream: instead of standard error.
        in_thread: a thread writes, so that a reader of the log who pauses stops nothing else.
    """
    target = stream or sys.stderr
    handler = ThreadHandler(target) if in_thread else logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter(process) if style == JSON else TextFormatter(process))
    handler.addFilter(Throttle())
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, JsonFormatter | TextFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    if level != "debug":
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)


def settings() -> dict[str, str]:
    """Return arguments for `setup` by which another process writes as this one does."""
    root = logging.getLogger()
    style = JSON if any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers) else TEXT
    level = logging.getLevelName(root.getEffectiveLevel()).lower()
    return {"level": level if level in LEVELS else "warning", "style": style}


def escape(text: str) -> str:
    """Return a text on one line, with nothing in it that a terminal or a reader of lines would take for a command."""
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the record's own fields, with the id of the request that it is about."""
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    current = request_id.get()
    if current is not None:
        fields.setdefault("request_id", current)
    return fields


class TextFormatter(logging.Formatter):
    """For people. Only lines that begin with a date are records; further lines of one begin with blanks and a bar."""

    def __init__(self, process: str = "") -> None:
        super().__init__(FORMAT, DATE_FORMAT)
        self._process = f"{process} " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        message = self._safe(record.getMessage())
        about = _fields_of(record).get("request_id")
        if about is not None and str(about) not in message:
            message += f" [{escape(str(about))}]"
        name = escape(record.name)
        line = f"{self.formatTime(record, DATE_FORMAT)} {record.levelname:7} {self._process}{name}: {message}"
        for text in _traces(self, record):
            line += CONTINUED + self._safe(text)
        return line

    @staticmethod
    def _safe(text: str) -> str:
        if text.isascii() and text.isprintable():
            return text
        return CONTINUED.join([escape(line) for line in text.rstrip("\n").split("\n")])


class JsonFormatter(logging.Formatter):
    """For machines: an object on a line of its own; time (UTC), level, logger, message, then the record's fields."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            entry["process"] = self._process
        entry |= {name: value for name, value in _fields_of(record).items() if name not in entry}
        traces = _traces(self, record)
        if traces:
            entry["exception"] = "\n".join(traces)
        return json.dumps(entry, default=str).replace("\x7f", "\\u007f")


def _traces(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Return the traceback and the stack that come with a record, if any."""
    traces = []
    if record.exc_info and record.exc_info[0] is not None:
        traces.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        traces.append(record.exc_text)
    if record.stack_info:
        traces.append(formatter.formatStack(record.stack_info))
    return traces


class ThreadHandler(logging.Handler):
    """Has a thread write records to a stream. If `MAX_UNWRITTEN` wait for that, others are dropped, and counted."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(MAX_UNWRITTEN)
        self._num_dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        try:
            line = self.format(record)
            if self._num_dropped:
                text = f"{self._num_dropped} records are missing here, because nobody has read the log"
                missing = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
                line = f"{self.format(missing)}\n{line}"
            self._lines.put_nowait(line)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1
        except Exception:  # boundary, as in all handlers: a record that cannot be formatted ends nothing
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all is written, for `FLUSH_SECONDS` at most."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError, ValueError):  # the stream is closed
                self._stream.write(line + "\n")
                self._stream.flush()
            self._lines.task_done()


class Throttle(logging.Filter):
    """Lets through one warning, or error, of a kind a second, with the number of those that were held back before it.

    Of a kind are records of the same logger and level with the same text before its values are put in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}  # when the last one passed, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record."""
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, record.levelno, str(record.msg)[:200])
        now = self._clock()
        passed, held = self._kinds.get(kind, (-SECONDS_APART, 0))
        if now - passed < SECONDS_APART:
            self._kinds[kind] = (passed, held + 1)
            return False
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (now, 0)
        if held:
            record.msg = f"{record.getMessage()} (and {held} more like it)"
            record.args = ()
        return True
