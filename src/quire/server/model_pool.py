"""`ModelPool`: decides which models of a server are in memory.

At most `max_loaded` models are in memory at a time. A request for another one loads it, in place of the least recently
used one. While all are in use, waiting requests are served in order of arrival: the model whose last request came first
accepts no more users until it has been replaced, so that no request starves. A model in use is never unloaded, a pinned
one never at all. Everything here happens on one event loop; of several fronts, one decides (`shared_models.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

from quire.engine.advice import size_text
from quire.engine.messages import check_sleep_level
from quire.errors import OverloadedError, QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.server.errors import HTTPProblem, shutting_down
from quire.server.model_list import ModelList
from quire.server.served_model import RESUMING, ServedModel

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
MAX_STAY_SECONDS = 30.0

Work = Callable[[ServedModel], Coroutine[Any, Any, None]]


class ModelPool(ModelList):
    """All models of one server, in the order of its options.

    Args:
        models: at least one, no two with the same name. Those that are loaded at start, and the pinned ones, must not
            be more than `max_loaded`.
        max_loaded: most models in memory at a time; None: all of them.
        load_timeout: seconds that loading may take, and that a request waits for it.
        idle_timeout: seconds without requests after which a model gives up memory; 0: never. unload_idle: all of its
            memory, unless it is pinned, rather than that of the KV cache.
        clock: monotonic seconds.

    Attributes:
        on_change: called when the state of a model may have changed. withdraw: called before a model is unloaded, has
            the other fronts leave its engine.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        max_loaded: int | None = None,
        load_timeout: float = 300.0,
        idle_timeout: float = 0.0,
        unload_idle: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(models)
        self._max_loaded = max_loaded or len(self.models)
        self._load_timeout = load_timeout
        self._idle_timeout = idle_timeout
        self._unload_idle = unload_idle
        self._clock = clock
        self._queue: list[ServedModel] = []  # those with waiters, in the order of their first ones
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False
        self._stay_timer: asyncio.TimerHandle | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.withdraw: Callable[[ServedModel], Awaitable[None]] = _nobody_else

    @property
    def keeps_all(self) -> bool:
        """Whether no model that is in memory ever has to leave it, or to sleep, unless an operator says so."""
        return self._max_loaded >= len(self.models) and not self._idle_timeout

    # ---- start and shutdown ----

    async def start(self, kept: Collection[str] | None = None) -> None:
        """Load the models that are loaded at start. Raises the first error.

        Args:
            kept: names of the models that are in memory, or being loaded, if this pool follows one of a process that
                has ended: their engines are used again, asleep or not, and the other models stay unloaded.
        """
        if kept is None:
            wanted = [model for model in self.models if model.at_start]
            outcomes = await asyncio.gather(*[self._wait_ready(model) for model in wanted])
            for model, outcome in zip(wanted, outcomes, strict=True):
                if outcome is None:
                    self.release(model)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        else:
            await self._resume([model for model in self.models if model.names[0] in kept])
        self._watcher = asyncio.create_task(self._watch(), name="quire-models")

    async def _resume(self, kept: Sequence[ServedModel]) -> None:
        """Use the engines of an earlier process; only an essential one is waited for, which may raise its error."""
        for model in self.models:
            model.note_started()
        for model in kept:
            model.last_used = model.last_acquired = self._clock()
            if model.llm.ready:
                model.note_ready(self._clock(), model.load_seconds)
            elif model.task is None:
                task = self._begin(model, RESUMING, self._load)
                if model.essential:
                    await task
                    if model.error is not None:
                        raise model.error

    async def close(self) -> None:
        """Close all engines. Waiters get the error of a server that shuts down."""
        self._closing = True
        self.abort_waiting()
        tasks = [*self._tasks, *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*[model.llm.close() for model in self.models])

    def abort_waiting(self) -> None:
        """Give all waiters the error of a server that shuts down."""
        for model in self.models:
            model.resolve_waiters(shutting_down())

    # ---- users ----

    async def acquire(self, model: ServedModel) -> None:
        """Have a model ready, and keep it so until `release`; may be cancelled.

        Raises:
            OverloadedError: too many requests wait for it, or it takes too long. HTTPProblem: it cannot be loaded.
        """
        if model.available and not self._closing:
            self._add_user(model)
            return
        if model.essential:
            await model.llm.check_health()
        model.note_death(self._clock())
        if self._closing:
            raise shutting_down()
        wait = model.retry_at - self._clock()
        if model.error is not None and wait > 0:
            raise model.unavailable(model.error, wait)
        if len(model.waiters) >= model.max_waiting:
            raise OverloadedError(
                f"{len(model.waiters)} requests wait for the model {model.names[0]} to be loaded; try again later",
                retry_after=5.0,
            )
        error = await self._wait_ready(model)
        if error is not None:
            final = isinstance(error, HTTPProblem | OverloadedError)
            raise error if final else model.unavailable(error, model.backoff)

    def release(self, model: ServedModel) -> None:
        """End a use that `acquire` began."""
        model.num_users -= 1
        assert model.num_users >= 0, "released more often than acquired"
        model.last_used = self._clock()
        if self._queue:
            self.advance()

    def _add_user(self, model: ServedModel) -> None:
        model.num_users += 1
        model.last_used = model.last_acquired = self._clock()

    def add_users(self, model: ServedModel, count: int) -> None:
        """Count uses that a pool before this one has allowed."""
        model.num_users += count

    async def _wait_ready(self, model: ServedModel) -> QuireError | None:
        """Wait until a model is ready, and become one of its users; return the error if that fails."""
        waiter: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        if model not in self._queue:
            self._queue.append(model)
        self.advance()
        try:
            await asyncio.wait([waiter], timeout=self._timeout(model))
        except asyncio.CancelledError:
            if waiter.done() and waiter.result() is None:
                self.release(model)
            model.remove_waiter(waiter)
            raise
        if waiter.done():
            return waiter.result()
        model.remove_waiter(waiter)
        self.advance()
        return OverloadedError(
            f"the model {model.names[0]} was not ready within {self._load_timeout:g} s; try again later",
            retry_after=10.0,
        )

    def _timeout(self, model: ServedModel) -> float | None:
        """Return the seconds that loading may take; None: any."""
        return None if model.essential else self._load_timeout

    # ---- loading and unloading ----

    def advance(self) -> None:
        """Serve waiters of available models; begin to load, or to make room for, the others."""
        if self._closing:
            return
        for model in self.models:
            model.draining = False
        free = self._max_loaded - sum(model.in_memory for model in self.models)
        coming = sum(model.action == "unloading" for model in self.models)
        for model in list(self._queue):
            if model.task is None and model.available:
                for _ in range(model.resolve_waiters(None)):
                    self._add_user(model)
            if not model.waiters:
                self._queue.remove(model)
            elif model.task is not None or model.draining:
                continue  # it is being loaded, or must be unloaded first
            elif model.in_memory or free > 0:
                free -= not model.in_memory
                self._begin(model, "loading", self._load)
            elif coming > 0:
                coming -= 1
            else:
                self._make_room()
        self.on_change()

    def _make_room(self) -> None:
        """Begin to unload a model, or to drain one, if any may be evicted: also one with waiters, which came later."""
        able = [model for model in self.models if model.can_evict and not model.draining]
        idle = [model for model in able if not model.in_use]
        if idle:
            victim = min(idle, key=lambda model: model.last_used)
            self._begin(victim, "unloading", self._unload)
        elif able:
            victim = min(able, key=lambda model: model.last_acquired)
            # A model that takes long to load stays for as long, or else the pool would thrash.
            stay = victim.ready_at + min(victim.load_seconds, MAX_STAY_SECONDS) - self._clock()
            victim.draining = stay <= 0
            if stay > 0:
                if self._stay_timer is not None:
                    self._stay_timer.cancel()
                self._stay_timer = asyncio.get_running_loop().call_later(stay, self.advance)

    def _begin(self, model: ServedModel, action: str, work: Work) -> asyncio.Task[None]:
        """Run `work` in the background; no other work on this model begins meanwhile."""
        assert model.task is None

        async def run() -> None:
            try:
                await work(model)
            except QuireError as error:
                logger.warning("model %s: %s failed: %s", model.names[0], action, error.message)
                raise
            finally:
                model.task, model.action = None, ""
                if not self._closing:
                    self.advance()

        model.action = action
        model.task = task = self._spawn(run(), f"quire-{action}")
        self.on_change()
        return task

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, QuireError):  # those were logged
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def _load(self, model: ServedModel) -> None:
        started = self._clock()
        waking = model.llm.is_sleeping
        try:
            async with asyncio.timeout(self._timeout(model)):
                await (model.llm.wake_up() if waking else self._start(model))
        except TimeoutError:
            # First, so that waiters get an error and the model its backoff even if closing fails.
            self._fail(model, QuireError(f"it was not loaded within {self._load_timeout:g} s", code="timeout"))
            if not waking:
                await model.llm.close()  # its engine would go on loading
        except QuireError as error:
            self._fail(model, error)
        except Exception as error:  # task boundary: waiters must get an error
            logger.exception("the model %s failed to load", model.names[0])
            self._fail(model, QuireError(f"{type(error).__name__} while loading"))
        else:
            model.note_ready(self._clock(), self._clock() - started)
            size = await _resident(model.llm)
            done = "awake" if waking else "found again" if model.action == RESUMING else "loaded"
            logger.info("model %s: %s after %.2f s, %s", model.names[0], done, self._clock() - started, size)

    async def _start(self, model: ServedModel) -> None:
        if model.llm.errored:
            await self.replace_engine(model)
        await model.llm.start()
        alone, first = len(self.models) == 1, model is self.first
        await model.llm.adapters.load_modules(model.names, first=first, alone=alone)

    async def replace_engine(self, model: ServedModel) -> None:
        """Close a model's engine, and put another one, not started, in its place."""
        assert model.make_llm is not None, "asked before"
        await model.llm.close()
        adapters, model.llm = model.llm.adapters, model.make_llm()
        model.llm.adapters.restore(adapters.state())

    def _fail(self, model: ServedModel, error: QuireError) -> None:
        if not model.essential:  # the server reports that one when it stops
            logger.error("model %s: cannot be loaded: %s", model.names[0], error.message)
        model.note_failure(error, self._clock())
        model.resolve_waiters(error)

    async def _unload(self, model: ServedModel) -> None:
        started = self._clock()
        size = await _resident(model.llm)
        await self.withdraw(model)
        await self.replace_engine(model)
        model.backoff = 0.0  # it was in good health
        logger.info("model %s: unloaded after %.2f s, %s freed", model.names[0], self._clock() - started, size)

    async def _sleep(self, model: ServedModel, level: int) -> None:
        started = self._clock()
        freed = await model.llm.sleep(level)
        seconds = self._clock() - started
        logger.info("model %s: asleep (%d) after %.2f s, %s freed", model.names[0], level, seconds, size_text(freed))

    # ---- idle models ----

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Free idle models, and reload pinned ones that have died; called periodically."""
        now = self._clock()
        for model in self.models:
            if model.task is not None or model.waiters:
                continue
            failed = model.llm.errored or (model.error is not None and not model.llm.ready)
            if failed and model.make_llm is not None and not model.essential:
                model.note_death(now)
                if model.pinned and model.at_start and now >= model.retry_at:
                    self._spawn(self._revive(model), "quire-revive")
            elif self._idle_timeout and model.can_sleep and now - model.last_used >= self._idle_timeout:
                self._free_idle(model)
        if self._queue:
            self.advance()  # an engine may have died, or finished work that has no user
        self.on_change()

    async def _revive(self, model: ServedModel) -> None:
        if await self._wait_ready(model) is None:
            self.release(model)

    def _free_idle(self, model: ServedModel) -> None:
        if self._unload_idle and not model.pinned and model.make_llm is not None:
            self._begin(model, "unloading", self._unload)
        elif not model.llm.is_sleeping:
            self._begin(model, "going to sleep", partial(self._sleep, level=1))

    # ---- operator requests ----

    async def load(self, model: ServedModel) -> None:
        """Load or wake a model now, however often that has failed. Raises as `acquire`."""
        model.retry_at = 0.0
        async with self.using(model):
            pass

    async def unload(self, model: ServedModel) -> None:
        """Free all memory of a model until a request needs it, also of a pinned one.

        Raises `HTTPProblem` while it is used, and where it could not be loaded again.
        """
        await self._wait_unused(model)
        if model.make_llm is None:
            raise HTTPProblem(409, "this server cannot unload its model", code="not_allowed")
        if model.in_memory:
            await asyncio.shield(self._begin(model, "unloading", self._unload))

    async def sleep(self, model: ServedModel, level: int) -> None:
        """Put a model to sleep until a request needs it. Raises `HTTPProblem` while it is used, or not loaded.

        Raises `QuireError` if the engine cannot sleep.
        """
        check_sleep_level(level)
        await self._wait_unused(model)
        if not model.in_memory:
            raise HTTPProblem(409, f"the model {model.names[0]} is not loaded", code="model_not_loaded")
        await asyncio.shield(self._begin(model, "going to sleep", partial(self._sleep, level=level)))

    async def _wait_unused(self, model: ServedModel) -> None:
        """Wait until no work on a model runs. Raises `HTTPProblem` if it is in use then."""
        await _task_done(model)
        if model.in_use or model.waiters:
            raise HTTPProblem(409, f"the model {model.names[0]} is in use; try again later", code="model_in_use")


async def _nobody_else(model: ServedModel) -> None:
    """Do nothing: no other process uses the engine."""


async def _task_done(model: ServedModel) -> None:
    while model.task is not None:
        await asyncio.wait([model.task])


async def _resident(llm: AsyncLLM) -> str:
    """Return the resident memory of an engine's process as text."""
    try:
        async with asyncio.timeout(1.0):
            return size_text(int((await llm.call("memory"))["resident"]))
    except (QuireError, TimeoutError, KeyError):
        return "unknown memory"
