"""The engine's main loop, the same in a thread and in a process: apply messages, step, send outputs.

It serves any number of clients (`Clients`) and knows the owner of each request: outputs go to the owner alone, only the
owner can abort, and the requests of a client that is gone are aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from quire.engine.core import EngineCore
from quire.engine.heartbeat import LoopObserver
from quire.engine.isolation import Isolation
from quire.engine.messages import AbortRequests, Call, CallResult, EngineOutputs, FromEngine, ToEngine
from quire.engine_request import EngineRequest
from quire.errors import ErrorData, QuireError
from quire.step import SchedulerOutput, SequenceOutput


class Clients(Protocol):
    """The clients of an engine, each known by a number."""

    @property
    def connected(self) -> list[int]:
        """All clients; they are sent the state of the engine when it becomes idle, falls asleep or wakes up."""

    @property
    def closed(self) -> bool:
        """Whether the loop is to end."""

    def receive(self, wait: bool) -> list[tuple[int, ToEngine | None]]:
        """Return the messages that have arrived and their clients; None is a client's end.

        With `wait`, wait for some, though not forever.
        """

    def send(self, client_index: int, message: FromEngine) -> None:
        """Send a message; a client that is gone is ignored."""


@dataclass(slots=True)
class _OwnedRequest:
    """An unfinished request. `ids` are its own and those of its unfinished sequences."""

    client_index: int
    request_id: str
    ids: set[str]


class RequestOwners:
    """Which client each unfinished request, and each of its sequences, belongs to."""

    def __init__(self) -> None:
        self._owned: dict[str, _OwnedRequest] = {}  # by each of its ids
        self._num_requests: dict[int, int] = {}  # by client, without those that have none

    def add(self, client_index: int, request: EngineRequest) -> None:
        """Record a request that the engine has accepted."""
        ids = {request.request_id, *request.sequence_ids}
        self._owned.update(dict.fromkeys(ids, _OwnedRequest(client_index, request.request_id, ids)))
        self._num_requests[client_index] = self._num_requests.get(client_index, 0) + 1

    def owned_by(self, client_index: int) -> list[str]:
        """Return the requests of a client."""
        return list({owned.request_id for owned in self._owned.values() if owned.client_index == client_index})

    def remove(self, client_index: int, ids: Iterable[str]) -> list[str]:
        """Remove those of these requests and sequences that belong to the client; return them."""
        found = []
        for name in ids:
            owned = self._owned.get(name)
            if owned is not None and owned.client_index == client_index:
                found.append(name)
                self._end(owned, name)
        return found

    def split(self, outputs: list[SequenceOutput]) -> dict[int, list[SequenceOutput]]:
        """Return the outputs by client, and remove the sequences that they end."""
        split: dict[int, list[SequenceOutput]] = {}
        if len(self._num_requests) == 1 and outputs:
            split = dict.fromkeys(self._num_requests, outputs)
        else:
            for output in outputs:
                owned = self._owned.get(output.sequence_id)
                if owned is not None:  # else the client has aborted it
                    split.setdefault(owned.client_index, []).append(output)
        for output in outputs:
            if output.finish_reason is not None and (owned := self._owned.get(output.sequence_id)) is not None:
                self._end(owned, output.sequence_id)
        return split

    def _end(self, owned: _OwnedRequest, name: str) -> None:
        """Remove a sequence, or a request with all its sequences."""
        ended = {name}
        if name == owned.request_id or owned.ids == {name, owned.request_id}:
            ended = owned.ids
            self._num_requests[owned.client_index] -= 1
            if not self._num_requests[owned.client_index]:
                del self._num_requests[owned.client_index]
        for end in ended:
            del self._owned[end]
        owned.ids = owned.ids - ended


def apply(
    core: EngineCore, owners: RequestOwners, clients: Clients, client_index: int, message: ToEngine | None
) -> None:
    """Carry out a client's message, and answer it.

    A request that the engine refuses gets its "error" here: one bad message must not end the loop.
    """
    match message:
        case EngineRequest():
            try:
                core.add(message)
            except QuireError as error:
                problem = ErrorData.of(error)
                outputs = [
                    SequenceOutput(sequence_id, [], finish_reason="error", error=problem)
                    for sequence_id in message.sequence_ids
                ]
                clients.send(client_index, core.snapshot(outputs))
            else:
                owners.add(client_index, message)
        case AbortRequests():
            core.abort(AbortRequests(owners.remove(client_index, message.request_ids)))
        case Call():
            level = core.sleep_level

            def send(result: CallResult) -> None:
                if core.sleep_level != level:  # before the result: whoever has that knows the state
                    _send(clients, {}, core.snapshot(), to_all=True)
                clients.send(client_index, result)

            _call(core, message, send)
        case None:
            core.abort(AbortRequests(owners.remove(client_index, owners.owned_by(client_index))))


def _call(core: EngineCore, call: Call, send: Callable[[CallResult], None]) -> None:
    """Run an operation, and send its result, now or from a later step."""

    def answer(result: dict[str, Any] | QuireError) -> None:
        if isinstance(result, QuireError):
            send(CallResult(call.call_id, error=ErrorData.of(result)))
        else:
            send(CallResult(call.call_id, result))

    try:
        if call.method == "load_lora":
            core.load_lora(call.arguments, answer)
        else:
            answer(core.call(call.method, call.arguments))
    except QuireError as error:
        answer(error)


def run(core: EngineCore, clients: Clients, observer: LoopObserver | None = None) -> None:
    """Serve until `clients.closed`. The observer is called at every event, before it happens."""
    if observer is None:
        observer = LoopObserver()
    else:
        core.on_plans = _announcing(core, observer)
    owners = RequestOwners()
    isolation = Isolation(clients.send)
    idle_sent = True  # whether clients were sent that nothing runs
    num_reported = 0  # scheduled tokens of which a client was told
    while not clients.closed:
        idle = not core.has_unfinished()
        if idle:
            idle_sent = idle_sent and not core.collect_failed_stores()
            observer.prepare()
            idle = not core.idle()
            observer.idle()
        for client_index, message in clients.receive(idle):
            idle_sent = idle_sent and not isinstance(message, EngineRequest)
            observer.begin_message(message)
            apply(core, owners, clients, client_index, message)
            isolation.note(client_index, message)
            observer.end_work()
        isolation.update(clients.connected)
        if core.has_unfinished():
            observer.begin_step()
            outputs = core.step()
            observer.end_work()
            idle_sent = not core.has_unfinished()
            split = owners.split(outputs.outputs)
            if clients.connected if idle_sent else split:
                num_scheduled = outputs.stats.num_scheduled_tokens
                outputs.stats.num_new_tokens, num_reported = num_scheduled - num_reported, num_scheduled
            _send(clients, split, outputs, to_all=idle_sent)
        elif not idle_sent:
            # The last requests were aborted before a step saw them: clients' gauges would keep showing them.
            _send(clients, {}, core.snapshot(), to_all=True)
            idle_sent = True


def _send(clients: Clients, split: dict[int, list[SequenceOutput]], step: EngineOutputs, *, to_all: bool) -> None:
    """Send each client its outputs of a step; `to_all`: those without any are sent the state of the engine."""
    stats = step.stats
    for client_index in clients.connected if to_all else split:
        clients.send(client_index, msgspec.structs.replace(step, outputs=split.get(client_index, []), stats=stats))
        if stats.num_new_tokens:
            stats = msgspec.structs.replace(stats, num_new_tokens=0)


def _announcing(core: EngineCore, observer: LoopObserver) -> Callable[[list[SchedulerOutput]], None]:
    def announce(plans: list[SchedulerOutput]) -> None:
        plans = [plan for plan in plans if not plan.is_empty]
        if not plans:
            return
        # All of them: any may be the one that fails.
        scheduled = list(dict.fromkeys(name for plan in plans for name in plan.num_scheduled_tokens))
        deferred = [request.request_id for request in core.scheduler.requests.deferred]
        observer.begin_plans(
            scheduled + deferred,
            lambda: [*core.scheduler.requests.request_ids(scheduled), *deferred],
            max(plan.total_num_scheduled_tokens for plan in plans),
            known=not plans[-1].wait_for_loads,  # how long a disk takes has nothing to do with tokens
        )

    return announce
