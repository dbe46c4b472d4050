"""Worker processes: children that run code which may take too long, too much memory, or end its process.

Compiling a grammar, rendering a chat template and trying out a tokenizer run third-party code on input that others
wrote, and no check in the same process can stop a call into C or Rust. A `WorkerPool` runs them as jobs in children,
each within limits of time and memory. A child that exceeds one is killed; it costs that job, and nothing else.

The child's module calls `serve` with what it does to a job. Jobs and results are bytes, each after its length. The
limit of time is one of processor time, so that a busy machine makes no job fail. The limit of memory is RLIMIT_AS;
where the system does not enforce it (macOS), the limit of time alone holds.

A job that takes long goes on with low priority, so that it takes little processor time from the engine, whose steps
are as slow as its slowest thread. Niceness can't be taken back without privileges; on Linux it is one of a thread, so
each job has a thread of its own, and the next job begins with normal priority. Elsewhere jobs keep their priority.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
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
WALL_FACTOR = 8.0  # how much longer than its processor time a job may take, since other processes run, too
LONG_JOB = 0.05  # seconds after which a job goes on with low priority
NICENESS = 10  # of a long job, above that of the others: it gets a tenth of their share of a core
STACK = 8 << 20  # bytes of a job's thread, as a main thread has; some systems give others much less
MEMORY = 1 << 30  # bytes of address space for the jobs, on top of what the interpreter and its libraries take
MAX_RESULT = 1 << 27  # bytes
# Libraries of numbers start a thread for each core, with a stack and buffers of its own; a job needs one thread.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",  # glibc reserves address space for each thread otherwise, which MEMORY counts
}
_LENGTH = struct.Struct("!Q")
_SECONDS = struct.Struct("!d")
_THREAD = struct.Struct("!Q")  # the id of the thread that does a job, sent when it begins
_RESULT, _NO_MEMORY, _FAILED = b"r", b"m", b"f"  # what the child sends after a job


class JobKilledError(Exception):
    """A job gave no result; the message is what it takes too much of."""


class JobTimeoutError(JobKilledError):
    """It took too long."""


class JobMemoryError(JobKilledError):
    """It ran out of memory, and its process goes on."""


class JobDiedError(JobKilledError):
    """Its process ended: by a library that found no memory, by a crash, or because somebody killed it."""


class WorkerPool:
    """Processes of one module, which do one job at a time; safe to use from several threads.

    They start when they are needed, are used again, and end with `close` or with the process that started them.

    Args:
        module: its `main` calls `serve`. what: the jobs, in the plural, for messages.
        memory: bytes of address space for the jobs. queue_timeout: seconds that a job waits for a process.
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
        self._idle: list[_Child] = []
        self._busy: list[_Child] = []
        self._closed = False
        # Not __del__: in a cycle of garbage, that may come after the sockets were found to be open.
        weakref.finalize(self, _kill_all, self._idle).atexit = False

    def run(self, job: bytes, timeout: float, *, retry: bool = True) -> bytes:
        """Return the result of a job. Blocks up to some seconds.

        Args:
            timeout: seconds of processor time for the job. retry: do it once more, in a new process, if the first one
                ends. The second try shows whether that was the job, or somebody who killed the process.

        Raises:
            JobKilledError: one of its kinds: the job was stopped. OverloadedError: too many jobs wait, the machine is
            too busy for this one, or it starts no process. QuireError: the job failed by a fault of ours.
        """
        if not self._slots.acquire(timeout=self._queue_timeout):
            raise OverloadedError(f"too many {self._what} wait for a worker process; try again later")
        try:
            try:
                return self._do(self._take() or self._new(), job, timeout)
            except JobDiedError:
                if not retry or self._closed:
                    raise
                return self._do(self._new(), job, timeout)
        except JobKilledError as error:
            logger.warning("a worker process for %s was stopped: its job took %s", self._what, error)
            raise
        finally:
            self._slots.release()

    def _do(self, child: _Child, job: bytes, timeout: float) -> bytes:
        with self._lock:
            self._busy.append(child)
        try:
            return child.do(job, timeout)
        finally:
            with self._lock:
                self._busy.remove(child)
            self._keep(child)

    def _keep(self, child: _Child) -> None:
        with self._lock:
            if child.alive and not self._closed:
                self._idle.append(child)
                return
        child.kill()

    def prestart(self) -> None:
        """Start a process, so that the first job need not wait for one."""

        def start() -> None:
            with contextlib.suppress(QuireError):  # the first job says it
                self._keep(self._new())

        threading.Thread(target=start, name=f"{self._module}-prestart", daemon=True).start()

    def close(self) -> None:
        """End the processes, also those at work: their jobs end with an error. A later job has one of its own."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
            for child in self._busy:  # whoever waits for its result sees that, and closes the connection
                child.end()
        _kill_all(idle)

    def _new(self) -> _Child:
        return _Child(self._module, self._what, self._memory)

    def _take(self) -> _Child | None:
        """Return an idle process that is alive, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                child = self._idle.pop()
            if child.alive:
                return child
            child.kill()


