"""The engine's main loop, the same in a thread and in a process: apply messages, step, send outputs."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.core import EngineCore
from quire.engine.heartbeat import LoopObserver
from quire.engine.messages import AbortRequests, Call, CallResult, EngineOutputs, FromEngine, Shutdown, ToEngine
from quire.engine_request import EngineRequest
from quire.errors import QuireError, RequestError
from quire.step import SchedulerOutput, SequenceOutput


def apply(core: EngineCore, message: ToEngine) -> CallResult | EngineOutputs | None:
    """Carry out one message on the core; return what is to be answered at once, if anything.

    A request that the scheduler refuses gets its "error" here: one bad message must not end the loop. `Shutdown` is
    the loop's own business.
    """
    match message:
        case EngineRequest():
            try:
                core.add(message)
            except RequestError as error:
                problem = error.message
                return core.snapshot(
                    [
                        SequenceOutput(sequence_id, [], finish_reason="error", error=problem, refused=True)
                        for sequence_id in message.sequence_ids
                    ]
                )
        case AbortRequests():
            core.abort(message)
        case Call():
            try:
                return CallResult(call_id=message.call_id, value=core.call(message.method, message.arguments))
            except QuireError as error:
                return CallResult(call_id=message.call_id, error=error.message)
        case Shutdown():
            raise AssertionError("Shutdown ends the loop and is never applied")
    return None


def run(
    core: EngineCore,
    receive: Callable[[bool], ToEngine | None],
    send: Callable[[FromEngine], None],
    alive: Callable[[], bool] = lambda: True,
    observer: LoopObserver | None = None,
) -> None:
    """Serve until a `Shutdown` arrives or `alive` returns False: the front is gone.

    Args:
        receive: return the next message, or None. With True, wait for one, though not forever.
        send: deliver to the front.
        observer: is called at every event, before it happens.
    """
    if observer is None:
        observer = LoopObserver()
    else:
        core.on_plans = _announcing(core, observer)
    idle_sent = True  # whether the front was sent that nothing runs
    while True:
        idle = not core.has_unfinished()
        if idle:
            observer.preparing()
            idle = not core.idle()
            observer.idle()
        message = receive(idle)
        while message is not None:
            if isinstance(message, Shutdown):
                return
            idle_sent = idle_sent and not isinstance(message, EngineRequest)
            observer.applying(message)
            answer = apply(core, message)
            observer.applied()
            if answer is not None:
                send(answer)
            message = receive(False)
        if core.has_unfinished():
            observer.stepping()
            outputs = core.step()
            observer.stepped()
            idle = not core.has_unfinished()
            if outputs.outputs or idle:
                send(outputs)
            idle_sent = idle
        elif not idle_sent:
            # The last requests were aborted before a step saw them: the front's gauges would keep showing them.
            send(core.snapshot())
            idle_sent = True
        elif not alive():
            return


def _announcing(core: EngineCore, observer: LoopObserver) -> Callable[[list[SchedulerOutput]], None]:
    def announce(plans: list[SchedulerOutput]) -> None:
        plans = [plan for plan in plans if not plan.is_empty]
        if not plans:
            return
        # All of them: any may be the one that fails.
        scheduled = list(dict.fromkeys(name for plan in plans for name in plan.num_scheduled_tokens))
        deferred = core.deferred_request_ids
        observer.planned(
            scheduled + deferred,
            lambda: [*core.scheduler.requests.ids_of(scheduled), *deferred],
            max(plan.total_num_scheduled_tokens for plan in plans),
            known=not plans[-1].wait_for_loads,  # how long a disk takes has nothing to do with tokens
        )

    return announce
