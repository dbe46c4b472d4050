"""States and runs: order, forks, errors, cancelling, streams; with a scripted engine in front of which all is real."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import EngineDeadError, GenerationError, QuireError, RequestError
from quire.lang import LocalBackend, ProgramCancelledError, State, assistant, gen, program, select, user
from tests.helpers.fake_engine import fake_async_llm

SYNC = 10.0


class Rig:
    """A backend on a fake engine, which answers with letters that depend on prompt and seed."""

    def __init__(self, **options: Any) -> None:
        llm, self.client = fake_async_llm(**options)
        self.backend = LocalBackend(llm=llm)

    @property
    def live(self) -> list[str]:
        return self.client.engine.live

    def on_loop(self, work: Any) -> None:
        """Call something on the backend's loop and wait for it."""
        done = threading.Event()
        self.backend.loop().call_soon_threadsafe(lambda: (work(), done.set()))
        assert done.wait(SYNC)

    def hold(self) -> None:
        """Let the engine make no more steps."""
        self.on_loop(self.client.hold)

    def wait_for_requests(self, count: int) -> None:
        """Return once the engine has seen so many."""
        seen = threading.Event()
        while not seen.is_set():
            self.on_loop(lambda: seen.set() if len(self.client.engine.added) >= count else None)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    with made.backend:
        made.backend.loop()
        yield made
    assert made.live == []
    assert made.client.closed


def test_parts_are_carried_out_in_order_and_values_are_read_when_needed(rig: Rig) -> None:
    @program
    def play(s: State, word: str) -> str:
        s += word + gen("a", max_tokens=3) + " and " + gen(max_tokens=2)
        s += gen("b", max_tokens=4)
        assert "a" in s and "c" not in s
        return s["a"].upper()

    state = play.run("one ", backend=rig.backend)
    assert state.value == state["a"].upper()
    assert state.text().startswith(f"one {state['a']} and ")
    assert state.text().endswith(state["b"])
    assert len(state.text()) == len("one ") + 3 + len(" and ") + 2 + 4


def test_a_name_that_is_used_again_has_its_latest_value(rig: Rig) -> None:
    @program
    def loop(s: State) -> list[str]:
        seen = []
        for _ in range(3):
            s += "x" + gen("word", max_tokens=4)
            seen.append(s["word"])
        return seen

    state = loop.run(backend=rig.backend)
    assert state.text() == "".join("x" + word for word in state.value)
    assert state["word"] == state.value[-1]


def test_programs_call_programs(rig: Rig) -> None:
    @program
    def inner(s: State, count: int) -> None:
        """An inner one."""
        s += gen("inner", max_tokens=count)

    @program
    def outer(s: State) -> None:
        s += "a"
        inner(s, count=5)

    assert len(outer.run(backend=rig.backend)["inner"]) == 5
    assert inner.__doc__ == "An inner one."


def test_forks_run_at_the_same_time(rig: Rig) -> None:
    @program
    def wide(s: State) -> None:
        forks = s.fork(5)
        for fork in forks:
            fork += "a" + gen("x", max_tokens=50)
        rig.wait_for_requests(5)
        rig.on_loop(rig.client.resume)
        s.join(forks)

    rig.hold()
    state = wide.run(backend=rig.backend, seed=1)
    assert len(set(state["x"])) == 5


