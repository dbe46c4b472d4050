"""The engine's side of its connections: accepts clients, reads their messages, and sends each its outputs.

Connections have no address. The parent process makes a pair of connected sockets for each client and passes one of them
on through the listener, a socket that the engine inherits (`EngineProcess.connect`). So connections have no name in the
file system or in an abstract namespace, only processes that got a socket from the parent can connect, and the kernel
removes a connection with the last process that holds an end. The parent closes the listener to end the engine; the
kernel does if the parent dies.

A client that sends an invalid message, or speaks another version of the protocol, is refused. A client that does not
read is disconnected, or waited for if it is the only one. Other clients are not affected.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire.engine.connection import Connection, ProtocolError, decode_message
from quire.engine.launch import receive_fds
from quire.engine.messages import PROTOCOL_VERSION, Failed, FromEngine, Hello, Ready, ToEngine

logger = logging.getLogger(__name__)

MAX_UNSENT = 16 << 20  # bytes that the engine computes ahead of a client that does not read
WAIT_SECONDS = 1.0  # how often an engine that waits reports that it is alive
CLOSE_SECONDS = 2.0


@dataclass(slots=True)
class _Client:
    """A client and its connection; `name` is None before the handshake. `events`: those that are polled for."""

    index: int
    connection: Connection
    name: str | None = None
    events: int = select.POLLIN


class SocketClients:
    """All connections of an engine. Implements `loop.Clients`.

    Args:
        listener: the inherited socket through which the parent passes connections on.

    Attributes:
        closed: whether the parent has closed the listener, or is gone.
        on_wait: called about once a second while the engine waits for messages, or for a client to read.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.set_inheritable(False)
        self._listener = listener
        self._ready: Callable[[], Ready] | None = None
        self._clients: dict[int, _Client] = {}
        self._by_fd: dict[int, _Client] = {}
        self._num_clients = 0
        self._received: list[tuple[int, ToEngine | None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._hello_decoder = msgspec.msgpack.Decoder(Hello)
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)
        self.closed = False
        self.on_wait: Callable[[], None] = lambda: None

    def start(self, ready: Callable[[], Ready]) -> None:
        """Begin to answer clients with what `ready` returns; they may have connected before."""
        self._ready = ready

    @property
    def connected(self) -> list[int]:
        """The clients that have completed the handshake."""
        return [client.index for client in self._clients.values() if client.name is not None]

    def receive(self, wait: bool) -> list[tuple[int, ToEngine | None]]:
        """Return messages that have arrived, with their clients; None stands for a client's end."""
        self._poll(0.0)
        if wait and not self._received and not self.closed:
            self.on_wait()
            self._poll(WAIT_SECONDS)
        received, self._received = self._received, []
        return received

    def send(self, client_index: int, message: FromEngine) -> None:
        """Send a message, unless the client is gone.

        If it has not read `MAX_UNSENT` bytes, it is disconnected, or, as the only client, waited for.
        """
        client = self._clients.get(client_index)
        if client is None:
            return
        try:
            client.connection.send(self._encoder.encode(message))
        except ProtocolError as error:
            self._refuse(client, f"the engine has no smaller answer: {error}")
            return
        while client.connection.num_unsent > MAX_UNSENT and not self.closed:
            if len(self.connected) > 1:
                self._refuse(client, f"the client has not read {client.connection.num_unsent} bytes")
                return
            self.on_wait()
            self._watch(client, reads=False)  # else its messages would pile up
            self._poll(WAIT_SECONDS)
        self._watch(client)

    def fail(self, failed: Failed) -> int:
        """Send every client, also one that has just connected, why the engine ends; return the exit code."""
        self._accept()
        for client in self._clients.values():
            client.connection.send(self._encoder.encode(failed))
        return failed.exit_code

    def close(self) -> None:
        """Send what is left, as far as clients take it within two seconds, and close all connections."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self._listener.close()
        while (left := deadline - time.monotonic()) > 0:
            waiting = [client.connection for client in self._clients.values() if client.connection.num_unsent]
            if not waiting:
                break
            poller = select.poll()
            for connection in waiting:
                poller.register(connection, select.POLLOUT)
            poller.poll(int(left * 1000))
            for connection in waiting:
                connection.flush()
        for client in self._clients.values():
            client.connection.close()

    def _poll(self, seconds: float) -> None:
        """Handle what happens within so many seconds, if nothing has happened yet."""
        for fd, events in self._poller.poll(int(seconds * 1000)):
            client = self._by_fd.get(fd)
            if client is None:
                if fd == self._listener.fileno():
                    self._accept()
                continue
            if events & select.POLLOUT:
                client.connection.flush()
                self._watch(client)
            if events & ~select.POLLOUT:
                self._read(client)

    def _accept(self) -> None:
        """Take the connections that the parent has passed on."""
        while not self.closed:
            try:
                data, fds = receive_fds(self._listener, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, fds = b"", []
            self.closed = not data
            for fd in fds:
                client = _Client(self._num_clients, Connection(socket.socket(fileno=fd)))
                self._num_clients += 1
                self._clients[client.index] = self._by_fd[fd] = client
                self._poller.register(fd, client.events)

    def _watch(self, client: _Client, *, reads: bool = True) -> None:
        """Poll a connection for what it sends, and for room to write if something is unsent."""
        events = (select.POLLIN if reads else 0) | (select.POLLOUT if client.connection.num_unsent else 0)
        if events != client.events and client.index in self._clients:
            client.events = events
            self._poller.modify(client.connection, events)

    def _read(self, client: _Client) -> None:
        connection = client.connection
        connection.read()
        try:
            while connection.frames:
                frame = connection.frames.popleft()
                if client.name is None:
                    self._greet(client, decode_message(self._hello_decoder, frame))
                else:
                    self._received.append((client.index, decode_message(self._decoder, frame)))
            if connection.error is not None:
                raise connection.error
        except ProtocolError as error:
            self._refuse(client, f"the engine got an invalid message: {error}")
            return
        if connection.ended:
            if client.name is not None:
                logger.info("client %s is gone", client.name)
            self._disconnect(client)

    def _greet(self, client: _Client, hello: Hello) -> None:
        """Answer the first message of a client."""
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"version {hello.protocol} of the protocol; the engine speaks {PROTOCOL_VERSION}")
        assert self._ready is not None, "nothing is read before start()"
        client.name = hello.client
        logger.debug("client %s is connected", client.name)
        self.send(client.index, self._ready())

    def _refuse(self, client: _Client, reason: str) -> None:
        """Tell a client why it is disconnected, as far as it has room for that, and disconnect it."""
        logger.error("client %s is disconnected: %s", client.name or "without a name", reason)
        client.connection.send(self._encoder.encode(Failed(reason)))
        self._disconnect(client)

    def _disconnect(self, client: _Client) -> None:
        fd = client.connection.fileno()
        self._poller.unregister(fd)
        del self._clients[client.index], self._by_fd[fd]
        client.connection.close()
        if client.name is not None:
            self._received.append((client.index, None))
