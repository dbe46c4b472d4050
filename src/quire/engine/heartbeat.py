"""The heartbeat of an engine: shared memory with the requests that it works on, and how long that may take.

The engine's loop writes before each piece of work (`HeartbeatWriter`): the time, the timeout of the work, and the
requests that it concerns. The parent process reads without the engine's help. So it finds an engine that is stuck
(`StallDetector`), and knows after a death which requests may have caused it. The two never wait for each other.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.engine.heartbeat_monitor import HeartbeatMonitor
from quire.engine.launch import HEARTBEAT_BYTES
from quire.engine.messages import AbortRequests, Call, ToEngine
from quire.engine_request import EngineRequest

MIN_TIMEOUT = 3.0  # of anything [s]
UNKNOWN_TIMEOUT = 120.0  # of a step if none of similar size was measured
CALL_TIMEOUT = 600.0  # of an operation, such as waking a model
TIMEOUT_FACTOR = 20.0  # over the slowest step of a size so far
DECAY = 0.01  # of the slowest step of a size, with each later one: one outlier must not count for ever
MAX_LOGGED = 20  # ids

_BEAT, _BEGAN, _TIMEOUT, _TOKENS, _SLOT, _SIZES = 0, 1, 2, 3, 4, 8  # places of int64; _SIZES has one for each slot
_HEAD = 128  # bytes
_SLOT_BYTES = (HEARTBEAT_BYTES - _HEAD) // 2
_SECOND = 1_000_000_000


class Heartbeat:
    """The shared memory: a few numbers, and two slots for ids, of which one is valid while the other is written.

    Args:
        fd: of a file of `HEARTBEAT_BYTES`, see `EngineFiles`; it may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, HEARTBEAT_BYTES)
        self._bytes = memoryview(self._memory)
        # Aligned and native, so that each number is written in one go.
        self._numbers = self._bytes[:_HEAD].cast("q")

    def beat(self, now: float) -> None:
        """Record progress at `now` (monotonic seconds, the same in all processes)."""
        self._numbers[_BEAT] = int(now * _SECOND)

    def begin(self, now: float, timeout: float, num_tokens: int = 0) -> None:
        """Record that work begins, with its timeout in seconds and, of a step, its tokens."""
        numbers = self._numbers
        numbers[_TIMEOUT] = int(timeout * _SECOND)
        numbers[_TOKENS] = num_tokens
        numbers[_BEAT] = numbers[_BEGAN] = int(now * _SECOND)

    def end(self, now: float) -> None:
        """Record that the work has ended."""
        numbers = self._numbers
        numbers[_BEAT] = int(now * _SECOND)
        numbers[_BEGAN] = 0
        numbers[_TIMEOUT] = int(MIN_TIMEOUT * _SECOND)

    def stop(self) -> None:
        """Record that the engine ends in order: there will be no more beats."""
        self._numbers[_BEAT] = 0

    def set_request_ids(self, request_ids: list[str]) -> None:
        """Record the requests that are worked on; as many as there is room for."""
        data = msgspec.msgpack.encode(request_ids)
        while len(data) > _SLOT_BYTES:
            request_ids = request_ids[: len(request_ids) // 2]
            data = msgspec.msgpack.encode(request_ids)
        slot = 1 - self._numbers[_SLOT] & 1
        start = _HEAD + slot * _SLOT_BYTES
        self._bytes[start : start + len(data)] = data
        self._numbers[_SIZES + slot] = len(data)
        self._numbers[_SLOT] = slot  # from here on the new ones are valid

    def read(self) -> tuple[float, float, float, int]:
        """Return the times of the last beat (0: none) and of the beginning of work (0: idle), its timeout, its tokens.

        Times are monotonic seconds.
        """
        beat, began, timeout, num_tokens = self._numbers[: _TOKENS + 1].tolist()
        return beat / _SECOND, began / _SECOND, timeout / _SECOND, num_tokens

    def request_ids(self) -> list[str]:
        """Return the requests that are worked on, or were when the engine ended."""
        slot = self._numbers[_SLOT] & 1
        start = _HEAD + slot * _SLOT_BYTES
        size = min(max(self._numbers[_SIZES + slot], 0), _SLOT_BYTES)
        try:
            return msgspec.msgpack.decode(self._bytes[start : start + size], type=list[str]) if size else []
        except (msgspec.DecodeError, UnicodeDecodeError):  # a corrupted engine may have written anywhere
            return []

    def close(self) -> None:
        """Unmap the memory."""
        self._numbers.release()
        self._bytes.release()
        self._memory.close()


class StepTimeouts:
    """The timeout of a step, by its number of tokens and the durations of earlier steps.

    Sizes are grouped by powers of two. The timeout is 20 times the slowest step of the size so far; without any, that
    of the nearest smaller size, scaled up; without any of those, two minutes. It is at least three seconds: machines
    are busy, and pages come from disk.
    """

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}  # seconds, by the bits of the number of tokens

    def seconds(self, num_tokens: int) -> float:
        """Return the timeout of a step of so many tokens."""
        size = num_tokens.bit_length()
        for smaller in range(size, min(size, 1) - 1, -1):  # steps without tokens are no measure of others
            slowest = self._slowest.get(smaller)
            if slowest is not None:
                return max(MIN_TIMEOUT, TIMEOUT_FACTOR * slowest * (1 << (size - smaller)))
        return UNKNOWN_TIMEOUT

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        size = num_tokens.bit_length()
        self._slowest[size] = max(self._slowest.get(size, 0.0) * (1.0 - DECAY), seconds)


