"""A front's end of the channel to its supervisor, with a supervisor that says what a test wants."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.engine.launch import LaunchedEngine
from quire.server.supervisor_client import SupervisorClient
from quire.supervisor.board import create_board
from quire.supervisor.channel import QUEUE_KIND, Channel, ConnectionQueue, Message
from tests.helpers.live_server import server_config


class FakeSupervisor:
    """The other end. `client` is the front's."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self.queue = ConnectionQueue(*socket.socketpair(socket.AF_UNIX, QUEUE_KIND))
        self.board_fd, board = create_board(1)
        self.client = SupervisorClient(Channel(ours), self.queue, board, 0, {})

    async def next(self, kind: str) -> Message:
        """Return the next message of a kind that the front sends."""
        async with asyncio.timeout(5):
            while True:
                for message, _ in self.channel.receive():
                    if message["type"] == kind:
                        return message
                await asyncio.sleep(0)

    def send(self, *messages: tuple[Message, list[int]]) -> None:
        """Send messages, which arrive together."""
        for message, fds in messages:
            self.channel.send(message, fds)

    def close(self) -> None:
        """Release what the two ends share."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.client._channel)
        loop.remove_reader(self.queue)
        self.client._channel.close()
        self.channel.close()
        self.queue.close()
        os.close(self.board_fd)


def supervised(test: Callable[[FakeSupervisor, asyncio.Task[tuple[int, LaunchedEngine]]], Awaitable[None]]) -> None:
    """Run a test with a front that has asked for an engine."""

    async def run() -> None:
        supervisor = FakeSupervisor()
        supervisor.client.attach()
        launching = asyncio.create_task(supervisor.client.launch("model", server_config(), None))
        try:
            await test(supervisor, launching)
        finally:
            supervisor.close()

    asyncio.run(run())


def started(call: int, fds: list[Any]) -> tuple[Message, list[int]]:
    """Return the answer with an engine, number 7, and descriptors that stand for what it shares."""
    return {"type": "result", "call": call, "engine": 7, "pid": 1}, fds


def test_an_engine_that_ends_as_soon_as_it_was_started_is_known_to_have_ended() -> None:
    """Else its death would be waited for, for ever."""

    async def test(supervisor: FakeSupervisor, launching: asyncio.Task[tuple[int, LaunchedEngine]]) -> None:
        call = (await supervisor.next("engine"))["call"]
        exited: Message = {"type": "exited", "engine": 7, "code": -9}
        supervisor.send(started(call, [supervisor.board_fd] * 3), (exited, []))
        number, launched = await launching
        assert (number, launched.exit_code.result(0)) == (7, -9)
        for fd in (launched.listener, launched.heartbeat, launched.stacks):
            os.close(fd)

    supervised(test)


@pytest.mark.parametrize("answered", [False, True])
def test_an_engine_that_nobody_waits_for_any_more_is_given_back_before_another_one_is_asked_for(answered: bool) -> None:
    """Else it would never end, or the later one would."""

    async def test(supervisor: FakeSupervisor, launching: asyncio.Task[tuple[int, LaunchedEngine]]) -> None:
        gc.collect()
        before = len(os.listdir("/dev/fd"))
        answer = started((await supervisor.next("engine"))["call"], [supervisor.board_fd] * 3)
        if answered:
            supervisor.send(answer)
            supervisor.client._on_readable()
        launching.cancel()
        await asyncio.gather(launching, return_exceptions=True)
        again = asyncio.create_task(supervisor.client.launch("model", server_config(), None))
        await asyncio.sleep(0)
        sent = [message for message, _ in supervisor.channel.receive()]
        assert [(message["type"], message["name"]) for message in sent] == [("release", "model"), ("engine", "model")]
        if not answered:
            supervisor.send(answer)
        supervisor.client._on_readable()
        assert len(os.listdir("/dev/fd")) == before
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    supervised(test)
