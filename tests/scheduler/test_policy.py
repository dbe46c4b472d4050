"""The waiting queue keeps its order through pushes, pops and removals."""

from __future__ import annotations

import random

import pytest

from quire.sampling_params import BeamSearchParams
from quire.scheduler.live import RequestQueue
from quire.scheduler.policy import make_policy


def in_order(requests, policy):
    """Names in the order in which a queue under `policy` yields them; all arrive in the order given."""
    queue = RequestQueue()
    for number, request in enumerate(requests):
        request.order_key = policy.key(request, number)
        queue.push(request)
    return [request.request_id for request in queue]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["b", "c", "a", "d"]), ("priority", ["c", "a", "d", "b"])],
)
def test_policies(request_of, policy, order):
    arrivals = [("a", 2.0, 1), ("b", 1.0, 2), ("c", 1.5, 0), ("d", 2.0, 1)]
    requests = [request_of(name, 3, arrival_time=time, priority=priority) for name, time, priority in arrivals]
    assert in_order(requests, make_policy(policy)) == order


def test_with_ageing_a_request_gains_a_rank_for_each_such_time_it_waits(request_of):
    arrivals = [("old", 0.0, 5), ("new", 30.0, 0), ("newer", 60.0, 0)]
    requests = [request_of(name, 3, arrival_time=time, priority=priority) for name, time, priority in arrivals]
    assert in_order(requests, make_policy("priority")) == ["new", "newer", "old"]
    assert in_order(requests, make_policy("priority", ageing=10.0)) == ["new", "old", "newer"]
    assert in_order(requests, make_policy("priority", ageing=5.0)) == ["old", "new", "newer"]


def test_tenants_take_turns_by_weight(request_of):
    """One tenant's flood does not delay another; who weighs twice as much gets twice the tokens."""
    flood = [request_of(f"a{i}", 100, tenant="a") for i in range(6)]
    others = [request_of(f"b{i}", 100, tenant="b") for i in range(3)]
    assert in_order(flood + others, make_policy("fair")) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]
    doubled = in_order(flood + others, make_policy("fair", weights={"a": 2.0}))
    assert doubled == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]


def test_a_tenant_that_was_idle_has_no_credit_and_generated_tokens_count(request_of):
    policy = make_policy("fair")
    first = request_of("a0", 100, tenant="a")
    first.order_key = policy.key(first, 0)
    policy.admitted(first)
    first.num_output_tokens = 900
    policy.ended(first)
    a, b = request_of("a1", 100, tenant="a"), request_of("b0", 500, tenant="b")
    assert in_order([a, b], policy) == ["b0", "a1"]  # a's answer cost as much as nine prompts
    policy.admitted(b)
    late = request_of("c0", 1, tenant="c")
    assert policy.key(late, 9)[0] == b.order_key[0]  # not 0: time went on while c was away


def test_random_pushes_and_removals(request_of):
    rng = random.Random(0)
    queue, model = RequestQueue(), {}
    for number in range(4000):
        draw = rng.random()
        if draw < 0.45:
            request = request_of(f"r{number}", 2)
            request.order_key = (rng.random(), number)
            queue.push(request)
            model[request.request_id] = request
        elif model:
            removed = model.pop(rng.choice(sorted(model)))
            queue.remove(removed)
        assert len(queue) == len(model)
        assert list(queue) == sorted(model.values(), key=lambda r: r.order_key)
        assert queue.peek() is (next(iter(queue)) if model else None)


def test_a_beam_search_is_charged_its_beams_once(run, request_of):
    crowd = run(num_blocks=64)
    request = request_of("beams", [7, 8, 9], 6, beam=BeamSearchParams(beam_width=3, max_tokens=6))
    crowd.add(request)
    crowd.finish()
    beams = crowd.last["beams"].beams
    assert request.num_output_tokens == max(len(beam.token_ids) for beam in beams) * len(beams)
    cut = request_of("cut", [7, 8, 9], 6, beam=BeamSearchParams(beam_width=3, max_tokens=6))
    crowd.add(cut)
    for _ in range(3):
        crowd.step()
    num_tokens = sum(sequence.num_output_tokens for sequence in cut.sequences)
    crowd.scheduler.abort_requests(["cut"])
    assert cut.num_output_tokens == num_tokens > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair"])
def test_requests_in_the_background_come_last(run, request_of, policy):
    r = run(policy=policy, max_num_seqs=1)
    r.add(request_of("line", 6, 3, background=True, priority=-5), request_of("next", 6, 3, background=True))
    r.add(request_of("late", 6, 3, arrival_time=9.0, priority=5))
    r.finish()
    assert list(r.first) == ["late", "line", "next"]


def test_what_somebody_waits_for_is_computed_without_the_background(run, request_of):
    r = run(num_blocks=64, max_num_batched_tokens=64)
    r.add(request_of("line", 5, 30, background=True), request_of("long", 40, 3, background=True))
    r.step()  # nobody else was there for long: a quarter of a step
    assert r.plans[-1].num_scheduled_tokens == {"line": 5, "long": 1}
    r.add(request_of("talk", 6, 3))
    assert r.step().num_scheduled_tokens == {"talk": 6}
    assert r.step().num_scheduled_tokens == {"talk": 1, "line": 1}  # a little beside what others decode
    r.add(request_of("more", 100, 1))  # longer than a step
    assert "line" not in r.step().num_scheduled_tokens | r.step().num_scheduled_tokens
    r.finish()
    assert r.scheduler.stats().num_preemptions == 0


def test_the_background_gives_up_its_place_and_its_blocks(run, request_of):
    r = run(num_blocks=8, max_num_seqs=2)
    r.add(request_of("line", 8, 12, background=True), request_of("other", 8, 12, background=True))
    while len(r.first) < 2:
        r.step()
    r.add(request_of("talk", 20, 4))
    plan = r.step()
    assert plan.preempted_sequence_ids == ["other"] and plan.num_scheduled_tokens == {"talk": 20}
    r.finish()
    assert r.last["talk"].num_preemptions == 0


def test_the_background_goes_on_where_others_wait_for_what_it_has(run, request_of):
    """No request may block another one for ever."""
    r = run(num_blocks=6, max_num_seqs=4)
    r.add(request_of("line", 10, 8, background=True))
    r.step()
    r.add(request_of("talk", 16, 6), request_of("more", 16, 6))
    r.finish()
    assert set(r.last) == {"line", "talk", "more"}