def test_names_that_nothing_has_are_refused_with_those_there_are(rig: Rig) -> None:
    @program
    def play(s: State) -> None:
        s += "a" + gen("word", max_tokens=1)
        s["wrod"]

    with pytest.raises(RequestError, match="nothing is called 'wrod' here; known: 'word'"):
        play.run(backend=rig.backend)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: gen("x", temprature=1), "temprature"),
        (lambda: gen("x", n=2), "n"),
        (lambda: gen("x", logprob_token_ids=[3]), "logprob_token_ids"),
        (lambda: gen("x", temperature=-1), "temperature"),
        (lambda: gen("x", max_tokens=0), "max_tokens"),
        (lambda: gen(""), "name"),
        (lambda: gen("x", regex="a", schema={}), "schema"),
        (lambda: gen("x", regex=""), "structured_outputs.regex"),
        (lambda: select("x", []), "choices"),
        (lambda: select("x", "abc"), "choices"),
        (lambda: select("x", ["a", ""]), "choices"),
        (lambda: select("x", ["a", "a"]), "choices"),
        (lambda: select("x", ["a"], method="best"), "method"),
        (lambda: "a" + gen("x") + 3, None),  # type: ignore[operator]
        (lambda: "\ud800" + gen("x"), "text"),
    ],
)
def test_bad_expressions_are_refused_where_they_stand(make: Any, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [({"sampling": {"logprobs": 1}}, "logprobs"), ({"seed": "x"}, "seed"), ({"sampling": {"stop": 3}}, "stop")],
)
def test_bad_options_of_a_run_are_refused(rig: Rig, options: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        program(lambda s: None).run(backend=rig.backend, **options)
    assert caught.value.param == param
    with pytest.raises(RequestError):
        program(lambda s: None).run_batch([{}], backend=rig.backend, **options)


def test_a_pydantic_model_is_a_schema() -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    [part] = gen("x", schema=Person).parts
    assert part.structured_outputs.json["required"] == ["name"]  # type: ignore[union-attr]


# Errors


def test_what_the_program_raises_is_raised(rig: Rig) -> None:
    @program
    def fail(s: State) -> None:
        s += "a" + gen("x", max_tokens=200)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail.run(backend=rig.backend)
    assert rig.live == []


def test_a_failed_gen_fails_its_reader_and_what_comes_behind(rig: Rig) -> None:
    @program
    def fail(s: State) -> None:
        s += "a" + gen("first", max_tokens=2)
        s["first"]
        s += "b" * 1000 + gen("second") + gen("third")

    [state] = fail.run_batch([{}], backend=rig.backend)
    assert len(state["first"]) == 2
    for read in (lambda: state["second"], lambda: state["third"], state.text, state.messages, state.wait):
        with pytest.raises(RequestError, match="context length"):
            read()
    assert isinstance(state.error, RequestError)


def test_an_error_in_a_fork_is_raised_where_the_fork_is_read(rig: Rig) -> None:
    @program
    def forks(s: State) -> Any:
        s += "a"
        children = s.fork(3)
        for index, child in enumerate(children):
            child += ("b" * 1000 if index == 1 else "b") + gen("x", max_tokens=2)
        s.join(children)
        assert children[0]["x"] and children[2]["x"]
        with pytest.raises(RequestError, match="context length"):
            children[1]["x"]
        with pytest.raises(RequestError, match="context length"):
            s["x"]
        s += gen("y", max_tokens=1)
        return s["y"]

    assert len(forks.run(backend=rig.backend).value) == 1


def test_engine_errors_arrive_as_they_are(rig: Rig) -> None:
    @program
    def play(s: State) -> None:
        s += "a" + gen("x", max_tokens=5)

    class Everything(set[str]):
        def __rand__(self, other: Any) -> Any:
            return other

    rig.client.engine.fail_on = Everything()
    with pytest.raises(GenerationError, match="not finite"):
        play.run(backend=rig.backend)
    rig.client.engine.fail_on = set()
    assert len(play.run(backend=rig.backend)["x"]) == 5


def test_one_failing_program_leaves_its_batch_alone(rig: Rig) -> None:
    @program
    def play(s: State, text: str) -> None:
        s += text + gen("x", max_tokens=3)

    states = play.run_batch([{"text": "a"}, {"text": "a" * 1000}, {"text": "b"}, {"wrong": 1}], backend=rig.backend)
    assert [type(state.error) for state in states][::2] == [type(None)] * 2
    assert len(states[0]["x"]) == len(states[2]["x"]) == 3
    assert isinstance(states[1].error, RequestError)
    assert isinstance(states[3].error, TypeError)
    assert play.run_batch([], backend=rig.backend) == []


def test_a_dead_engine_is_an_error_of_every_reader(rig: Rig) -> None:
    @program
    def play(s: State) -> None:
        s += "a" + gen("x", max_tokens=200)
        rig.wait_for_requests(1)
        rig.on_loop(rig.client.die)
        s["x"]

    rig.hold()
    with pytest.raises(EngineDeadError):
        play.run(backend=rig.backend)
    rig.client.engine._live.clear()


# Cancelling


def test_forks_that_nobody_waits_for_end_with_the_program(rig: Rig) -> None:
    @program
    def race(s: State) -> list[State]:
        slow, fast = s.fork(2)
        fast += "b" + gen("x", max_tokens=2)
        fast.wait()
        rig.hold()
        slow += "a" + gen("x", max_tokens=200)
        rig.wait_for_requests(2)
        return [slow, fast]

    slow, fast = race.run(backend=rig.backend).value
    assert len(fast["x"]) == 2
    assert fast.text() == "b" + fast["x"]
    with pytest.raises(ProgramCancelledError, match="the program ended"):
        slow["x"]
    with pytest.raises(ProgramCancelledError):
        slow.text()
    assert len(rig.client.engine.aborted) == 1


def test_a_fork_can_be_cancelled_with_its_own_forks(rig: Rig) -> None:
    @program
    def prune(s: State) -> None:
        keep, drop = s.fork(2)
        drop += "a"
        below = drop.fork(2)
        for fork in [keep, *below]:
            fork += "b" + gen("x", max_tokens=60)
        rig.wait_for_requests(3)
        drop.cancel()
        for fork in below:
            with pytest.raises(ProgramCancelledError, match="cancelled"):
                fork["x"]
        rig.on_loop(rig.client.resume)
        s.join([keep])

    rig.hold()
    assert len(prune.run(backend=rig.backend)["x"][0]) == 60
    assert len(rig.client.engine.aborted) == 2


def test_an_interrupted_run_aborts_its_requests(rig: Rig) -> None:
    @program
    def play(s: State) -> None:
        s += "a" + gen("x", max_tokens=200)
        for fork in s.fork(3):
            fork += "b" + gen("y", max_tokens=200)
        rig.wait_for_requests(1)
        raise KeyboardInterrupt

    rig.hold()
    with pytest.raises(KeyboardInterrupt):
        play.run(backend=rig.backend)
    assert len(rig.client.engine.aborted) == 1
    rig.on_loop(rig.client.resume)
    assert rig.live == []


def test_nothing_can_be_appended_once_the_program_has_ended(rig: Rig) -> None:
    state = program(lambda s: s.__iadd__("a")).run(backend=rig.backend)
    with pytest.raises(RequestError, match="has ended"):
        state += "b"
    with pytest.raises(RequestError, match="has ended"):
        state.fork(2)
    assert state.text() == "a"


def test_closing_the_backend_ends_its_programs() -> None:
    threads = set(threading.enumerate())
    rig = Rig()
    errors: list[BaseException | None] = []

    @program
    def play(s: State) -> None:
        s += "a" + gen("x", max_tokens=200)
        s["x"]

    def work() -> None:
        errors.extend(state.error for state in play.run_batch([{}, {}], backend=rig.backend))

    rig.hold()
    thread = threading.Thread(target=work)
    thread.start()
    rig.wait_for_requests(2)
    rig.backend.close()
    thread.join(SYNC)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [ProgramCancelledError] * 2
    assert rig.client.closed and rig.live == []
    with pytest.raises(QuireError, match="closed"):
        play.run(backend=rig.backend)
    assert set(threading.enumerate()) <= threads


def test_a_backend_that_was_never_used_closes() -> None:
    rig = Rig()
    rig.backend.close()
    rig.backend.close()
    assert not rig.client.closed


# More requests than the engine takes


@pytest.mark.parametrize("limit", [{"max_num_queued_reqs": 3}, {"max_num_queued_tokens": 50}])
def test_many_forks_wait_instead_of_being_refused(limit: dict[str, Any]) -> None:
    rig = Rig(max_num_seqs=2, **limit)

    @program
    def wide(s: State) -> None:
        forks = s.fork(20)
        for fork in forks:
            fork += "a" * 30 + gen("x", max_tokens=2)
        s.join(forks)

    with rig.backend:
        assert len(wide.run(backend=rig.backend)["x"]) == 20


# Streams


def test_a_stream_is_the_text_as_it_comes(rig: Rig) -> None:
    @program
    def play(s: State) -> None:
        s += user("Hi") + assistant(gen("x", max_tokens=5))
        for fork in s.fork(1):
            fork += user("unseen")

    with play.stream(backend=rig.backend, seed=1) as stream:
        pieces = list(stream)
    assert "".join(pieces) == stream.state.text() == f"user: Hi\nassistant: {stream.state['x']}\n"
    assert len(pieces) >= 4 + 5
    assert "".join(play.stream(backend=rig.backend, seed=1, name="x")) == stream.state["x"]
    assert list(stream) == []


def test_a_stream_raises_at_its_end(rig: Rig) -> None:
    @program
    def play(s: State) -> None:
        s += "a" + gen("x", max_tokens=2) + "b" * 1000 + gen("y")

    stream = play.stream(backend=rig.backend)
    pieces = []
    with pytest.raises(RequestError, match="context length"):
        for piece in stream:
            pieces.append(piece)
    assert "".join(pieces).startswith("a" + stream.state["x"])
    assert next(stream, None) is None


@pytest.mark.parametrize("drop", [False, True])
def test_a_stream_that_is_closed_or_dropped_cancels_its_program(rig: Rig, drop: bool) -> None:
    @program
    def play(s: State) -> None:
        s += "a" + gen("x", max_tokens=200)

    rig.hold()
    stream = play.stream(backend=rig.backend)
    assert next(stream) == "a"
    rig.wait_for_requests(1)
    state, thread = stream.state, stream._thread
    if not drop:
        stream.close()
    del stream
    thread.join(SYNC)
    assert not thread.is_alive()
    assert isinstance(state.error, ProgramCancelledError)
    assert len(rig.client.engine.aborted) == 1
