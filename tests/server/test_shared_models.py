"""Several fronts and one decision: who uses what, who is asked, and what is left of it when a front ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.errors import ModelError
from quire.server.errors import HTTPProblem
from tests.server.front_world import FrontWorld

Make = Callable[..., FrontWorld]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[FrontWorld] = []

    def world(*arguments: Any, **options: Any) -> FrontWorld:
        made.append(FrontWorld(*arguments, **options))
        return made[-1]

    yield world
    for item in made:
        item.close()


def test_a_model_is_loaded_once_whichever_fronts_are_asked(make: Make) -> None:
    world = make(3, "ab")
    for row in (2, 0, 1):
        world.serve(row, "ab")
    assert world.log == ["load a", "load b"]
    assert world.states == {"a": "loaded", "b": "loaded"}


def test_what_is_loaded_at_start_is_loaded_once_and_all_fronts_have_it(make: Make) -> None:
    world = make(2, "ab", at_start="a")
    assert world.states == {"a": "loaded", "b": "unloaded"}
    assert world.engines["a"].users == {0, 1}
    assert world.log == ["load a"]


def test_a_model_that_another_front_uses_is_not_unloaded_to_make_room(make: Make) -> None:
    world = make(2, "ab", 1)
    world.begin(1, "a")
    waiting = world.begin(0, "b")
    assert not waiting.done()
    world.end(1, "a")
    assert waiting.done()
    assert world.log == ["load a", "unload a", "load b"]
    assert world.states == {"a": "unloaded", "b": "loaded"}


def test_all_fronts_leave_an_engine_that_is_unloaded(make: Make) -> None:
    world = make(3, "ab")
    for row in range(3):
        world.serve(row, "a")
    world.operate(2, "unload", "a")
    assert world.loaded == ""
    assert world.log == ["load a", "unload a"]
    world.serve(1, "a")
    assert world.log == ["load a", "unload a", "load a"]


def test_a_front_that_uses_a_model_asks_no_more_until_another_one_must_have_room(make: Make) -> None:
    world = make(2, "ab", 1)
    world.begin(1, "a")
    world.freeze(0)
    assert world.begin(1, "a").done(), "nobody had to be asked"
    world.freeze(0, False)
    world.now += 60
    waiting = world.begin(0, "b")
    late = world.begin(1, "a")
    assert not late.done(), "or b would wait for ever"
    world.end(1, "a")
    world.end(1, "a")
    world.wait_until(waiting.done)
    world.end(0, "b")
    world.wait_until(late.done)


def test_nobody_is_asked_where_models_stay(make: Make) -> None:
    world = make(2, "a", at_start="a", may_unload=False)
    world.freeze(0)
    world.serve(1, "aaa")


@pytest.mark.parametrize("row", [0, 1])
def test_an_operator_may_ask_any_front(make: Make, row: int) -> None:
    world = make(2, "ab")
    world.operate(row, "load", "a")
    assert world.states["a"] == "loaded"
    world.operate(row, "sleep", "a", 2)
    assert world.states["a"] == "sleeping"
    world.serve(1 - row, "a")
    assert world.states["a"] == "loaded"
    world.operate(row, "unload", "a")
    assert world.states["a"] == "unloaded"
    assert world.log == ["load a", "sleep a", "wake a", "unload a"]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("user", [0, 1])
def test_what_is_used_anywhere_stays(make: Make, row: int, user: int) -> None:
    world = make(2, "a")
    world.begin(user, "a")
    for action, arguments in (("unload", ()), ("sleep", (1,))):
        with pytest.raises(HTTPProblem, match="is in use") as caught:
            world.operate(row, action, "a", *arguments)
        assert (caught.value.status, caught.value.code) == (409, "model_in_use")
    world.end(user, "a")
    world.operate(row, "unload", "a")


def test_the_end_of_a_request_at_another_front_is_known_when_an_operator_asks(make: Make) -> None:
    world = make(2, "a")
    task = world.begin(1, "a")
    assert task.done()
    front = world.fronts[1]
    world.used.clear()

    async def end_and_unload() -> None:
        front.models.release(front.models.first)
        await world.fronts[0].models.unload(world.fronts[0].models.first)

    world.loop.run_until_complete(end_and_unload())
    assert world.loaded == ""


def test_adapters_are_the_same_at_all_fronts(make: Make, tmp_path: Any) -> None:
    world = make(2, "ab")
    world.operate(1, "load_adapter", "a", "pirate", str(tmp_path))
    world.settle()
    for front in world.fronts.values():
        assert front.models.find("pirate") is front.models.first
    world.kill(0)
    world.start(0)
    assert [front.models.adapter_names for front in world.fronts.values()] == [["pirate"], ["pirate"]]
    world.operate(0, "unload_adapter", "a", "pirate")
    world.settle()
    assert [front.models.adapter_names for front in world.fronts.values()] == [[], []]


def test_a_model_that_cannot_be_loaded_is_the_same_error_at_all_fronts(make: Make) -> None:
    world = make(2, "ab")
    world.failures["a"] = ModelError("the file is broken")
    for row in (1, 0):
        task = world.begin(row, "a")
        world.wait_until(task.done)
        error = task.exception()
        assert isinstance(error, HTTPProblem)
        assert (error.status, error.code, error.headers["Retry-After"]) == (503, "model_unavailable", "1")
        assert "the file is broken" in error.message
    assert world.states["a"] == "failed"
    assert world.log == ["load a"]


def test_a_request_that_goes_away_waits_no_more(make: Make) -> None:
    world = make(2, "ab", 1, held=True)
    task = world.begin(1, "a")
    assert world.leader.models.first.waiters
    task.cancel()
    world.wait_until(lambda: not world.leader.models.first.waiters)
    world.finish_load("a")
    assert world.leader.models.first.num_users == 0


def test_requests_of_all_fronts_are_served_in_the_order_in_which_they_came(make: Make) -> None:
    world = make(3, "abc", 1)
    world.begin(0, "a")
    second, third = world.begin(2, "b"), world.begin(1, "c")
    world.end(0, "a")
    world.wait_until(second.done)
    assert not third.done()
    world.end(2, "b")
    world.wait_until(third.done)
    assert world.log[-1] == "load c"


# ---- fronts that end ----


def test_what_a_front_used_is_free_when_it_dies(make: Make) -> None:
    world = make(2, "ab", 1)
    world.begin(1, "a")
    waiting = world.begin(0, "b")
    assert not waiting.done()
    world.kill(1)
    world.wait_until(waiting.done)
    assert world.log == ["load a", "unload a", "load b"]


def test_what_a_front_waited_for_is_forgotten_when_it_dies(make: Make) -> None:
    world = make(2, "ab", 1)
    world.begin(0, "a")
    world.begin(1, "b")
    world.kill(1)
    world.end(0, "a")
    assert world.log == ["load a"]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("num_fronts", [1, 2])
def test_models_are_as_they_were_after_the_leader_has_died(make: Make, level: int, num_fronts: int) -> None:
    world = make(num_fronts, "abc", at_start="b")
    world.serve(0, "a")
    if level:
        world.operate(0, "sleep", "a", level)
    world.failures["c"] = ModelError("the file is broken")
    task = world.begin(0, "c")
    assert task.exception() is not None
    before, log, created = world.states, list(world.log), 1_000_000
    world.leader.models.first.created = created
    world.do(world.leader.pool.sweep)
    world.kill(0)
    world.start(0)
    assert world.states == before == {"a": "sleeping" if level else "loaded", "b": "loaded", "c": "failed"}
    assert world.log == log, "nothing was loaded, woken up or unloaded"
    assert {front.models.first.created for front in world.fronts.values()} == {created}
    for row in world.fronts:
        error = world.begin(row, "c").exception()
        assert error is not None and "the file is broken" in str(error), "it is not tried again at once"
    for row in world.fronts:
        world.serve(row, "a")
    assert world.log[len(log) :] == (["wake a"] if level else [])


def test_the_next_leader_knows_what_the_others_use(make: Make) -> None:
    world = make(3, "abc", 2)
    world.begin(1, "a")
    world.begin(2, "b")
    world.kill(0)
    world.start(0)
    assert world.leader.row == 1
    waiting = world.begin(0, "c")
    assert not waiting.done()
    world.end(2, "b")
    world.wait_until(waiting.done)
    assert world.loaded == "ac"
    world.end(1, "a")
    world.operate(2, "unload", "a")
    assert world.loaded == "c"


def test_requests_that_wait_when_the_leader_dies_wait_for_the_next_one(make: Make) -> None:
    world = make(3, "ab", 1)
    world.begin(1, "a")
    waiting = [world.begin(2, "b"), world.begin(1, "b")]
    world.kill(0)
    assert not any(task.done() for task in waiting)
    world.end(1, "a")
    world.wait_until(lambda: all(task.done() for task in waiting))
    for task in waiting:
        task.result()
    assert world.log == ["load a", "unload a", "load b"]


def test_loading_goes_on_when_the_leader_dies(make: Make) -> None:
    world = make(2, "ab")
    world.held = True
    waiting = world.begin(1, "a")
    assert world.states["a"] == "loading"
    world.kill(0)
    world.start(0)
    assert world.states["a"] == "loading"
    world.finish_load("a")
    world.wait_until(waiting.done)
    waiting.result()
    assert world.log == ["load a"]
    assert world.states["a"] == "loaded"


def test_an_engine_that_was_put_to_sleep_as_the_leader_died_is_asleep(make: Make) -> None:
    world = make(2, "a", at_start="a")
    front = world.fronts[0]
    front.spawn_soon(lambda: front.models.sleep(front.models.first, 1))
    world.wait_until(lambda: "sleep a" in world.log)
    world.kill(0)
    world.engines["a"].level = 1
    world.start(0)
    assert world.states == {"a": "sleeping"}
    world.serve(0, "a")
    assert world.states == {"a": "loaded"}


@pytest.mark.parametrize("action", ["sleep", "unload"])
def test_a_model_is_idle_when_no_front_uses_it(make: Make, action: str) -> None:
    world = make(2, "a", idle_timeout=10, unload_idle=action == "unload")
    world.begin(1, "a")
    world.now += 60
    world.do(world.leader.pool.sweep)
    assert world.states == {"a": "loaded"}
    world.end(1, "a")
    world.now += 9
    world.do(world.leader.pool.sweep)
    assert world.states == {"a": "loaded"}
    world.kill(0)
    world.start(0)
    world.do(world.leader.pool.sweep)
    assert world.states == {"a": "loaded"}, "a new leader begins to count"
    world.now += 10
    world.do(world.leader.pool.sweep)
    assert world.states == {"a": "sleeping" if action == "sleep" else "unloaded"}
    world.serve(0, "a")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_front_that_freezes_delays_others_only_until_it_is_killed(make: Make, victim: int) -> None:
    world = make(2, "ab", 1)
    world.begin(victim, "a")
    world.freeze(victim)
    waiting = world.begin(1 - victim, "b")
    assert not waiting.done()
    world.kill(victim)
    world.wait_until(waiting.done)
    waiting.result()
    assert world.loaded == "b"


def test_a_front_that_was_frozen_while_a_model_was_unloaded_leaves_its_engine(make: Make) -> None:
    world = make(2, "ab")
    world.serve(1, "a")
    world.freeze(1)
    world.operate(0, "unload", "a")
    assert world.loaded == "a", "its connection is open"
    world.freeze(1, False)
    world.wait_until(lambda: world.loaded == "")
    world.serve(1, "a")


def test_an_engine_ends_with_the_frozen_front_that_did_not_leave_it(make: Make) -> None:
    world = make(2, "ab")
    world.serve(1, "a")
    world.freeze(1)
    world.operate(0, "unload", "a")
    world.kill(1)
    assert world.loaded == ""


def test_a_leader_that_stops_in_order_leaves_the_others_their_requests(make: Make) -> None:
    world = make(2, "ab", 1)
    world.begin(1, "a")
    waiting = world.begin(1, "b")
    front = world.fronts[0]

    async def stop() -> None:
        world.serving.remove(0)
        world._tell()
        await front.models.close()

    world.loop.run_until_complete(stop())
    del world.fronts[0]
    world.settle()
    assert not waiting.done()
    world.end(1, "a")
    world.wait_until(waiting.done)
    waiting.result()


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))])
def test_whatever_happens_requests_are_served_and_nothing_is_unloaded_while_it_is_used(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    world = make(rng.choice([2, 3]), "abcd", rng.choice([1, 2, 4]), may_unload=rng.random() < 0.7)
    waiting: list[Any] = []
    for _ in range(50):
        world.now += rng.random() * 40
        row = rng.choice(list(world.fronts))
        choice = rng.random()
        if choice < 0.4:
            waiting.append((world.fronts[row], world.begin(row, rng.choice("abcd"))))
        elif choice < 0.7 and world.used:
            front, name = rng.choice(world.used)
            if not front.frozen:
                world.end(front.row, name)
        elif choice < 0.8 and waiting:
            front, task = waiting.pop(rng.randrange(len(waiting)))
            if not task.done():
                task.cancel()
                world.settle()
        elif choice < 0.9:
            world.kill(row)
            world.start(row)
        else:
            world.do(world.leader.pool.sweep)
    for _ in range(200):
        for front, name in list(world.used):
            world.end(front.row, name)
        world.now += 40
        world.do(world.leader.pool.sweep)
        if all(task.done() for front, task in waiting if not front.dead) and not world.used:
            break
    for front, task in waiting:
        if not front.dead:
            assert task.done(), "a request waits for ever"
            task.result()
    if world.may_unload:
        world.settle()
        assert all(model.num_users == 0 for model in world.leader.models.models)
        for row in world.fronts:
            world.serve(row, "abcd")
    assert len(world.engines) <= (world.max_loaded or 4)
