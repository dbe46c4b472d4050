"""Lanes in the place of a GPU's: what is not ordered by marks happens in any order, as late as it may."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.gpu.lanes import Lane


class AnyOrder:
    """Lanes that do nothing until they must, and then in the most unfavourable order that `choose` finds.

    What runs in one lane keeps its order and waits for marks; nothing else is promised, as on a device.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._queues: dict[Lane, deque[tuple[str, Any]]] = {lane: deque() for lane in Lane}
        self._passed: set[int] = set()
        self._numbers = itertools.count()

    def run(self, lane: Lane, work: Callable[[], object]) -> None:
        self._queues[lane].append(("run", work))

    def mark(self, lane: Lane) -> int:
        number = next(self._numbers)
        self._queues[lane].append(("mark", number))
        return number

    def wait(self, lane: Lane, mark: int) -> None:
        self._queues[lane].append(("wait", mark))

    def passed(self, mark: int) -> bool:
        return mark in self._passed

    def join(self, mark: int) -> None:
        while mark not in self._passed:
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
        assert able, "all lanes wait for each other"
        kind, what = able[self._choose(len(able))].popleft()
        if kind == "run":
            what()
        elif kind == "mark":
            self._passed.add(what)


class Late(AnyOrder):
    """The same beside a model that computes at once: what the other lanes do is done when the model must wait for it.

    Then others may be done before it, by `choose`, or not.
    """

    def run(self, lane: Lane, work: Callable[[], object]) -> None:
        if lane is Lane.COMPUTE:
            work()
        else:
            super().run(lane, work)

    def mark(self, lane: Lane) -> int:
        number = super().mark(lane)
        if lane is Lane.COMPUTE:
            self._queues[lane].pop()
            self._passed.add(number)
        return number

    def wait(self, lane: Lane, mark: int) -> None:
        if lane is Lane.COMPUTE:
            self.join(mark)
        else:
            super().wait(lane, mark)
