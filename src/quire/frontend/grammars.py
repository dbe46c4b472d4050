"""`GrammarCompiler`: compiles the grammars of structured output in child processes that can be stopped.

A grammar that takes longer than `TIMEOUT` seconds costs a process and its own request, nothing else. Results, errors
too, are cached up to a number of bytes, except timeouts: next time the machine may be less busy. The same job requested
twice at a time is compiled once.

A child (`main`) takes jobs, as JSON, from a connection and sends results, as msgpack. It compiles with the same code,
within the same limits, that the engine will use.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from quire import logs
from quire.child_process import start_module
from quire.errors import ErrorData, OverloadedError, QuireError, RequestError
from quire.frontend.formats.message import MessageSpec
from quire.frontend.formats.registry import REASONING_FORMATS, TOOL_FORMATS, MessageFormat
from quire.structured_outputs import StructuredOutputParams

logger = logging.getLogger(__name__)

TIMEOUT = 2.0  # seconds for one job
START_TIMEOUT = 30.0  # seconds for a process to start, on a busy machine
MAX_PROCESSES = 2
QUEUE_TIMEOUT = 8.0  # seconds that a job waits for one of them
CACHE_BYTES = 16 << 20
MEMORY = 1 << 30  # bytes of address space of a child; about 200 MiB of it are the interpreter and its libraries


class StructuredOutputJob(msgspec.Struct, tag=True, frozen=True):
    """Compile the grammar of a whole text."""

    params: StructuredOutputParams
    special_tokens: dict[str, int] = {}


class MessageJob(msgspec.Struct, tag=True, frozen=True):
    """Compile the grammar of an assistant's message; the names are those of the model's formats."""

    tool_format: str | None
    reasoning_format: str | None
    message_spec: MessageSpec


Job = StructuredOutputJob | MessageJob


class CompileResult(msgspec.Struct):
    """A grammar (None: nothing is constrained), or an error; a `transient` one is not cached."""

    grammar: str | None = None
    error: ErrorData | None = None
    transient: bool = False

    def unwrap(self) -> str | None:
        """Return the grammar, or raise the error."""
        if self.error is not None:
            raise self.error.exception()
        return self.grammar

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        return len(self.grammar or "") + (0 if self.error is None else len(self.error.message)) + 256


_encode_job = msgspec.json.Encoder().encode  # keeps the order of keys, and integers of any size, as schemas have them
_decode_job = msgspec.json.Decoder(Job).decode
_encode_result = msgspec.msgpack.Encoder().encode
_decode_result = msgspec.msgpack.Decoder(CompileResult).decode


class GrammarCompiler:
    """Compiles jobs; safe to use from several threads. Processes start with the first job, and end with `close`."""

    def __init__(
        self, timeout: float = TIMEOUT, cache_bytes: int = CACHE_BYTES, queue_timeout: float = QUEUE_TIMEOUT
    ) -> None:
        self._timeout = timeout
        self._queue_timeout = queue_timeout
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, Future[CompileResult]] = OrderedDict()  # cached, or under way
        self._cached_bytes = 0
        self._idle: list[_Process] = []
        self._slots = threading.BoundedSemaphore(MAX_PROCESSES)
        self._closed = False

    def is_cached(self, job: Job) -> bool:
        """Whether the result of a job is cached."""
        with self._lock:
            result = self._results.get(_key(_encode_job(job)))
            return result is not None and result.done()

    def compile(self, job: Job) -> str | None:
        """Return the grammar for a job; None if nothing is to be constrained. Blocks up to some seconds.

        Raises:
            RequestError: the job cannot be compiled; "grammar_too_complex" if it took too long or too much memory.
            OverloadedError: too many jobs wait.
        """
        data = _encode_job(job)
        key = _key(data)
        with self._lock:
            future = self._results.get(key)
            first = future is None
            if future is None:
                future = self._results[key] = Future()
            self._results.move_to_end(key)
        if not first:
            return future.result().unwrap()
        try:
            if not self._slots.acquire(timeout=self._queue_timeout):
                raise OverloadedError("too many grammars wait to be compiled; try again later")
            try:
                result = self._run(data)
            finally:
                self._slots.release()
        except BaseException as error:
            with self._lock:
                del self._results[key]
            future.set_exception(error)
            raise
        with self._lock:
            future.set_result(result)
            if result.transient or (result.error is not None and not result.error.refused):
                del self._results[key]
            else:
                self._cached_bytes += result.num_bytes
                self._evict()
        return result.unwrap()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _run(self, data: bytes) -> CompileResult:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        try:
            if process is not None and not process.alive:
                process.kill()
                process = None
            process = process or _Process()
            try:
                result = process.compile(data, self._timeout)
            except _ProcessDiedError:  # by this job, or killed from outside: a second try shows which
                process = _Process()
                result = process.compile(data, self._timeout)
        except (_TimeoutError, _ProcessDiedError) as error:
            logger.warning("compiling a grammar takes %s; it was stopped", error)
            return CompileResult(error=_too_complex(f"compiling it takes {error}"), transient=True)
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return result
        process.kill()
        return result

    def _evict(self) -> None:
        """Drop the results that were used longest ago, as far as they are too many, but not the last one."""
        done = [key for key, future in self._results.items() if future.done()]
        for key in done[:-1]:
            if self._cached_bytes <= self._cache_bytes:
                break
            self._cached_bytes -= self._results.pop(key).result().num_bytes

    def __del__(self) -> None:
        self.close()


class _TimeoutError(Exception):
    """The process gave no result in time; the message is what the job takes too much of."""


class _ProcessDiedError(Exception):
    """The process ended without a result; the message is what the job takes too much of."""


class _Process:
    """One process that compiles."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            file = theirs.fileno()
            options = map(str, (*logs.settings().values(), file))
            self._process = start_module(
                "quire.frontend.grammars",
                *options,
                pass_fds=[file],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        try:
            self._receive(START_TIMEOUT)
        except (_TimeoutError, _ProcessDiedError):
            raise QuireError("the process that compiles grammars does not start") from None
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def compile(self, data: bytes, timeout: float) -> CompileResult:
        """Compile a job; a process without a result in time is killed."""
        try:
            self._connection.send_bytes(data)
        except OSError:
            self.kill()
            raise _ProcessDiedError("too much memory") from None
        return _decode_result(self._receive(timeout))

    def _receive(self, timeout: float) -> bytes:
        """Wait for a result, which is sent in one go."""
        try:
            if self._connection.poll(timeout):
                return self._connection.recv_bytes()
        except (EOFError, OSError):
            self.kill()
            # A job makes it die of nothing but its limit of memory: what goes wrong otherwise is a result.
            raise _ProcessDiedError("too much memory") from None
        self.kill()
        raise _TimeoutError(f"more than {timeout:g} seconds")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _key(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _too_complex(message: str) -> ErrorData:
    return ErrorData("RequestError", message, "structured_outputs", "grammar_too_complex")


# ---- the child process ----


def compile_job(job: Job) -> CompileResult:
    """Compile a job; an error of the request is a result, too."""
    from quire.structured.compile import (  # in the child only: the front needs no compiler
        checked,
        compile_structured_output,
    )

    try:
        if isinstance(job, StructuredOutputJob):
            return CompileResult(compile_structured_output(job.params, job.special_tokens))
        calls = None if job.tool_format is None else TOOL_FORMATS[job.tool_format]
        reasoning = None if job.reasoning_format is None else REASONING_FORMATS[job.reasoning_format]
        grammar = MessageFormat(calls, reasoning, job.message_spec.special_tokens).grammar(job.message_spec)
        return CompileResult(None if grammar is None else checked(grammar))
    except RequestError as error:
        error.param = error.param or "structured_outputs"
        return CompileResult(error=ErrorData.of(error))
    except RecursionError:
        return CompileResult(error=_too_complex("it is nested too deeply"))
    except MemoryError:
        return CompileResult(error=_too_complex("compiling it takes too much memory"))
    except Exception as error:  # the boundary of the process: a fault of ours must not look like one of the request
        logger.exception("compiling a grammar failed")
        return CompileResult(error=ErrorData("QuireError", f"compiling a grammar failed: {type(error).__name__}"))


def main() -> None:
    """Compile jobs until the connection is closed; an empty message says that the child is ready."""
    import resource

    import quire.structured.compile  # noqa: F401 - loaded before the first job, whose time is limited

    logs.setup(*sys.argv[1:3], process="grammar")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what it means
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with Connection(int(sys.argv[3])) as connection:
        connection.send_bytes(b"")
        while True:
            try:
                job = connection.recv_bytes()
            except (EOFError, OSError):
                return
            connection.send_bytes(_encode_result(compile_job(_decode_job(job))))
