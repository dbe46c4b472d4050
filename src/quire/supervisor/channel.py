"""How the supervisor and its fronts talk, over Unix sockets; nothing here blocks.

`Channel` carries messages, which are JSON objects behind their lengths in four bytes, between the supervisor and one
front. File descriptors travel with a message's first byte. `ConnectionQueue` carries accepted connections to whichever
front takes them first.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from quire.engine.launch import receive_fds

HEADER = struct.Struct(">I")
READ_BYTES = 1 << 16
MAX_FDS = 4  # of one message
MAX_MESSAGE_BYTES = 1 << 26

# Of both kinds a reader gets whole messages; the queue of datagrams is shorter.
QUEUE_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM

Message = dict[str, Any]


class Channel:
    """One end of a connection that carries messages both ways, in order.

    Attributes:
        closed: the other end was closed, or sent what is no message; nothing is sent or received any more.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()  # the descriptors are copies
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self.closed = False

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something is left to `flush`."""
        return bool(self._unsent)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message, or what there is room for; `flush` sends the rest. The caller keeps its descriptors."""
        if self.closed:
            return
        payload = json.dumps({**message, "fds": len(fds)} if fds else message).encode()
        self._unsent.append((memoryview(HEADER.pack(len(payload)) + payload), [os.dup(fd) for fd in fds]))
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as there is room."""
        while self._unsent and not self.closed:
            data, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS):
                    return
                self._end()
                return
            for fd in fds:
                os.close(fd)
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], [])

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Return the messages that have arrived, with their descriptors, which are the caller's to close."""
        messages: list[tuple[Message, list[int]]] = []
        while not self.closed:
            try:
                data, fds = receive_fds(self._socket, READ_BYTES, MAX_FDS)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data, fds = b"", []
            self._fds.extend(fds)
            self._received += data
            messages += self._complete()
            if not data:
                self._end()
        return messages

    def _complete(self) -> list[tuple[Message, list[int]]]:
        messages: list[tuple[Message, list[int]]] = []
        while len(self._received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received)
            if size > MAX_MESSAGE_BYTES:
                self._end()
                break
            if len(self._received) < HEADER.size + size:
                break
            try:
                message = json.loads(self._received[HEADER.size : HEADER.size + size])
                fds = [self._fds.popleft() for _ in range(message.pop("fds", 0))]
            except (ValueError, AttributeError, TypeError, IndexError):
                self._end()
                break
            del self._received[: HEADER.size + size]
            messages.append((message, fds))
        return messages

    def close(self) -> None:
        """Close this end."""
        self._end()
        self._socket.close()

    def _end(self) -> None:
        self.closed = True
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        for fd in self._fds:
            os.close(fd)
        self._unsent.clear()
        self._fds.clear()


class ConnectionQueue:
    """Accepted connections, each of which one of the readers gets: a front that is frozen leaves them to others.

    Args:
        reader, writer: the ends of a pair of sockets of `QUEUE_KIND`. Fronts have the reader only, and share it.
    """

    def __init__(self, reader: socket.socket, writer: socket.socket | None = None) -> None:
        reader.setblocking(False)
        self._reader = reader
        self._writer = writer
        if writer is not None:
            writer.setblocking(False)

    def fileno(self) -> int:
        """Return the reader's descriptor."""
        return self._reader.fileno()

    def put(self, message: Message, fd: int) -> bool:
        """Put a connection into the queue, which has a copy of its descriptor from then on; return whether it fits."""
        assert self._writer is not None, "a front only reads"
        try:
            socket.send_fds(self._writer, [json.dumps(message).encode()], [fd])
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno not in (errno.ETOOMANYREFS, errno.ENOBUFS):
                raise
            return False
        return True

    def take(self) -> tuple[Message, int | None] | None:
        """Return a connection, whose descriptor is the caller's to close; None if there is none.

        A reader that has as many open files as it may have gets no descriptor, and the connection is lost.
        """
        try:
            data, fds = receive_fds(self._reader, READ_BYTES, 1)
        except (BlockingIOError, InterruptedError):
            return None
        return (json.loads(data), fds[0] if fds else None) if data else None

    def close(self) -> None:
        """Close the ends."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
