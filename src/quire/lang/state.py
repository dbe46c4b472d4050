"""`State`: one growing text or conversation that a program appends to, executed in the background in order.

`state += gen(...)` returns at once. A task on the backend's loop executes what was appended, one part after the other;
`state["name"]` waits until that value is there. A fork has a task of its own, which begins with a copy of its
parent's context as it is at that place of the program.

When a part fails, the state keeps the error, and everything appended later fails with it. It is raised where something
is read: a value, the text, the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quire.errors import QuireError, RequestError, echo
from quire.lang.backend import Backend, Capture, Context
from quire.lang.parts import Begin, End, Expression, Gen, Part, Select, parts_of

MAX_FORKS = 1024

Job = Callable[[], Awaitable[Any]]
# Called with each new piece of a state's text, and the name of the gen or select it belongs to.
Sink = Callable[[str, str | None], None]
Value = Capture | list[Capture]


class ProgramCancelledError(QuireError):
    """The state was cancelled, or the program ended before this was generated."""

    default_code = "cancelled"


class State:
    """Created by running a program. Only one thread at a time may append to it; several may read.

    Args:
        sampling: options for every gen and select. seed: None leaves the choice of seeds to the backend; otherwise each
            gen without a seed of its own has one that depends on `seed`, `path` and its number in the state.
        path: the indices of the forks that lead to it. source: gives the context to begin with.
        sink: receives the text as it is generated.

    Attributes:
        value: what the program's function returned, once it has.
    """

    def __init__(
        self,
        backend: Backend,
        source: Callable[[], Awaitable[Context]],
        *,
        sampling: Mapping[str, Any],
        seed: int | None = None,
        path: tuple[int, ...] = (),
        values: Mapping[str, Future[Value]] | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.value: Any = None
        self._backend = backend
        self._loop = backend.loop()
        self._sampling = dict(sampling)
        self._seed = seed
        self._path = path
        self._sink = sink
        self._values: dict[str, Future[Value]] = dict(values or {})
        self._own: set[str] = set()
        self._forks: list[State] = []
        self._num_gens = 0
        self._context: Context | None = None
        self._error: BaseException | None = None
        self._current: asyncio.Future[Any] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: asyncio.Queue[tuple[Job, Future[Any]] | None] = asyncio.Queue()

        async def begin() -> None:
            self._context = await source()

        self._submit(begin)
        self._ended: Future[None] = asyncio.run_coroutine_threadsafe(self._run_jobs(), self._loop)

    # Appending

    def __iadd__(self, value: str | Expression) -> State:
        """Append a text or an expression. Raises `RequestError` for anything else, and once the program has ended."""
        for part in parts_of(value):
            self._append(part)
        return self

    @contextlib.contextmanager
    def turn(self, role: str) -> Iterator[State]:
        """What is appended within the block is one turn of `role`."""
        self._append(Begin(role))
        yield self
        self._append(End())

    def system(self) -> contextlib.AbstractContextManager[State]:
        """A system turn, for a `with` block."""
        return self.turn("system")

    def user(self) -> contextlib.AbstractContextManager[State]:
        """A user's turn, for a `with` block."""
        return self.turn("user")

    def assistant(self) -> contextlib.AbstractContextManager[State]:
        """An assistant's turn, for a `with` block."""
        return self.turn("assistant")

    def fork(self, count: int) -> list[State]:
        """Return states that go on from here, each on its own, at the same time. They know all values so far.

        Raises:
            RequestError: `count` is not within [1, 1024], or the program has ended.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_FORKS:
            raise RequestError(f"count must be an integer from 1 to {MAX_FORKS}, got {echo(count)}", param="count")

        async def copy() -> Context:
            assert self._context is not None
            return self._context.copy()

        first = len(self._forks)
        for index in range(first, first + count):
            snapshot = self._submit(copy)
            self._forks.append(
                State(
                    self._backend,
                    lambda snapshot=snapshot: asyncio.shield(asyncio.wrap_future(snapshot)),  # type: ignore[misc]
                    sampling=self._sampling,
                    seed=self._seed,
                    path=(*self._path, index),
                    values=self._values,
                )
            )
        return self._forks[first:]

    def join(self, forks: Sequence[State]) -> None:
        """Wait for forks, and take over what they captured: `state[name]` is the list of their values, in order.

        Forks that have no such name are left out, and lists that a fork took over from its own forks are joined on.
        Raises nothing if a fork failed; reading a name that it was to capture does.
        """
        names = {name: None for fork in forks for name in fork._values if name in fork._own}
        for fork in forks:
            fork._drain()
        for name in names:
            self._values[name] = _gather([fork._values[name] for fork in forks if name in fork._own])
            self._own.add(name)

    def cancel(self) -> None:
        """End the state and its forks: a running gen is aborted in the engine, and what is still missing fails."""
        self.fail(ProgramCancelledError("the state was cancelled"))

    # Reading

    def __getitem__(self, name: str) -> Any:
        """Wait for a value and return its text; after `join` a list of texts.

        Raises:
            RequestError: nothing has this name. Otherwise what kept it from being generated.
        """
        value = self.capture(name)
        return value.text if isinstance(value, Capture) else [item.text for item in value]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def capture(self, name: str) -> Any:
        """As `state[name]`, but return the `Capture`, which says more than the text."""
        if name not in self._values:
            known = ", ".join(map(repr, self._values)) or "nothing"
            raise RequestError(f"nothing is called {echo(name)} here; known: {known}", param="name")
        return self._values[name].result()

    def text(self) -> str:
        """Wait for everything appended so far and return it; each turn is a line "role: content"."""
        return self._read().shown()

    def messages(self) -> list[dict[str, str]]:
        """Wait for everything appended so far and return the turns as chat messages; [] in a program without."""
        return self._read().messages()

    def wait(self) -> None:
        """Wait for everything appended so far. Raises what went wrong."""
        self._read()

    @property
    def error(self) -> BaseException | None:
        """What went wrong so far."""
        return self._error

    # Execution

    def _append(self, part: Part) -> None:
        if isinstance(part, Gen):
            options = {**self._sampling, **part.options}
            self._capture(part.name, lambda context, emit: context.generate(part, self._seeded(options), emit))
        elif isinstance(part, Select):
            options = dict(self._sampling)
            self._capture(part.name, lambda context, emit: context.select(part, self._seeded(options), emit))
        else:
            self._submit(lambda: self._write(part))

    def _capture(self, name: str | None, work: Callable[[Context, Callable[[str], None]], Awaitable[Capture]]) -> None:
        async def run() -> Capture:
            assert self._context is not None
            return await work(self._context, lambda text: self._emit(text, name))

        future = self._submit(run)
        if name is not None:
            self._values[name] = future
            self._own.add(name)

    async def _write(self, part: Part) -> None:
        assert self._context is not None
        match part:
            case Begin(role):
                self._emit(self._context.begin(role), None)
            case End():
                self._emit(self._context.end(), None)
            case str():
                self._context.literal(part)
                self._emit(part, None)

    def _seeded(self, options: dict[str, Any]) -> dict[str, Any]:
        """Add the seed of a gen or select; called as they are executed, so in order."""
        number, self._num_gens = self._num_gens, self._num_gens + 1
        if self._seed is None or options.get("seed") is not None:
            return options
        return {**options, "seed": derived_seed(self._seed, *self._path, number)}

    def _emit(self, text: str, name: str | None) -> None:
        if self._sink is not None and text:
            self._sink(text, name)

    def _submit(self, job: Job) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RequestError("the program has ended; nothing can be appended to its state")
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, (job, future))
        return future

    async def _run_jobs(self) -> None:
        """Run one job after the other; after an error fail all of them."""
        while (item := await self._jobs.get()) is not None:
            job, future = item
            if self._error is None:
                self._current = asyncio.ensure_future(job())
                try:
                    result = await self._current
                except asyncio.CancelledError:
                    self._error = self._error or ProgramCancelledError("the state was cancelled")
                except Exception as error:  # task boundary: readers of the state get it
                    self._error = error
                finally:
                    self._current = None
            if self._error is None:
                future.set_result(result)
            else:
                future.set_exception(self._error)

    def _stop(self, error: BaseException) -> None:
        """On the loop: fail everything from now on, and what runs now, too."""
        self._error = self._error or error
        if self._current is not None:
            self._current.cancel()

    def _drain(self) -> None:
        """Wait for everything appended so far, whether it failed or not."""

        async def nothing() -> None:
            pass

        try:
            done = self._submit(nothing)
        except RequestError:
            done = self._ended
        done.exception()

    def _read(self) -> Context:
        self._drain()
        if self._error is not None:
            raise self._error
        assert self._context is not None
        return self._context

    def fail(self, error: BaseException) -> None:
        """Fail everything that is not there yet with `error`."""
        for fork in self._forks:
            fork.fail(error)
        with contextlib.suppress(RuntimeError):  # the backend was closed, and everything with it
            self._loop.call_soon_threadsafe(self._stop, error)

    def close(self) -> None:
        """Cancel forks that still run, and this state if it does; wait until all has ended. What is there stays."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:

            def stop() -> None:
                if self._current is not None or not self._jobs.empty():
                    self._stop(ProgramCancelledError("the program ended before this was generated"))
                self._jobs.put_nowait(None)

            self._loop.call_soon_threadsafe(stop)
        for fork in self._forks:
            fork.close()
        self._ended.result()
        self._backend.leave_run(self)


def derived_seed(*numbers: int) -> int:
    """Return a seed in [0, 2**63) that depends on all the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _gather(futures: Sequence[Future[Value]]) -> Future[Value]:
    """Return the captures of finished futures as one value, or the first error."""
    joined: Future[Value] = Future()
    error = next((item.exception() for item in futures if item.exception() is not None), None)
    if error is not None:
        joined.set_exception(error)
    else:
        captures = [item.result() for item in futures]
        joined.set_result([one for item in captures for one in (item if isinstance(item, list) else [item])])
    return joined
