"""Messages and descriptors between processes: none is lost, mixed up or left open, however the bytes are cut."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.supervisor.channel import QUEUE_KIND, Channel, ConnectionQueue

MESSAGES = st.lists(st.tuples(st.binary(max_size=3000), st.integers(0, 4)), max_size=30)


def open_files() -> int:
    """Return how many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


@settings(max_examples=40, deadline=None)
@given(messages=MESSAGES, send_buffer=st.integers(4608, 20000))
def test_messages_arrive_in_order_with_their_files(messages: list[tuple[bytes, int]], send_buffer: int) -> None:
    before = open_files()
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sender, receiver = Channel(ours), Channel(theirs)
    with open(os.devnull) as file:
        numbers = iter(range(len(messages)))
        received: list[tuple[dict[str, Any], int]] = []
        for content, num_files in messages:
            fds = []
            for _ in range(num_files):
                fds.append(os.dup(file.fileno()))
            sender.send({"number": next(numbers), "content": content.hex()}, fds)
            for fd in fds:
                os.close(fd)
            if len(content) % 3 == 0:
                received += take(receiver)
        while sender.unsent:
            sender.flush()
            received += take(receiver)
        received += take(receiver)
    expected = [
        ({"number": number, "content": content.hex()}, num_files)
        for number, (content, num_files) in enumerate(messages)
    ]
    assert received == expected
    sender.close()
    assert receiver.receive() == [] and receiver.closed
    receiver.close()
    assert open_files() == before


def take(channel: Channel) -> list[tuple[dict[str, Any], int]]:
    """Return the messages that have arrived, with the numbers of their files, which are closed."""
    taken = []
    for message, fds in channel.receive():
        for fd in fds:
            os.fstat(fd)
            os.close(fd)
        taken.append((message, len(fds)))
    return taken


def test_what_is_no_message_ends_the_channel() -> None:
    for data in (struct.pack(">I", 2**31), struct.pack(">I", 3) + b"\xff{}", struct.pack(">I", 10) + b'{"fds": 7}'):
        ours, theirs = socket.socketpair()
        with ours:
            channel = Channel(theirs)
            ours.sendall(data)
            assert channel.receive() == [] and channel.closed
            channel.send({})  # does nothing
            channel.close()


def test_each_connection_is_taken_by_one_reader() -> None:
    before = open_files()
    reader, writer = socket.socketpair(socket.AF_UNIX, QUEUE_KIND)
    other = ConnectionQueue(reader.dup())
    queue = ConnectionQueue(reader, writer)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = 0
        while queue.put({"number": sent}, theirs.fileno()):
            sent += 1
        assert sent >= 5, "what does not fit is the sender's to keep"
        numbers = []
        while (taken := [queue, other][len(numbers) % 2].take()) is not None:
            numbers.append(taken[0]["number"])
            os.close(taken[1])
        assert numbers == list(range(sent))
    queue.close()
    other.close()
    assert open_files() == before
