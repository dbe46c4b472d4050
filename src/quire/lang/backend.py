"""What a program runs on: `Backend`, which has an event loop in a thread, and `Context`, the text of one state.

Each state has a `Context`, and forks copy it. `local` and `endpoint` implement both. How programs are executed lives in
`state` and `program`.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from quire.errors import GenerationError, QuireError, RequestError, echo
from quire.lang.parts import ROLES, Gen, Select
from quire.structured_outputs import StructuredOutputParams

# Sampling options that would keep a choice from being written to its end.
LENGTH_OPTIONS = frozenset(("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"))

# Called with each new piece of a text.
Emit = Callable[[str], None]


@dataclass(slots=True)
class Capture:
    """What a gen or select produced.

    Attributes:
        finish_reason: "stop", "length", or None for a select by log-probability. stop_reason: the stop string or id.
        token_ids: as generated; None where a backend does not know them.
        num_prompt_tokens, num_cached_tokens: length of the prompt, and how many of these had their keys and values
            cached; None where a backend does not know. Of a select by log-probability: sums over its requests.
        scores: of a select by log-probability, mean log-probability per token of each choice.
        speculated: whether the text came from an earlier call (`OpenAIBackend(speculate=True)`).
    """

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    scores: dict[str, float] | None = None
    speculated: bool = False


@dataclass(slots=True)
class Turn:
    """A message; `open` until its turn has ended."""

    role: str
    content: str = ""
    open: bool = True

    def message(self) -> dict[str, str]:
        """Return the turn as a chat message."""
        return {"role": self.role, "content": self.content}


class Context(ABC):
    """The growing text or conversation of one state. Its methods run on the backend's loop, one at a time.

    Attributes:
        text: the text of a program without roles. turns: those of a program with roles, which has no other text.
    """

    def __init__(self) -> None:
        self.text = ""
        self.turns: list[Turn] = []

    @property
    def open_turn(self) -> Turn | None:
        """The turn that has not ended."""
        return self.turns[-1] if self.turns and self.turns[-1].open else None

    def begin(self, role: str) -> str:
        """Begin a turn; return what it adds to the text that is shown."""
        if role not in ROLES:
            raise RequestError(f"role must be one of {', '.join(ROLES)}, got {echo(role)}", param="role")
        if self.text:
            raise RequestError("a program with text outside of turns cannot have turns", param="role")
        if self.open_turn is not None:
            raise RequestError(f"a turn of {role} began within a turn of {self.open_turn.role}", param="role")
        self.turns.append(Turn(role))
        return f"{role}: "

    def end(self) -> str:
        """End the turn; return as `begin`."""
        turn = self.open_turn
        if turn is None:
            raise RequestError("a turn ended that had not begun")
        turn.open = False
        return "\n"

    def literal(self, text: str) -> None:
        """Append text of the program."""
        self.append(text)

    def append(self, text: str) -> None:
        """Append text, in the open turn if the program has roles. Raises `RequestError` between turns."""
        turn = self.open_turn
        if turn is not None:
            turn.content += text
        elif self.turns:
            raise RequestError("a program with roles cannot have text outside of turns; put it in a turn")
        else:
            self.text += text

    def check_open(self) -> None:
        """Raise `RequestError` where nothing may be appended."""
        self.append("")

    def shown(self) -> str:
        """Return all of it for human eyes: each turn is a line "role: content"."""
        if not self.turns:
            return self.text
        return "".join(f"{turn.role}: {turn.content}" + ("" if turn.open else "\n") for turn in self.turns)

    def messages(self) -> list[dict[str, str]]:
        """Return the turns as chat messages."""
        return [turn.message() for turn in self.turns]

    def copy(self) -> Self:
        """Return an independent copy, for a fork. Fields that subclasses add are replaced, never changed in place."""
        fork = copy.copy(self)
        fork.turns = [replace(turn) for turn in self.turns]
        return fork

    @abstractmethod
    async def generate(self, gen: Gen, options: dict[str, Any], emit: Emit) -> Capture:
        """Let the model write, and append that.

        Args:
            options: those of the gen over those of the run. emit: given the text as it comes.

        Raises:
            QuireError: it was not possible; nothing was appended.
        """

    @abstractmethod
    async def select(self, select: Select, options: dict[str, Any], emit: Emit) -> Capture:
        """Let the model choose, and append that. Arguments and errors as for `generate`."""

    async def constrained(self, select: Select, options: dict[str, Any], emit: Emit) -> Capture:
        """Let the model generate one of the choices, with the sampling options that do not concern the length."""
        kept = {name: value for name, value in options.items() if name not in LENGTH_OPTIONS}
        kept["max_tokens"] = 1 + max(len(choice.encode()) for choice in select.choices)  # a token has a byte, or more
        choices = StructuredOutputParams(choice=list(select.choices))
        capture = await self.generate(Gen(select.name, {}, choices), kept, emit)
        if capture.text not in select.choices:
            raise GenerationError(f"{echo(capture.text)} was generated, which is none of the choices")
        return capture


class Closable(Protocol):
    """A running program, as far as its backend needs to know it."""

    def close(self) -> None:
        """Cancel what still runs, and wait until it has ended."""


class Backend(ABC):
    """Runs programs. Use it as a context manager, or call `close`. Any threads may use it at the same time.

    It has an event loop in a thread of its own, which starts with the first run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._runs: set[Closable] = set()

    @abstractmethod
    def context(self) -> Context:
        """Return an empty context."""

    @abstractmethod
    async def shut_down(self) -> None:
        """Release what the backend holds; runs on its loop, once, and only if the loop was ever started."""

    def enter_run(self, run: Closable) -> None:
        """Register a run that `close` has to end. Raises `QuireError` if the backend is closed."""
        with self._lock:
            if self._closed:
                raise QuireError("this backend was closed")
            self._runs.add(run)

    def leave_run(self, run: Closable) -> None:
        """Unregister a run that has ended, if it is registered."""
        with self._lock:
            self._runs.discard(run)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. Raises `QuireError` if the backend is closed."""
        with self._lock:
            if self._closed:
                raise QuireError("this backend was closed")
            if self._loop is None:
                started: Future[asyncio.AbstractEventLoop] = Future()
                self._thread = threading.Thread(target=_serve, args=(started,), name="quire-lang", daemon=True)
                self._thread.start()
                self._loop = started.result()
            return self._loop

    def close(self) -> None:
        """Cancel all runs and release everything. Later calls do nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            runs = list(self._runs)
        if closed:
            return
        for run in runs:
            run.close()
        if self._loop is not None and self._thread is not None:
            try:
                asyncio.run_coroutine_threadsafe(self.shut_down(), self._loop).result()
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(started: Future[asyncio.AbstractEventLoop]) -> None:
    """The thread of a backend: run a loop until it is stopped, then end what is left."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.call_soon(started.set_result, loop)
        loop.run_forever()
