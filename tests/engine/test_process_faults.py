"""Real engine processes that die, hang, are stopped, and hear nonsense: the front learns of it, nothing is left behind.

The engine is the real one, but for a model that does what prompts say (`tests/helpers/faulty_engine.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import uvloop

from quire.engine import channel, heartbeat
from quire.engine.channel import framed
from quire.engine.messages import Call, CallResult, EngineOutputs
from quire.engine.process import ProcessClient
from quire.engine_request import EngineRequest
from quire.errors import EngineDeadError
from quire.frontend.grammars import GrammarCompiler, StructuredOutputJob
from quire.structured_outputs import StructuredOutputParams
from tests.engine.test_clients import config_for, gone, request
from tests.helpers import faulty_engine
from tests.helpers.faulty_engine import HANG, KILL, RAISE, SEGFAULT

ROOT = Path(__file__).resolve().parents[2]


def bad(request_id: str, token: int) -> EngineRequest:
    """A request that does `token` to the engine."""
    return msgspec.structs.replace(request(request_id), prompt_token_ids=[token, 1])


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


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 120))


# ---- deaths ----


@pytest.mark.parametrize(
    ("token", "message"),
    [(SEGFAULT, "exit code -11"), (KILL, "exit code -9"), (RAISE, "the engine failed: ArithmeticError")],
)
def test_an_engine_that_dies_in_a_step_leaves_the_names_of_those_in_it(
    folder: Path, token: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            client.send(bad("bad", token))
            error = await death(client)
            assert message in error.message
            assert error.suspects == ("endless", "bad")
            assert await death(client) is error, "again and again"
            assert client.stalled_for() == 0.0

    with caplog.at_level(logging.ERROR, "quire.engine.process"):
        run(scenario())
    if token == SEGFAULT:
        assert "Segmentation fault" in caplog.text
        assert "in execute" in caplog.text, "where it was"


def test_the_same_on_the_servers_event_loop(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            client.send(bad("bad", SEGFAULT))
            assert (await death(client)).suspects == ("endless", "bad")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 60))


def test_an_idle_engine_that_is_killed_suspects_nobody(folder: Path) -> None:
    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
        try:
            await client.start()
            client.send(request("short", max_tokens=1))
            await client.receive()
            client.send(Call(call_id=1, method="stats"))
            while not isinstance(await client.receive(), CallResult):
                pass
            memory = client._heartbeat
            assert memory is not None
            await until(lambda: not memory.request_ids())
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            assert (await death(client)).suspects == ()
        finally:
            await client.close()

    run(scenario())


def test_an_engine_killed_while_it_loads_is_said_to_have_ended(folder: Path) -> None:
    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
        client.spawn()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await client.start()
        await client.close()

    run(scenario())


def test_closing_does_not_wait_for_a_model_to_load(folder: Path) -> None:
    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        pid = client.pid
        assert pid is not None
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await client.close()
        assert not psutil.pid_exists(pid)

    run(scenario())


# ---- hostile bytes ----


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def hostile(path: Path) -> dict[str, bytes]:
    noise = random.Random(6).randbytes(1 << 20)
    return {
        "noise": noise,
        "a frame of noise": framed(noise[:1000]),
        "an empty frame": framed(b""),
        "a pickle": pickle.dumps(Bomb(path)),
        "a frame with a pickle": framed(pickle.dumps(Bomb(path))),
        "a length of 2 GiB": struct.pack(">I", 2**31) + noise,
        "the wrong message": framed(msgspec.msgpack.encode({"type": "EngineRequest", "request_id": 7})),
        "text that is not UTF-8": framed(b"\x82\xa4type\xa2\xff\xfe"),
        "nesting without end": framed(b"\x91" * 100_000),
        "a field nested without end": framed(b"\x82\xa4type\xa8Shutdown\xa1x" + b"\x91" * 100_000 + b"\xc0"),
    }


@pytest.mark.parametrize("kind", hostile(Path()))
def test_nonsense_ends_the_engine_and_nothing_is_executed(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = tmp_path / "PWNED"

    async def scenario() -> None:
        async with started(folder) as client:
            assert client._channel is not None
            monkeypatch.setattr(channel, "framed", lambda payload: payload)
            client._channel.send(hostile(touched)[kind] + bytes(4))
            error = await death(client)
            assert "no message" in error.message

    run(scenario())
    assert not touched.exists()


@pytest.mark.parametrize("kind", hostile(Path()))
def test_an_engine_that_talks_nonsense_is_ended(folder: Path, tmp_path: Path, kind: str) -> None:
    touched = tmp_path / "PWNED"
    program = tmp_path / "mad.py"
    program.write_text(
        "import json, socket, sys, time\n"
        "channel = socket.socket(fileno=json.loads(sys.stdin.buffer.read())['channel'])\n"
        f"channel.sendall(open({str(tmp_path / 'bytes')!r}, 'rb').read())\n"
        "time.sleep(600)\n"
    )
    # A frame that never becomes complete would be waited for: nothing says that it will not.
    (tmp_path / "bytes").write_bytes(hostile(touched)[kind] + bytes(1 << 16))

    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module="mad")
        try:
            with pytest.raises(EngineDeadError, match="no message"):
                await client.start()
            assert client._process is not None
            assert client._process.returncode == -9
        finally:
            await client.close()

    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        run(scenario())
    finally:
        os.chdir(before)
    assert not touched.exists()


# ---- stalls ----


def test_a_stopped_engine_is_stalled_until_it_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            assert client.pid is not None and client.stalled_for() == 0.0
            watch = client._watch
            assert watch is not None
            os.kill(client.pid, signal.SIGSTOP)
            await until(lambda: psutil.Process(client.pid).status() == psutil.STATUS_STOPPED)
            ahead = [0.0]
            monkeypatch.setattr(watch, "_clock", lambda: time.monotonic() + ahead[0])
            for _ in range(100):  # as if somebody had looked every two seconds
                ahead[0] += 2.0
                stalled = client.stalled_for()
            assert stalled > 60.0
            asked = time.monotonic()
            assert await client.dump_stacks() == ""
            assert time.monotonic() - asked < 30.0, "a stopped engine is not waited for"
            os.kill(client.pid, signal.SIGCONT)
            ahead[0] = 0.0
            await until(lambda: client.stalled_for() == 0.0)
            assert isinstance(await client.receive(), EngineOutputs)

    run(scenario())


def test_a_stuck_step_tells_where_it_is_and_can_be_ended(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            memory = client._heartbeat
            assert memory is not None
            client.send(bad("stuck", HANG))
            await until(lambda: "stuck" in memory.request_ids())
            stacks = ""
            while "in execute" not in stacks:  # it is about to get stuck, or is
                stacks = await client.dump_stacks()
            assert "faulty_engine.py" in stacks
            pid = client.pid
            client.kill()
            error = await death(client)
            assert "exit code -9" in error.message
            assert error.suspects == ("endless", "stuck")
            assert pid is not None and not psutil.pid_exists(pid)

    with caplog.at_level(logging.WARNING, "quire.engine.process"):
        run(scenario())
    assert '"request_ids": ["endless", "stuck"]' in caplog.text
    assert "in execute" in caplog.text


def test_an_engine_that_is_closed_while_it_is_asked_where_it_is(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            asked = asyncio.create_task(client.dump_stacks())
            await asyncio.sleep(0)
            client.kill()
            await client.close()
            assert await asked == ""
            assert await client.dump_stacks() == ""
            assert client.stalled_for() == 0.0
            client.kill()

    run(scenario())


def test_an_engine_that_does_not_listen_is_closed_by_force(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.process._CLOSE_SECONDS", 0.2)

    async def scenario() -> int:
        async with started(folder) as client:
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        return pid

    assert not psutil.pid_exists(run(scenario()))


def test_the_signals_of_a_terminal_and_of_a_service_manager_are_for_the_front(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            assert client.pid is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pid, number)
            client.send(request("after", max_tokens=2))
            finished = False
            while not finished:
                news = await client.receive()
                assert isinstance(news, EngineOutputs)
                finished = any(output.sequence_id == "after" and output.finish_reason for output in news.outputs)

    run(scenario())


# ---- nothing is left ----


def left_in(*folders: str) -> set[str]:
    return {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}


FRONT = """
import asyncio, os, sys
from quire.config import EngineConfig
from quire.engine.process import ProcessClient
from quire.frontend.grammars import StructuredOutputJob
from quire.frontend.grammars import GrammarCompiler
from quire.structured_outputs import StructuredOutputParams
async def main():
    config = EngineConfig.from_kwargs(model={folder!r}, load_format="dummy", device="reference",
                                      num_gpu_blocks_override=8)
    client = ProcessClient(config, module={module!r})
    if {load}:
        await client.start()
    else:
        client.spawn()
    compiler = GrammarCompiler()
    await asyncio.to_thread(compiler.compile, StructuredOutputJob(StructuredOutputParams(regex="a+")))
    print(client.pid, compiler._idle[0]._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize(("load", "busy"), [(True, False), (True, True), (False, False)])
def test_after_a_killed_front_its_processes_are_gone_and_nothing_is_left(folder: Path, load: bool, busy: bool) -> None:
    before = left_in("/dev/shm", "/tmp")
    program = FRONT.format(folder=str(folder), module=faulty_engine.MODULE, load=load)
    front = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src")),
    )
    assert front.stdout is not None
    with front.stdout:
        children = [int(pid) for pid in front.stdout.readline().split()]
    assert len(children) == 2 and all(psutil.pid_exists(pid) for pid in children)
    for pid in (front.pid, *children):
        sockets = psutil.Process(pid).net_connections("all")
        assert not [found for found in sockets if found.status == psutil.CONN_LISTEN or found.laddr]
    if busy:  # as if in the middle of something, so that they do not notice by themselves
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
    front.kill()
    front.wait()
    assert all(gone(pid, 2.0 if load else 10.0) for pid in children)  # one that begins has to begin before it can end
    ours = [path for path in left_in("/dev/shm", "/tmp") - before if "quire" in path]
    assert ours == []


