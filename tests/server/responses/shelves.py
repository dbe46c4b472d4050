"""A store of responses whose clock is set by hand, used from outside of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from quire.errors import NotFoundError
from quire.server.responses.store import RemoteResponse, ResponseStore, StoredResponse
from quire.server_config import ServerConfig

T = TypeVar("T")


class Shelves:
    """A store; to be closed, or used in a `with` statement.

    Args:
        slot: of the process that it stands for. options: of the server.
    """

    def __init__(self, slot: int = 0, *, now: float = 0.0, **options: Any) -> None:
        self.now = now
        self.store = ResponseStore(ServerConfig(**options), lambda: self.now, slot=slot)
        self.count = 0
        self._slot = slot
        self._runner = asyncio.Runner()

    def __enter__(self) -> Shelves:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that it stands for; what runs is left as it is."""
        self.store.close()
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns."""
        return self._runner.run(work)

    def put(
        self, owner: bytes = b"", size: int = 10, *, finished: bool = True, events: bool = False, **response: Any
    ) -> StoredResponse:
        """Keep another response with so long a text."""
        self.count += 1
        name = f"{self._slot}_{self.count}" if self._slot else str(self.count)
        fields = {"id": f"resp_{name}", "status": "in_progress", "store": True, "output": [], **response}
        items = [{"id": f"msg_{name}", "text": "x" * size}]
        stored = StoredResponse(owner, fields, [{"id": "msg_earlier"}], items, events=events)

        async def add() -> None:
            with contextlib.suppress(Exception):  # what failed says so itself
                await self.store.add(stored)

        self.run(add())
        if finished:
            self.end(stored)
        return stored

    def end(self, stored: StoredResponse, *output: dict[str, Any], last: tuple[bytes, ...] = ()) -> None:
        """End a response."""

        async def end() -> None:
            self.store.finish(stored, last)
            await stored.ended.wait()

        stored.response.update(status="completed", output=list(output))
        self.run(end())

    def find(self, stored: StoredResponse) -> StoredResponse | RemoteResponse:
        """Return a response as it is found now. Raises `NotFoundError`."""
        return self.run(self.store.find(stored.owner, stored.response_id))

    def has(self, stored: StoredResponse) -> bool:
        """Whether it is still there."""
        try:
            return self.find(stored).response == stored.response
        except NotFoundError:
            return False

    def has_item(self, item_id: str) -> bool:
        """Whether an item of the empty key's responses is still there."""
        return item_id in self.run(self.store.items(b"", [item_id]))

    @property
    def num_stored(self) -> int:
        """Responses."""
        return self.run(self.store.totals())[0]

    @property
    def size(self) -> int:
        """Bytes of the finished ones."""
        return self.run(self.store.totals())[1]
