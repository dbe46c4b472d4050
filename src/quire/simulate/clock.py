"""The two clocks that requests can be replayed against: a virtual one, and the machine's."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the replay began."""

    def __call__(self) -> float:
        """Return the time."""

    def wait_until(self, when: float) -> None:
        """Let time pass until `when`; return at once if that is over."""


class VirtualClock:
    """A clock that stands still unless it is moved."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the virtual time [s]."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds

    def wait_until(self, when: float) -> None:
        """Jump to `when`, never back."""
        self.now = max(self.now, when)


class WallClock:
    """Real time, from the moment of construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Return seconds since construction."""
        return time.perf_counter() - self._start

    def wait_until(self, when: float) -> None:
        """Sleep until `when`."""
        left = when - self()
        if left > 0:
            time.sleep(left)
