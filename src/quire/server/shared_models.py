"""`SharedModels`: the models of a server as one of its fronts uses them, whichever front decides about them.

The leader of the fronts (`Fronts.leader`) has the `ModelPool` that decides what is in memory. It publishes the state of
all models, so that every front shows the same, and a later leader goes on from there. The others attach to the engines
that run, and ask the leader for the use of a model when they have had none of it. It counts as used there until their
last request for it has ended, so that requests in between cost no question. Before a model is unloaded, the leader has
the others leave its engine. When the leader ends, the next one learns from the others what they use before it decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import QuireError
from quire.server.errors import problem_data, problem_of, shutting_down
from quire.server.fronts import FrontGoneError, Fronts
from quire.server.model_list import ModelList
from quire.server.model_pool import ModelPool
from quire.server.served_model import ServedModel

logger = logging.getLogger(__name__)

STATE = "models"  # the key of what the leader publishes
RETRY_SECONDS = 0.1  # before a leader that does not react is asked again
LEAVE_SECONDS = 5.0  # that the others have to leave an engine
SETTLE_SECONDS = 0.5
IN_MEMORY = ("loaded", "loading", "sleeping")


def adapters_key(name: str) -> str:
    """Return the key under which the adapters of a model are published."""
    return f"adapters/{name}"


@dataclass(slots=True)
class _Hold:
    """What this front uses of a model while another one leads.

    Attributes:
        num_users: running requests that need it. uses: the numbers of those that the leader counts; a model with users
            has at least one, unless models stay in memory. attached: whether this front uses, or is about to use, its
            engine.
    """

    num_users: int = 0
    uses: set[int] = field(default_factory=set)
    attached: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Use:
    """A use of a model by another front. waiting: the task that waits for it."""

    model: ServedModel
    waiting: asyncio.Task[Any] | None


class SharedModels(ModelList):
    """The models of a server, for the routes of one front.

    Args:
        pool: of this front, over its own connections to the engines. may_unload: whether an operator may have models
            unloaded, or put to sleep.
    """

    def __init__(self, pool: ModelPool, fronts: Fronts, *, may_unload: bool) -> None:
        super().__init__(pool.models)
        self._pool = pool
        self._fronts = fronts
        self._stays = pool.keeps_all and not may_unload  # what is in memory, so that nobody need be asked
        self._holds = {model.names[0]: _Hold() for model in pool.models}
        self._uses: dict[int, dict[int, _Use]] = {}  # of other fronts, by their rows and numbers, while this one leads
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._releasing: set[asyncio.Task[Any]] = set()
        self._asking: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._leads = fronts.rows == [fronts.row]
        self._decided = asyncio.Event()  # set while it is known who leads, and the leader knows all uses
        self._started: asyncio.Future[None] | None = None
        if self._leads:
            self._decided.set()
        pool.on_change = self._publish
        pool.withdraw = self._withdraw
        fronts.handlers |= {
            "models_acquire": self._acquire,
            "models_release": self._release,
            "models_operate": self._operate,
            "models_leave": self._leave,
            "models_settle": self._settle,
            "models_in_use": self._in_use,
        }
        fronts.on_change.append(self._on_fronts)
        fronts.on_published.append(self._on_published)

    # ---- start and shutdown ----

    async def start(self) -> None:
        """Have the models loaded that are loaded at start, or use what earlier fronts have loaded.

        Raises the first error, in the front that leads.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._note_state()
        if self._leads:
            self._spawn(self._lead())
        else:
            self._on_fronts()
        await asyncio.shield(self._started)

    async def close(self) -> None:
        """Close all connections to engines, which end unless other fronts use them."""
        self.abort_waiting()
        self._closing = True
        for uses in self._uses.values():
            for use in uses.values():
                if use.waiting is not None:
                    use.waiting.cancel()  # without an answer: it asks the next leader
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    def abort_waiting(self) -> None:
        """Give this front's requests that wait for a model the error of a server that shuts down."""
        for task in self._asking:
            task.cancel()
        self._pool.abort_waiting()

    # ---- who leads ----

    def _on_fronts(self) -> None:
        """Note that fronts have come or gone."""
        fronts = self._fronts
        if self._closing or fronts.row not in fronts.rows:
            return
        if self._leads:
            for row in [row for row in self._uses if row not in fronts.rows]:
                self._forget(row, list(self._uses[row]))
        elif fronts.leader != fronts.row:
            if not self._decided.is_set():
                self._decided.set()
                self._note_state()
        elif self._started is not None:
            self._leads = True
            self._decided.clear()
            self._spawn(self._lead())

    async def _lead(self) -> None:
        """Begin to decide: from the state that the last leader has published, and with the uses of all fronts."""
        fronts = self._fronts
        assert self._started is not None
        state = fronts.published.get(STATE)
        try:
            for row in fronts.others:
                await self._learn_uses(row)
            for model in self.models:
                hold = self._holds[model.names[0]]
                self._pool.add_users(model, hold.num_users)
                hold.num_users = 0
                hold.uses.clear()
                with contextlib.suppress(TimeoutError):  # it may just leave an engine
                    async with asyncio.timeout(LEAVE_SECONDS), hold.lock:
                        pass
                model.lead(None if state is None else state["models"][model.names[0]])
            self._decided.set()
            if state is None or not state["started"]:
                await self._pool.start()
            else:
                found = state["models"]
                await self._pool.start([name for name in found if found[name]["status"] in IN_MEMORY])
            self._publish()
        except Exception as error:  # task boundary
            if self._started.done():
                logger.exception("the models cannot be taken over")
                raise
            self._started.set_exception(error)
        else:
            if not self._started.done():
                self._started.set_result(None)

    async def _learn_uses(self, row: int) -> None:
        """Count what another front uses already."""
        while row in self._fronts.rows:
            with contextlib.suppress(FrontGoneError):
                used = await self._fronts.ask(row, "models_in_use", seconds=1.0)
                for name, numbers in used.items():
                    model = self.find(name)
                    self._pool.add_users(model, len(numbers))
                    self._uses.setdefault(row, {}).update({number: _Use(model, None) for number in numbers})
                return
            await asyncio.sleep(RETRY_SECONDS)

    # ---- state ----

    def _publish(self) -> None:
        """Publish the state of all models, if it has changed."""
        if not self._leads or not self._decided.is_set() or self._closing:
            return
        models = {model.names[0]: model.publication() for model in self.models}
        state = {"started": not self.starting, "models": models}
        if state != self._fronts.published.get(STATE):
            self._fronts.publish(STATE, state)

    def _on_published(self, key: str) -> None:
        if self._leads or self._closing:
            return
        if key == STATE:
            self._note_state()
        for model in self.models:
            if key == adapters_key(model.names[0]):
                model.llm.adapters.restore(self._fronts.published[key])

    def _note_state(self) -> None:
        """Show what the leader has published, and attach to the engines that run."""
        state = self._fronts.published.get(STATE)
        if state is None or self._leads:
            return
        for model in self.models:
            model.follow(state["models"][model.names[0]])
            if state["started"]:
                model.note_started()  # also before it is known who leads: requests wait for that
                if self._decided.is_set():
                    self._spawn(self._follow(model))
        if state["started"] and self._decided.is_set() and self._started is not None and not self._started.done():
            self._started.set_result(None)

    # ---- engines, while another front leads ----

    async def _follow(self, model: ServedModel) -> None:
        """Attach to the engine of a model that is in memory, or leave it, as the leader has published."""
        if self._leads or self._closing or model.view is None:
            return
        status = model.view["status"]
        if status in ("loaded", "sleeping"):
            try:
                await self._attach(model)
            except QuireError as error:
                logger.warning("model %s: its engine cannot be used yet: %s", model.names[0], error.message)
        elif status in ("unloaded", "failed") and not model.essential:
            await self._detach(model)

    async def _attach(self, model: ServedModel) -> None:
        """Use the engine that runs for a model. Raises `QuireError` if there is none."""
        hold = self._holds[model.names[0]]
        async with hold.lock:
            if self._leads or (model.llm.ready and not model.llm.is_sleeping):
                return
            if model.llm.errored:
                if model.essential:
                    await model.llm.check_health()
                await self._pool.replace_engine(model)
            hold.attached = True
            await model.llm.start()

    async def _detach(self, model: ServedModel) -> None:
        """Leave the engine of a model."""
        hold = self._holds[model.names[0]]
        async with hold.lock:
            if hold.attached and not self._leads:
                hold.attached = False
                await self._pool.replace_engine(model)

    # ---- users ----

    def is_available(self, model: ServedModel) -> bool:
        """Whether `acquire` need not wait."""
        if self._leads:
            return self._decided.is_set() and model.available
        view, llm = model.view, model.llm
        if view is None or not llm.ready or llm.is_sleeping:
            return False
        return self._stays or (bool(self._holds[model.names[0]].uses) and not view["draining"])

    async def acquire(self, model: ServedModel) -> None:
        """Have a model ready, and keep it so until `release`; may be cancelled. Raises as `ModelPool.acquire`."""
        while True:
            await self._decided.wait()
            if self._leads:
                await self._pool.acquire(model)
                return
            hold = self._holds[model.names[0]]
            if self.is_available(model):
                hold.num_users += 1
                return
            if model.essential:
                await model.llm.check_health()
            if self._closing:
                raise shutting_down()
            if await self._ask_for(model, hold):
                try:
                    await self._attach(model)
                    if model.llm.is_sleeping:  # it is awake, as others have been told already
                        await model.llm.wake_up()
                except BaseException:
                    self.release(model)
                    raise
                if model.llm.ready:
                    return
                self.release(model)  # this front has begun to lead, and may have to load it
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask_for(self, model: ServedModel, hold: _Hold) -> bool:
        """Ask the leader for a use of a model, and wait for it; return whether it is granted: else there is no leader.

        Raises `QuireError` if it is refused.
        """
        number = next(self._numbers)
        value = {"row": self._fronts.row, "use": number, "model": model.names[0]}
        leader = self._fronts.leader
        asking = self._spawn(self._fronts.ask(leader, "models_acquire", value, seconds=None))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            reply = await asking
        except FrontGoneError:
            return False
        except asyncio.CancelledError:
            self._give_back([number])
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                asking.cancel()
                raise
            raise shutting_down() from None
        if reply.get("error") is not None:
            raise problem_of(reply["error"])
        if self._leads or leader != self._fronts.leader:  # it was the last thing that this leader did
            return False
        hold.uses.add(number)
        hold.num_users += 1
        return True

    def release(self, model: ServedModel) -> None:
        """End a use that `acquire` began."""
        hold = self._holds[model.names[0]]
        if not hold.num_users:
            self._pool.release(model)
            return
        hold.num_users -= 1
        if not hold.num_users and hold.uses:
            numbers = list(hold.uses)
            hold.uses.clear()
            self._give_back(numbers)

    def _give_back(self, numbers: Sequence[int]) -> None:
        if self._closing:
            return
        task = self._spawn(self._tell_released(numbers))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _tell_released(self, numbers: Sequence[int]) -> None:
        """Tell the leader that uses have ended, until it knows; another one asks."""
        leader = self._fronts.leader
        while leader == self._fronts.leader and not self._leads:
            with contextlib.suppress(FrontGoneError):
                value = {"row": self._fronts.row, "uses": numbers}
                await self._fronts.ask(leader, "models_release", value, seconds=1.0)
                return
            await asyncio.sleep(RETRY_SECONDS)

    # ---- what an operator wants ----

    async def load(self, model: ServedModel) -> None:
        """As `ModelPool.load`."""
        await self._have_done("load", model)

    async def unload(self, model: ServedModel) -> None:
        """As `ModelPool.unload`."""
        await self._have_done("unload", model)

    async def sleep(self, model: ServedModel, level: int) -> None:
        """As `ModelPool.sleep`."""
        await self._have_done("sleep", model, level)

    async def load_adapter(self, model: ServedModel, name: str, path: str) -> None:
        """Have a model loaded, and load and check an adapter of it. Raises as `acquire` and `AdapterRegistry.load`."""
        await self._have_done("load_adapter", model, name, path)

    async def unload_adapter(self, model: ServedModel, name: str) -> None:
        """Unload an adapter. Raises as `AdapterRegistry.unload`."""
        await self._have_done("unload_adapter", model, name)

    async def _have_done(self, action: str, model: ServedModel, *arguments: Any) -> None:
        """Have the leader do something; what has changed is known to all fronts then."""
        while True:
            await self._decided.wait()
            if self._leads:
                await self._do(action, model, arguments)
                return
            value = {"action": action, "model": model.names[0], "arguments": arguments}
            try:
                reply = await self._fronts.ask(self._fronts.leader, "models_operate", value, seconds=None)
            except FrontGoneError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if reply.get("error") is not None:
                raise problem_of(reply["error"])
            return

    async def _do(self, action: str, model: ServedModel, arguments: Sequence[Any]) -> None:
        adapters = model.llm.adapters
        if action in ("unload", "sleep"):
            await self._fronts.ask_others("models_settle")  # what they have used, and use no more
        match action, *arguments:
            case ["load"]:
                await self._pool.load(model)
            case ["unload"]:
                await self._pool.unload(model)
            case ["sleep", level]:
                await self._pool.sleep(model, level)
            case ["load_adapter", name, path]:
                async with self._pool.using(model):
                    await model.llm.adapters.load(name, path)
            case ["unload_adapter", name]:
                if model.available:
                    await adapters.unload(name)
                else:
                    adapters.withdraw(name)
        await self._fronts.ask_others("models_settle")

    # ---- what other fronts ask ----

    async def _acquire(self, value: Any) -> dict[str, Any]:
        """Let another front use a model. Called in the leader, and so are `_release` and `_operate`."""
        row, number, model = value["row"], value["use"], self.find(value["model"])
        uses = self._uses.setdefault(row, {})
        use = uses[number] = _Use(model, asyncio.current_task())
        try:
            await self._decided.wait()
            if not self._leads:
                raise FrontGoneError(f"front {self._fronts.row} does not decide")
            await self._pool.acquire(model)
        except QuireError as error:
            uses.pop(number, None)
            return {"error": problem_data(error)}
        use.waiting = None
        return {}

    async def _release(self, value: Any) -> None:
        self._forget(value["row"], value["uses"])

    def _forget(self, row: int, numbers: Sequence[int]) -> None:
        """End uses of another front, also those that it waits for."""
        uses = self._uses.get(row, {})
        for number in numbers:
            use = uses.pop(number, None)
            if use is not None and use.waiting is not None:
                use.waiting.cancel()
            elif use is not None:
                self._pool.release(use.model)
        if not uses:
            self._uses.pop(row, None)

    async def _operate(self, value: Any) -> dict[str, Any]:
        try:
            await self._decided.wait()
            await self._do(value["action"], self.find(value["model"]), value["arguments"])
        except QuireError as error:
            return {"error": problem_data(error)}
        return {}

    async def _withdraw(self, model: ServedModel) -> None:
        """Have the other fronts leave the engine of a model; nobody uses it."""
        fronts = self._fronts
        asked = [fronts.ask(row, "models_leave", model.names[0], seconds=LEAVE_SECONDS) for row in fronts.others]
        await asyncio.gather(*asked, return_exceptions=True)  # a front that is frozen will find it unloaded

    async def _leave(self, name: str) -> None:
        """Leave the engine of a model, for the leader; and so are the following ones."""
        await self._detach(self.find(name))

    async def _settle(self, value: Any) -> None:
        """Return once the leader knows which uses have ended, and all that it has published is known here."""
        await asyncio.sleep(0)
        if self._releasing:
            await asyncio.wait(list(self._releasing), timeout=SETTLE_SECONDS)

    async def _in_use(self, value: Any) -> dict[str, list[int]]:
        """Return the numbers of the uses of each model."""
        return {name: list(hold.uses) for name, hold in self._holds.items() if hold.uses}

    # ---- tasks ----

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="quire-shared-models")
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, QuireError):
            logger.error("%s failed", task.get_name(), exc_info=error)
