"""Jobs for worker processes wait in order, not for ever, not for jobs of other kinds, and not once given up."""

from __future__ import annotations

import asyncio
import threading
import time

import psutil
import pytest

from quire.errors import OverloadedError, QuireError
from quire.frontend import waiting
from quire.frontend.waiting import WaitingThreads
from quire.frontend.worker_process import MAX_PROCESSES
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputParams
from tests.helpers.fake_engine import fake_async_llm

USER = {"role": "user", "content": "hi"}
ENDLESS = "{% for i in range(99999999999) %}{% endfor %}"


class Blocked:
    """All threads are at work, until `end`."""

    def __init__(self, threads: WaitingThreads) -> None:
        self._event = threading.Event()
        self._tasks = [asyncio.create_task(threads.run(self._event.wait)) for _ in range(MAX_PROCESSES)]

    async def begin(self) -> None:
        await asyncio.sleep(0)

    async def end(self) -> None:
        self._event.set()
        await asyncio.gather(*self._tasks)


def test_a_job_waits_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "QUEUE_TIMEOUT", 0.01)

    async def check() -> None:
        threads = WaitingThreads("jobs")
        blocked = Blocked(threads)
        await blocked.begin()
        begun: list[int] = []
        for number in range(3):
            with pytest.raises(OverloadedError, match="too many jobs wait"):
                await threads.run(lambda number=number: begun.append(number))
        await blocked.end()
        assert await threads.run(lambda: 5) == 5 and not begun
        threads.close()

    asyncio.run(check())


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING", 3)

    async def check() -> None:
        threads = WaitingThreads("jobs")
        blocked = Blocked(threads)
        await blocked.begin()
        order: list[int] = []
        tasks = [asyncio.create_task(threads.run(lambda number=number: order.append(number))) for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="too many jobs wait"):
            await tasks[3]
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        await blocked.end()
        await asyncio.gather(tasks[0], tasks[2])
        assert sorted(order) == [0, 2]
        threads.close()

    asyncio.run(check())


@pytest.mark.slow
def test_templates_of_requests_delay_no_grammar_and_no_template_of_the_model() -> None:
    async def check() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            for kind in ("grammars", "chat templates"):
                assert llm._waiting[kind] is not llm._waiting["chat templates of requests"]
            assert llm.front_model.chat_template is not None
            assert llm.front_model.chat_template.workers is not llm.front_model.request_templates.workers
            hostile = [
                asyncio.create_task(llm.chat_prompt([USER], chat_template=f"{ENDLESS}{{# {number} #}}"))
                for number in range(8)
            ]
            await asyncio.sleep(0.1)
            form = StructuredOutputParams(regex="[a-z]+other")
            stream = await llm.submit([1, 2], SamplingParams(max_tokens=3, structured_outputs=form))
            assert not any(task.done() for task in hostile[2:])
            stream.close()
        await asyncio.gather(*hostile, return_exceptions=True)

    asyncio.run(check())


def test_close_ends_the_jobs_at_work_and_those_that_wait() -> None:
    async def check() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            tasks = [
                asyncio.create_task(llm.chat_prompt([USER], chat_template=f"{ENDLESS}{{# close {number} #}}"))
                for number in range(20)
            ]
            workers = llm.front_model.request_templates.workers
            while len(workers._pool._busy) < MAX_PROCESSES:  # noqa: ASYNC110 - in another thread
                await asyncio.sleep(0.01)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, QuireError | asyncio.CancelledError)
        assert not workers._pool._busy

    def workers() -> set[int]:
        children = psutil.Process().children()
        return {child.pid for child in children if "quire.frontend.chat_worker" in child.cmdline()}

    of_others, before = workers(), time.process_time()
    asyncio.run(check())
    assert time.process_time() - before < 5.0
    assert workers() <= of_others
