"""The thread team and recorded programs: each item once, instructions in order, whatever sleeps and whatever ends."""

from __future__ import annotations

import gc
import random
import threading

import numba
import numpy as np
import pytest

from quire.errors import ConfigError
from quire.kernels.cpu.arithmetic import Arithmetic
from quire.kernels.cpu.arrays import Recorded
from quire.kernels.cpu.jit import op
from quire.kernels.cpu.pointers import i64_ptr
from quire.kernels.cpu.threads import SMALL_WORK, Launcher

LARGE = SMALL_WORK  # work that is shared among threads


@op
def count_up(args, first, last, scratch):
    """x[i] = 10 * x[i] + digit, for items i. args: x, digit."""
    x = i64_ptr(args[0])
    for i in range(first, last):
        x[i] = 10 * x[i] + args[1]


@op
def choose_items(args, first, last, scratch):
    """count[0] = wanted[0]. args: count, wanted."""
    i64_ptr(args[0])[0] = i64_ptr(args[1])[0]


def launcher(threads: int, spins: int = 600) -> Launcher:
    made = Launcher(threads, spins)
    made.recorder = Arithmetic(made)
    return made


def digits(count: int, seed: int) -> list[tuple[int, int]]:
    """Random instructions: a digit, and work that is small or large."""
    rng = random.Random(seed)
    return [(rng.randrange(10), rng.choice((1, LARGE))) for _ in range(count)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("items", [1, 3, 64])
def test_every_item_of_every_instruction_is_done_once_and_in_order(threads: int, items: int) -> None:
    team, x = launcher(threads), np.zeros(items, np.int64)
    plan = digits(12, seed=items)
    with team.record() as made:
        for digit, work in plan:
            team.emit(count_up, x, digit, items=items, work=work)
    assert not x.any(), "nothing runs while it is recorded"
    expected = int("".join(str(digit) for digit, _ in plan))
    for _ in range(3):
        x[:] = 0
        made[0].run()
        assert x.tolist() == [expected] * items


def test_threads_that_sleep_all_the_time_miss_no_program_and_repeat_none() -> None:
    team, arrays = launcher(2, spins=0), [np.zeros(4, np.int64) for _ in range(3)]
    programs = []
    for number, x in enumerate(arrays):
        with team.record() as made:
            for digit in range(number + 1):
                team.emit(count_up, x, digit + 1, items=4, work=LARGE)
        programs.append((made[0], x, [1, 12, 123][number]))
    rng = random.Random(0)
    for _ in range(2000):
        program, x, expected = rng.choice(programs)
        x[:] = 0
        program.run()
        assert x.tolist() == [expected] * 4


def test_more_threads_than_cores_still_do_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 5)
    team, x = launcher(5, spins=50), np.zeros(7, np.int64)
    with team.record() as made:
        for digit in range(6):
            team.emit(count_up, x, digit, items=7, work=LARGE, grain=1)
    for _ in range(200):
        x[:] = 0
        made[0].run()
        assert x.tolist() == [12345] * 7


def test_programs_may_be_dropped_as_soon_as_they_have_run() -> None:
    team, x = launcher(2), np.zeros(2, np.int64)
    for digit in range(300):
        with team.record() as made:
            for _ in range(3):
                team.emit(count_up, x, digit % 10, items=2, work=LARGE)
        x[:] = 0
        made.pop().run()
        assert x.tolist() == [digit % 10 * 111] * 2


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_items_may_be_known_only_when_its_turn_comes(threads: int) -> None:
    team, x = launcher(threads), np.zeros(50, np.int64)
    count, wanted = np.zeros(1, np.int64), np.zeros(1, np.int64)
    with team.record() as made:
        team.emit(choose_items, count, wanted, items=1, work=1)
        team.emit(count_up, x, 1, items=0, work=0, items_at=count, alone_below=5, grain=1)
    for items in (0, 1, 4, 5, 50):
        wanted[0], x[:] = items, 0
        made[0].run()
        assert x.tolist() == [1] * items + [0] * (50 - items)


def test_callers_from_several_python_threads_take_turns() -> None:
    team, arrays = launcher(2), [np.zeros(8, np.int64) for _ in range(4)]

    def work(x: np.ndarray) -> None:
        for _ in range(200):
            team.emit(count_up, x, 0, items=8, work=LARGE)
            x += 1

    callers = [threading.Thread(target=work, args=(x,)) for x in arrays]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    expected = 0
    for _ in range(200):
        expected = (10 * expected + 1) % 2**64
    assert all(x.astype(np.uint64).tolist() == [expected] * 8 for x in arrays)


@pytest.mark.parametrize("seed", range(8))
def test_memory_of_dropped_arrays_is_used_again_but_never_too_early(seed: int) -> None:
    """Random arithmetic, recorded and at once, while arrays come and go: the same values in the end."""
    results = []
    for recorded in (False, True):
        rng, values = random.Random(seed), np.random.default_rng(seed)
        team = launcher(2)
        inputs = [values.standard_normal((3, 40)).astype(np.float32) for _ in range(3)]
        arithmetic = Arithmetic(team)

        def compute(rng: random.Random = rng, inputs: list = inputs, arithmetic: Arithmetic = arithmetic) -> np.ndarray:
            alive = [arithmetic.combine(0, x, 0.0, None) for x in inputs]
            for _ in range(60):
                x, y = rng.choice(alive), rng.choice(alive)
                alive.append(arithmetic.combine(rng.randrange(2), x, y, None))
                if rng.random() < 0.3:
                    alive[rng.randrange(len(alive))] = alive[-1][:, ::1]
                while len(alive) > 4:
                    alive.pop(rng.randrange(len(alive)))
            return alive[-1]

        if recorded:
            with team.record() as made:
                result = compute()
            for _ in range(2):
                made[0].run()
            assert team.arena.size == 1 << 26
            results.append(np.array(np.asarray(result)))
        else:
            results.append(compute())
    np.testing.assert_array_equal(*results)


def test_an_array_that_holds_nothing_yet_lets_nobody_read_it() -> None:
    team = launcher(1)
    with team.record():
        x = team.empty((4, 6))
        assert isinstance(x, Recorded)
        x[:, 1:3] += 1.0
        refused = [
            lambda: np.exp(x),
            lambda: np.concatenate([x, x]),
            lambda: x / 2,
            lambda: x[np.array([0])],
            lambda: x[0, 0],
            lambda: x.copy(),
            lambda: x.astype(np.float64),
            lambda: x.__setitem__(0, 1.0),
        ]
        for use in refused:
            with pytest.raises(TypeError, match="recorded"):
                use()


def test_the_threads_of_a_team_end_with_it() -> None:
    before = set(threading.enumerate())
    team, x = launcher(2), np.zeros(2, np.int64)
    team.emit(count_up, x, 1, items=2, work=LARGE)
    (thread,) = set(threading.enumerate()) - before
    del team
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads is 5000; allowed: 1 to"):
        Launcher(5000)
