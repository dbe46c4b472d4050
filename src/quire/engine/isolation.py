"""`Isolation`: lets one client of an engine have requests in it while the others have none.

A client that looks for the request which kills engines needs that: with requests of others in the engine it could not
tell. Clients get it one after the other. The others step aside first; they keep what they have generated, and go on
later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.messages import Alone, FromEngine, Isolate, StepAside, SteppedAside, ToEngine


class Isolation:
    """The clients that want to be alone, and those that have stepped aside.

    Args:
        send: sends a client a message.
    """

    def __init__(self, send: Callable[[int, FromEngine], None]) -> None:
        self._send = send
        self._wanting: list[int] = []  # the first one is alone, or is to be so
        self._granted = False
        self._told: set[int] = set()  # those that were told to step aside
        self._aside: set[int] = set()  # those of them that have done so

    def note(self, client: int, message: ToEngine | None) -> None:
        """Note a client's message; None is its end."""
        match message:
            case Isolate(alone=True) if client not in self._wanting:
                self._wanting.append(client)
            case Isolate(alone=False):
                self._remove(client)
            case SteppedAside() if client in self._told:
                self._aside.add(client)
            case None:
                self._remove(client)
                self._told.discard(client)
                self._aside.discard(client)

    def _remove(self, client: int) -> None:
        if client in self._wanting:
            self._granted = self._granted and client != self._wanting[0]
            self._wanting.remove(client)

    def update(self, connected: Sequence[int]) -> None:
        """Tell the clients what has changed; called after messages have been applied."""
        if not self._wanting and not self._told:
            return
        alone = self._wanting[0] if self._wanting else None
        for client in connected:
            if alone not in (None, client) and client not in self._told:
                self._told.add(client)
                self._send(client, StepAside(True))
            elif alone in (None, client) and client in self._aside:  # else it might still be sent outputs
                self._told.discard(client)
                self._aside.discard(client)
                self._send(client, StepAside(False))
        others = [client for client in connected if client != alone]
        if alone is not None and not self._granted and alone not in self._told and self._aside.issuperset(others):
            self._granted = True
            self._send(alone, Alone())
