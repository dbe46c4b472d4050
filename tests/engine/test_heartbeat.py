"""Signs of life: what an engine's loop writes, and what its front makes of it, in a time that only the test passes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.heartbeat import (
    CALL_TIMEOUT,
    MIN_TIMEOUT,
    UNKNOWN_TIMEOUT,
    Heartbeat,
    HeartbeatWriter,
    StallDetector,
    StepTimeouts,
)
from quire.engine.launch import EngineFiles
from quire.engine.loop import run
from quire.engine.messages import AbortRequests, Call, ToEngine
from quire.engine_request import EngineRequest
from quire.executor.null import NullExecutor
from quire.step import PendingOutput, SchedulerOutput
from tests.engine.conftest import request
from tests.helpers.loop_clients import ScriptedClients


class Time:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def memory() -> Iterator[Heartbeat]:
    files = EngineFiles()
    made = Heartbeat(files.heartbeat)
    files.close_child()
    files.close()
    yield made
    made.close()


# ---- memory ----


def test_two_mappings_of_one_descriptor_see_the_same_and_it_has_no_name() -> None:
    files = EngineFiles()
    ours, theirs = Heartbeat(files.heartbeat), Heartbeat(files.heartbeat)
    assert os.fstat(files.heartbeat).st_nlink == 0
    files.close_child()
    files.close()
    theirs.begin(12.5, 8.0, 7)
    theirs.set_request_ids(["a", "b"])
    assert ours.read() == (12.5, 12.5, 8.0, 7)
    assert ours.request_ids() == ["a", "b"]
    theirs.close()
    ours.close()


def test_names_are_any_texts_and_the_last_ones_count(memory: Heartbeat) -> None:
    @given(st.lists(st.text(max_size=20), max_size=30))
    def check(names: list[str]) -> None:
        memory.set_request_ids(names)
        assert memory.request_ids() == names

    check()


def test_of_too_many_names_some_are_kept(memory: Heartbeat) -> None:
    names = [f"request-{number}" for number in range(50_000)]
    memory.set_request_ids(names)
    kept = memory.request_ids()
    assert len(kept) > 1000
    assert kept == names[: len(kept)]


def test_names_half_written_are_not_seen(memory: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.set_request_ids(["old"])
    numbers = memory._numbers

    class Dying:
        """Ends the engine at the last of the stores."""

        def __getitem__(self, place: int) -> int:
            return numbers[place]

        def __setitem__(self, place: int, value: int) -> None:
            if place == 4:
                raise KeyboardInterrupt
            numbers[place] = value

    with monkeypatch.context() as patch:
        patch.setattr(memory, "_numbers", Dying())
        with pytest.raises(KeyboardInterrupt):
            memory.set_request_ids(["new"])
    assert memory.request_ids() == ["old"]


def test_memory_full_of_nonsense_names_nobody(memory: Heartbeat) -> None:
    memory.set_request_ids(["a"])
    for nonsense in (b"\xff" * 4096, b"cos\nsystem\n(S'x'\ntR." * 100):
        memory._bytes[: len(nonsense)] = nonsense
        assert memory.request_ids() == []
        assert StallDetector(memory, Time()).stalled_for() >= 0.0


# ---- how long a step may take ----


def test_a_step_of_which_nothing_is_known_may_take_two_minutes() -> None:
    allowed = StepTimeouts()
    assert allowed.seconds(1) == UNKNOWN_TIMEOUT
    allowed.note(1000, 1.0)
    assert allowed.seconds(1) == UNKNOWN_TIMEOUT, "larger steps say nothing of smaller ones"


def test_a_step_may_take_twenty_times_as_long_as_the_slowest_of_its_size() -> None:
    allowed = StepTimeouts()
    allowed.note(100, 0.1)
    allowed.note(65, 2.0)
    assert [allowed.seconds(tokens) for tokens in (64, 100, 127)] == [40.0] * 3
    assert allowed.seconds(128) == 80.0, "twice the size"
    assert allowed.seconds(1023) == 320.0
    assert allowed.seconds(63) == UNKNOWN_TIMEOUT


def test_one_slow_step_is_forgotten_in_time() -> None:
    allowed = StepTimeouts()
    allowed.note(100, 6.0)
    assert allowed.seconds(100) == 120.0
    allowed.note(100, 0.1)
    assert 100.0 < allowed.seconds(100) < 120.0
    for _ in range(1000):
        allowed.note(100, 0.1)
    assert allowed.seconds(100) == MIN_TIMEOUT


def test_a_step_may_always_take_three_seconds() -> None:
    allowed = StepTimeouts()
    allowed.note(0, 0.0)
    assert allowed.seconds(0) == MIN_TIMEOUT
    assert allowed.seconds(1) == UNKNOWN_TIMEOUT, "a step without tokens says nothing of others"
    allowed.note(4, 0.0001)
    assert allowed.seconds(4) == allowed.seconds(4000) == MIN_TIMEOUT


# ---- stalls ----


def test_an_engine_that_loads_is_not_stalled(memory: Heartbeat) -> None:
    clock = Time()
    watch = StallDetector(memory, clock)
    for _ in range(1000):
        clock.now += 3.0
        assert watch.stalled_for() == 0.0


def test_an_idle_engine_is_never_stalled(memory: Heartbeat) -> None:
    clock = Time()
    observer, watch = HeartbeatWriter(memory, clock=clock), StallDetector(memory, clock)
    observer.idle()
    for _ in range(3600):
        clock.now += 1.0
        observer.wait()
        assert watch.stalled_for() == 0.0
    for _ in range(20):  # now it is stopped
        clock.now += 1.0
        stalled = watch.stalled_for()
    assert stalled == 20.0 - MIN_TIMEOUT


def test_a_step_is_stalled_after_its_allowance_and_no_more_when_it_ends(memory: Heartbeat) -> None:
    clock = Time()
    observer, watch = HeartbeatWriter(memory, clock=clock), StallDetector(memory, clock)

    def step(seconds: float) -> list[float]:
        observer.begin_step()
        observer.begin_plans(["a"], lambda: ["a"], 64, known=True)
        seen = []
        while seconds > 0:
            clock.now += min(1.0, seconds)
            seconds -= 1.0
            seen.append(watch.stalled_for())
        observer.end_work()
        seen.append(watch.stalled_for())
        return seen

    assert not any(step(UNKNOWN_TIMEOUT - 10.0))  # the first one
    observer._timeouts = StepTimeouts()
    assert not any(step(0.5))
    stuck = step(12.0)
    assert stuck == [0.0] * 10 + [1.0, 2.0, 0.0]  # 20 x 0.5 s are allowed
    assert not any(step(100.0)), "one has been that slow and was alive"


def test_a_wait_for_the_disk_is_not_judged_by_tokens(memory: Heartbeat) -> None:
    clock = Time()
    timeouts = StepTimeouts()
    timeouts.note(0, 0.001)
    observer, watch = HeartbeatWriter(memory, timeouts, clock), StallDetector(memory, clock)
    observer.begin_plans([], list, 0, known=False)
    for _ in range(50):
        clock.now += 2.0
        assert watch.stalled_for() == 0.0
    observer.end_work()
    assert timeouts.seconds(0) == MIN_TIMEOUT, "nothing was learnt from it"


def test_messages_have_their_time_too(memory: Heartbeat) -> None:
    clock = Time()
    observer, watch = HeartbeatWriter(memory, clock=clock), StallDetector(memory, clock)

    def stalled_after(message: ToEngine, seconds: float) -> float:
        observer.begin_message(message)
        for _ in range(int(seconds)):
            clock.now += 1.0
            stalled = watch.stalled_for()
        observer.end_work()
        assert watch.stalled_for() == 0.0
        return stalled

    assert stalled_after(request("a"), MIN_TIMEOUT + 3) == 3.0
    assert stalled_after(AbortRequests(["a"]), MIN_TIMEOUT + 3) == 3.0
    assert stalled_after(Call(1, "wake_up"), CALL_TIMEOUT - 1) == 0.0


def test_time_in_which_nobody_looked_counts_for_two_seconds(memory: Heartbeat) -> None:
    clock = Time()
    observer, watch = HeartbeatWriter(memory, clock=clock), StallDetector(memory, clock)
    observer.idle()
    assert watch.stalled_for() == 0.0
    clock.now += 3600.0  # the whole machine slept
    assert watch.stalled_for() == 0.0
    clock.now += 1.0
    assert watch.stalled_for() == 0.0
    clock.now += 1.0
    assert watch.stalled_for() == 1.0, "2 + 1 + 1 seconds of silence"
    observer.wait()
    assert watch.stalled_for() == 0.0


def test_a_pause_that_began_just_after_a_beat_counts_for_two_seconds_as_well(memory: Heartbeat) -> None:
    clock = Time()
    observer, watch = HeartbeatWriter(memory, clock=clock), StallDetector(memory, clock)
    observer.idle()
    assert watch.stalled_for() == 0.0
    clock.now += 0.9
    observer.wait()  # nobody has seen it when everything stops
    clock.now += 3600.0
    assert watch.stalled_for() == 0.0
    clock.now += 2.0
    assert watch.stalled_for() == 1.0, "2 + 2 seconds of silence"


def test_an_engine_that_ends_is_not_stalled(memory: Heartbeat) -> None:
    clock = Time()
    observer, watch = HeartbeatWriter(memory, clock=clock), StallDetector(memory, clock)
    observer.idle()
    observer.stop()
    clock.now += 100.0
    assert watch.stalled_for() == 0.0


def test_what_it_does_is_described_for_a_log(memory: Heartbeat) -> None:
    clock = Time()
    observer, watch = HeartbeatWriter(memory, clock=clock), StallDetector(memory, clock)
    observer.begin_plans(["x"], lambda: [f"r{number}" for number in range(100)], 7, known=True)
    clock.now += 1.5
    told = watch.describe()
    assert (told["doing"], told["seconds"], told["num_tokens"], told["num_requests"]) == ("a step", 1.5, 7, 100)
    assert told["request_ids"][:2] == ["r0", "r1"] and len(told["request_ids"]) == 20


# ---- the loop ----


class Death(BaseException):
    """As if the process had been killed here."""


class DyingExecutor(NullExecutor):
    """Dies in a step that begins a prompt in `fatal`; notes what is said of each step before it runs."""

    def __init__(self, memory: Heartbeat) -> None:
        super().__init__()
        self.memory = memory
        self.fatal: set[str] = set()
        self.seen: list[list[str]] = []

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        self.seen.append(self.memory.request_ids())
        if any(new.sequence_id in self.fatal for new in plan.new_sequences):
            raise Death
        return super().submit(plan)


def serve(memory: Heartbeat, folder: Path, messages: list[ToEngine], fatal: str = "") -> DyingExecutor:
    executor = DyingExecutor(memory)
    executor.fatal = {fatal}
    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64)
    core = EngineCore(config, executor=executor)
    run(core, ScriptedClients([[(0, message) for message in messages]]), HeartbeatWriter(memory))
    return executor


def test_each_step_names_its_requests_before_it_runs_and_an_idle_engine_none(memory: Heartbeat, folder: Path) -> None:
    executor = serve(memory, folder, [request("a", max_tokens=2), request("b", max_tokens=3, sequences=2)])
    assert executor.seen[0] == ["a", "b"], "requests, not sequences, and each once"
    assert executor.seen[1:3] == [["a", "b"], ["b"]]
    assert memory.request_ids() == []
    _, began, _, _ = memory.read()
    assert began == 0.0


def test_after_a_death_in_a_step_those_in_it_are_known(memory: Heartbeat, folder: Path) -> None:
    with pytest.raises(Death):
        serve(memory, folder, [request("a"), request("bad"), request("c")], fatal="bad")
    assert memory.request_ids() == ["a", "bad", "c"]


def test_after_a_death_in_a_message_only_its_request_is_suspected(
    memory: Heartbeat, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = EngineCore.add

    def dying(core: EngineCore, message: EngineRequest) -> None:
        if message.request_id == "bad":
            raise Death
        add(core, message)

    monkeypatch.setattr(EngineCore, "add", dying)
    with pytest.raises(Death):
        serve(memory, folder, [request("a"), request("b"), request("bad")])
    assert memory.request_ids() == ["bad"]


def test_after_a_death_in_planning_all_that_could_be_the_reason_are_known(
    memory: Heartbeat, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core_step = EngineCore.step
    steps = []

    def dying(core: EngineCore) -> object:
        steps.append(None)
        if len(steps) == 1:
            monkeypatch.setattr(type(core.scheduler), "schedule", lambda self: (_ for _ in ()).throw(Death()))
        return core_step(core)

    monkeypatch.setattr(EngineCore, "step", dying)
    with pytest.raises(Death):
        serve(memory, folder, [request("a"), request("b")])
    assert memory.request_ids() == ["a", "b"]


def test_a_loop_that_nobody_watches_tells_nobody(folder: Path) -> None:
    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64)
    core = EngineCore(config, executor=NullExecutor())
    run(core, ScriptedClients([[(0, request("a"))]]))
    assert core.on_plans is None
