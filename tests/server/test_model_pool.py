"""The pool of models: who is loaded, who has to go, who waits, and what happens when loading fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.errors import ModelError, NotFoundError, OverloadedError
from quire.server.errors import HTTPProblem, headers_of
from tests.server.pool_world import World

Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[World] = []

    def world(*arguments: Any, **options: Any) -> World:
        made.append(World(*arguments, **options))
        return made[-1]

    yield world
    for item in made:
        item.close()


def status(world: World) -> dict[str, str]:
    return {model.names[0]: model.status for model in world.pool.models}


def test_a_model_is_loaded_by_its_first_request_and_stays(make: Make) -> None:
    world = make("abc", None)
    assert status(world) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
    world.serve("abba")
    assert world.log == ["load a", "load b"]
    assert status(world) == {"a": "loaded", "b": "loaded", "c": "unloaded"}


def test_the_least_recently_used_model_makes_room(make: Make) -> None:
    world = make("abcd", 2)
    world.serve("ab" + "a" + "c")
    assert world.log == ["load a", "load b", "unload b", "load c"]
    world.serve("d")
    assert world.log[4:] == ["unload a", "load d"]
    assert world.loaded == "cd"


def test_the_end_of_a_request_counts_as_use(make: Make) -> None:
    world = make("abc", 2)
    world.begin("a")
    world.now += 1
    world.serve("b")
    world.now += 1
    world.end("a")
    world.serve("c")
    assert world.loaded == "ac"


def test_pinned_models_stay(make: Make) -> None:
    world = make("abcd", 2, pinned="a")
    world.serve("abcdb")
    assert "unload a" not in world.log
    assert world.loaded == "ab"


def test_everybody_who_asks_waits_for_the_same_load_and_goes_on_in_order(make: Make) -> None:
    world = make("ab", None, held=True)
    tasks = [world.ask("a") for _ in range(5)]
    world.settle()
    assert status(world)["a"] == "loading"
    assert not any(task.done() for task in tasks)
    order: list[int] = []
    for number, task in enumerate(tasks):
        task.add_done_callback(lambda _, number=number: order.append(number))
    world.finish_load("a")
    assert order == [0, 1, 2, 3, 4]
    assert world.log == ["load a"]
    assert world.pool.first.num_users == 5


def test_two_models_are_loaded_at_the_same_time_where_there_is_room(make: Make) -> None:
    world = make("abc", 2, held=True)
    tasks = {name: world.begin(name) for name in "abc"}
    assert world.starting == {"a", "b"}
    world.finish_load("b")
    assert tasks["b"].done()
    assert not tasks["a"].done()
    assert world.starting == {"a"}, "c waits until b has no users"
    world.end("b")
    assert world.starting == {"a", "c"}
    world.finish_load("a")
    world.finish_load("c")
    assert all(task.done() for task in tasks.values())


def test_a_model_in_use_is_not_unloaded_but_takes_no_more_users_while_others_wait(make: Make) -> None:
    world = make("abc", 2)
    for name in "ab":
        world.begin(name)
        world.now += 1
    waiting = world.begin("c")
    assert not waiting.done()
    more = world.begin("b")
    assert more.done(), "only the one whose last request came first is closed"
    late = world.begin("a")
    assert not late.done(), "or c would wait for ever"
    world.end("a")
    assert waiting.done()
    assert world.loaded == "bc"
    assert not late.done()
    world.now += 1
    world.end("b")
    world.end("b")
    assert late.done()
    assert world.loaded == "ac"


def test_a_model_that_another_one_has_spared_is_open_again(make: Make) -> None:
    world = make("abc", 2)
    world.begin("a")
    world.now += 1
    world.begin("b")
    waiting = world.begin("c")
    late = world.begin("a")
    assert not late.done()
    world.end("b")
    assert waiting.done()
    assert late.done(), "b has gone, so that a need not"
    assert world.loaded == "ac"


def test_work_that_nobody_answers_for_keeps_a_model(make: Make) -> None:
    world = make("ab", 1)
    world.serve("a")
    world.engine("a").num_unfinished = 1
    waiting = world.begin("b")
    world.sweep()
    assert not waiting.done()
    world.engine("a").num_unfinished = 0
    world.sweep()
    assert waiting.done()


def test_a_model_that_loads_slowly_stays_for_as_long_as_that_took(make: Make) -> None:
    world = make("ab", 1)
    world.load_seconds = 10.0
    world.begin("a")
    waiting = world.begin("b")
    assert world.begin("a").done(), "it was loaded just now"
    world.now += 11.0
    world.sweep()
    assert not world.begin("a").done()
    world.end("a")
    world.end("a")
    assert waiting.done()


def test_whoever_goes_away_waits_no_more(make: Make) -> None:
    world = make("abc", 1, held=True)
    first, second = world.begin("a"), world.begin("b")
    second.cancel()
    first.cancel()
    world.settle()
    world.finish_load("a")
    assert world.pool.first.num_users == 0
    third = world.begin("c")
    world.finish_load("c")
    assert third.done()
    assert world.log == ["load a", "unload a", "load c"], "b was not loaded for nobody"


def test_whoever_goes_away_in_the_moment_of_being_let_in_is_no_user(make: Make) -> None:
    world = make("ab", None, held=True)
    task = world.begin("a")
    release = world.engine("a").release
    assert release is not None
    release.set_result(None)
    while world.pool.first.num_users == 0:  # granted, but the request has not run since
        world.loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    world.settle()
    assert task.cancelled() == (world.granted == [])
    assert world.pool.first.num_users == len(world.granted)


def test_a_load_that_fails_is_told_to_all_and_tried_again_later(make: Make) -> None:
    world = make("ab", None, held=True)
    world.fail("a", "/secret/folder/a/config.json is missing")
    tasks = [world.ask("a") for _ in range(3)]
    world.settle()
    world.finish_load("a")
    for task in tasks:
        error = task.exception()
        assert isinstance(error, HTTPProblem)
        assert error.status == 503
        assert error.code == "model_unavailable"
        assert "config.json is missing" in error.message
        assert "/secret" not in error.message
        assert headers_of(error)["Retry-After"] == "1"
    assert status(world)["a"] == "failed"
    assert isinstance(world.begin("a").exception(), HTTPProblem)
    assert world.log == ["load a"], "not before a second has passed"
    world.now += 1.5
    world.begin("a")
    assert world.log == ["load a", "load a"]
    world.finish_load("a")
    world.now += 1.5
    assert isinstance(world.begin("a").exception(), HTTPProblem)
    assert world.log == ["load a", "load a"], "the second time it takes longer"
    world.now += 1.0
    del world.failures["a"]
    good = world.begin("a")
    world.finish_load("a")
    assert good.result() == "a"
    assert status(world)["a"] == "loaded"


def test_a_failed_load_leaves_its_place_to_others(make: Make) -> None:
    world = make("ab", 1)
    world.fail("a")
    assert isinstance(world.begin("a").exception(), HTTPProblem)
    assert world.begin("b").result() == "b"


def test_a_load_that_takes_too_long_is_given_up(make: Make) -> None:
    world = make("ab", None, held=True, load_timeout=0.05)
    task = world.ask("a")
    with pytest.raises((OverloadedError, HTTPProblem)) as caught:
        world.loop.run_until_complete(task)
    assert "0.05 s" in caught.value.message
    assert int(headers_of(caught.value)["Retry-After"]) >= 1
    world.settle()
    assert status(world)["a"] == "failed"
    given_up = world.engine("a")
    assert given_up.closed, "or it would go on loading"
    world.held = False
    world.now += 2.0
    assert world.begin("a").done()
    assert world.engine("a") is not given_up


def test_a_load_that_takes_too_long_fails_even_if_its_engine_cannot_be_closed(make: Make) -> None:
    world = make("ab", None, held=True, load_timeout=0.05)
    engine = world.engine("a")
    engine.close_error = OSError("no process to kill")
    with pytest.raises((OverloadedError, HTTPProblem)):
        world.loop.run_until_complete(world.ask("a"))
    world.settle()
    assert status(world)["a"] == "failed"
    engine.close_error = None
    assert isinstance(world.begin("a").exception(), HTTPProblem), "not before a second has passed"
    assert world.log == ["load a"]


def test_a_request_that_finds_no_room_in_time_is_sent_away(make: Make) -> None:
    world = make("ab", 1, load_timeout=0.05)
    world.begin("a")
    with pytest.raises(OverloadedError, match="b was not ready within"):
        world.loop.run_until_complete(world.ask("b"))
    assert world.begin("a").done(), "nobody waits any more, so a takes users again"


def test_too_many_may_not_wait(make: Make) -> None:
    world = make("ab", None, held=True, max_waiting=3)
    tasks = [world.begin("a") for _ in range(4)]
    assert isinstance(tasks[3].exception(), OverloadedError)
    world.finish_load("a")
    assert [task.exception() for task in tasks[:3]] == [None, None, None]


def test_an_engine_that_died_is_replaced_by_the_next_request(make: Make) -> None:
    world = make("ab", None)
    world.serve("a")
    world.now += 100.0
    world.begin("a")
    world.engine("a").die()
    assert status(world)["a"] == "failed"
    assert world.begin("a").done()
    assert world.log == ["load a", "load a"]
    world.end("a")
    world.end("a")
    assert world.pool.first.num_users == 0


def test_an_engine_that_dies_again_and_again_is_given_a_rest(make: Make) -> None:
    world = make("ab", None)
    world.serve("a")
    world.engine("a").die()
    assert isinstance(world.begin("a").exception(), HTTPProblem)
    world.now += 1.1
    world.serve("a")
    world.engine("a").die()
    assert isinstance(world.begin("a").exception(), HTTPProblem)
    world.now += 1.1
    assert isinstance(world.begin("a").exception(), HTTPProblem), "now it is two seconds"


def test_a_pinned_model_that_died_is_replaced_unasked(make: Make) -> None:
    world = make("ab", None, pinned="a", at_start="a")
    world.loop.run_until_complete(world.pool.start())
    world.now += 100.0
    world.engine("a").die()
    world.sweep()
    assert world.loaded == "a"


@pytest.mark.parametrize("unload", [False, True])
def test_idle_models_give_up_memory(make: Make, unload: bool) -> None:
    world = make("abc", None, pinned="a", idle_timeout=10.0, unload_idle=unload)
    world.serve("ab")
    world.begin("c")
    world.now += 9.5
    world.sweep()
    assert status(world) == {"a": "sleeping", "b": "loaded", "c": "loaded"}
    world.now += 1.0
    world.sweep()
    world.sweep()
    assert status(world) == {"a": "sleeping", "b": "unloaded" if unload else "sleeping", "c": "loaded"}
    assert world.log.count("sleep a") == 1
    world.serve("ab")
    assert status(world) == {"a": "loaded", "b": "loaded", "c": "loaded"}
    assert "wake a" in world.log
    assert ("wake b" in world.log) != unload


def test_a_sleeping_model_makes_room_first(make: Make) -> None:
    world = make("abc", 2, idle_timeout=10.0)
    world.serve("a")
    world.now += 11.0
    world.sweep()
    world.serve("bc")
    assert world.loaded == "bc"
    world.serve("a")
    assert world.log[-2:] == ["unload b", "load a"]


def test_models_by_hand(make: Make) -> None:
    world = make("abc", 2)
    pool, run = world.pool, world.loop.run_until_complete
    a, b = pool.find("a"), pool.find("b")
    with pytest.raises(HTTPProblem, match="not loaded"):
        run(pool.sleep(a, 1))
    run(pool.load(a))
    assert (a.status, a.num_users) == ("loaded", 0)
    run(pool.sleep(a, 2))
    assert world.engine("a").level == 2
    run(pool.load(a))
    assert a.status == "loaded"
    world.engine("a").sleep_error = ModelError("busy")
    with pytest.raises(ModelError, match="busy"):
        run(pool.sleep(a, 1))
    assert a.status == "loaded"
    world.begin("a")
    for work in (pool.sleep(a, 1), pool.unload(a)):
        with pytest.raises(HTTPProblem) as caught:
            run(work)
        assert (caught.value.status, caught.value.code) == (409, "model_in_use")
    world.end("a")
    run(pool.unload(a))
    run(pool.unload(a))
    assert a.status == "unloaded"
    world.fail("b")
    for _ in range(3):
        with pytest.raises(HTTPProblem):
            run(pool.load(b))
    assert world.log.count("load b") == 3, "whoever loads by hand need not wait"


def test_models_that_must_be_there_from_the_start(make: Make) -> None:
    world = make("abc", 2, pinned="a", at_start="ac", held=True)
    assert status(world) == {"a": "loading", "b": "unloaded", "c": "loading"}
    start = world.loop.create_task(world.pool.start())
    world.settle()
    assert status(world) == {"a": "loading", "b": "unloaded", "c": "loading"}
    world.finish_load("c")
    assert not start.done()
    world.finish_load("a")
    start.result()
    world.held = False
    world.serve("b")
    assert world.loaded == "ab"


def test_one_that_cannot_be_loaded_at_start_is_told_as_it_is(make: Make) -> None:
    world = make("ab", None, at_start="ab")
    world.fail("b", "no such folder")
    with pytest.raises(ModelError, match="no such folder"):
        world.loop.run_until_complete(world.pool.start())


def test_closing_ends_loads_and_sends_everybody_away(make: Make) -> None:
    world = make("abc", 1, held=True)
    tasks = [world.begin(name) for name in "aab"]
    world.loop.run_until_complete(world.pool.close())
    world.settle()
    for task in tasks:
        error = task.exception()
        assert isinstance(error, HTTPProblem)
        assert error.code == "server_shutting_down"
    assert world.log == ["load a"]
    assert isinstance(world.begin("c").exception(), HTTPProblem)
    assert all(engine.closed for engines in world.engines.values() for engine in engines)


def test_those_who_wait_can_be_sent_away_while_the_rest_goes_on(make: Make) -> None:
    world = make("ab", 1, held=True)
    first = world.begin("a")
    world.finish_load("a")
    waiting = world.begin("b")
    world.do(world.pool.abort_waiting)
    error = waiting.exception()
    assert isinstance(error, HTTPProblem)
    assert error.code == "server_shutting_down"
    assert first.result() == "a"
    assert world.engine("a").ready
    world.end("a")
    assert world.log == ["load a"]


def test_unknown_names_are_told_which_there_are(make: Make) -> None:
    world = make("abc", None)
    with pytest.raises(NotFoundError, match="this server has a, b, c"):
        world.pool.find("d")
