"""`RecoveringClient`: an engine client that replaces an engine that died or hangs.

It has the interface of `EngineClient`. When the engine dies, a new engine is started and sent all unfinished requests
with the tokens that they have (`replay.py`), so that a stream pauses and then continues. `quarantine.py` finds the
request that killed the engine, if one did; while a request is isolated, all others wait, also those of other processes
that use the engine (`engine/isolation.py`). An engine that sends no
heartbeat for longer than its work explains is killed, and replaced in the same way; so is a new engine that takes much
longer than the first one to load its model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from quire import logs
from quire.engine.client import EngineClient
from quire.engine.messages import (
    AbortRequests,
    Alone,
    Call,
    CallResult,
    EngineOutputs,
    Isolate,
    Ready,
    StepAside,
    SteppedAside,
    ToEngine,
)
from quire.engine_request import EngineRequest
from quire.errors import EngineDeadError, GenerationError, QuireError, listed
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.quarantine import Quarantine

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
STALLED_SECONDS = 1.5  # of unexplained silence, after which the server is not ready
STACKS_SECONDS = 2.0  # for `dump_stacks`, which takes half a second at most
SLEPT_SECONDS = 1.0  # a poll delayed by so much means that this process, and perhaps the engine, was suspended
MIN_LOAD_TIMEOUT = 600.0  # of a new engine until its model is loaded [s]
LOAD_TIMEOUT_FACTOR = 4.0  # over what the first engine took
RETRY_SECONDS = 0.2  # before another engine is started after one that did not start; longer after several
MAX_LOGGED = 8


class RecoveringClient:
    """Sends messages to the current engine and receives its messages. `EngineClient` describes methods of both.

    Args:
        client: of the first engine. make_client: makes the clients of later engines; None: an engine that dies is not
            replaced.
        outputs: returns the processor that has the unfinished requests.
        max_restarts: most deaths within a minute that no poison request explains.
        stall_timeout: seconds of unexplained silence after which an engine is killed.
        on_death: called at every death, before anything else. on_restart: called when another engine is ready.

    Attributes:
        recovering: whether the engine is being replaced.
        stalled: whether it has been silent for longer than `STALLED_SECONDS` without a reason.
        num_restarts: how many engines followed the first one.
        last_recovery_seconds: from the last death until the new engine was ready; None if there was none.
    """

    def __init__(
        self,
        client: EngineClient,
        make_client: Callable[[], EngineClient] | None,
        *,
        outputs: Callable[[], OutputProcessor],
        max_restarts: int,
        stall_timeout: float,
        on_death: Callable[[], None] = lambda: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._make_client = make_client
        self._outputs = outputs
        self._max_restarts = max_restarts if make_client is not None else 0
        self._stall_timeout = stall_timeout
        self._on_death = on_death
        self._on_restart = on_restart
        self._quarantine = Quarantine(self._max_restarts)
        self._up = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._fence: int | None = None  # id of the call whose answer follows the abort of the last isolated request
        self._num_fences = 0
        self._aside = False  # whether another client isolates a request
        self._asked = self._alone = False  # to be alone in the engine; it was granted
        self._killed: EngineClient | None = None
        self._load_timeout = MIN_LOAD_TIMEOUT
        self.recovering = False
        self.stalled = False
        self.num_restarts = 0
        self.last_recovery_seconds: float | None = None

    @property
    def running(self) -> bool:
        """Whether messages reach an engine."""
        return self._up.is_set() and not self.recovering

    @property
    def replaceable(self) -> bool:
        """Whether there may be another engine after this one."""
        return self._max_restarts > 0

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has been silent without a reason; 0.0 while it is being replaced."""
        return 0.0 if self.recovering else self._client.stalled_for()

    @property
    def num_poison_requests(self) -> int:
        """Requests that were ended because they had killed engines."""
        return self._quarantine.num_poison_requests

    async def start(self) -> Ready:
        """Wait for the first engine. Raises `QuireError` if it cannot start."""
        began = time.monotonic()
        ready = await self._client.start()
        self._load_timeout = max(MIN_LOAD_TIMEOUT, LOAD_TIMEOUT_FACTOR * (time.monotonic() - began))
        self._up.set()
        self._watcher = asyncio.create_task(self._watch(), name="quire-watchdog")
        return ready

    async def wait(self) -> None:
        """Wait until an engine is ready, or none will be started any more."""
        await self._up.wait()

    def send(self, message: ToEngine) -> None:
        """Send a message, in order. While no engine runs, do nothing: the next one gets all unfinished requests."""
        if not self.running:
            return
        isolated = self._quarantine.isolated
        if (isolated is None and not self._aside) or not isinstance(message, EngineRequest):
            self._client.send(message)
        if isolated is not None and isinstance(message, AbortRequests):
            self._review()

    async def receive(self) -> EngineOutputs | CallResult:
        """Wait for a message. Raises `EngineDeadError` once the engine is dead and not replaced."""
        while True:
            if self._quarantine.has_suspects:
                self._review()  # the caller has processed the last message
            try:
                message = await self._client.receive()
            except EngineDeadError as error:
                await self._recover(error)
                continue
            match message:
                case CallResult(call_id=call_id) if call_id == self._fence:
                    self._fence = None
                    self._isolate_next()
                case StepAside():
                    self._step_aside(message.aside)
                case Alone():
                    self._begin_alone()
                case _:
                    return message

    async def close(self) -> None:
        """Stop the engine, unless others use it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self._up.set()
        await self._client.close()

    # ---- after a death ----

    async def _recover(self, error: EngineDeadError) -> None:
        """Replace the engine. Raises `EngineDeadError` if that is given up."""
        died = time.monotonic()
        self._up.clear()
        self.recovering = True
        self._fence = None
        self._on_death()
        try:
            await self._start_engine(self._note_death(error))
        finally:
            self.recovering = self.stalled = False
            self._up.set()
        self._resume(died)

    async def _start_engine(self, error: EngineDeadError) -> None:
        """Start engines, after one that died of `error`, until one is ready.

        Raises `EngineDeadError` once engines have died too often, or if no engine can be started with these options.
        """
        num_failed = 0  # attempts, which may take longer than the quarantine remembers deaths
        while (make_client := self._make_client) is not None and not (
            self._quarantine.too_many_deaths() or num_failed > self._max_restarts
        ):
            await asyncio.sleep(num_failed * RETRY_SECONDS)
            await self._client.close()
            self._client = make_client()
            try:
                async with asyncio.timeout(self._load_timeout):
                    await self._client.start()
                return
            except TimeoutError:
                self._client.kill()
                error = EngineDeadError(f"it did not load the model in {self._load_timeout:.0f} s, and was killed")
            except EngineDeadError as again:
                error = again
            except QuireError as problem:
                logger.error("no new engine can be started: %s", problem.message)
                raise EngineDeadError(f"the engine could not be started again: {problem.message}") from problem
            logger.error("a new engine did not start: %s", error.message)
            num_failed += 1
            self._quarantine.note_death(time.monotonic(), {})
        if self._max_restarts:
            raise EngineDeadError(f"the engine died too often; the last time: {error.message}")
        raise error

    def _note_death(self, error: EngineDeadError) -> EngineDeadError:
        outputs = self._outputs()
        named = set(error.suspects)
        if not named:  # unknown: it may be any request that the engine had
            isolated = self._quarantine.isolated
            named = set(outputs.request_ids if isolated is None else [isolated])
        owners = outputs.owners(named)
        live = [
            name for name in outputs.request_ids if name in owners
        ]  # in order of arrival, in which they are isolated
        working_on = {name: outputs.progress(name) for name in [*owners.difference(live), *live]}
        logger.error(
            "the engine died: %s; it was working on %d requests: %s; %d are unfinished",
            error.message,
            len(working_on),
            listed(working_on, MAX_LOGGED) or "none",
            outputs.num_unfinished,
        )
        if self._max_restarts:
            poison = self._quarantine.note_death(time.monotonic(), working_on, others_wait=self._aside)
            if poison is not None:
                logger.error("request %s kills engines and is ended", poison)
                message = "the engine died again and again when it worked on this request"
                outputs.fail(poison, GenerationError(message, code="request_killed_engine"))
        else:
            self._quarantine.note_death(time.monotonic(), {})
        return error

    def _resume(self, died: float) -> None:
        """Send the new engine all live requests, or the first one to be isolated."""
        self._aside = self._asked = self._alone = False
        self.num_restarts += 1
        self.last_recovery_seconds = time.monotonic() - died
        logger.warning(
            "there is a new engine after %.2f s (restart %d); %d requests go on",
            self.last_recovery_seconds,
            self.num_restarts,
            self._outputs().num_unfinished,
        )
        self._isolate_next()
        self._on_restart()

    # ---- isolated requests ----

    def _isolate_next(self, running: str | None = None) -> None:
        """Isolate the next suspect. If there is none, replay all requests but `running`, which the engine has."""
        isolated = self._quarantine.isolate_next(self._outputs().progress)
        if isolated is not None:
            logger.warning("request %s runs alone, because engines died while they worked on it", isolated)
            if self._alone:
                self._replay(isolated)
            elif not self._asked:
                self._asked = True
                self._client.send(Isolate(True))
            return
        if self._asked:
            self._asked = self._alone = False
            self._client.send(Isolate(False))
        if not self._aside:
            self._replay_all(running)

    def _begin_alone(self) -> None:
        """Send the isolated request: no other client has requests in the engine."""
        self._alone = self._asked
        isolated = self._quarantine.isolated
        if self._alone and isolated is not None:
            self._replay(isolated)

    def _step_aside(self, aside: bool) -> None:
        """Have no requests in the engine while another client isolates one; go on with them afterwards."""
        self._aside = aside
        outputs = self._outputs()
        if aside:
            unfinished = [name for request_id in outputs.request_ids for name in outputs.engine_ids(request_id)]
            if unfinished:
                self._client.send(AbortRequests(request_ids=unfinished))
            self._client.send(SteppedAside())
        elif self._quarantine.isolated is None:
            self._replay_all()

    def _replay_all(self, running: str | None = None) -> None:
        for request_id in self._outputs().request_ids:
            if request_id != running:
                self._replay(request_id)

    def _replay(self, request_id: str) -> None:
        for engine_request in self._outputs().replay(request_id):
            self._client.send(engine_request)

    def _review(self) -> None:
        """Clear suspects that got past the point of a death; release the isolated request once it did."""
        outputs, quarantine = self._outputs(), self._quarantine
        isolated = quarantine.isolated
        if isolated is None:
            quarantine.clear(outputs.progress)
        elif self._fence is None and quarantine.is_over(outputs.progress):
            if not quarantine.has_queue(outputs.progress):
                self._isolate_next(running=isolated if self._alone else None)
                return
            unfinished = outputs.engine_ids(isolated)
            if unfinished:  # it is replayed after the last suspect was isolated
                self._client.send(AbortRequests(request_ids=unfinished))
            self._num_fences += 1
            self._fence = -self._num_fences
            self._client.send(Call(call_id=self._fence, method="stats"))

    # ---- hangs ----

    async def _watch(self) -> None:
        """Kill the engine if it hangs; a background task."""
        logs.request_id.set(None)  # the task belongs to no request
        patience = 0
        before = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if now - before > WATCH_SECONDS + SLEPT_SECONDS:
                # An engine that was suspended as well needs time to answer.
                patience = int(STALLED_SECONDS / WATCH_SECONDS)
            before = now
            silent = self.silent_seconds
            patience = max(patience - 1, 0) if silent else 0
            if patience:
                continue
            if silent > STALLED_SECONDS and not self.stalled:
                logger.warning("the engine has been silent for %.1f s without a reason", silent)
            self.stalled = silent > STALLED_SECONDS
            if silent > self._stall_timeout and self._client is not self._killed:
                await self._end_stuck(silent)

    async def _end_stuck(self, silent: float) -> None:
        client = self._client
        logger.error("the engine is stuck: silent for %.1f s; it is ended", silent)
        try:
            async with asyncio.timeout(STACKS_SECONDS):
                await client.dump_stacks()
        except Exception:  # boundary: the engine must be killed even if this fails
            logger.exception("the stacks of the stuck engine cannot be logged")
        if client is self._client and not self.recovering:
            self._killed = client
            client.kill()  # `receive` raises `EngineDeadError` then
