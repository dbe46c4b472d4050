"""`SupervisorClient`: what a front gets from its supervisor: connections, engines, what others have published."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from quire.config import EngineConfig
from quire.engine.launch import LaunchedEngine, engine_options
from quire.engine.process import ProcessClient
from quire.errors import EngineDeadError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import QueueLoad, StatListener
from quire.server.errors import HTTPProblem, retry_headers
from quire.server.fronts import FrontGoneError, Fronts
from quire.server.limits import QuotaOwner
from quire.server.model_entry import served_names
from quire.supervisor.board import Board
from quire.supervisor.channel import Channel, ConnectionQueue, Message
from quire.supervisor.connections import Admission
from quire.supervisor.quotas import Answer

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.1
MAX_TAKEN = 4  # connections at a time, before other fronts, and what runs here, get their turn
ASK_SECONDS = 1.0
RATE_SCALE = 1000  # the board has whole numbers only
QUOTA_SECONDS = 2.0  # a supervisor that does not answer by then is stopped, or the machine has no time for it

Reply = tuple[Message, list[int]]


class SupervisorClient(Fronts):
    """The front's end of the channel. Everything but its constructor belongs to the event loop.

    Args:
        row: of the board, which is this front's.
        published: values by key, as all fronts have published them so far.

    Attributes:
        on_connection: called with the descriptor of a connection, its number and how it was counted; a connection from
            another front has no number.
        on_drain, on_reload: called when the server is to stop, or to read its files again.
    """

    def __init__(
        self, channel: Channel, queue: ConnectionQueue, board: Board, row: int, published: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._queue = queue
        self._board = board
        super().__init__(row)
        self.rows = []
        self.quotas = SupervisorQuotas(self)
        self._answering: set[asyncio.Task[None]] = set()
        self.published = published
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing = False
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._asked: dict[int, int] = {}  # by the number of a call, the front that is to answer
        self._num_calls = 0
        self._exit_codes: dict[int, Future[int]] = {}
        self._closed: list[int] = []
        self.on_connection: Callable[[int, int | None, Admission], None] = lambda fd, number, admission: os.close(fd)
        self.on_drain: Callable[[], None] = lambda: None
        self.on_reload: Callable[[], None] = lambda: None

    def attach(self) -> None:
        """Begin to read, on the running event loop, and to take connections."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._on_readable)
        self._loop.add_reader(self._queue, self._on_connection)
        self._send({"type": "serving"})

    async def beat(self, is_alive: Callable[[], bool]) -> None:
        """Show that this process reacts, until cancelled; `is_alive`: whether /livez says so."""
        while True:
            self._board.beat(self.row, alive=is_alive())
            await asyncio.sleep(BEAT_SECONDS)

    def share_receiving_bytes(self, num_bytes: int) -> int:
        """Record the bytes of bodies that this front has; return those of all fronts."""
        self._board.set_receiving_bytes(self.row, num_bytes)
        return self._board.receiving_bytes()

    def share_load(self, queue: int, load: QueueLoad) -> QueueLoad:
        """Record what this front has queued at an engine, by its number; return what the other fronts have."""
        self._board.set_queue(self.row, queue, (load.num_requests, load.num_tokens, round(load.rate * RATE_SCALE)))
        num_requests, num_tokens, rate = self._board.queue_of_others(self.row, queue)
        return QueueLoad(num_requests, num_tokens, rate / RATE_SCALE)

    @property
    def num_connections(self) -> int:
        return self._board.num_connections

    def is_crowded(self) -> bool:
        """Whether connections get scarce, those of all fronts counted."""
        return self._board.is_crowded

    def publish(self, key: str, value: Any) -> None:
        super().publish(key, value)
        self._send({"type": "publish", "key": key, "value": value})

    def ready(self, model: str) -> None:
        """Say that the models are loaded; `model`: the first one's name."""
        self._send({"type": "ready", "model": model})

    def stopping(self) -> None:
        """Take no further connections."""
        if self._loop is not None:
            self._loop.remove_reader(self._queue)
        self._send({"type": "stopping"})

    def exit(self, code: int, error: str = "") -> None:
        """Say that this process exits on purpose; unless the server is being stopped, it is to exit with this code."""
        self._send({"type": "exit", "code": code, "error": error})
        while self._channel.unsent and not self._channel.closed:
            self._channel.flush()

    def close_connection(self, number: int | None) -> None:
        """Say that a connection was closed."""
        if number is None:
            return
        self._closed.append(number)
        if len(self._closed) == 1:
            assert self._loop is not None
            self._loop.call_soon(self._send_closed)

    def _send_closed(self) -> None:
        closed, self._closed = self._closed, []
        self._send({"type": "closed", "numbers": closed})

    # ---- quotas of keys ----

    async def call_quotas(self, method: str, arguments: Sequence[Any]) -> Any:
        """Return what a method of the supervisor's `QuotaShare` for this front returns."""
        reply, _ = await self._call({"type": "quota", "method": method, "arguments": arguments})
        return reply["value"]

    def tell_quotas(self, method: str, arguments: Sequence[Any]) -> None:
        """Call a method of the supervisor's `QuotaShare` for this front."""
        self._send({"type": "quota", "method": method, "arguments": arguments})

    # ---- other fronts ----

    async def ask(self, row: int, method: str, value: Any = None, *, seconds: float | None = ASK_SECONDS) -> Any:
        self._num_calls += 1
        call = self._num_calls
        assert self._loop is not None, "attached before"
        answer = self._calls[call] = self._loop.create_future()
        self._asked[call] = row
        self._send({"type": "ask", "to": row, "call": call, "method": method, "value": value})
        try:
            async with asyncio.timeout(seconds):
                reply, _ = await answer
        except TimeoutError:
            raise FrontGoneError(f"front {row} does not answer") from None
        finally:
            self._calls.pop(call, None)
            self._asked.pop(call, None)
        if "error" in reply:
            raise FrontGoneError(f"front {row} does not answer: {reply['error']}")
        return reply["value"]

    def connect(self, row: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._send({"type": "relay", "to": row}, [theirs.fileno()])
        return ours

    async def _answer(self, message: Message) -> None:
        reply: Message = {"type": "answer", "to": message["from"], "call": message["call"]}
        try:
            reply["value"] = await self.handlers[message["method"]](message["value"])
        except Exception as error:  # boundary: the other front must learn of it
            logger.exception("a question of another front, %s, cannot be answered", message["method"])
            reply["error"] = type(error).__name__
        self._send(reply)

    # ---- engines ----

    async def launch(self, name: str, config: EngineConfig, replaced: int | None) -> tuple[int, LaunchedEngine]:
        """Return the engine of a model, which is started if there is none, and its number.

        Args:
            replaced: number of the engine that is to be replaced; if another front has done that, its engine is
                returned.

        Raises `EngineDeadError` if no process can be started.
        """
        answer = self._begin({"type": "engine", "name": name, "options": engine_options(config), "replaced": replaced})
        try:
            reply, fds = await answer
        except asyncio.CancelledError:
            self._give_back(name, answer)
            raise
        if "error" in reply:
            raise EngineDeadError(f"the engine process cannot be started: {reply['error']}")
        number = reply["engine"]
        exit_code = self._exit_codes[number]
        listener, heartbeat, stacks = fds
        return number, LaunchedEngine(
            reply["pid"],
            listener,
            heartbeat,
            stacks,
            exit_code,
            signal=lambda sent: self._send({"type": "signal", "engine": number, "signal": sent}),
            end=lambda reacts: self._release(number, reacts),
        )

    async def _release(self, number: int, reacts: bool) -> None:
        await self._call({"type": "release", "engine": number, "reacts": reacts})
        exit_code = self._exit_codes.pop(number, None)
        if exit_code is not None and not exit_code.done():  # others use it, or it ended unseen
            exit_code.set_result(0)

    def _give_back(self, name: str, answer: asyncio.Future[Reply]) -> None:
        """Release the engine that a cancelled `launch` was given, or is about to be given.

        By its name: the message must come before that of a later `launch` of the same model.
        """
        if not answer.cancelled():
            reply, fds = answer.result()
            self._exit_codes.pop(reply.get("engine", 0), None)
            for fd in fds:
                os.close(fd)
        self._begin({"type": "release", "name": name, "reacts": False})

    def _begin(self, message: Message) -> asyncio.Future[Reply]:
        """Ask the supervisor something; return the future of its reply."""
        assert self._loop is not None, "attached before"
        self._num_calls += 1
        answer = self._calls[self._num_calls] = self._loop.create_future()
        self._send({**message, "call": self._num_calls})
        return answer

    async def _call(self, message: Message) -> Reply:
        return await self._begin(message)

    # ---- messages ----

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        self._channel.send(message, fds)
        self._watch()

    def _watch(self) -> None:
        if self._loop is None or self._loop.is_closed() or self._channel.unsent == self._writing:
            return
        self._writing = self._channel.unsent
        if self._writing:
            self._loop.add_writer(self._channel, self._on_writable)
        else:
            self._loop.remove_writer(self._channel)

    def _on_writable(self) -> None:
        self._channel.flush()
        self._watch()

    def _on_connection(self) -> None:
        """Take some connections; others may be for other fronts."""
        for _ in range(MAX_TAKEN):
            taken = self._queue.take()
            if taken is None:
                return
            message, fd = taken
            self._send({"type": "taken", "number": message["number"]})
            if fd is None:
                self.close_connection(message["number"])
            else:
                self.on_connection(fd, message["number"], Admission("", message["excess"], message["may_probe"]))

    def _on_readable(self) -> None:
        for message, fds in self._channel.receive():
            self._handle(message, fds)
        if self._channel.closed:
            os._exit(1)  # the supervisor is gone

    def _handle(self, message: Message, fds: Sequence[int]) -> None:
        match message["type"]:
            case "result" | "answer":
                answer = self._calls.pop(message["call"], None)
                if answer is None or answer.done():
                    for fd in fds:
                        os.close(fd)
                else:
                    if "engine" in message:  # now: the next message may say that it has ended
                        exit_code = self._exit_codes[message["engine"]] = Future()
                        exit_code.set_running_or_notify_cancel()
                    answer.set_result((message, list(fds)))
            case "ask":
                task = asyncio.create_task(self._answer(message), name="quire-answer")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case "relay":
                self.on_connection(fds[0], None, Admission("", relayed=True))
            case "fronts":
                self._note_rows(message["rows"])
            case "exited":
                ended = self._exit_codes.get(message["engine"])
                if ended is not None and not ended.done():
                    ended.set_result(message["code"])
            case "published":
                self.published[message["key"]] = message["value"]
                for note in self.on_published:
                    note(message["key"])
            case "drain":
                self.on_drain()
            case "reload":
                self.on_reload()

    def _note_rows(self, rows: list[int]) -> None:
        """Note which fronts serve; those that do not any more owe no answers."""
        self.rows = rows
        for call, row in self._asked.items():
            answer = self._calls.get(call)
            if row not in rows and answer is not None and not answer.done():
                answer.set_result(({"error": "gone"}, []))
        for note in self.on_change:
            note()


class SupervisorQuotas(QuotaOwner):
    """The supervisor's quotas, which are those of all fronts."""

    def __init__(self, supervisor: SupervisorClient) -> None:
        super().__init__()
        self._supervisor = supervisor

    async def ask(self, method: str, *arguments: Any) -> Answer:
        try:
            async with asyncio.timeout(QUOTA_SECONDS):
                answer: Answer = await self._supervisor.call_quotas(method, arguments)
        except TimeoutError:
            raise HTTPProblem(
                503,
                "the limits of this key cannot be looked up; try again later",
                code="engine_unavailable",
                headers=retry_headers(1.0),
            ) from None
        return answer

    def tell(self, method: str, *arguments: Any) -> None:
        self._supervisor.tell_quotas(method, arguments)


class AsyncLLMFactory:
    """Makes an `AsyncLLM` of a model whose engines are the supervisor's."""

    def __init__(self, supervisor: SupervisorClient) -> None:
        self._supervisor = supervisor
        self._numbers: dict[str, int] = {}  # of the engine that each model has, or had last

    def __call__(self, config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
        """Return the engine and its front end; the engine may run already."""
        name = served_names(config)[0]

        async def launch(config: EngineConfig, *, replaced: bool) -> LaunchedEngine:
            old = self._numbers.get(name) if replaced else None
            self._numbers[name], launched = await self._supervisor.launch(name, config, old)
            return launched

        first = ProcessClient(config, launch=partial(launch, replaced=False))
        again = partial(ProcessClient, config, launch=partial(launch, replaced=True))
        return AsyncLLM(config, listeners=listeners, client=first, make_client=again)
