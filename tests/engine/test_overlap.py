"""The engine over an executor that ends its steps late: planning goes on meanwhile, and what fails is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.heartbeat import LoopObserver
from quire.engine.loop import run as run_loop
from quire.engine.messages import AbortRequests, EngineOutputs
from quire.engine_request import EngineRequest
from quire.executor.null import NullExecutor
from quire.sampling_params import SamplingParams
from quire.step import ModelOutput, PendingOutput, SchedulerOutput
from tests.helpers.loop_clients import ScriptedClients

PATIENCE = 30.0  # seconds, after which a test fails that would wait for ever


class LateStep:
    """A step that a thread computes once it is let."""

    overlaps = True

    def __init__(self, executor: LateExecutor, number: int, future: Future[ModelOutput]) -> None:
        self._executor, self._number, self._future = executor, number, future

    def result(self) -> ModelOutput:
        """Let it end, if nothing was begun after it, and wait."""
        self._executor.said.append(f"result {self._number}")
        if self._number == self._executor.num_begun - 1:
            self._executor.gate.set()
        return self._future.result(PATIENCE)


class LateExecutor(NullExecutor):
    """Ends a step when the next one has been begun, or its result is asked for before. `broken`: that step fails."""

    def __init__(self, broken: int = -1) -> None:
        super().__init__(1000)
        self.said: list[str] = []
        self.gate = threading.Event()
        self.num_begun = 0
        self._broken = broken
        self._pool = ThreadPoolExecutor(1)

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Begin a step, and let the one before end."""
        self.gate.set()
        if not plan.num_scheduled_tokens:
            return self._pool.submit(super().submit, plan).result(PATIENCE)
        compute_now = super().submit
        number, gate = self.num_begun, threading.Event()
        self.num_begun, self.gate = number + 1, gate
        self.said.append(f"begin {number}")

        def compute() -> ModelOutput:
            assert gate.wait(PATIENCE), "nobody goes on"
            if number == self._broken:
                raise ArithmeticError("as asked")
            output = compute_now(plan).result()
            output.host_gap = 0.25
            return output

        return LateStep(self, number, self._pool.submit(compute))

    def close(self) -> None:
        """End the thread."""
        self.gate.set()
        self._pool.shutdown()


@pytest.fixture
def make_core(folder: Path) -> Iterator[Callable[..., EngineCore]]:
    """Make an engine over a late executor, which is closed in the end."""
    made: list[EngineCore] = []

    def make(broken: int = -1, **options: object) -> EngineCore:
        config = EngineConfig.from_kwargs(
            model=str(folder), num_gpu_blocks_override=64, async_scheduling=True, **options
        )
        made.append(EngineCore(config, executor=LateExecutor(broken), info=load_model_info(folder)))
        return made[-1]

    yield make
    for core in made:
        core.close()


def request(request_id: str, prompt: list[int], max_tokens: int = 5, stop_ids: tuple[int, ...] = ()) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id, prompt, params, max_tokens=max_tokens, stop_ids=list(stop_ids))


def said_by(core: EngineCore) -> list[str]:
    assert isinstance(core.executor, LateExecutor)
    return core.executor.said


def test_each_step_is_begun_before_the_result_of_the_last_is_wanted(make_core: Callable[..., EngineCore]) -> None:
    core = make_core()
    core.add(request("a", [1, 2, 3], 4))
    news = []
    while core.has_unfinished():
        news.append([(output.new_token_ids, output.finish_reason) for output in core.step().outputs])
    begun = "begin 0,begin 1,result 0,begin 2,result 1,begin 3,result 2,result 3"
    assert ",".join(said_by(core)) == begun
    assert news == [[], [([4], None)], [([5], None)], [([6], None)], [([7], "length")], *news[5:]]
    assert not any(news[5:])


def test_everything_ends_as_it_would_otherwise(make_core: Callable[..., EngineCore]) -> None:
    core = make_core(max_num_batched_tokens=16)
    core.add(request("a", [1, 2, 3]))
    core.add(request("b", [10] * 40, max_tokens=3))
    core.add(request("c", [7], max_tokens=50, stop_ids=(10,)))
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            tokens.setdefault(output.sequence_id, []).extend(output.new_token_ids)
    assert tokens == {"a": [4, 5, 6, 7, 8], "b": [11, 12, 13], "c": [8, 9, 10]}
    stats = core.call("stats")
    assert (stats["num_free_blocks"], stats["num_discarded_tokens"]) == (64, 1)
    assert core.call("check_integrity") == {"ok": True}


def test_gaps_are_counted_while_there_is_work(make_core: Callable[..., EngineCore]) -> None:
    """The first step of each busy time waits for a request, not for the host."""
    core = make_core()
    for turn in range(1, 3):
        core.add(request(f"{turn}", [1, 2, 3], 4))
        while core.has_unfinished():
            core.step()
        stats = core.call("stats")
        assert stats["host_gap_seconds"] == turn * 3 * 0.25
        assert stats["step_seconds"] > 0.0


def test_a_step_that_fails_ends_the_engine_and_is_logged(
    make_core: Callable[..., EngineCore], caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(broken=2)
    core.add(request("a", [1, 2, 3], 9))
    told: list[int] = []
    with pytest.raises(ArithmeticError, match="as asked"):
        while core.has_unfinished():
            for output in core.step().outputs:
                told += output.new_token_ids
    assert told == [4, 5]
    assert "a step failed" in caplog.text and caplog.text.count("not finished") == 2


def test_all_that_may_be_to_blame_are_named_before_they_are_waited_for(make_core: Callable[..., EngineCore]) -> None:
    """Requests of the step in flight, and of the one that is begun beside it."""

    class Observer(LoopObserver):
        named: list[tuple[list[str], int]] = []

        def begin_plans(self, names, resolve, num_tokens, *, known) -> None:  # type: ignore[no-untyped-def]
            self.named.append((sorted(resolve()), num_tokens))

    core = make_core()
    clients = ScriptedClients(
        [[(0, AbortRequests(["nobody"])), (0, request("a", [1, 2, 3], 2))], [(0, request("b", [5] * 9, 1))]]
    )
    run_loop(core, clients, Observer())
    assert Observer.named[:2] == [(["a"], 3), (["a", "b"], 10)]
    assert [output.finish_reason for output in clients.outputs(0)].count("length") == 2
    assert isinstance(clients.sent[0][-1], EngineOutputs) and not core.has_unfinished()


def test_it_is_on_where_there_is_a_gpu_and_off_elsewhere(folder: Path) -> None:
    core = EngineCore(
        EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=9),
        executor=NullExecutor(1000),
        info=load_model_info(folder),
    )
    assert core.config.scheduler.async_scheduling is False
