"""The engine's main loop, the same in a thread and in a process: apply messages, step, send outputs."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.core import EngineCore
from quire.engine.heartbeat import Unwatched
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
    signs: Unwatched | None = None,
) -> None:
    """Serve until a `Shutdown` arrives or `alive` returns False: the front is gone.

    Args:
        receive: return the next message, or None. With True, wait for one, though not forever.
        send: deliver to the front.
        signs: records what is about to happen.
    """
    if signs is None:
        signs = Unwatched()
    else:
        core.on_plans = _announcing(core, signs)
    told_idle = True  # whether the front knows that nothing runs
    while True:
        idle = not core.has_unfinished()
        if idle:
            signs.preparing()
            idle = not core.idle()
            signs.idle()
        message = receive(idle)
        while message is not None:
            if isinstance(message, Shutdown):
                return
            told_idle = told_idle and not isinstance(message, EngineRequest)
            signs.applying(message)
            answer = apply(core, message)
            signs.applied()
            if answer is not None:
                send(answer)
            message = receive(False)
        if core.has_unfinished():
            signs.stepping()
            outputs = core.step()
            signs.stepped()
            idle = not core.has_unfinished()
            if outputs.outputs or idle:
                send(outputs)
            told_idle = idle
        elif not told_idle:
            # The last requests were aborted before a step saw them: the front's gauges would keep showing them.
            send(core.snapshot())
            told_idle = True
        elif not alive():
            return


def _announcing(core: EngineCore, signs: Unwatched) -> Callable[[list[SchedulerOutput]], None]:
    def announce(plans: list[SchedulerOutput]) -> None:
        plans = [plan for plan in plans if not plan.is_empty]
        if not plans:
            return
        # All of them: any may be the one that fails.
        scheduled = list(dict.fromkeys(name for plan in plans for name in plan.num_scheduled_tokens))
        deferred = core.deferred_request_ids
        signs.planned(
            scheduled + deferred,
            lambda: [*core.scheduler.requests.ids_of(scheduled), *deferred],
            max(plan.total_num_scheduled_tokens for plan in plans),
            known=not plans[-1].wait_for_loads,  # how long a disk takes has nothing to do with tokens
        )

    return announce