class _Child:
    """One process."""

    def __init__(self, module: str, what: str, memory: int) -> None:
        self._what = what
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                try:
                    self._process = _start(module, memory, theirs.fileno())
                except BaseException:
                    self._socket.close()
                    raise
        except OSError as error:  # no file, process or memory is left
            raise OverloadedError(f"a worker process for {what} cannot be started ({error.strerror})") from None
        try:
            self._receive(START_TIMEOUT)
        except TimeoutError:
            raise OverloadedError(f"the machine is too busy to start a worker process for {what}") from None
        except JobKilledError:
            raise QuireError(f"the worker process for {what} does not start") from None

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
        begin = max(timeout, 1.0)
        try:
            self._socket.settimeout(begin)
            send(self._socket, _SECONDS.pack(timeout) + job)
            [thread] = _THREAD.unpack(self._receive(begin))
        except TimeoutError:  # stopped before it had the job
            self.kill()
            raise JobDiedError(f"more than {begin:.3g} seconds to begin") from None
        except OSError:
            raise self._died(timeout) from None
        try:
            if not self._done_within(LONG_JOB):
                _lower_priority(thread)
            result = self._receive(WALL_FACTOR * timeout, timeout)
        except TimeoutError:  # it would have been ended if it had run for so long
            raise OverloadedError(f"the machine is too busy for {self._what}; try again later") from None
        kind, data = result[:1], result[1:]
        if kind == _NO_MEMORY:
            raise JobMemoryError("too much memory")
        if kind == _FAILED:
            raise QuireError(f"a worker process for {self._what} failed ({data.decode()})")
        return data

    def _done_within(self, seconds: float) -> bool:
        """Whether something was sent, or the connection is closed, within so many seconds."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:  # for `_receive`
            pass
        except BaseException:  # nobody waits for the job any more
            self.kill()
            raise
        return True

    def _receive(self, wall: float, timeout: float = 0.0) -> bytes:
        """Receive a message within `wall` seconds. Raises `TimeoutError`, `JobKilledError`; the process is killed."""
        deadline = time.monotonic() + wall
        try:
            return receive(self._socket, lambda: max(deadline - time.monotonic(), 1e-6))
        except TimeoutError:
            self.kill()
            raise
        except OSError:
            raise self._died(timeout) from None
        except BaseException:
            self.kill()
            raise

    def _died(self, timeout: float) -> JobKilledError:
        """Return what a job takes that ended the process. Libraries abort when there is no memory."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closes its files before it has an exit code
            self._process.wait(1.0)
        code = self.kill()
        if code == -signal.SIGPROF:
            return JobTimeoutError(f"more than {timeout:.3g} seconds")
        if code in (-signal.SIGABRT, -signal.SIGKILL):
            return JobDiedError("too much memory")
        reason = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return JobDiedError(f"its process down ({reason})")

    def end(self) -> None:
        """End it at once; its files are for `kill`, in the thread that waits for it."""
        self._process.kill()

    def kill(self) -> int:
        """End it at once; return the exit code."""
        self._process.kill()
        code = self._process.wait()
        self._socket.close()
        return code


def _start(module: str, memory: int, file: int) -> subprocess.Popen[bytes]:
    options = map(str, (*logs.settings().values(), memory, file))
    return start_module(
        module,
        *options,
        pass_fds=[file],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        environment={**os.environ, **ONE_THREAD},
    )


def _lower_priority(thread: int) -> None:
    """Lower the priority of a thread of a child. The child may be within C code that lets no other thread run."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _kill_all(children: list[_Child]) -> None:
    for child in children:
        child.kill()


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
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_memory(int(memory))
    threading.stack_size(STACK)
    with socket.socket(fileno=int(file)) as connection, contextlib.suppress(OSError):  # until it is closed
        send(connection, b"")
        while True:
            job = threading.Thread(target=_do_job, args=(connection, work, receive(connection)))
            began = time.monotonic()
            job.start()
            job.join()
            if time.monotonic() - began > LONG_JOB:
                gc.collect()  # what it made, held by the traceback of its error, would stay until many jobs later


def _do_job(connection: socket.socket, work: Callable[[bytes], bytes], message: bytes) -> None:
    with contextlib.suppress(OSError):  # the connection is closed, which `serve` sees
        send(connection, _THREAD.pack(threading.get_native_id()))  # not to have begun is not the fault of the job
        send(connection, _result(work, message))


def _result(work: Callable[[bytes], bytes], message: bytes) -> bytes:
    """Return what is sent about a job. One that takes too long ends this process, also within a call into C."""
    [timeout] = _SECONDS.unpack_from(message)
    signal.setitimer(signal.ITIMER_PROF, timeout)
    try:
        return _RESULT + work(message[_SECONDS.size :])
    except MemoryError:
        return _NO_MEMORY
    except Exception as error:  # the boundary of the process: a fault of ours must not look like one of the job
        logger.exception("a job failed")
        return _FAILED + type(error).__name__.encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def limit_memory(size: int) -> None:
    """Let this process take `size` bytes of address space more than it has, where the system has such limits."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = size + address_space()
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, OSError, ValueError):
        logger.debug("this system has no limit of memory for a process")


def address_space() -> int:
    """Return how many bytes of address space this process has; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
