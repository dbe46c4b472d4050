"""`program` turns a function into a `Program`: something to run once, for many inputs at a time, or as a stream."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from quire.errors import RequestError, echo
from quire.lang.backend import Backend, Context
from quire.lang.parts import check_options
from quire.lang.state import Sink, State, derived_seed

MAX_THREADS = 64


def program(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose first parameter is the state; a decorator."""
    return Program(function)


class Program:
    """A function over a state, and the ways to run it.

    All of them take the function's own arguments, and these:

        backend: what generates. sampling: fields of `SamplingParams` for every gen that does not say otherwise.
        seed: makes all gens reproducible; each has a seed that depends on it and on the gen's place in the program.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        """Run within another program, on its state."""
        return self._function(state, *args, **kwargs)

    def run(
        self,
        *args: Any,
        backend: Backend,
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> State:
        """Run to the end and return the state. Forks that are still running then are cancelled.

        Raises:
            Whatever the function raised, or what went wrong in its state. A fork's error is raised where the fork is
            read, and nowhere else.
        """
        state = _start(backend, sampling, seed)
        self._execute(state, args, kwargs)
        if state.error is not None:
            raise state.error
        return state

    def run_batch(
        self,
        inputs: Sequence[Mapping[str, Any]],
        *,
        backend: Backend,
        num_threads: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> list[State]:
        """Run for many inputs side by side; the engine batches what they generate. Return the states in order.

        Args:
            inputs: the keyword arguments of each run. With a `seed`, each has its own, from it and its number.
            num_threads: most runs at a time, None means 64.

        A run that fails leaves the others alone: its state has an `error`, which is raised when the state is read.
        """
        if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
            raise RequestError(f"num_threads must be at least 1, got {echo(num_threads)}", param="num_threads")
        _check(sampling, seed)
        states: list[State] = []
        pool = ThreadPoolExecutor(min(len(inputs) or 1, num_threads or MAX_THREADS), "quire-program")
        try:
            for index in range(len(inputs)):
                states.append(_start(backend, sampling, None if seed is None else derived_seed(seed, index)))
            list(pool.map(lambda state, values: self._execute(state, (), values), states, inputs))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for state in states:
                state.close()
            pool.shutdown()
        return states

    def stream(
        self,
        *args: Any,
        backend: Backend,
        name: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Stream:
        """Run in a thread, and iterate over the pieces of the state's text while they come.

        Args:
            name: only the pieces of what the gens and selects of this name capture.
        """
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def sink(text: str, owner: str | None) -> None:
            if name is None or name == owner:
                pieces.put(text)

        state = _start(backend, sampling, seed, sink)

        def work() -> None:
            try:
                self._execute(state, args, kwargs)
            finally:
                pieces.put(None)

        thread = threading.Thread(target=work, name="quire-program", daemon=True)
        thread.start()
        return Stream(state, thread, pieces)

    def _execute(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the function and wait for what it appended. An error goes to the state; an interrupt is raised, too."""
        try:
            state.value = self._function(state, *args, **kwargs)
            state.wait()
        except Exception as error:  # thread boundary: readers of the state get it
            state.fail(error)
        finally:
            state.close()


def _start(backend: Backend, sampling: Mapping[str, Any] | None, seed: int | None, sink: Sink | None = None) -> State:
    """Return the state of a new run, which the backend closes if it is closed itself."""
    _check(sampling, seed)

    async def source() -> Context:
        return backend.context()

    state = State(backend, source, sampling=sampling or {}, seed=seed, sink=sink)
    backend.enter_run(state)
    return state


class Stream:
    """The text of a running program, as an iterator of pieces. Closing or dropping it cancels the program.

    Raises, at the end of the iteration, what `Program.run` would have raised.

    Attributes:
        state: the program's state.
    """

    def __init__(self, state: State, thread: threading.Thread, pieces: queue.SimpleQueue[str | None]) -> None:
        self.state = state
        self._thread = thread
        self._pieces = pieces
        self._over = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = None if self._over else self._pieces.get()
        if piece is not None:
            return piece
        over, self._over = self._over, True
        if not over and self.state.error is not None:
            raise self.state.error
        raise StopIteration

    def close(self) -> None:
        """Cancel the program if it still runs, and wait for its end."""
        self._over = True
        self.state.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Dropped without being closed. A destructor cannot wait, and an error would reach no caller.
        if not self._over:
            self.state.cancel()


def _check(sampling: Mapping[str, Any] | None, seed: int | None) -> None:
    check_options(sampling or {}, param="sampling")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise RequestError(f"seed must be an integer, got {echo(seed)}", param="seed", code="invalid_type")
