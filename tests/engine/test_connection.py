"""Frames survive any splitting and keep their order whoever is slow; clients of an engine do not disturb others."""

from __future__ import annotations

import asyncio
import itertools
import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from quire.engine import clients as clients_module
from quire.engine import connection as connection_module
from quire.engine.clients import SocketClients
from quire.engine.connection import (
    HEADER,
    MAX_FRAME_BYTES,
    AsyncConnection,
    Connection,
    FrameDecoder,
    ProtocolError,
    encode_frame,
)
from quire.engine.messages import PROTOCOL_VERSION, AbortRequests, CallResult, Failed, Hello, Ready

LOOPS = {"plain": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
READY = Ready(num_blocks=1, block_size=1, max_model_len=1, vocab_size=1, max_num_seqs=1)


def run(kind: str, scenario: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        return runner.run(asyncio.wait_for(scenario, 60))


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def payloads(count: int, seed: int = 1) -> list[bytes]:
    """Frames of all sizes; some larger than what a socket holds."""
    rng = random.Random(seed)
    sizes = [0, 1, 3, 4, 5, 100, 5000]
    found = [struct.pack(">I", number) + rng.randbytes(rng.choice(sizes)) for number in range(count)]
    found[count // 2] = rng.randbytes(1 << 20)
    return found


# ---- frames ----


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(0, 500), max_size=20))
def test_any_splitting_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(encode_frame, frames))
    for places in (sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))}), range(len(stream) + 1)):
        decoder = FrameDecoder()
        assert [
            frame for start, end in itertools.pairwise(places) for frame in decoder.feed(stream[start:end])
        ] == frames


@given(st.binary(max_size=200))
def test_random_bytes_are_cut_or_refused_and_never_kept_beyond_what_they_announce(data: bytes) -> None:
    decoder = FrameDecoder(max_bytes=64)
    frames = decoder.feed(data)
    assert all(len(frame) <= 64 for frame in frames)
    assert data.startswith(b"".join(map(encode_frame, frames)))
    if decoder.error is not None:
        assert "64 are allowed" in str(decoder.error)
        assert decoder.feed(encode_frame(b"too late")) == []


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_that_is_too_long_is_refused_at_once(size: int) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(b"good") + struct.pack(">I", size)) == [b"good"]
    assert str(size) in str(decoder.error)


def test_the_longest_frame_is_allowed_and_a_longer_one_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FrameDecoder(max_bytes=5).feed(encode_frame(b"12345")) == [b"12345"]
    assert HEADER.unpack(encode_frame(bytes(300))[:4]) == (300,)
    monkeypatch.setattr(connection_module, "MAX_FRAME_BYTES", 299)
    with pytest.raises(ProtocolError, match="300 bytes"):
        encode_frame(bytes(300))


# ---- a connection ----


@contextmanager
def ends() -> Iterator[tuple[AsyncConnection, Connection]]:
    ours, theirs = socket.socketpair()
    client, engine = AsyncConnection(ours), Connection(theirs)
    try:
        yield client, engine
    finally:
        client.close()
        engine.close()


def exchange(connection: Connection, payloads: list[bytes], count: int) -> list[bytes]:
    """Send these and wait for so many, as a peer in a thread does."""
    got: list[bytes] = []
    for payload in payloads:
        connection.send(payload)
        connection.read()
    while (len(got) < count and not connection.ended) or connection.num_unsent:
        select.select([connection], [connection] if connection.num_unsent else [], [], 1.0)
        connection.flush()
        connection.read()
        got.extend(connection.frames)
        connection.frames.clear()
    return got


@pytest.mark.parametrize("kind", LOOPS)
def test_what_each_side_sends_arrives_in_order_under_load(kind: str) -> None:
    down, up = payloads(1000, 1), payloads(1000, 2)
    got: list[bytes] = []

    async def scenario(client: AsyncConnection, engine: Connection) -> list[bytes]:
        client.send(down[0])  # before it is attached
        thread = in_thread(lambda: got.extend(exchange(engine, up, len(down))))
        client.attach()
        for payload in down[1:]:  # more than the sockets hold, without ever leaving this thread
            client.send(payload)
        received = [await client.receive() for _ in up]
        await asyncio.to_thread(thread.join)
        return received

    with ends() as (client, engine):
        assert run(kind, scenario(client, engine)) == up
    assert got == down


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("unread", [False, True])
def test_the_last_messages_of_an_engine_are_read_though_it_reads_no_more(kind: str, unread: bool) -> None:
    async def scenario(client: AsyncConnection, engine: Connection) -> None:
        client.attach()
        if unread:  # the kernel then reports an error instead of an end
            client.send(b"never read")
        last = [bytes([number]) * 10_000 for number in range(8)]
        for payload in last:
            engine.send(payload)
        engine.close()
        client.send(b"nobody reads this")
        client.send(b"nor this")
        assert [await client.receive() for _ in last] == last
        for _ in range(2):
            with pytest.raises(EOFError):
                await client.receive()

    with ends() as (client, engine):
        run(kind, scenario(client, engine))


@pytest.mark.parametrize("kind", LOOPS)
def test_hostile_bytes_are_an_error_after_what_came_before(kind: str) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        client = AsyncConnection(ours)
        try:
            client.attach()
            theirs.sendall(encode_frame(b"fine") + struct.pack(">I", 2**31) + b"cos\nsystem\n")
            assert await client.receive() == b"fine"
            for _ in range(2):
                with pytest.raises(ProtocolError, match="2147483648"):
                    await client.receive()
        finally:
            client.close()
            theirs.close()

    run(kind, scenario())


def test_cancelling_a_receive_loses_no_frame() -> None:
    async def scenario(client: AsyncConnection, engine: Connection) -> None:
        client.attach()
        waiting = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        engine.send(b"one")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await client.receive() == b"one"

    with ends() as (client, engine):
        run("plain", scenario(client, engine))


