"""A step planned while the one before is in flight: expected ends, tentative tokens, preemption, aborts."""

from __future__ import annotations

import pytest

from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.unified import UnifiedPlanner

SCHEDULERS = [UnifiedPlanner, PrefillFirstPlanner]


def both(run, kind, requests, **options):
    """Run the same requests step by step, and with a step in flight; return both runs."""
    runs = []
    for ahead in (False, True):
        one = run(kind, ahead=ahead, **options)
        one.add(*requests())
        one.finish()
        runs.append(one)
    return runs


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_what_ends_by_count_is_known_before_it_ends(run, request_of, kind):
    waiting, overlapped = both(run, kind, lambda: [request_of(f"r{i}", 5 + i, 4 + 3 * i) for i in range(4)])
    assert overlapped.tokens == waiting.tokens
    assert overlapped.num_ahead > 5
    assert overlapped.scheduler.stats().num_discarded_tokens == 0
    assert [n for n in overlapped.scheduled() if n] == [n for n in waiting.scheduled() if n]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_stop_id_costs_one_token_more(run, request_of, kind):
    probe = run(kind)
    probe.add(request_of("a", 6, 20))
    probe.finish()
    stop_id = probe.tokens["a"][7]
    waiting, overlapped = both(run, kind, lambda: [request_of("a", 6, 20, stop_ids=[stop_id])])
    assert overlapped.tokens == waiting.tokens and overlapped.reason("a") == "stop"
    assert sum(map(len, overlapped.scheduled())) == sum(map(len, waiting.scheduled())) + 1
    assert overlapped.scheduler.stats().num_discarded_tokens == 1


def test_blocks_are_named_when_their_last_token_is_known(run, request_of):
    """What a sequence has generated is found as if it had been waited for, in the step after its block is full."""
    names = []
    for ahead in (False, True):
        one = run(ahead=ahead, block_size=2)
        one.add(request_of("a", 3, 12))
        one.finish()
        assert one.num_ahead == (11 if ahead else 0)
        names.append(len([block for block in one.scheduler.kv.pool.blocks if block.block_hash is not None]))
        text = one.prompts["a"] + one.tokens["a"]
        one.add(request_of("b", text, 2))
        one.finish()
        assert one.first["b"].num_cached_tokens == 14
    assert names[0] == names[1] == 7


def test_no_block_hash_covers_a_token_that_is_not_final(run, request_of):
    one = run(ahead=True, block_size=1)
    one.add(request_of("a", 3, 12))
    for _ in range(6):
        one.step()
        hashed = [block for block in one.scheduler.kv.pool.blocks if block.block_hash is not None]
        sequence = one.requests["a"].sequences[0]
        assert len(hashed) == min(len(sequence.token_ids), sequence.num_computed_tokens)
    assert one.num_ahead == 5
    one.finish()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_nobody_is_ended_for_want_of_blocks_that_a_step_in_flight_frees(run, request_of, kind):
    """Four sequences of one request, which end one after the other by their stop ids, in a pool that is too small."""
    ends = []
    for number in range(60):
        name, options = f"a{number}", {"num_blocks": 9, "block_size": 2, "max_model_len": 16}
        waiting, overlapped = both(
            run, kind, lambda name=name: [request_of(name, 4, 12, n=4, stop_ids=range(9))], **options
        )
        assert overlapped.tokens == waiting.tokens
        assert {n: overlapped.reason(n) for n in overlapped.last} == {n: waiting.reason(n) for n in waiting.last}
        ends += [news.finish_reason for news in overlapped.last.values()]
    assert ends.count("stop") > 50 and ends.count("error") > 10


def test_bad_keys_of_one_preempted_in_flight_are_not_found(run, request_of):
    """Its blocks went back with their names before it was known that they are bad."""
    one = run(ahead=True, policy="priority", max_num_seqs=1)
    one.add(request_of("a", 13, 9, priority=1))
    one.step(lambda plan: ["a"])
    one.add(request_of("b", 5, 2))
    plan = one.step()
    assert plan.preempted_sequence_ids == ["a"] and one.reason("a") == "error"
    one.add(request_of("c", one.prompts["a"], 3))
    one.finish()
    assert one.reason("c") == "length" and one.tokens["c"] == one.expected("c")[0]


@pytest.mark.parametrize("swapped", [False, True])
def test_one_preempted_in_flight_keeps_its_token(run, request_of, swapped):
    mode = "swap" if swapped else "recompute"
    one = run(ahead=True, policy="priority", max_num_seqs=1, num_host_blocks=16, preemption_mode=mode)
    one.add(request_of("a", 6, 9, priority=1))
    one.step()
    one.add(request_of("b", 5, 2))
    plan = one.step()
    assert plan.preempted_sequence_ids == ["a"]
    assert len(one.tokens["a"]) == 1 and one.scheduler.stats().num_swapped_out == swapped
    one.finish()
    assert one.tokens["a"] == one.expected("a")[0] and one.tokens["b"] == one.expected("b")[0]


def test_one_preempted_in_flight_may_end_with_its_token(run, request_of):
    probe = run()
    probe.add(request_of("a", 6, 1))
    probe.finish()
    one = run(ahead=True, policy="priority", max_num_seqs=1)
    one.add(request_of("a", 6, 9, priority=1, stop_ids=probe.tokens["a"]))
    one.step()
    one.add(request_of("b", 5, 2))
    assert one.step().preempted_sequence_ids == ["a"]
    assert one.reason("a") == "stop"
    one.finish()
    assert one.tokens["a"] == probe.tokens["a"]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_name_may_be_used_again_while_the_aborted_one_is_in_flight(run, request_of, kind):
    one = run(kind, ahead=True)
    one.add(request_of("a", 6, 9), request_of("b", 7, 9))
    one.step()
    one.step()
    one.scheduler.abort_requests(["a"])
    one.last.pop("a")
    one.add(request_of("a", [1, 2, 3], 5))
    one.finish()
    assert one.tokens["a"] == one.expected("a")[0] and one.tokens["b"] == one.expected("b")[0]
    assert one.scheduler.stats().num_discarded_tokens == 1


def test_chunks_of_a_prompt_overlap_and_so_do_forked_sequences(run, request_of):
    one = run(ahead=True, max_num_batched_tokens=8)
    one.add(request_of("a", 20, 6, n=2))
    one.finish()
    steps = [plan for plan in one.plans if plan.num_scheduled_tokens]
    # Beside all but the one in which the samples part from each other, and the last, a step was planned.
    assert one.num_ahead == len(steps) - 2
    for index, name in enumerate(("a-0", "a-1")):
        assert one.tokens[name] == one.expected("a", index)[0]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_what_a_step_in_flight_spoils_for_a_request_that_is_aborted_meanwhile_is_not_reused(run, request_of, kind):
    one = run(kind, ahead=True)
    one.add(request_of("a", 13, 5), request_of("b", 9, 9))
    one.step(broken=lambda plan: ["a"])
    one.scheduler.abort_requests(["a"])
    one.finish()
    one.add(request_of("c", one.prompts["a"], 5))
    one.finish()
    assert one.first["c"].num_cached_tokens == 0
    assert [one.reason(name) for name in "bc"] == ["length", "length"]
