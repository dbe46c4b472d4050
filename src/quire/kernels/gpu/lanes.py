"""`Lanes`: the orders in which a GPU does things, as far as moving blocks is concerned: three streams and their events.

Work of one lane is done in the order in which it was given; lanes go on beside each other unless one waits for a mark
of another. The host waits for none of it but in `join`. Which lane does what is decided in `host_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch

Mark = Any  # a place in a lane, opaque


class Lane(Enum):
    """COMPUTE is where the model runs: whatever stream is current. OUT and IN have a copy engine each."""

    COMPUTE = 0
    OUT = 1
    IN = 2


class Lanes(Protocol):
    """See above."""

    def run(self, lane: Lane, work: Callable[[], object]) -> None:
        """Have `work` done; what it reads must stay as it is until then."""

    def mark(self, lane: Lane) -> Mark:
        """Return a mark that is passed when all is done that the lane was given so far."""

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Have what the lane is given from now on wait for the mark."""

    def passed(self, mark: Mark) -> bool:
        """Whether a mark is passed by now."""

    def join(self, mark: Mark) -> None:
        """Return when a mark is passed; from any thread."""

    def buffer(self, rows: int, nbytes: int) -> torch.Tensor:
        """Return uint8 [rows, nbytes] of the host's memory that copies need not wait for.

        Nobody uses its memory for something else while work with this very tensor, or parts of it, is to be done.
        """


class CudaLanes:
    """See `Lanes`: the current stream and two of its own."""

    def __init__(self, device: torch.device) -> None:
        self._own = {lane: torch.cuda.Stream(device) for lane in (Lane.OUT, Lane.IN)}

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._own.get(lane) or torch.cuda.current_stream()

    def run(self, lane: Lane, work: Callable[[], object]) -> None:
        if lane is Lane.COMPUTE:
            work()
            return
        with torch.cuda.stream(self._own[lane]):
            work()

    def mark(self, lane: Lane) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, mark: Mark) -> None:
        self._stream(lane).wait_event(mark)

    def passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def join(self, mark: Mark) -> None:
        mark.synchronize()

    def buffer(self, rows: int, nbytes: int) -> torch.Tensor:
        """See `Lanes.buffer`.

        PyTorch notes which streams copy to pinned memory of its own, and from it, before it reuses some. It knows that
        memory by the tensor's storage: one made of the same memory by way of numpy would not do.
        """
        return torch.empty((rows, nbytes), dtype=torch.uint8, pin_memory=True)


class AtOnce:
    """See `Lanes`, where tensors are in the host's memory: everything is done when it is asked for."""

    def run(self, lane: Lane, work: Callable[[], object]) -> None:
        work()

    def mark(self, lane: Lane) -> Mark:
        return None

    def wait(self, lane: Lane, mark: Mark) -> None:
        """See `Lanes.wait`."""

    def passed(self, mark: Mark) -> bool:
        return True

    def join(self, mark: Mark) -> None:
        """See `Lanes.join`."""

    def buffer(self, rows: int, nbytes: int) -> torch.Tensor:
        return torch.empty((rows, nbytes), dtype=torch.uint8)
