"""The channel: frames survive any splitting, keep their order whoever is slow, and hostile bytes are an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from quire.engine import channel
from quire.engine.channel import HEADER, MOST_BYTES, ChannelError, EngineEnd, Frames, FrontEnd, framed

LOOPS = {"plain": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def run(kind: str, scenario: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        return runner.run(asyncio.wait_for(scenario, 60))


@contextlib.contextmanager
def ends() -> Iterator[tuple[FrontEnd, EngineEnd]]:
    ours, theirs = socket.socketpair()
    front, engine = FrontEnd(ours), EngineEnd(theirs.detach())
    try:
        yield front, engine
    finally:
        front.close()
        engine.close(0.0)


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


# ---- cutting ----


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(0, 500), max_size=20))
def test_any_splitting_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, frames))
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    cutter = Frames()
    found = [frame for start, end in itertools.pairwise(places) for frame in cutter.feed(stream[start:end])]
    assert found == frames


def test_one_byte_at_a_time() -> None:
    frames = [*payloads(6)[:3], b""]
    cutter = Frames()
    stream = b"".join(map(framed, frames))
    assert [frame for byte in stream for frame in cutter.feed(bytes([byte]))] == frames


@given(st.binary(max_size=200))
def test_random_bytes_are_cut_or_refused_and_never_kept_beyond_what_they_announce(data: bytes) -> None:
    cutter = Frames(most_bytes=64)
    frames = cutter.feed(data)
    assert all(len(frame) <= 64 for frame in frames)
    assert data.startswith(b"".join(map(framed, frames)))
    if cutter.error is not None:
        assert "64 are allowed" in str(cutter.error)
        assert cutter.feed(framed(b"too late")) == []


@pytest.mark.parametrize("size", [MOST_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_that_is_too_long_is_refused_at_once(size: int) -> None:
    cutter = Frames()
    assert cutter.feed(framed(b"good") + struct.pack(">I", size)) == [b"good"]
    assert str(size) in str(cutter.error)


def test_the_longest_frame_is_allowed_and_a_longer_one_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Frames(most_bytes=5).feed(framed(b"12345")) == [b"12345"]
    assert HEADER.unpack(framed(bytes(300))[:4]) == (300,)
    monkeypatch.setattr(channel, "MOST_BYTES", 299)
    with pytest.raises(ChannelError, match="300 bytes"):
        framed(bytes(300))


# ---- both ends ----


@pytest.mark.parametrize("kind", LOOPS)
def test_what_each_side_sends_arrives_in_order_under_load(kind: str) -> None:
    down, up = payloads(3000, 1), payloads(3000, 2)

    async def scenario(front: FrontEnd, engine: EngineEnd) -> tuple[list[bytes], list[bytes]]:
        got: list[bytes] = []

        def work() -> None:
            for payload in up:
                engine.send(payload)
                while (frame := engine.receive(False)) is not None:
                    got.append(frame)
            while len(got) < len(down):
                if (frame := engine.receive(True)) is not None:
                    got.append(frame)
            engine.close(60.0)  # what it has not sent yet

        front.send(down[0])  # before it is attached
        thread = in_thread(work)
        front.attach()
        for payload in down[1:]:
            front.send(payload)
        received = [await front.receive() for _ in up]
        await asyncio.to_thread(thread.join)
        return got, [frame for frame in received if frame is not None]

    with ends() as (front, engine):
        got, received = run(kind, scenario(front, engine))
    assert got == down
    assert received == up


@pytest.mark.parametrize("kind", LOOPS)
def test_a_front_that_does_not_read_slows_the_engine_down_and_loses_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MOST_UNSENT", 1 << 16)
    monkeypatch.setattr(channel, "_WAIT_SECONDS", 0.01)
    sent: list[int] = []
    waits = threading.Event()
    many = [number.to_bytes(4, "big") * 256 for number in range(2000)]  # 2 MB, more than the sockets hold

    async def scenario(front: FrontEnd, engine: EngineEnd) -> list[bytes | None]:
        front.attach()
        engine.waiting = waits.set

        def work() -> None:
            for number, payload in enumerate(many):
                engine.send(payload)
                sent.append(number)
            engine.close(60.0)

        thread = in_thread(work)
        assert waits.wait(30)  # the event loop does not get on meanwhile: it is this thread
        assert len(sent) < len(many)
        received = [await front.receive() for _ in range(len(many) + 1)]
        await asyncio.to_thread(thread.join)
        return received

    with ends() as (front, engine):
        assert run(kind, scenario(front, engine)) == [*many, None]


@pytest.mark.parametrize("kind", LOOPS)
def test_sending_to_an_engine_that_does_not_read_never_waits(kind: str) -> None:
    many = payloads(500) * 4

    async def scenario(front: FrontEnd, engine: EngineEnd) -> list[bytes]:
        front.attach()
        for payload in many:  # much more than the sockets hold, without ever leaving this thread
            front.send(payload)
        got: list[bytes] = []

        def work() -> None:
            while len(got) < len(many):
                if (frame := engine.receive(True)) is not None:
                    got.append(frame)

        await asyncio.to_thread(work)
        return got

    with ends() as (front, engine):
        assert run(kind, scenario(front, engine)) == many


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("unread", [False, True])
def test_the_last_words_of_an_engine_are_read_though_it_reads_no_more(kind: str, unread: bool) -> None:
    async def scenario(front: FrontEnd, engine: EngineEnd) -> list[bytes | None]:
        front.attach()
        if unread:  # the kernel then reports an error instead of an end
            front.send(b"never read")
        words = [bytes([number]) * 10_000 for number in range(8)]
        for word in words:
            engine.send(word)
        engine.close()
        front.send(b"into the void")
        front.send(b"and again")
        assert [await front.receive() for _ in words] == words
        return [await front.receive(), await front.receive()]

    with ends() as (front, engine):
        assert run(kind, scenario(front, engine)) == [None, None]


def test_the_engine_hears_of_the_end_of_the_front_after_what_it_said() -> None:
    with ends() as (front, engine):
        front.send(b"one")
        asyncio.run(_attached(front))
        front.close()
        assert engine.receive(False) == b"one"
        with pytest.raises(EOFError):
            engine.receive(True)
        with pytest.raises(EOFError):
            engine.send(b"anybody?")


async def _attached(front: FrontEnd) -> None:
    front.attach()


def test_an_engine_that_waits_shows_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_WAIT_SECONDS", 0.001)
    with ends() as (_front, engine):
        shown: list[None] = []
        engine.waiting = lambda: shown.append(None)
        assert [engine.receive(True) for _ in range(3)] == [None] * 3
        assert len(shown) == 3
        assert engine.receive(False) is None
        assert len(shown) == 3


@pytest.mark.parametrize("kind", LOOPS)
def test_hostile_bytes_are_an_error_at_the_front(kind: str) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        front = FrontEnd(ours)
        try:
            front.attach()
            theirs.sendall(framed(b"fine") + struct.pack(">I", 2**31) + b"cos\nsystem\n")
            assert await front.receive() == b"fine"
            for _ in range(2):
                with pytest.raises(ChannelError, match="2147483648"):
                    await front.receive()
        finally:
            front.close()
            theirs.close()

    run(kind, scenario())


def test_hostile_bytes_are_an_error_at_the_engine() -> None:
    ours, theirs = socket.socketpair()
    engine = EngineEnd(theirs.detach())
    with ours:
        ours.sendall(struct.pack(">I", 2**31) + bytes(100))
        with pytest.raises(ChannelError, match="2147483648"):
            engine.receive(True)
    engine.close(0.0)


def test_cancelling_a_receive_loses_no_frame() -> None:
    async def scenario(front: FrontEnd, engine: EngineEnd) -> None:
        front.attach()
        waiting = asyncio.create_task(front.receive())
        await asyncio.sleep(0)
        engine.send(b"one")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await front.receive() == b"one"

    with ends() as (front, engine):
        run("plain", scenario(front, engine))
