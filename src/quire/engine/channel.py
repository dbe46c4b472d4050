"""The way between front and engine process: one pair of connected sockets that the child inherits.

It has no name. Nothing of it lies in the file system, nobody else can connect to it, and the kernel takes it away
with the last process that holds an end. So a front that was killed leaves no folder, socket or shared memory behind,
and to either end the end of the stream means that the other one is gone; no library's own threads stand between.

What travels is msgpack in frames: a length of four bytes, the most significant first, and so many bytes. Bytes that
are no such frame are a `ChannelError`, which ends the engine; nothing here makes objects of them (`messages.py` says
which there are). `FrontEnd` is for asyncio, `EngineEnd` for the engine's loop. Neither loses or reorders frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

HEADER = struct.Struct(">I")
MOST_BYTES = 1 << 28  # of one frame; a step's news with all log-probabilities of a long prompt is a tenth of that
MOST_UNSENT = 16 << 20  # bytes that the engine computes ahead of a front that does not read
_READ_BYTES = 1 << 18
_READS = 8  # at a time: what comes after that waits until the event loop has served others
_WAIT_SECONDS = 1.0  # how often an engine that waits gives a sign of life


T = TypeVar("T")


class ChannelError(Exception):
    """What came over the channel is not what the other end would send."""


class Frames:
    """Cuts a stream of bytes into frames, whatever the pieces in which it arrives.

    Attributes:
        error: set once a frame claimed to be too long; nothing comes after those before it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._needed = 0  # length of `_rest` below which there is no use in looking at it
        self.error: ChannelError | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete with `data`."""
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
            if size > self._most_bytes:
                self.error = ChannelError(f"a frame of {size} bytes was announced; {self._most_bytes} are allowed")
                return frames
            self._needed = HEADER.size + size
            if end - start < self._needed:
                break
            frames.append(data[start + HEADER.size : start + self._needed])
            start += self._needed
            self._needed = HEADER.size
        self._rest = bytearray(data[start:])
        return frames


def framed(payload: bytes) -> bytes:
    """Return the payload as a frame. Raises `ChannelError` if it is too long for one."""
    if len(payload) > MOST_BYTES:
        raise ChannelError(f"a message of {len(payload)} bytes is too long; {MOST_BYTES} are allowed")
    return HEADER.pack(len(payload)) + payload


def message(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Return the message in a frame. Raises `ChannelError` if it is none."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ChannelError(str(error)) from None


class FrontEnd:
    """The front's end, on an event loop. Reading is by callback: no task or future for each frame.

    Plain sockets and not a transport: a transport that cannot write gives up reading, too, and with it the last words
    of an engine that failed.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._cut = Frames()
        self._frames: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self._writing = False  # whether the event loop was asked to tell when there is room
        self._deaf = False  # whether the engine takes nothing any more
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def attach(self) -> None:
        """Begin to read and write, on the running event loop. What was sent before has been kept."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_readable)
        self._write()

    def send(self, payload: bytes) -> None:
        """Send without waiting; what the engine has no room for is kept. Does nothing once it is gone."""
        if self._deaf:
            return
        data = framed(payload)
        if not self._unsent and self._loop is not None:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._stop_writing()
                return
            if sent == len(data):
                return
            self._unsent.append(memoryview(data)[sent:])
            self._write()
        else:
            self._unsent.append(memoryview(data))

    async def receive(self) -> bytes | None:
        """Return the next frame; None when the engine's end is closed and all it sent was read.

        Raises `ChannelError` if that cannot be cut into frames.
        """
        while not self._frames:
            if self._cut.error is not None:
                raise self._cut.error
            if self._ended:
                return None
            assert self._loop is not None and self._waiter is None, "one reader, after attach()"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._frames.popleft()

    def finish(self) -> None:
        """Take what has arrived, and expect no more: the engine process has ended."""
        while self._read():
            pass
        self._end()

    def close(self) -> None:
        """Close this end; the engine notices."""
        self._end()
        self._stop_writing()
        self._socket.close()

    def _on_readable(self) -> None:
        # Until there is nothing left: after an error of the other end some event loops call only once.
        for _ in range(_READS):
            if not self._read():
                return

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        if self._ended:
            return False
        try:
            count = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the other end was closed before it had read everything
            count = 0
        if count == 0:
            self._end()
            return False
        self._frames.extend(self._cut.feed(bytes(self._buffer[:count])))
        if self._cut.error is not None:
            self._end()
            return False
        self._wake()
        return True

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._leave(lambda loop: loop.remove_reader(self._socket))
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _write(self) -> None:
        """Send what was kept, as far as there is room."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except (BlockingIOError, InterruptedError):
            if not self._writing and self._loop is not None:
                self._loop.add_writer(self._socket, self._write)
                self._writing = True
        except OSError:
            self._stop_writing()
        else:
            self._unwatch()

    def _stop_writing(self) -> None:
        self._deaf = True
        self._unsent.clear()
        self._unwatch()

    def _unwatch(self) -> None:
        if self._writing:
            self._writing = False
            self._leave(lambda loop: loop.remove_writer(self._socket))

    def _leave(self, what: Callable[[asyncio.AbstractEventLoop], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            what(self._loop)


class EngineEnd:
    """The engine's end, blocking. `EOFError` means that the front is gone.

    Args:
        fd: the inherited socket.
        waiting: called about once a second while nothing happens because the front has nothing to say or does not
            read, so that this is not mistaken for being stuck.
    """

    def __init__(self, fd: int, waiting: Callable[[], None] = lambda: None) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._socket.set_inheritable(False)  # the stream must end with this process, not with one that it starts
        self.waiting = waiting
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._cut = Frames()
        self._frames: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0

    def receive(self, wait: bool) -> bytes | None:
        """Return the next frame, or None. With `wait`, wait up to a second for one.

        Raises:
            EOFError: the front is gone. ChannelError: what it sent cannot be cut into frames.
        """
        if not self._frames:
            self._flush()
            self._read()
        if not self._frames and wait:
            self.waiting()
            deadline = time.monotonic() + _WAIT_SECONDS
            while not self._frames and (left := deadline - time.monotonic()) > 0:
                self._poll(left)
                self._flush()
                self._read()
        return self._frames.popleft() if self._frames else None

    def send(self, payload: bytes) -> None:
        """Send; what the front has not read yet is kept, and waited for when that becomes very much.

        Raises `EOFError` if the front is gone.
        """
        data = memoryview(framed(payload))
        self._unsent.append(data)
        self._num_unsent += len(data)
        self._flush()
        while self._num_unsent > MOST_UNSENT:
            self.waiting()
            self._poll(_WAIT_SECONDS, reading=False)
            self._flush()

    def close(self, seconds: float = 2.0) -> None:
        """Send what is left, as far as the front takes it within so many seconds, and close."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(EOFError, OSError):
            while self._unsent and (left := deadline - time.monotonic()) > 0:
                self._poll(left, reading=False)
                self._flush()
        self._socket.close()

    def _poll(self, seconds: float, *, reading: bool = True) -> None:
        poll = select.poll()
        poll.register(self._socket, (select.POLLIN if reading else 0) | (select.POLLOUT if self._unsent else 0))
        poll.poll(max(1, int(seconds * 1000)))

    def _read(self) -> None:
        if self._cut.error is not None:  # what came before it has been taken
            raise self._cut.error
        try:
            count = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            raise EOFError("the front is gone")
        self._frames.extend(self._cut.feed(bytes(self._buffer[:count])))
        if self._cut.error is not None and not self._frames:
            raise self._cut.error

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._num_unsent -= sent
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            raise EOFError("the front is gone") from None
