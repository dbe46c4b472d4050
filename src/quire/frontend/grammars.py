"""`GrammarCompiler`: has grammars compiled in processes that can be stopped, and remembers what came of it.

A form that takes longer than `TIMEOUT` seconds costs a process and its own request, nothing else. Answers, errors too,
are kept up to a number of bytes, but not that there was none in time: next time the machine may be less busy. The same
job asked for twice at a time is done once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import select
import subprocess
import threading
from collections import OrderedDict
from concurrent.futures import Future

import msgspec

from quire import logs
from quire.child_process import start_module
from quire.errors import OverloadedError, QuireError, RequestError
from quire.frontend.grammar_jobs import FAULT, Answer, Job, read_frame, write_frame

logger = logging.getLogger(__name__)

TIMEOUT = 2.0  # seconds for one job
START_TIMEOUT = 30.0  # seconds for a process to start, on a busy machine
MOST_PROCESSES = 2
PATIENCE = 8.0  # seconds that a job waits for one of them
CACHE_BYTES = 16 << 20

_encode = msgspec.json.Encoder().encode  # keeps the order of keys, and integers of any size, as schemas have them
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class GrammarCompiler:
    """Compiles jobs; safe to use from several threads. Processes start with the first job, and end with `close`."""

    def __init__(self, timeout: float = TIMEOUT, cache_bytes: int = CACHE_BYTES, patience: float = PATIENCE) -> None:
        self._timeout = timeout
        self._patience = patience
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Answer] = OrderedDict()
        self._cached_bytes = 0
        self._under_way: dict[bytes, Future[Answer]] = {}
        self._idle: list[_Process] = []
        self._places = threading.BoundedSemaphore(MOST_PROCESSES)
        self._closed = False

    def known(self, job: Job) -> bool:
        """Whether `compile` would answer at once."""
        with self._lock:
            return _key(_encode(job)) in self._cache

    def compile(self, job: Job) -> str | None:
        """Return the grammar for a job; None if nothing is to be constrained. Blocks up to some seconds.

        Raises:
            RequestError: what is wrong with the form; "grammar_too_complex" if it took too long or too much memory.
            OverloadedError: too many forms wait.
        """
        data = _encode(job)
        key = _key(data)
        with self._lock:
            answer = self._cache.get(key)
            if answer is not None:
                self._cache.move_to_end(key)
                return _result(answer)
            pending = self._under_way.get(key)
            mine = pending is None
            if pending is None:
                pending = self._under_way[key] = Future()
        if not mine:
            return _result(pending.result())
        try:
            answer = self._ask(data)
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            pending.set_exception(error)
            raise
        with self._lock:
            del self._under_way[key]
            if answer.code != FAULT and not answer.fleeting:
                self._remember(key, answer)
        pending.set_result(answer)
        return _result(answer)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _ask(self, data: bytes) -> Answer:
        if not self._places.acquire(timeout=self._patience):
            raise OverloadedError("too many forms wait to be compiled; try again later")
        try:
            return self._ask_process(data)
        finally:
            self._places.release()

    def _ask_process(self, data: bytes) -> Answer:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        try:
            if process is not None and not process.alive:
                process.kill()
                process = None
            process = process or _Process()
            try:
                answer = process.ask(data, self._timeout)
            except _DiedError:  # of this job, or because somebody killed it: another try tells which
                process = _Process()
                answer = process.ask(data, self._timeout)
        except (_TooMuchError, _DiedError) as error:
            logger.warning("compiling a grammar takes %s; it was stopped", error)
            return Answer(error=f"compiling it takes {error}", code="grammar_too_complex", fleeting=True)
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return answer
        process.kill()
        return answer

    def _remember(self, key: bytes, answer: Answer) -> None:
        self._cache[key] = answer
        self._cached_bytes += _size(answer)
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= _size(oldest)

    def __del__(self) -> None:
        self.close()


class _TooMuchError(Exception):
    """The process gave no answer in time; says what it takes."""


class _DiedError(Exception):
    """The process ended without an answer; says what a job takes that does this to it."""


class _Process:
    """One process that compiles."""

    def __init__(self) -> None:
        self._process = start_module(
            "quire.frontend.grammar_process",
            *logs.settings().values(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._read(START_TIMEOUT)
        except (_TooMuchError, _DiedError):
            raise QuireError("the process that compiles grammars does not start") from None
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def ask(self, data: bytes, timeout: float) -> Answer:
        """Have a job done; a process that does not answer in time is gone afterwards."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, data)  # type: ignore[arg-type]
        except OSError:
            self.kill()
            raise _DiedError("too much memory") from None
        return _decode_answer(self._read(timeout))

    def _read(self, timeout: float) -> bytes:
        """Wait for the beginning of an answer, then read it: it is written in one go."""
        stream = self._process.stdout
        assert stream is not None
        poller = select.poll()  # `select` itself knows no file descriptors above 1023
        poller.register(stream, select.POLLIN)
        ready = poller.poll(1000 * timeout)
        data = read_frame(stream) if ready else None  # type: ignore[arg-type]
        if data is None:
            self.kill()
            if not ready:
                raise _TooMuchError(f"more than {timeout:g} seconds")
            # A job makes it die of nothing but its limit of memory: what goes wrong otherwise is an answer.
            raise _DiedError("too much memory")
        return data

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not sent yet cannot be
                    stream.close()


def _key(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _size(answer: Answer) -> int:
    return len(answer.grammar or "") + len(answer.error or "") + 256


def _result(answer: Answer) -> str | None:
    if answer.code == FAULT:
        raise QuireError(answer.error or "compiling a grammar failed")
    if answer.error is not None:
        raise RequestError(answer.error, param=answer.param or "structured_outputs", code=answer.code)
    return answer.grammar