# ---- the clients of an engine ----


class Engine:
    """The engine's side, and what the parent does with the listener."""

    def __init__(self) -> None:
        self.listener, theirs = socket.socketpair()
        self.clients = SocketClients(theirs)
        self.clients.start(lambda: READY)
        self.connections: list[Connection] = []

    def connect(self) -> Connection:
        """Connect a client that has said nothing yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.listener, [b"c"], [theirs.fileno()])
        self.connections.append(Connection(ours))
        return self.connections[-1]

    def greet(self, connection: Connection, hello: Hello | None = None) -> None:
        connection.send(msgspec.msgpack.encode(hello or Hello("a test", PROTOCOL_VERSION)))
        self.settle()

    def settle(self) -> list[tuple[int, Any]]:
        """Handle all that has arrived."""
        return [item for _ in range(4) for item in self.clients.receive(False)]


def messages(connection: Connection) -> list[Any]:
    """What a client was sent."""
    connection.read()
    found = [msgspec.msgpack.decode(frame, type=Ready | CallResult | Failed) for frame in connection.frames]
    connection.frames.clear()
    return found


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.listener.close()
    for connection in made.connections:
        connection.close()
    made.clients.close()


def test_each_client_is_greeted_and_known_by_a_number_until_it_is_gone(engine: Engine) -> None:
    first, second = engine.connect(), engine.connect()
    assert engine.settle() == [] and engine.clients.connected == []
    for connection in (first, second):
        engine.greet(connection)
        assert messages(connection) == [READY]
    assert engine.clients.connected == [0, 1]
    abort = AbortRequests(["a"])
    second.send(msgspec.msgpack.encode(abort))
    first.send(msgspec.msgpack.encode(abort))
    first.close()
    assert engine.settle() == [(0, abort), (0, None), (1, abort)]
    engine.clients.send(0, CallResult(1))  # too late
    engine.clients.send(1, CallResult(2))
    assert messages(second) == [CallResult(2)]
    third = engine.connect()
    engine.greet(third)
    assert engine.clients.connected == [1, 2], "numbers are not used again"


def test_a_client_that_begins_to_talk_nonsense_is_disconnected_after_its_messages(engine: Engine) -> None:
    client = engine.connect()
    engine.greet(client)
    client.send(msgspec.msgpack.encode(AbortRequests(["a"])))
    client._socket.sendall(struct.pack(">I", 2**31))
    assert engine.settle() == [(0, AbortRequests(["a"])), (0, None)]
    assert isinstance(messages(client)[-1], Failed)


def test_the_only_client_slows_the_engine_down_and_loses_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_UNSENT", 1 << 16)
    monkeypatch.setattr(clients_module, "WAIT_SECONDS", 0.01)
    client, got, waits = engine.connect(), list[Any](), threading.Event()
    engine.greet(client)
    many = [CallResult(number, value={"x": "x" * 1000}) for number in range(1000)]  # more than the sockets hold

    def read() -> None:
        assert waits.wait(30)  # it does not get on meanwhile
        while len(got) < 1 + len(many):
            select.select([client], [], [], 1.0)
            got.extend(messages(client))

    engine.clients.on_wait = waits.set
    thread = in_thread(read)
    for number, message in enumerate(many):
        assert waits.is_set() or number < 500
        engine.clients.send(0, message)
    engine.clients.close()
    thread.join()
    assert got == [READY, *many]


def test_one_of_several_clients_that_does_not_read_is_disconnected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_UNSENT", 1 << 16)
    slow, other = engine.connect(), engine.connect()
    for connection in (slow, other):
        engine.greet(connection)
    for number in range(1000):
        engine.clients.send(0, CallResult(number, value={"x": "x" * 1000}))
        engine.clients.send(1, CallResult(number))
        assert messages(other)[-1] == CallResult(number)
    assert engine.settle() == [(0, None)]
    assert engine.clients.connected == [1]


def test_an_engine_that_waits_for_a_slow_client_stops_when_another_connects_or_it_is_to_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_UNSENT", 1 << 16)
    monkeypatch.setattr(clients_module, "WAIT_SECONDS", 0.01)
    large, others = CallResult(1, value={"x": "x" * (1 << 20)}), list[Connection]()
    slow = engine.connect()
    engine.greet(slow)

    def connect() -> None:
        if not others:
            others.append(engine.connect())
            others[0].send(msgspec.msgpack.encode(Hello("another", PROTOCOL_VERSION)))

    engine.clients.on_wait = connect
    engine.clients.send(0, large)
    assert engine.settle() == [(0, None)] and engine.clients.connected == [1]
    engine.clients.on_wait = engine.listener.close
    engine.clients.send(1, large)
    assert engine.clients.closed


def test_an_engine_that_waits_shows_that_it_does(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "WAIT_SECONDS", 0.001)
    shown: list[None] = []
    engine.clients.on_wait = lambda: shown.append(None)
    assert [engine.clients.receive(True) for _ in range(3)] == [[]] * 3
    assert len(shown) == 3
    assert engine.clients.receive(False) == []
    assert len(shown) == 3


def test_an_engine_that_fails_tells_also_those_who_have_just_connected(engine: Engine) -> None:
    first = engine.connect()
    engine.greet(first)
    second = engine.connect()
    assert engine.clients.fail(Failed("broken", exit_code=2)) == 2
    assert messages(first)[-1] == messages(second)[-1] == Failed("broken", exit_code=2)


def test_without_a_parent_an_engine_is_closed(engine: Engine) -> None:
    client = engine.connect()
    engine.greet(client)
    engine.listener.close()
    assert engine.clients.receive(True) == []
    assert engine.clients.closed
