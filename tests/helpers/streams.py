"""Streams in the place of a GPU's: what is not ordered by events happens in any order, as late as it may."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.gpu.streams import Stream


class AnyOrder:
    """Streams that do nothing until they must, and then in the most unfavourable order that `choose` finds.

    What runs in one stream keeps its order and waits for events; nothing else is promised, as on a device.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._queues: dict[Stream, deque[tuple[str, Any]]] = {stream: deque() for stream in Stream}
        self._passed: set[int] = set()
        self._numbers = itertools.count()

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        self._queues[stream].append(("run", work))

    def record(self, stream: Stream) -> int:
        number = next(self._numbers)
        self._queues[stream].append(("event", number))
        return number

    def wait(self, stream: Stream, event: int) -> None:
        self._queues[stream].append(("wait", event))

    def query(self, event: int) -> bool:
        return event in self._passed

    def synchronize(self, event: int) -> None:
        while event not in self._passed:
            self._go_on()

    def drain(self) -> None:
        while any(self._queues.values()):
            self._go_on()

    def buffer(self, rows: int, nbytes: int) -> torch.Tensor:
        return torch.zeros((rows, nbytes), dtype=torch.uint8)

    def _go_on(self) -> None:
        able = [
            queue
            for queue in self._queues.values()
            if queue and not (queue[0][0] == "wait" and queue[0][1] not in self._passed)
        ]
        assert able, "all streams wait for each other"
        kind, what = able[self._choose(len(able))].popleft()
        if kind == "run":
            what()
        elif kind == "event":
            self._passed.add(what)


class Late(AnyOrder):
    """The same beside a model that computes at once: what the other streams do is done when the model must wait for it.

    Then others may be done before it, by `choose`, or not.
    """

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        if stream is Stream.COMPUTE:
            work()
        else:
            super().run(stream, work)

    def record(self, stream: Stream) -> int:
        number = super().record(stream)
        if stream is Stream.COMPUTE:
            self._queues[stream].pop()
            self._passed.add(number)
        return number

    def wait(self, stream: Stream, event: int) -> None:
        if stream is Stream.COMPUTE:
            self.synchronize(event)
        else:
            super().wait(stream, event)
