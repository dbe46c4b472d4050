"""The three CUDA streams that move blocks beside a running model, and their events; see `host_blocks.py`.

Work of one stream is done in the order in which it was submitted; streams go on beside each other unless one waits for
an event of another. The host waits for none of it but in `synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

Event = Any  # a place in a stream, opaque; None where everything is done at once


class Stream(Enum):
    """COMPUTE is the one that the model runs in: whatever stream is current. D2H and H2D have a copy engine each."""

    COMPUTE = 0
    D2H = 1
    H2D = 2


class Streams:
    """The current stream and two more; with tensors in host memory all work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._own = {stream: torch.cuda.Stream(device) for stream in (Stream.D2H, Stream.H2D)} if self._on_gpu else {}

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._own.get(stream) or torch.cuda.current_stream()

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        """Submit `work`; what it reads must not change until it has run."""
        if stream not in self._own:
            work()
            return
        with torch.cuda.stream(self._own[stream]):
            work()

    def record(self, stream: Stream) -> Event:
        """Return an event that completes when all work submitted to the stream so far has run."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of the stream wait for the event."""
        if event is not None:
            self._stream(stream).wait_event(event)

    def query(self, event: Event) -> bool:
        """Whether an event has completed."""
        return event is None or bool(event.query())

    def synchronize(self, event: Event) -> None:
        """Block until an event completes; any thread may call this."""
        if event is not None:
            event.synchronize()

    def buffer(self, rows: int, nbytes: int) -> torch.Tensor:
        """Return uint8 [rows, nbytes] of host memory, pinned, that stays until work with it, or parts of it, is done.

        PyTorch notes which streams copy to pinned memory of its own, and from it, before it reuses some. It knows that
        memory by the tensor's storage: one made of the same memory by way of numpy would not do.
        """
        return torch.empty((rows, nbytes), dtype=torch.uint8, pin_memory=self._on_gpu)
