"""The client's side of an engine: the interface, and a client over a connection.

A client is connected to one engine. `process.ProcessClient` starts the engine's process too, `thread.ThreadClient` runs
it in a thread.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from quire.engine.connection import AsyncConnection, ProtocolError, decode_message
from quire.engine.messages import (
    PROTOCOL_VERSION,
    Failed,
    FromEngine,
    Hello,
    Ready,
    Received,
    ToEngine,
)
from quire.errors import ConfigError, EngineDeadError


class EngineClient(Protocol):
    """Carries messages between one asyncio loop and an engine elsewhere.

    `stalled_for`, `dump_stacks` and `kill` have an effect only in the client that owns the engine's process.
    """

    @abstractmethod
    async def start(self) -> Ready:
        """Wait until the engine is ready. Raises `QuireError` if it cannot start."""

    @abstractmethod
    def send(self, message: ToEngine) -> None:
        """Send a message, in order, without blocking. Does nothing once the engine is gone; `receive` raises then."""

    @abstractmethod
    async def receive(self) -> Received:
        """Wait for a message. Raises `EngineDeadError` once the engine is gone."""

    def stalled_for(self) -> float:
        """Return the seconds by which the engine's silence exceeds the timeout of its work; 0.0 if it is not stalled.

        Cheap, and independent of the engine, which may be stuck.
        """
        return 0.0

    async def dump_stacks(self) -> str:
        """Log and return the stacks of an engine that does not react; called before `kill`.

        Waits half a second at most, because a stopped process cannot answer.
        """
        return ""

    def kill(self) -> None:
        """End an engine that does not react; `receive` then raises `EngineDeadError`."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Close the connection, or end the engine if the client owns it, and release all resources."""


EndOfConnection = EOFError | ProtocolError | Failed
"""Why a connection ended: the engine closed its end, sent an invalid message, or announced its end."""


async def _why_dead(end: EndOfConnection) -> EngineDeadError:
    if isinstance(end, Failed):
        return EngineDeadError(end.message)
    return EngineDeadError(f"the connection to the engine has ended: {end}")


class SocketClient(EngineClient):
    """A client of an engine process that another client owns and that further clients may share.

    Args:
        connection: what `EngineProcess.connect` returned, in this process or in the one that passed it on.
        name: of the client, for the engine's log.
        why_dead: returns the error for the end of a connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str = "client",
        why_dead: Callable[[EndOfConnection], Awaitable[EngineDeadError]] = _why_dead,
    ) -> None:
        self._connection = AsyncConnection(connection)
        self._why_dead = why_dead
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._dead: EngineDeadError | None = None
        self._connection.send(self._encoder.encode(Hello(name, PROTOCOL_VERSION)))

    async def start(self) -> Ready:
        self._connection.attach()
        message = await self._next()
        if isinstance(message, Failed) and message.exit_code == ConfigError.exit_code:
            raise ConfigError(message.message, param=message.param)
        if not isinstance(message, Ready):
            raise await self._end(message)
        return message

    def send(self, message: ToEngine) -> None:
        self._connection.send(self._encoder.encode(message))

    async def receive(self) -> Received:
        message = await self._next()
        if isinstance(message, Failed | Ready):
            raise await self._end(message)
        return message

    def finish(self) -> None:
        """Read what has arrived and end the connection, because the engine's process has ended."""
        self._connection.finish()

    async def close(self) -> None:
        self._connection.close()

    async def _next(self) -> FromEngine:
        if self._dead is not None:
            raise self._dead
        try:
            return decode_message(self._decoder, await self._connection.receive())
        except (EOFError, ProtocolError) as end:
            raise await self._end(end) from None

    async def _end(self, end: EndOfConnection | FromEngine) -> EngineDeadError:
        """Return the error for this end of the connection; a message out of turn is a protocol error."""
        if not isinstance(end, EndOfConnection):
            end = ProtocolError(f"{type(end).__name__} out of turn")
        if self._dead is None:
            self._dead = await self._why_dead(end)
        return self._dead
