"""Both asynchronous clients carry requests to a real engine and back, say when it dies, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.config import SERVER_GROUPS, EngineConfig
from quire.engine.create import create_client
from quire.engine.messages import AbortRequests, Call, CallResult, EngineOutputs
from quire.engine.process import ProcessClient
from quire.engine_request import EngineRequest
from quire.errors import EngineDeadError, QuireError
from quire.sampling_params import SamplingParams


def config_for(folder: Path, **options: object) -> EngineConfig:
    defaults = {"model": str(folder), "load_format": "dummy", "device": "reference", "num_gpu_blocks_override": 64}
    return EngineConfig.from_kwargs(groups=SERVER_GROUPS, log_level="warning", **{**defaults, **options})


def request(request_id: str, max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        sequence_ids=[request_id],
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        arrival_time=0.0,
        seeds=[0],
        stop_ids=[],
        max_tokens=max_tokens,
    )


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether the process ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("kind", ["process", "inline"])
def test_requests_calls_and_aborts_reach_the_engine(folder: Path, kind: str) -> None:
    async def scenario() -> None:
        client = create_client(config_for(folder), kind)
        try:
            ready = await client.start()
            assert (ready.num_blocks, ready.vocab_size) == (64, 1000)
            client.send(request("a"))
            client.send(request("endless", max_tokens=100_000))
            tokens: list[int] = []
            finished = None
            while finished is None:
                news = await client.receive()
                assert isinstance(news, EngineOutputs)
                for output in news.outputs:
                    if output.sequence_id == "a":
                        tokens += output.new_token_ids
                        finished = output.finish_reason
            assert (len(tokens), finished) == (4, "length")
            client.send(AbortRequests(request_ids=["endless"]))
            client.send(Call(call_id=1, method="stats"))
            client.send(Call(call_id=2, method="nonsense"))
            client.send(Call(call_id=3, method="blocks", arguments={"limit": 3}))
            client.send(Call(call_id=4, method="blocks", arguments={"limit": "3"}))
            answers: list[CallResult] = []
            while len(answers) < 4:
                news = await client.receive()
                if isinstance(news, CallResult):
                    answers.append(news)
            assert answers[0].value is not None
            assert (answers[0].value["num_running"], answers[0].value["num_free_blocks"]) == (0, 64)
            assert answers[1].error is not None and "nonsense" in answers[1].error
            assert answers[2].value is not None
            assert [block["id"] for block in answers[2].value["blocks"]] == [0, 1, 2]
            assert answers[3].error is not None and "limit" in answers[3].error
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("kind", ["process", "inline"])
def test_the_front_hears_that_nothing_runs_any_more(folder: Path, kind: str) -> None:
    async def scenario() -> None:
        client = create_client(config_for(folder, max_num_seqs=1), kind)
        try:
            await client.start()
            for request_id in ("running", "waiting"):
                client.send(request(request_id, max_tokens=100_000))
            await client.receive()
            client.send(AbortRequests(request_ids=["running", "waiting"]))
            # Added and aborted in one go: no step ever sees this one.
            client.send(request("brief"))
            client.send(AbortRequests(request_ids=["brief"]))
            while True:
                news = await client.receive()
                assert isinstance(news, EngineOutputs)
                if news.stats.num_running == news.stats.num_waiting == 0:
                    assert news.stats.num_free_blocks == 64
                    return
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


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

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_killed_engine_is_noticed(folder: Path) -> None:
    async def scenario() -> float:
        client = ProcessClient(config_for(folder))
        await client.start()
        assert client.pid is not None
        client.send(request("endless", max_tokens=100_000))
        await client.receive()
        os.kill(client.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDeadError, match="exit code -9"):
            while True:
                await client.receive()
        noticed = time.monotonic() - killed
        with pytest.raises(EngineDeadError):
            await client.receive()
        client.send(request("late"))
        await client.close()
        return noticed

    noticed = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert noticed < 30.0  # not after the idle poll of a queue nobody fills


def test_cancelling_receive_is_a_cancellation_not_a_death(folder: Path) -> None:
    async def scenario() -> None:
        client = ProcessClient(config_for(folder))
        try:
            await client.start()
            waiting = asyncio.create_task(client.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            client.send(request("a", max_tokens=1))
            news = await client.receive()
            assert isinstance(news, EngineOutputs) and news.outputs[0].finish_reason == "length"
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_engine_does_not_outlive_a_killed_front(folder: Path) -> None:
    program = f"""
import asyncio, sys
from quire.config import EngineConfig
from quire.engine.process import ProcessClient
async def main():
    client = ProcessClient(EngineConfig.from_kwargs(model={str(folder)!r}, load_format="dummy", device="reference",
                                                    num_gpu_blocks_override=8))
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    source = str(Path(__file__).resolve().parents[2] / "src")
    front = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=source)
    )
    assert front.stdout is not None
    with front.stdout:
        engine = int(front.stdout.readline())
    assert Path(f"/proc/{engine}").exists()
    front.kill()
    front.wait()
    assert gone(engine)


def test_secrets_stay_in_the_front(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Pipe:
        def write(self, data: bytes) -> None:
            sent.append(data)

        def close(self) -> None: ...

    class Started:
        stdin = Pipe()
        pid = 0

        def __init__(self, command: list[str], *, stdin: int, pass_fds: tuple[int, ...], env: dict[str, str]) -> None:
            sent.append(repr((command, sorted(env.items()))).encode())

        def kill(self) -> None: ...

        def wait(self) -> int:
            return 0

    async def scenario() -> None:
        client = ProcessClient(config_for(folder, api_key=["hunter2"]))
        client.spawn()
        await client.close()

    monkeypatch.setattr(subprocess, "Popen", Started)
    asyncio.run(scenario())
    assert b"load_format" in b"".join(sent)
    assert b"hunter2" not in b"".join(sent)
