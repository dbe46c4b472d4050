"""`Fronts`: the other processes that serve the same address, as one of them sees them.

Every request may reach any of them. What only one can answer is asked of it (`ask`) or forwarded to it (`connect`);
what only one may decide is the leader's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from quire.errors import QuireError
from quire.server.limits import QuotaOwner


class FrontGoneError(QuireError):
    """Another front does not react: it may be replaced soon."""

    http_status = 503
    default_code = "engine_unavailable"


class Fronts:
    """All fronts of a server; this class itself stands for a front that is alone.

    Attributes:
        row: this front's number. rows: those of all fronts that serve, the one that has served for longest first; empty
            until this one serves, too.
        quotas: the owner of the quotas of keys.
        handlers: by method, what answers other fronts: called with a JSON-like value, returns one.
        published: values by key, as all fronts have published them so far.
        on_change: each is called when `rows` has changed. on_published: each is called with the key of a value that
            another front has published.
    """

    def __init__(self, row: int = 0) -> None:
        self.row = row
        self.rows = [row]
        self.quotas = QuotaOwner()
        self.handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.published: dict[str, Any] = {}
        self.on_change: list[Callable[[], None]] = []
        self.on_published: list[Callable[[str], None]] = []

    @property
    def num_connections(self) -> int | None:
        """Open connections of clients to all fronts; None without a supervisor, which counts them."""
        return None

    @property
    def others(self) -> list[int]:
        """The other fronts that serve."""
        return [row for row in self.rows if row != self.row]

    @property
    def leader(self) -> int:
        """The front that decides what only one can decide; it does so until it ends."""
        return self.rows[0] if self.rows else self.row

    def publish(self, key: str, value: Any) -> None:
        """Give all fronts, also later ones, a JSON-like value."""
        self.published[key] = value

    async def ask(self, row: int, method: str, value: Any = None, *, seconds: float | None = None) -> Any:
        """Return what another front's handler of a method returns, JSON-like.

        Raises:
            FrontGoneError: it does not react within `seconds`, has failed to answer, or ends meanwhile.
        """
        raise FrontGoneError(f"front {row} does not answer")

    async def ask_others(self, method: str, value: Any = None) -> dict[int, Any]:
        """Return the answers of all other fronts, by row; those that do not react are left out."""
        rows = self.others
        answers = await asyncio.gather(*[self.ask(row, method, value) for row in rows], return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, FrontGoneError):
                raise answer
        return {row: answer for row, answer in zip(rows, answers, strict=True) if not isinstance(answer, BaseException)}

    def connect(self, row: int) -> socket.socket:
        """Return a connection to another front's HTTP server; at its end if that front is gone."""
        raise FrontGoneError(f"front {row} does not answer")