@pytest.mark.slow
def test_fronts_killed_at_any_moment_of_their_beginning_leave_no_process(folder: Path) -> None:
    program = FRONT.format(folder=str(folder), module=faulty_engine.MODULE, load=True)
    rng = random.Random(5)

    def children_of(front: int) -> list[psutil.Process]:
        """Those that were told that `front` is their parent, whoever that is now."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.info["cmdline"]
            and process.info["cmdline"][1:2] == ["-m"]
            and str(front) in process.info["cmdline"]
        ]

    seen = 0
    for _ in range(20):
        front = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env=dict(os.environ, PYTHONPATH=str(ROOT / "src")),
        )
        started = time.monotonic()
        while not children_of(front.pid) and time.monotonic() < started + 30.0:
            time.sleep(0.001)
        time.sleep(rng.choice([0.0, 0.01, 0.1, 0.3]))
        seen += len(children_of(front.pid))
        front.kill()
        front.wait()
        deadline = time.monotonic() + 10.0  # one that just begins has to begin before it can end
        while children_of(front.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert seen >= 20


def test_a_child_does_not_die_with_the_thread_that_asked_for_it(folder: Path) -> None:
    async def scenario() -> None:
        client = ProcessClient(config_for(folder), module=faulty_engine.MODULE)
        try:
            await asyncio.to_thread(client.spawn)
            await asyncio.get_running_loop().shutdown_default_executor()
            await client.start()
            client.send(request("a", max_tokens=1))
            assert isinstance(await client.receive(), EngineOutputs)
        finally:
            await client.close()

    run(scenario())


def test_a_child_whose_parent_is_gone_already_does_not_begin(folder: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "quire.child_process", "1", "quire.engine.process"],
        stdin=subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src")),
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
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
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


def test_a_killed_engine_is_reaped_without_being_closed(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder) as client:
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not psutil.pid_exists(pid))

    run(scenario())


def test_grammar_processes_are_replaced_when_they_are_killed() -> None:
    compiler = GrammarCompiler()
    try:
        first = compiler.compile(StructuredOutputJob(StructuredOutputParams(regex="a+")))
        os.kill(compiler._idle[0]._process.pid, signal.SIGKILL)
        second = compiler.compile(StructuredOutputJob(StructuredOutputParams(regex="b+")))
        assert first is not None and second is not None and first != second
    finally:
        compiler.close()


def test_memory_without_a_name_is_had_without_memfd_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd, memory = heartbeat.create_heartbeat()
    try:
        assert os.fstat(fd).st_nlink == 0
        memory.name(["a"])
        assert heartbeat.Heartbeat(fd).request_ids() == ["a"]
    finally:
        os.close(fd)
        memory.close()
