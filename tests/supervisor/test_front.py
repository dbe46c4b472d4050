"""How long a front is held to be silent: what is not its fault does not count."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from quire.engine.heartbeat_monitor import HeartbeatMonitor
from quire.supervisor import front as front_module
from quire.supervisor.board import Board, create_board
from quire.supervisor.front import START_SECONDS, Front


class Clock:
    """Monotonic time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        self.waited = 0.0
        monkeypatch.setattr(front_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(front_module, "_seconds_waited", lambda pid: self.waited)

    def silent(self, front: Front, seconds: float, *, step: float = 0.2, waiting: float = 0.0) -> float:
        """Let so much time pass, of which a share goes by waiting for a processor; return what counts."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            self.waited += step * waiting
            front.silent_for()
        return front.silent_for()


@pytest.fixture
def board() -> Board:
    fd, made = create_board(1)
    os.close(fd)
    return made


@pytest.fixture
def front(board: Board) -> Front:
    made = object.__new__(Front)
    made.row, made._board = 0, board
    made._began = time.monotonic()
    made._monitor = HeartbeatMonitor()
    made._last_beat = 0.0
    made._waited = None
    made.process = subprocess.Popen([sys.executable, "-c", ""])  # type: ignore[assignment]
    made.process.wait()
    return made


def beat(board: Board, clock: Clock) -> None:
    board.beat(0)
    clock.now = board.last_beat(0)


def test_silence_counts_from_the_last_heartbeat(front: Front, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert clock.silent(front, START_SECONDS - 1) == 0.0, "it may take long to start"
    assert clock.silent(front, 3) == pytest.approx(2, abs=0.1)
    beat(board, clock)
    assert clock.silent(front, 2.5) == pytest.approx(2.5, abs=0.01)


def test_waiting_for_a_processor_does_not_count(front: Front, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    beat(board, clock)
    monkeypatch.setattr(front_module.sys, "platform", "linux")
    assert clock.silent(front, 10, waiting=1.0) < 0.8
    beat(board, clock)
    assert clock.silent(front, 10, waiting=0.5) == pytest.approx(5.2, abs=0.3)


def test_a_machine_that_was_stopped_is_not_the_fronts_fault(
    front: Front, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    beat(board, clock)
    clock.silent(front, 0.2)
    assert clock.silent(front, 3600, step=3600) == pytest.approx(2.2, abs=0.1)


def test_nor_is_it_if_the_front_had_a_heartbeat_just_before(
    front: Front, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    front.silent_for()
    board.beat(0)  # nobody has seen it when everything stops
    clock.now = board.last_beat(0) + 3600
    assert front.silent_for() == pytest.approx(2.0, abs=0.1)
