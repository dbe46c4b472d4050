"""What a job does to its worker process costs that job alone, and the error says what it was."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.errors import OverloadedError, QuireError
from quire.frontend import worker_process
from quire.frontend.worker_process import JobDiedError, JobKilledError, JobMemoryError, JobTimeoutError, WorkerPool

MODULE = "tests.helpers.odd_worker"
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))
    pool = WorkerPool(MODULE, "odd jobs", max_processes=1, memory=256 << 20)
    yield pool
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory of a process is not limited")
def test_memory_is_counted_from_what_the_process_has_when_it_is_ready(pool: WorkerPool) -> None:
    assert pool.run(b"%d" % (128 << 20), 10.0) == b"%d" % (128 << 20)
    with pytest.raises(JobMemoryError, match="too much memory"):
        pool.run(b"%d" % (512 << 20), 10.0)


@pytest.mark.parametrize("module", ["tokenizer_check", "grammars", "chat_worker"])
def test_a_worker_has_one_thread_however_many_cores_there_are(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in worker_process.ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    pool = WorkerPool(f"quire.frontend.{module}", "jobs")
    child = pool._new()
    try:
        process = psutil.Process(child.pid)
        assert process.num_threads() == 1
        assert process.memory_info().vms < 300 << 20
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        (b"exit", JobDiedError, r"its process down \(exit code 3\)"),
        (b"abort", JobDiedError, "too much memory"),
        (b"compute", JobTimeoutError, "more than 0.2 seconds"),
        (b"oserror", QuireError, r"a worker process for odd jobs failed \(OSError\)"),
    ],
)
def test_an_error_says_what_the_job_did(pool: WorkerPool, job: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pool.run(job, 0.2)
    assert pool.run(b"hello", 10.0) == b"hello"


def test_a_signal_from_outside_is_no_lack_of_memory(pool: WorkerPool) -> None:
    child = pool._new()
    psutil.Process(child.pid).send_signal(signal.SIGUSR1)
    with pytest.raises(JobDiedError, match=r"its process down \(SIGUSR1\)"):
        child.do(b"hello", 5.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_a_long_job_has_low_priority_and_the_next_one_has_not(pool: WorkerPool) -> None:
    normal = int(pool.run(b"niceness", 5.0))
    assert int(pool.run(b"niceness after a while", 5.0)) == min(normal + worker_process.NICENESS, 19)
    assert int(pool.run(b"niceness", 5.0)) == normal == os.getpriority(os.PRIO_PROCESS, 0)
    assert len(pool._idle) == 1, "all by the same process"


def test_a_job_that_is_given_no_time_by_the_machine_may_come_again(pool: WorkerPool) -> None:
    with pytest.raises(OverloadedError, match="too busy"):
        pool.run(b"sleep", 0.1)
    assert pool.run(b"hello", 10.0) == b"hello"


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_a_process_that_does_not_take_its_job_is_said_to_be_one(pool: WorkerPool, size: int) -> None:
    child = pool._new()
    psutil.Process(child.pid).suspend()
    with pytest.raises(JobDiedError, match="more than 1 seconds to begin"):
        child.do(b"x" * size, 0.1)


@pytest.mark.parametrize("broken", ["start_module", "socket.socketpair"])
def test_no_process_can_be_started(pool: WorkerPool, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    original = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        made.extend(original())
        return made[0], made[1]

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("socket.socketpair", pair)
        patch.setattr(f"quire.frontend.worker_process.{broken}", fail)
        with pytest.raises(OverloadedError, match="cannot be started"):
            pool.run(b"hello", 10.0)
    assert all(end.fileno() == -1 for end in made)
    assert pool.run(b"hello", 10.0) == b"hello"


def test_close_ends_the_jobs_at_work(pool: WorkerPool) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.run(b"sleep", 60.0)
        except JobKilledError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not pool._busy:
        pass
    pool.close()
    thread.join(30.0)
    assert len(errors) == 1 and not pool._idle
