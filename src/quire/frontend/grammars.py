"""`GrammarCompiler`: compiles the grammars of structured output in child processes that can be stopped.

A grammar that takes longer than `TIMEOUT` seconds costs a process and its own request, nothing else. Results, errors
too, are cached up to a number of bytes, except timeouts: next time the machine may be less busy. The same job requested
twice at a time is compiled once.

A child (`main`) of a `WorkerPool` takes jobs, as JSON, and gives results, as msgpack. It compiles with the same code,
within the same limits, that the engine will use.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future

import msgspec

from quire.errors import ErrorData, RequestError
from quire.frontend.formats.message import MessageSpec
from quire.frontend.formats.registry import REASONING_FORMATS, TOOL_FORMATS, MessageFormat
from quire.frontend.worker_process import QUEUE_TIMEOUT, JobKilledError, WorkerPool, serve
from quire.structured_outputs import StructuredOutputParams

TIMEOUT = 2.0  # seconds for one job
CACHE_BYTES = 16 << 20


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
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, Future[CompileResult]] = OrderedDict()  # cached, or under way
        self._cached_bytes = 0
        self._workers = WorkerPool(__name__, "grammars", queue_timeout=queue_timeout)

    def cached(self, job: Job) -> CompileResult | None:
        """Return the result of a job if it is cached."""
        key = _key(_encode_job(job))
        with self._lock:
            future = self._results.get(key)
            if future is None or not future.done():
                return None
            self._results.move_to_end(key)
        return future.result()

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
            result = self._run(data)
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
        self._workers.close()

    def _run(self, data: bytes) -> CompileResult:
        try:
            return _decode_result(self._workers.run(data, self._timeout))
        except JobKilledError as error:
            return CompileResult(error=_too_complex(f"compiling it takes {error}"), transient=True)

    def _evict(self) -> None:
        """Drop the results that were used longest ago, as far as they are too many, but not the last one."""
        done = [key for key, future in self._results.items() if future.done()]
        for key in done[:-1]:
            if self._cached_bytes <= self._cache_bytes:
                break
            self._cached_bytes -= self._results.pop(key).result().num_bytes


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


def main() -> None:
    """Compile jobs until the connection is closed."""
    import quire.structured.compile  # noqa: F401 - loaded before the first job, whose time is limited

    serve("grammar", lambda job: _encode_result(compile_job(_decode_job(job))))
