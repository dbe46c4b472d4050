"""Connections between clients and an engine process: sockets that carry messages in frames.

A frame is a length of four bytes, most significant first, and a payload of so many bytes: a message of `messages.py` in
msgpack. Bytes that are no such frame or message are a `ProtocolError`; decoding makes declared structs only, so that
nothing in them is ever executed.

`Connection` does the work and never blocks. `AsyncConnection` drives one from an asyncio loop, for a client;
`clients.py` polls all those of an engine. How connections come to be, and the handshake, are described there.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TypeVar

import msgspec

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 28  # one step's log-probabilities of a long prompt are a tenth of that
READ_BYTES = 1 << 18
MAX_READS = 8  # of one connection in a row, before others are served

T = TypeVar("T")


class ProtocolError(Exception):
    """The peer sent bytes that are no frame or no message, or a message is too long to be sent."""


class FrameDecoder:
    """Cuts a stream of bytes, which arrives in pieces of any size, into frames.

    Attributes:
        error: set once a frame was announced that is too long; nothing is decoded after it.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._needed = 0  # while `_rest` is shorter, no frame is complete
        self.error: ProtocolError | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the frames that `data` completes."""
        if self.error is not None:
            return []
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
        frames: list[bytes] = []
        start, end = 0, len(data)
        self._needed = HEADER.size
        while end - start >= HEADER.size:
            (size,) = HEADER.unpack_from(data, start)
            if size > self._max_bytes:
                self.error = ProtocolError(f"a frame of {size} bytes was announced; {self._max_bytes} are allowed")
                return frames
            self._needed = HEADER.size + size
            if end - start < self._needed:
                break
            frames.append(data[start + HEADER.size : start + self._needed])
            start += self._needed
            self._needed = HEADER.size
        self._rest = bytearray(data[start:])
        return frames


def encode_frame(payload: bytes) -> bytes:
    """Return the frame of a payload. Raises `ProtocolError` if it is too long."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes is too long; {MAX_FRAME_BYTES} are allowed")
    return HEADER.pack(len(payload)) + payload


def decode_message(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Return the message of a frame. Raises `ProtocolError` if it is none."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from None


class Connection:
    """A connected socket that carries frames both ways and never blocks. Frames are neither lost nor reordered.

    Attributes:
        frames: payloads that were read and not taken yet.
        ended: nothing more will be read: the peer has closed its end, or sent what is no frame.
        broken: nothing more can be sent.
        num_unsent: bytes that wait until the peer has read others.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.set_inheritable(False)  # the stream must end with this process, not with one that it starts
        self._socket = sock
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._decoder = FrameDecoder()
        self._unsent: deque[memoryview] = deque()
        self.frames: deque[bytes] = deque()
        self.ended = False
        self.broken = False
        self.num_unsent = 0

    @property
    def error(self) -> ProtocolError | None:
        """The error in the bytes that follow `frames`; None if there is none."""
        return self._decoder.error

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send a frame; `flush` sends later what there is no room for now. Does nothing if the peer reads no more."""
        if self.broken:
            return
        data = memoryview(encode_frame(payload))
        self._unsent.append(data)
        self.num_unsent += len(data)
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send unsent frames, as far as the socket has room."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self.num_unsent -= sent
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._break()

    def read(self, max_reads: int = MAX_READS) -> bool:
        """Read what has arrived, at most `max_reads` * `READ_BYTES` bytes; return whether there may be more."""
        for _ in range(max_reads):
            if self.ended:
                return False
            try:
                count = self._socket.recv_into(self._buffer)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:  # the peer closed its end before it had read everything
                count = 0
            self.frames.extend(self._decoder.feed(bytes(self._buffer[:count])))
            self.ended = count == 0 or self._decoder.error is not None
        return not self.ended

    def close(self) -> None:
        """Close this end; the peer notices."""
        self.ended = True
        self._break()
        self._socket.close()

    def _break(self) -> None:
        self.broken = True
        self._unsent.clear()
        self.num_unsent = 0


class AsyncConnection:
    """A connection on an asyncio loop. Reading is by callback: there is no task or future for each frame.

    It uses the socket itself and not an asyncio transport, which stops reading when it cannot write, so that the last
    messages of an engine that failed would be lost.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._connection = Connection(sock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading = self._writing = False  # whether the loop watches the socket for that
        self._waiter: asyncio.Future[None] | None = None

    def attach(self) -> None:
        """Begin to read, on the running event loop. What was sent before has been kept."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._on_readable)
        self._reading = True
        self._watch()

    def send(self, payload: bytes) -> None:
        """Send a frame without waiting, see `Connection.send`."""
        self._connection.send(payload)
        self._watch()

    async def receive(self) -> bytes:
        """Return the next frame.

        Raises `EOFError` when the peer has closed its end and all it sent was read, and `ProtocolError` if it sent what
        is no frame.
        """
        connection = self._connection
        while not connection.frames:
            if connection.error is not None:
                raise connection.error
            if connection.ended:
                raise EOFError("the connection was closed")
            assert self._loop is not None and self._waiter is None, "one reader, after attach()"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return connection.frames.popleft()

    def finish(self) -> None:
        """Read what has arrived and end the connection, because the peer's process has ended."""
        while self._connection.read():
            pass
        self._connection.ended = True
        self._watch()

    def close(self) -> None:
        """Close this end; the peer notices."""
        self._connection.ended = self._connection.broken = True
        self._watch()
        self._connection.close()

    def _on_readable(self) -> None:
        self._connection.read()
        self._watch()

    def _on_writable(self) -> None:
        self._connection.flush()
        self._watch()

    def _watch(self) -> None:
        """Register the socket for the events that matter now; wake `receive` if it has something to return."""
        connection, loop = self._connection, self._loop
        if (connection.frames or connection.ended) and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if loop is None or loop.is_closed():
            return
        if self._reading and connection.ended:
            self._reading = False
            loop.remove_reader(connection)
        writing = connection.num_unsent > 0 and not connection.broken
        if writing != self._writing:
            self._writing = writing
            if writing:
                loop.add_writer(connection, self._on_writable)
            else:
                loop.remove_writer(connection)
