"""`WaitingConnections`: accepted connections that no front serves, because none is there or reacts.

They are handed over once there is one. Until then only their first bytes are looked at, without taking them from the
socket: probes are answered, and so are all others that have waited for long. With TLS the first bytes can only be had
after a handshake, which this process then does itself; a connection that has begun one cannot be handed over any more,
so that it gets an answer from here whatever it asks for.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.supervisor.connections import Admission
from quire.supervisor.probes import DRAINING, MAX_REQUEST_LINE, STALLED, ProbeAnswers

MAX_WAIT = 10.0  # seconds until also other requests than probes are answered, and silent connections closed
TLS_WAIT = 0.5  # seconds until a handshake is begun here
MAX_HANDSHAKES = 16  # that are begun at a time: each takes a millisecond
ANSWER_SECONDS = 2.0  # from then, or from the answer, until a connection is closed
DRAIN_BYTES = 1 << 16


@dataclass(slots=True)
class Accepted:
    """An accepted connection: its number, its socket, how it was counted and when it came [monotonic seconds]."""

    number: int
    socket: socket.socket
    admission: Admission
    arrived: float = field(default_factory=time.monotonic)
    closing_at: float | None = None  # set once it is answered, or a handshake was begun
    answered: bool = False
    has_sent: bool = False

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close this process's copy."""
        self.socket.close()


class WaitingConnections:
    """The connections, in the order in which they came.

    Args:
        answers: makes responses. tls: returns the context for handshakes; None without TLS.
    """

    def __init__(self, answers: ProbeAnswers, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        self._answers = answers
        self._tls = tls
        self._connections: list[Accepted] = []
        self._num_handshakes = 0  # begun in this call of `poll`

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Accepted) -> None:
        """Let a connection wait."""
        self._connections.append(connection)

    def take(self) -> list[Accepted]:
        """Return those that can be handed over, which wait no longer."""
        taken = [connection for connection in self._connections if connection.closing_at is None]
        self._connections = [connection for connection in self._connections if connection.closing_at is not None]
        return taken

    def poll(self, status: str | None) -> list[Accepted]:
        """Answer what is to be answered, close what is over, and return that.

        Args:
            status: why there is no front; None if there is one, which will answer.
        """
        now = time.monotonic()
        self._num_handshakes = 0
        return self._close([connection for connection in self._connections if self._step(connection, status, now)])

    def shrink(self, most: int) -> list[Accepted]:
        """Close those that are too many, and return them: first those that have sent nothing, the oldest ones."""
        too_many = len(self._connections) - most
        if too_many <= 0:
            return []
        in_order = sorted(self._connections, key=lambda connection: (connection.has_sent, connection.arrived))
        return self._close(in_order[:too_many])

    def _close(self, ended: list[Accepted]) -> list[Accepted]:
        for connection in ended:
            connection.close()
        if ended:
            gone = {connection.number for connection in ended}
            self._connections = [item for item in self._connections if item.number not in gone]
        return ended

    def close(self) -> None:
        """Close all of them."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _step(self, connection: Accepted, status: str | None, now: float) -> bool:
        """Do what can be done for a connection without waiting; return whether it has ended."""
        if connection.closing_at is not None and now >= connection.closing_at:
            return True
        try:
            if connection.answered:
                return connection.socket.recv(DRAIN_BYTES) == b""
            if connection.closing_at is None:
                data = connection.socket.recv(MAX_REQUEST_LINE, socket.MSG_PEEK)
                connection.has_sent = True
                if not data or status is None:
                    return not data
                if self._tls is None:
                    at_once = status == DRAINING or now - connection.arrived >= MAX_WAIT
                    self._answer(connection, data, status, probes_only=not at_once)
                    return False
                if now - connection.arrived < TLS_WAIT or self._num_handshakes >= MAX_HANDSHAKES:
                    return False
                self._num_handshakes += 1
                connection.closing_at = now + ANSWER_SECONDS
                connection.socket = self._tls().wrap_socket(
                    connection.socket, server_side=True, do_handshake_on_connect=False
                )
            assert isinstance(connection.socket, ssl.SSLSocket)
            connection.socket.do_handshake()
            self._answer(connection, connection.socket.recv(MAX_REQUEST_LINE), status or STALLED, probes_only=False)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return status is not None and now - connection.arrived >= MAX_WAIT
        except (OSError, ValueError):  # the client is gone, or speaks no TLS
            return True
        return False

    def _answer(self, connection: Accepted, data: bytes, status: str, *, probes_only: bool) -> None:
        response = self._answers.answer(data, status, probes_only=probes_only)
        if response is None:
            return
        connection.answered = True
        connection.closing_at = time.monotonic() + ANSWER_SECONDS
        if self._tls is None:
            connection.socket.recv(DRAIN_BYTES)  # closed with unread data it would be reset, and the answer lost
        connection.socket.send(response)
        if isinstance(connection.socket, ssl.SSLSocket):
            connection.socket.unwrap()  # it sends the end; the client's may come later
        else:
            connection.socket.shutdown(socket.SHUT_WR)
