"""Real engine processes that die, hang or are stopped: their parent learns of it, and nothing is left behind.

The engine is the real one, but for a model that does what prompts say (`tests/helpers/faulty_engine.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from quire.child_process import GROUP_SIGNALS
from quire.config import EngineConfig
from quire.engine import heartbeat
from quire.engine.launch import EngineFiles, LaunchedEngine, engine_options, launch
from quire.engine.messages import EngineOutputs
from quire.engine.process import EngineProcess, ProcessClient
from quire.engine_request import EngineRequest
from quire.errors import EngineDeadError, OverloadedError, QuireError
from tests.engine.conftest import request
from tests.engine.test_clients import config_for, run
from tests.helpers import faulty_engine
from tests.helpers.faulty_engine import HANG, KILL, RAISE, SEGFAULT

ROOT = Path(__file__).resolve().parents[2]


def bad(request_id: str, token: int) -> EngineRequest:
    """A request that does `token` to the engine."""
    return request(request_id, prompt=(token, 1))


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[ProcessClient]:
    """An engine that runs a request without end, so that it is never idle."""
    client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
    try:
        await client.start()
        client.send(request("endless", max_tokens=100_000))
        await client.receive()
        yield client
    finally:
        await client.close()


async def death(client: ProcessClient) -> EngineDeadError:
    """Read until the engine is dead."""
    with pytest.raises(EngineDeadError) as caught:
        while True:
            await client.receive()
    return caught.value


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether the process ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# ---- deaths ----


@pytest.mark.parametrize(
    ("token", "message", "new_loop"),
    [
        (SEGFAULT, "exit code -11", uvloop.new_event_loop),
        (KILL, "exit code -9", None),
        (RAISE, "the engine failed: ArithmeticError", None),
    ],
)
def test_an_engine_that_dies_in_a_step_leaves_the_names_of_those_in_it(
    folder: Path,
    token: int,
    message: str,
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            client.send(bad("bad", token))
            error = await death(client)
            assert message in error.message
            assert error.suspects == ("endless", "bad")
            assert await death(client) is error, "again and again"
            assert client.stalled_for() == 0.0
            client.send(request("late"))
            pid = client.process.pid
            assert pid is not None
            await until(lambda: not psutil.pid_exists(pid))  # reaped, though nobody has closed it

    with caplog.at_level(logging.ERROR, "quire.engine.process"), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 120))
    if token == SEGFAULT:
        assert "Segmentation fault" in caplog.text
        assert "in submit" in caplog.text, "where it was"


def test_an_idle_engine_that_is_killed_suspects_nobody(folder: Path) -> None:
    async def scenario() -> None:
        options = engine_options(config_for(folder))
        launched = await asyncio.to_thread(launch, options, faulty_engine.MODULE)
        await asyncio.get_running_loop().shutdown_default_executor()  # it does not die with the thread

        async def start_engine(config: EngineConfig) -> LaunchedEngine:
            return launched

        client = ProcessClient(config_for(folder), launch=start_engine)
        try:
            await client.start()
            client.send(request("short", max_tokens=1))
            await client.receive()
            await until(lambda: not client.process.request_ids)
            pid = client.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert (await death(client)).suspects == ()
        finally:
            await client.close()

    run(scenario())


@pytest.mark.parametrize("error", [OverloadedError("too many connections"), OSError(24, "Too many open files")])
def test_an_engine_to_which_no_connection_can_be_made_is_ended(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(process: EngineProcess) -> None:
        raise error

    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
        with monkeypatch.context() as patch, pytest.raises(QuireError, match=r"[Tt]oo many"):
            patch.setattr(EngineProcess, "connect", fail)
            await client.start()
        assert not psutil.pid_exists(client.process.pid)

    run(scenario())


def test_an_engine_killed_while_it_loads_is_said_to_have_ended(folder: Path) -> None:
    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        os.kill(client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await start
        await client.close()

    run(scenario())


def test_closing_does_not_wait_for_a_model_to_load(folder: Path) -> None:
    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        pid = client.process.pid
        assert pid is not None
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await client.close()
        assert not psutil.pid_exists(pid)

    run(scenario())


def test_an_engine_that_talks_nonsense_is_ended(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mad.py").write_text(
        "import json, socket, sys, time\n"
        "listener = socket.socket(fileno=json.loads(sys.stdin.buffer.read())['listener'])\n"
        "_, [connection], _, _ = socket.recv_fds(listener, 1, 1)\n"
        "socket.socket(fileno=connection).sendall(b'\\0\\0\\0\\4mad!')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module="mad")
        with pytest.raises(EngineDeadError, match="invalid message"):
            await client.start()
        assert client.process.exit_code.result() == -signal.SIGKILL

    run(scenario())


def test_a_process_that_cannot_be_started_is_an_error_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)

    async def scenario() -> None:
        before = psutil.Process().num_fds()
        client = ProcessClient(config_for(folder))
        with pytest.raises(EngineDeadError, match=r"cannot be started: .* temporarily unavailable"):
            await client.start()
        client.kill()
        await client.close()
        assert psutil.Process().num_fds() == before

    run(scenario())


def test_a_connection_that_the_engine_has_no_room_for_is_refused_and_the_others_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited: list[socket.socket] = []

    class Loading:
        """A process that accepts no connections yet."""

        stdin, pid = io.BytesIO(), 0

        def __init__(self, command: object, *, pass_fds: tuple[int, ...], **options: object) -> None:
            inherited.append(socket.socket(fileno=os.dup(pass_fds[0])))

        def send_signal(self, number: int) -> None:
            inherited[0].close()

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Loading)
    process = EngineProcess(launch(engine_options(config_for(folder))))
    process._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is
    with contextlib.ExitStack() as connections:
        with pytest.raises(OverloadedError, match="too many connections"):
            for _ in range(1000):
                connections.enter_context(process.connect()).setblocking(False)
        accepted = socket.recv_fds(inherited[0], 1, 1)[1]
        with socket.socket(fileno=accepted[0]) as first, process.connect() as later:
            first.sendall(b"hello")
            later.setblocking(False)
            with pytest.raises(BlockingIOError):
                later.recv(1)  # it is not at its end
    asyncio.run(process.close())


# ---- stalls ----


def test_a_stopped_engine_is_stalled_until_it_goes_on_and_can_be_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.launch.CLOSE_SECONDS", 0.2)

    async def scenario() -> None:
        async with started(folder) as client:
            pid, stalls = client.process.pid, client.process._stalls
            assert pid is not None and stalls is not None and client.stalled_for() == 0.0
            for number in GROUP_SIGNALS:
                os.kill(pid, number)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            ahead = [0.0]
            monkeypatch.setattr(stalls, "_clock", lambda: time.monotonic() + ahead[0])
            for _ in range(100):  # as if somebody had looked every two seconds
                ahead[0] += 2.0
                stalled = client.stalled_for()
            assert stalled > 60.0
            began = time.monotonic()
            assert await client.dump_stacks() == ""
            assert time.monotonic() - began < 30.0, "a stopped engine is not waited for"
            os.kill(pid, signal.SIGCONT)
            ahead[0] = 0.0
            await until(lambda: client.stalled_for() == 0.0)
            assert isinstance(await client.receive(), EngineOutputs)
            os.kill(pid, signal.SIGSTOP)
            dump = asyncio.create_task(client.dump_stacks())
            await asyncio.sleep(0)
            await client.close()  # while its stacks are waited for
            await dump  # perhaps with what the first one had asked for
            assert await client.dump_stacks() == ""
            assert client.stalled_for() == 0.0
            client.kill()
            assert not psutil.pid_exists(pid)

    run(scenario())


def test_a_stuck_step_tells_where_it_is_and_can_be_ended(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            client.send(bad("stuck", HANG))
            await until(lambda: "stuck" in client.process.request_ids)
            stacks = ""
            while "in submit" not in stacks:  # it is about to get stuck, or is
                stacks = await client.dump_stacks()
            assert "faulty_engine.py" in stacks
            pid = client.process.pid
            client.kill()
            error = await death(client)
            assert "exit code -9" in error.message
            assert error.suspects == ("endless", "stuck")
            assert pid is not None and not psutil.pid_exists(pid)

    with caplog.at_level(logging.WARNING, "quire.engine.process"):
        run(scenario())
    assert '"request_ids": ["endless", "stuck"]' in caplog.text
    assert "in submit" in caplog.text


# ---- nothing is left ----


def left_in(*folders: str) -> set[str]:
    return {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}


PARENT = """
import asyncio, os, sys
from quire.config import EngineConfig
from quire.engine.process import ProcessClient
from quire.frontend.grammars import GrammarCompiler, StructuredOutputJob
from quire.structured_outputs import StructuredOutputParams
async def main():
    config = EngineConfig.from_kwargs(model={folder!r}, load_format="dummy", device="reference",
                                      num_gpu_blocks_override=8)
    client = ProcessClient(config, module={module!r})
    if {load}:
        await client.start()
    else:
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0)
    compiler = GrammarCompiler()
    await asyncio.to_thread(compiler.compile, StructuredOutputJob(StructuredOutputParams(regex="a+")))
    print(client.process.pid, compiler._workers._idle[0].pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def start_parent(folder: Path, *, load: bool) -> subprocess.Popen[bytes]:
    """Start a process that starts an engine and a process for grammars, and prints their ids."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT.format(folder=str(folder), module=faulty_engine.MODULE, load=load)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)])),
    )


@pytest.mark.parametrize("load", [True, False])
def test_after_a_killed_parent_its_processes_are_gone_and_nothing_is_left(folder: Path, load: bool) -> None:
    before = left_in("/dev/shm", "/tmp")
    parent = start_parent(folder, load=load)
    assert parent.stdout is not None
    with parent.stdout:
        children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2 and all(psutil.pid_exists(pid) for pid in children)
    for pid in (parent.pid, *children):
        sockets = psutil.Process(pid).net_connections("all")
        assert not [found for found in sockets if found.status == psutil.CONN_LISTEN or found.laddr]
    if load:  # as if in the middle of something, so that they do not notice by themselves
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in children)
    assert [path for path in left_in("/dev/shm", "/tmp") - before if "quire" in path] == []


@pytest.mark.slow
def test_parents_killed_at_any_moment_of_their_beginning_leave_no_process(folder: Path) -> None:
    rng = random.Random(5)

    def children_of(parent: int) -> list[psutil.Process]:
        """Those that were told that this is their parent, whoever that is now."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.info["cmdline"]
            and process.info["cmdline"][1:3] == ["-P", "-m"]
            and str(parent) in process.info["cmdline"]
        ]

    seen = 0
    for _ in range(20):
        parent = start_parent(folder, load=True)
        assert parent.stdout is not None
        began = time.monotonic()
        while not children_of(parent.pid) and time.monotonic() < began + 30.0:
            time.sleep(0.001)
        time.sleep(rng.choice([0.0, 0.01, 0.1, 0.3]))
        seen += len(children_of(parent.pid))
        parent.kill()
        parent.wait()
        parent.stdout.close()
        deadline = time.monotonic() + 10.0  # one that just begins has to begin before it can end
        while children_of(parent.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert seen >= 20


def test_a_child_whose_parent_is_gone_already_does_not_begin(folder: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "quire.child_process", "1", "quire.engine.process"],
        stdin=subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)])),
        timeout=60,
        capture_output=True,
    )
    assert (child.returncode, child.stderr) == (1, b"")


@pytest.mark.slow
def test_twenty_engines_one_after_the_other_leave_no_process_descriptor_or_thread(folder: Path) -> None:
    me = psutil.Process()

    def held() -> tuple[int, list[int]]:
        return me.num_fds(), [child.pid for child in me.children(recursive=True)]

    async def one() -> None:
        async with started(folder) as client:
            assert client.process.pid is not None
            os.kill(client.process.pid, signal.SIGKILL)
            await death(client)

    async def scenario() -> None:
        await one()  # what is made once and kept
        before, threads = held(), me.num_threads()
        for _ in range(20):
            await one()
            assert not [child for child in me.children() if child.status() == psutil.STATUS_ZOMBIE]
        assert held() == before
        await until(lambda: me.num_threads() <= threads)

    run(scenario())


def test_memory_without_a_name_is_had_without_memfd_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    files = EngineFiles()
    memory = heartbeat.Heartbeat(files.heartbeat)
    try:
        assert os.fstat(files.heartbeat).st_nlink == 0
        memory.set_request_ids(["a"])
        assert heartbeat.Heartbeat(files.heartbeat).request_ids() == ["a"]
    finally:
        files.close_child()
        files.close()
        memory.close()