class LoopObserver:
    """Called by the engine's loop before it does something; this one ignores it."""

    def idle(self) -> None:
        """Nothing is left to do."""

    def prepare(self) -> None:
        """Nothing is left to do but what makes later steps faster."""

    def wait(self) -> None:
        """The loop waits for its clients; called about every second."""

    def begin_message(self, message: ToEngine | None) -> None:
        """A message is applied; None: the requests of a client that is gone are aborted."""

    def begin_step(self) -> None:
        """A step is planned."""

    def begin_plans(
        self, names: list[str], resolve: Callable[[], Iterable[str]], num_tokens: int, *, known: bool
    ) -> None:
        """Planned steps are executed, or waited for.

        Args:
            names: of everything that is worked on. resolve: returns the ids of their requests; not called if `names`
                are those of the last call. known: whether the duration depends on the tokens.
        """

    def end_work(self) -> None:
        """The message was applied, or the step is over."""

    def stop(self) -> None:
        """The loop has ended."""


class HeartbeatWriter(LoopObserver):
    """Writes what the engine's loop does into a `Heartbeat`."""

    def __init__(
        self, heartbeat: Heartbeat, timeouts: StepTimeouts | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._heartbeat = heartbeat
        self._timeouts = timeouts or StepTimeouts()
        self._clock = clock
        self._names: list[str] = []  # of the last plan; none once others are written
        self._planned: list[str] = []  # the requests of the last plan
        self._new: list[str] = []  # requests added since
        self._num_tokens = -1  # of the plan that is executed; negative: its duration is no measure
        self._began = 0.0

    def idle(self) -> None:
        if self._planned or self._new or self._names:
            self._names, self._planned, self._new = [], [], []
            self._heartbeat.set_request_ids([])
        self._heartbeat.end(self._clock())

    def prepare(self) -> None:
        self._heartbeat.begin(self._clock(), UNKNOWN_TIMEOUT)  # something may have to be compiled

    def wait(self) -> None:
        self._heartbeat.beat(self._clock())

    def begin_message(self, message: ToEngine | None) -> None:
        request_ids: list[str] = []
        match message:
            case EngineRequest():
                request_ids = [message.request_id]
                self._new.append(message.request_id)
            case AbortRequests():
                request_ids = message.request_ids
        self._heartbeat.set_request_ids(request_ids)
        self._names = []
        self._heartbeat.begin(self._clock(), CALL_TIMEOUT if isinstance(message, Call) else MIN_TIMEOUT)

    def begin_step(self) -> None:
        if not self._names:
            self._heartbeat.set_request_ids(self._planned + self._new)
            self._new = []
        self._heartbeat.begin(self._clock(), MIN_TIMEOUT)

    def begin_plans(
        self, names: list[str], resolve: Callable[[], Iterable[str]], num_tokens: int, *, known: bool
    ) -> None:
        if names != self._names:
            self._names = names
            self._planned = list(resolve())
            self._heartbeat.set_request_ids(self._planned)
        self._began = self._clock()
        self._num_tokens = num_tokens if known else -1
        timeout = self._timeouts.seconds(num_tokens) if known else UNKNOWN_TIMEOUT
        self._heartbeat.begin(self._began, timeout, num_tokens)

    def end_work(self) -> None:
        now = self._clock()
        if self._num_tokens >= 0:
            self._timeouts.note(self._num_tokens, now - self._began)
            self._num_tokens = -1
        self._heartbeat.end(now)

    def stop(self) -> None:
        self._heartbeat.stop()


class StallDetector:
    """Measures how long an engine has been silent beyond the timeout of its work. See `HeartbeatMonitor`."""

    def __init__(self, heartbeat: Heartbeat, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._clock = clock
        self._monitor = HeartbeatMonitor()

    def stalled_for(self) -> float:
        """Return seconds; 0.0 if it is not stalled, and as long as its model is being loaded."""
        beat, _, timeout, _ = self._heartbeat.read()
        silent = self._monitor.silent_for(self._clock(), beat)
        return max(0.0, silent - timeout) if beat else 0.0

    def describe(self) -> dict[str, Any]:
        """Return what the engine was doing, for a log."""
        beat, began, timeout, num_tokens = self._heartbeat.read()
        now, request_ids = self._clock(), self._heartbeat.request_ids()
        return {
            "doing": "a step" if began and num_tokens else "something" if began else "nothing",
            "seconds": round(now - (began or beat), 3),
            "allowed_seconds": round(timeout, 3),
            "num_tokens": num_tokens if began else 0,
            "num_requests": len(request_ids),
            "request_ids": request_ids[:MAX_LOGGED],
        }
