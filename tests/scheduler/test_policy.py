"""The waiting queue keeps its order through pushes, pops and removals."""

from __future__ import annotations

import random

import pytest

from quire.scheduler.policy import POLICIES, WaitingQueue
from quire.scheduler.request import RequestStatus


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["b", "c", "a", "d"]), ("priority", ["c", "a", "d", "b"])],
)
def test_policies(request_of, policy, order):
    arrivals = [("a", 2.0, 1), ("b", 1.0, 2), ("c", 1.5, 0), ("d", 2.0, 1)]
    queue = WaitingQueue()
    for number, (name, time, priority) in enumerate(arrivals):
        request = request_of(name, 3, arrival_time=time, priority=priority)
        request.order_key = POLICIES[policy](request, number)
        queue.push(request)
    assert [queue.pop().request_id for _ in arrivals] == order
    assert queue.pop() is None and queue.peek() is None and len(queue) == 0


def test_random_pushes_pops_and_removals(request_of):
    rng = random.Random(0)
    queue, model = WaitingQueue(), {}
    for number in range(4000):
        draw = rng.random()
        if draw < 0.45:
            request = request_of(f"r{number}", 2)
            request.order_key = (rng.random(), number)
            queue.push(request)
            model[request.request_id] = request
        elif draw < 0.7 and model:
            first = min(model.values(), key=lambda r: r.order_key)
            assert queue.peek() is first
            assert queue.pop() is model.pop(first.request_id)
            if rng.random() < 0.3:  # preempted: back to where it was
                queue.push(first)
                model[first.request_id] = first
        elif model:
            removed = model.pop(rng.choice(sorted(model)))
            removed.status = RequestStatus.FINISHED_ABORTED
            queue.discard(removed)
        assert len(queue) == len(model)
        assert {r.request_id for r in queue} == set(model)
