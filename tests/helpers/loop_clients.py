"""Clients of an engine loop, without sockets or threads: what they send is a list, what they are sent is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from quire.engine.messages import EngineOutputs, FromEngine, ToEngine
from quire.step import SequenceOutput

Batch = Sequence[tuple[int, ToEngine | None]]


class ScriptedClients:
    """Implements `loop.Clients`: a batch arrives at each look, and the loop ends when it waits after the last one.

    Attributes:
        sent: all messages to each client. waits: of each look, whether the loop would have waited.
    """

    def __init__(self, batches: Sequence[Batch], connected: Sequence[int] = (0,)) -> None:
        self._batches = list(batches)
        self.connected = list(connected)
        self.closed = False
        self.sent: dict[int, list[FromEngine]] = defaultdict(list)
        self.waits: list[bool] = []

    def receive(self, wait: bool) -> list[tuple[int, ToEngine | None]]:
        """Return the next batch."""
        self.waits.append(wait)
        if self._batches:
            return list(self._batches.pop(0))
        self.closed = wait
        return []

    def send(self, client_index: int, message: FromEngine) -> None:
        """Keep what is sent."""
        self.sent[client_index].append(message)

    def outputs(self, client_index: int) -> list[SequenceOutput]:
        """Return all outputs that a client was sent."""
        return [
            output for item in self.sent[client_index] if isinstance(item, EngineOutputs) for output in item.outputs
        ]
