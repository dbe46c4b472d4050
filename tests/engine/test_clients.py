"""Clients carry requests to real engines and back; those that share an engine process do not disturb each other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from quire.config import SERVER_GROUPS, EngineConfig
from quire.engine.client import EngineClient, SocketClient
from quire.engine.connection import FrameDecoder, encode_frame
from quire.engine.launch import LaunchedEngine, engine_options, launch
from quire.engine.messages import PROTOCOL_VERSION, AbortRequests, Call, CallResult, EngineOutputs, Failed, Hello
from quire.engine.process import EngineProcess, ProcessClient, create_client
from quire.engine.thread import ThreadClient
from quire.engine_request import EngineRequest
from quire.errors import EngineAsleepError, EngineDeadError, ErrorData, QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.sampling_params import SamplingParams
from tests.engine.conftest import CONFIG, request
from tests.helpers import faulty_engine
from tests.helpers.faulty_engine import KILL, PACED

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 4096


def config_for(folder: Path, **options: object) -> EngineConfig:
    defaults = {"model": str(folder), "load_format": "dummy", "device": "reference", "num_gpu_blocks_override": 64}
    return EngineConfig.from_kwargs(groups=SERVER_GROUPS, log_level="warning", **{**defaults, **options})


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 120))


async def call(client: EngineClient, method: str, **arguments: Any) -> CallResult:
    client.send(Call(call_id=7, method=method, arguments=arguments))
    while True:
        message = await client.receive()
        if isinstance(message, CallResult):
            return message


async def tokens_of(client: EngineClient, request_id: str) -> list[int]:
    """Read until a request has ended; return what it generated."""
    tokens: list[int] = []
    while True:
        message = await client.receive()
        assert isinstance(message, EngineOutputs)
        for output in message.outputs:
            if output.sequence_id == request_id:
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    assert output.finish_reason == "length"
                    return tokens


@pytest.mark.parametrize("kind", ["process", "inline"])
def test_requests_calls_and_aborts_reach_the_engine(folder: Path, kind: str) -> None:
    async def scenario() -> None:
        # A process without a model, for what is tested is the way to it; whole ones are those of tests/e2e.
        make = partial(ProcessClient, module=faulty_engine.MODULE) if kind == "process" else ThreadClient
        client: EngineClient = make(config_for(folder))
        try:
            ready = await client.start()
            assert (ready.num_blocks, ready.vocab_size) == (64, 1000) and ready.incarnation
            client.send(request("a"))
            client.send(request("endless", max_tokens=100_000))
            tokens = await tokens_of(client, "a")
            assert len(tokens) == 4
            client.send(AbortRequests(request_ids=["endless"]))
            stats = await call(client, "stats")
            assert stats.value is not None
            assert (stats.value["num_running"], stats.value["num_free_blocks"]) == (0, 64)
            error = (await call(client, "nonsense")).error
            assert error is not None and "nonsense" in error.message and error.code == "invalid_config"
            blocks = await call(client, "blocks", limit=3)
            assert blocks.value is not None and [block["id"] for block in blocks.value["blocks"]] == [0, 1, 2]
            assert "limit" in str((await call(client, "blocks", limit="3")).error)
            if isinstance(client, ProcessClient):  # with another client beside it: the same bits
                assert client.process is not None
                other = SocketClient(client.process.connect())
                assert await other.start() == ready
                client.send(request("a", max_tokens=8))
                other.send(request("b", max_tokens=8))
                assert await tokens_of(client, "a") == await tokens_of(other, "b")
                client.send(request("c"))
                assert await tokens_of(client, "c") == tokens
                await other.close()
        finally:
            await client.close()

    run(scenario())


@pytest.mark.parametrize("kind", ["process", "inline"])
def test_a_model_that_cannot_be_loaded_is_reported_at_start(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        client = create_client(config_for(tmp_path / "nowhere"), kind)
        try:
            with pytest.raises(QuireError, match="nowhere") as caught:
                await client.start()
            assert caught.value.exit_code == 2
        finally:
            await client.close()

    run(scenario())


def test_a_model_that_failed_before_there_was_a_connection_is_reported_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_for(tmp_path / "nowhere")
        ended = launch(engine_options(config))
        assert await asyncio.to_thread(ended.exit_code.result, 60) == 2
        launched = [ended]

        async def start_engine(config: EngineConfig) -> LaunchedEngine:
            return launched.pop() if launched else launch(engine_options(config))

        client = ProcessClient(config, launch=start_engine)
        try:
            with pytest.raises(QuireError, match="nowhere") as caught:
                await client.start()
            assert caught.value.exit_code == 2
        finally:
            await client.close()

    run(scenario())


def test_secrets_stay_in_the_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Started:
        pid = 0

        def __init__(
            self, command: list[str], *, stdin: BinaryIO, pass_fds: tuple[int, ...], env: dict[str, str]
        ) -> None:
            sent.extend((repr((command, sorted(env.items()))).encode(), stdin.read()))

        def send_signal(self, number: int) -> None: ...

        def wait(self) -> int:
            return 0

    async def scenario() -> None:
        client = ProcessClient(config_for(folder, api_key=["hunter2"]))
        start = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await client.close()

    monkeypatch.setattr(subprocess, "Popen", Started)
    run(scenario())
    assert b"load_format" in b"".join(sent)
    assert b"hunter2" not in b"".join(sent)


# ---- several clients of one process ----


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine process without a model, in which a step takes 10 ms."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(CONFIG)
    config = config_for(folder, num_gpu_blocks_override=NUM_BLOCKS, max_model_len=512)
    process = EngineProcess(launch(engine_options(config), faulty_engine.MODULE))
    yield process
    assert not process.exit_code.done(), "no client has ended it"
    asyncio.run(process.close())
    assert process.exit_code.result() == 0


@asynccontextmanager
async def connected(engine: EngineProcess, name: str = "a test") -> AsyncIterator[SocketClient]:
    client = SocketClient(engine.connect(), name)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def until_idle(client: EngineClient, num_running: int = 0) -> None:
    """Wait until only so many requests run and the blocks of all others are free."""
    while True:
        stats = (await call(client, "stats")).value
        assert stats is not None
        if (stats["num_running"], stats["num_waiting"]) == (num_running, 0):
            assert stats["num_free_blocks"] >= NUM_BLOCKS - 32 * num_running
            return


CLIENT = """
import asyncio, socket, sys, msgspec
from quire.engine.client import SocketClient
from quire.engine_request import EngineRequest
async def main():
    client = SocketClient(socket.socket(fileno=int(sys.argv[1])), "another process")
    ready = await client.start()
    for number in range(3):
        client.send(msgspec.json.decode(sys.argv[2].replace("NUMBER", str(number)), type=EngineRequest))
    await client.receive()
    print(ready.incarnation, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def another_process(engine: EngineProcess, theirs: EngineRequest) -> subprocess.Popen[bytes]:
    """Start a process that connects, sends three requests like this one, and waits."""
    with engine.connect() as connection:
        return subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(connection.fileno()), msgspec.json.encode(theirs).decode()],
            pass_fds=[connection.fileno()],
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=str(ROOT / "src")),
        )


