"""Worker processes: children that run code which may take too long, too much memory, or end its process.

Compiling a grammar, rendering a chat template and trying out a tokenizer run third-party code on input that others
wrote, and no check in the same process can stop a call into C or Rust. A `WorkerPool` runs them as jobs in children,
each within limits of time and memory. A child that exceeds one is killed; it costs that job, and nothing else.

The child's module calls `serve` with what it does to a job. Jobs and results are bytes, each after its length. The
limit of memory is RLIMIT_AS; where the system does not enforce it (macOS), the limit of time alone holds.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

from quire import logs
from quire.child_process import start_module
from quire.errors import OverloadedError, QuireError

logger = logging.getLogger(__name__)

START_TIMEOUT = 30.0  # seconds for a process to start, on a busy machine
QUEUE_TIMEOUT = 8.0  # seconds that a job waits for a process
MAX_PROCESSES = 2
MEMORY = 1 << 30  # bytes of address space; some 100 to 200 MiB of it are the interpreter and its libraries
MAX_RESULT = 1 << 27  # bytes
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_LENGTH = struct.Struct("!Q")


class JobKilledError(Exception):
    """A job gave no result; the message is what it takes too much of."""


class JobTimeoutError(JobKilledError):
    """It took too long."""


class JobDiedError(JobKilledError):
    """Its process ended: by the limit of memory, by a crash, or because somebody killed it."""


class WorkerPool:
    """Processes of one module, which do one job at a time; safe to use from several threads.

    They start when they are needed, are used again, and end with `close` or with the process that started them.

    Args:
        module: its `main` calls `serve`. what: the jobs, in the plural, for messages.
        memory: bytes of address space of a process. queue_timeout: seconds that a job waits for a process.
    """

    def __init__(
        self,
        module: str,
        what: str,
        *,
        max_processes: int = MAX_PROCESSES,
        memory: int = MEMORY,
        queue_timeout: float = QUEUE_TIMEOUT,
    ) -> None:
        self._module, self._what, self._memory = module, what, memory
        self._queue_timeout = queue_timeout
        self._slots = threading.BoundedSemaphore(max_processes)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False
        # Not __del__: in a cycle of garbage, that may come after the sockets were found to be open.
        weakref.finalize(self, _kill_all, self._idle).atexit = False

    def run(self, job: bytes, timeout: float, *, retry: bool = True) -> bytes:
        """Return the result of a job. Blocks up to some seconds.

        Args:
            timeout: seconds for the job. retry: do it once more, in a new process, if the first one ends. The second
                try shows whether that was the job, or somebody who killed the process.

        Raises:
            JobTimeoutError, JobDiedError: it was stopped. OverloadedError: too many jobs wait.
        """
        if not self._slots.acquire(timeout=self._queue_timeout):
            raise OverloadedError(f"too many {self._what} wait for a worker process; try again later")
        try:
            worker = self._take() or self._new()
            try:
                result = worker.do(job, timeout)
            except JobDiedError:
                if not retry:
                    raise
                worker = self._new()
                result = worker.do(job, timeout)
            self._give(worker)
            return result
        except JobKilledError as error:
            logger.warning("a worker process for %s was stopped: its job took %s", self._what, error)
            raise
        finally:
            self._slots.release()

    def prestart(self) -> None:
        """Start a process, so that the first job need not wait for one."""

        def start() -> None:
            with contextlib.suppress(QuireError):  # the first job says it
                self._give(self._new())

        threading.Thread(target=start, name=f"{self._module}-prestart", daemon=True).start()

    def close(self) -> None:
        """End the processes; those at work end with their jobs. A later job has a process of its own."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
        _kill_all(idle)

    def _new(self) -> _Worker:
        return _Worker(self._module, self._what, self._memory)

    def _take(self) -> _Worker | None:
        """Return an idle process that is alive, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()

    def _give(self, worker: _Worker) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.kill()


class _Worker:
    """One process."""

    def __init__(self, module: str, what: str, memory: int) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            file = theirs.fileno()
            options = map(str, (*logs.settings().values(), memory, file))
            self._process = start_module(
                module, *options, pass_fds=[file], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        try:
            self._receive(START_TIMEOUT)
        except JobKilledError:
            raise QuireError(f"the worker process for {what} does not start") from None
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def do(self, job: bytes, timeout: float) -> bytes:
        """Return the result of a job; a process without one in time is killed."""
        try:
            self._socket.settimeout(max(timeout, 0.001))
            send(self._socket, job)
        except OSError:
            raise self._died() from None
        try:
            self._receive(timeout)
        except JobTimeoutError as error:  # stopped before it had the job
            raise JobDiedError(str(error)) from None
        return self._receive(timeout)

    def _receive(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        try:
            return receive(self._socket, lambda: max(deadline - time.monotonic(), 1e-6))
        except TimeoutError:
            self.kill()
            raise JobTimeoutError(f"more than {timeout:.3g} seconds") from None
        except OSError:
            raise self._died() from None
        except BaseException:
            self.kill()
            raise

    def _died(self) -> JobDiedError:
        """Return what a job takes that ended the process. Libraries abort when there is no memory."""
        code = -self.kill()
        if code in CRASHES:
            return JobDiedError(f"its process down ({signal.Signals(code).name})")
        return JobDiedError("too much memory")

    def kill(self) -> int:
        """End it at once; return the exit code."""
        self._process.kill()
        code = self._process.wait()
        self._socket.close()
        return code


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def send(connection: socket.socket, data: bytes) -> None:
    """Send one message."""
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket, left: Callable[[], float | None] = lambda: None) -> bytes:
    """Receive one message.

    Args:
        left: seconds until the message must be there; None: it may take as long as it wants.

    Raises:
        TimeoutError: it is not. OSError: the connection is closed, or the message is too long.
    """

    def exactly(count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            connection.settimeout(left())
            got = connection.recv_into(view)
            if not got:
                raise OSError("closed")
            view = view[got:]
        return bytes(data)

    [length] = _LENGTH.unpack(exactly(_LENGTH.size))
    if length > MAX_RESULT:
        raise OSError("too long")
    return exactly(length)


def serve(process: str, work: Callable[[bytes], bytes]) -> None:
    """Do jobs until the connection is closed: what `main` of a child's module is.

    The module is imported before the limits hold, and before the child says that it is ready, so that a job need not
    wait for imports.

    Args:
        process: its name in logs. work: from a job to its result.
    """
    level, style, memory, file = sys.argv[1:5]
    logs.setup(level, style, process=process)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what it means
    limit_memory(int(memory))
    with socket.socket(fileno=int(file)) as connection:
        try:
            send(connection, b"")
            while True:
                job = receive(connection)
                send(connection, b"")  # a process that does not take its job is not the fault of the job
                send(connection, work(job))
        except OSError:
            return


def limit_memory(size: int) -> None:
    """Limit the address space of this process [bytes], where the system has such limits."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, OSError, ValueError):
        logger.debug("this system has no limit of memory for a process")