def test_a_client_process_that_is_killed_leaves_nothing_in_the_engine_and_others_go_on(engine: EngineProcess) -> None:
    async def scenario() -> None:
        async with connected(engine) as client:
            client.send(request("ours", 400, prompt=(PACED, 2)))
            other = another_process(engine, request("theirs-NUMBER", 400, prompt=(PACED, 1)))
            assert other.stdout is not None
            with other.stdout:
                incarnation = (await asyncio.to_thread(other.stdout.readline)).decode().strip()
            stats = (await call(client, "stats")).value
            assert stats is not None and stats["num_running"] == 4
            other.kill()
            other.wait()
            await until_idle(client, num_running=1)
            again = SocketClient(engine.connect())
            assert (await again.start()).incarnation == incarnation, "a client that comes back finds the same engine"
            again.send(request("theirs-0", 4))
            assert len(await tokens_of(again, "theirs-0")) == 4
            await again.close()
            client.send(AbortRequests(["ours"]))
            await until_idle(client)

    run(scenario())


def hostile(path: Path) -> dict[str, bytes]:
    noise = random.Random(6).randbytes(1 << 20)
    bomb = f"cos\nsystem\n(S'touch {path}'\ntR.".encode()  # a pickle that runs a command
    return {
        "noise": noise,
        "a frame of noise": encode_frame(noise[:1000]),
        "an empty frame": encode_frame(b""),
        "a pickle": bomb,
        "a frame with a pickle": encode_frame(bomb),
        "a length of 2 GiB": struct.pack(">I", 2**31) + noise,
        "another version": encode_frame(msgspec.msgpack.encode(Hello("future", protocol=1000))),
        "the wrong message": encode_frame(msgspec.msgpack.encode({"type": "EngineRequest", "request_id": 7})),
        "text that is not UTF-8": encode_frame(b"\x82\xa4type\xa2\xff\xfe"),
        "nesting without end": encode_frame(b"\x91" * 100_000),
        "a field nested without end": encode_frame(b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 100_000 + b"\xc0"),
    }


def refusal(connection: socket.socket, data: bytes, *, greeted: bool) -> Failed:
    """Send these bytes, after a greeting or in its place; return the last message before the connection ends."""
    decoder, frames = FrameDecoder(), list[bytes]()
    with connection, suppress(OSError):  # it is closed with bytes unread
        if greeted:
            connection.sendall(encode_frame(msgspec.msgpack.encode(Hello("hostile", PROTOCOL_VERSION))))
        with suppress(BrokenPipeError):
            connection.sendall(data)
        while received := connection.recv(1 << 16):
            frames += decoder.feed(received)
    return msgspec.msgpack.decode(frames[-1], type=Failed)


@pytest.mark.parametrize("greeted", [False, True])
def test_clients_that_talk_nonsense_are_refused_while_others_are_served(
    engine: EngineProcess, tmp_path: Path, greeted: bool
) -> None:
    touched = tmp_path / "PWNED"

    async def scenario() -> None:
        async with connected(engine) as good:
            good.send(request("good", 400, prompt=(PACED, 1)))
            for kind, data in hostile(touched).items():
                failed = await asyncio.to_thread(refusal, engine.connect(), data, greeted=greeted)
                expected = "version 1000" if kind == "another version" and not greeted else "invalid message"
                assert expected in failed.message, kind
            await until_idle(good, num_running=1)

    run(scenario())
    assert not touched.exists()


@pytest.mark.slow
def test_a_client_that_does_not_read_is_disconnected_and_the_others_are_served(engine: EngineProcess) -> None:
    async def scenario() -> None:
        async with connected(engine) as good:
            slow = engine.connect()
            with slow:
                slow.sendall(encode_frame(msgspec.msgpack.encode(Hello("slow", PROTOCOL_VERSION))))
                slow.sendall(encode_frame(msgspec.msgpack.encode(request("slow", 400, prompt=(PACED, 1)))))
                show = Call(call_id=1, method="blocks", arguments={"limit": NUM_BLOCKS})
                for _ in range(60):
                    slow.sendall(encode_frame(msgspec.msgpack.encode(show)))
                await until_idle(good)
                good.send(request("good"))
                assert len(await tokens_of(good, "good")) == 4

    run(scenario())


def test_what_one_client_puts_to_sleep_sleeps_for_all_and_any_wakes_it_up(engine: EngineProcess, folder: Path) -> None:
    config = config_for(folder, skip_tokenizer_init=True)
    greedy = SamplingParams(max_tokens=4, ignore_eos=True)

    async def finishes(llm: AsyncLLM) -> bool:
        return [output async for output in llm.generate([1, 2, 3], greedy)][-1].finished

    async def scenario() -> None:
        first, second = (AsyncLLM(config, client=SocketClient(engine.connect())) for _ in range(2))
        async with first, second:
            await first.sleep()
            with pytest.raises(EngineAsleepError):
                await finishes(second)
            assert first.is_sleeping and second.is_sleeping
            async with connected(engine) as newcomer:  # which has heard nothing of it
                newcomer.send(request("early"))
                outputs = await newcomer.receive()
                assert isinstance(outputs, EngineOutputs) and outputs.sleep_level == 1
                assert outputs.outputs[0].error == ErrorData.of(
                    EngineAsleepError("the engine is asleep; wake it up first")
                )
            await second.wake_up()
            assert not second.is_sleeping and await finishes(second)
            await first.call("stats")  # whatever came before has been read
            assert not first.is_sleeping and await finishes(first)

    run(scenario())


def test_after_a_restart_of_the_engine_its_clients_connect_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    config = config_for(tmp_path)

    async def scenario() -> None:
        first = EngineProcess(launch(engine_options(config), faulty_engine.MODULE))
        clients = [SocketClient(first.connect()), SocketClient(first.connect())]
        ids = {(await client.start()).incarnation for client in clients}
        clients[0].send(request("bad", prompt=(KILL, 1)))
        for client in clients:
            with pytest.raises(EngineDeadError):
                await client.receive()
        assert await first.wait() == -signal.SIGKILL
        clients.append(SocketClient(first.connect()))
        with pytest.raises(EngineDeadError):
            await clients[-1].start()
        await first.close()
        second = EngineProcess(launch(engine_options(config), faulty_engine.MODULE))
        clients.append(SocketClient(second.connect()))
        ids.add((await clients[-1].start()).incarnation)
        clients[-1].send(request("a"))
        assert len(await tokens_of(clients[-1], "a")) == 4
        assert len(ids) == 2
        await second.close()
        for client in clients:
            await client.close()

    run(scenario())


def test_an_engine_that_talks_nonsense_is_dead_to_its_client(tmp_path: Path) -> None:
    async def scenario(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        client = SocketClient(ours)
        with theirs:
            theirs.setblocking(False)
            with suppress(BlockingIOError):
                # A frame that never becomes complete would be waited for: nothing says that it will not.
                theirs.send(data + bytes(1 << 16))
            for receive in (client.start, client.receive):
                with pytest.raises(EngineDeadError, match="ended"):
                    await receive()
        await client.close()

    touched = tmp_path / "PWNED"
    for data in hostile(touched).values():
        run(scenario(data))
    assert not touched.exists()
