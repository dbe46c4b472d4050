"""Tentative tokens that somebody guessed: whatever the guesses, the text is the one without them."""

from __future__ import annotations

import pytest

from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.request import RequestStatus
from quire.scheduler.unified import UnifiedPlanner
from tests.scheduler.conftest import VOCAB, check_hashes, continuation

PLANNERS = [UnifiedPlanner, PrefillFirstPlanner]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", PLANNERS)
def test_right_drafts_save_steps(run, request_of, kind, depth):
    one = run(kind, depth=depth)
    one.add(request_of("a", 6, 21))
    one.step()
    while one.scheduler.has_unfinished() or one.in_flight:
        sequence = one.scheduler.requests.get_sequence("a")
        if sequence is not None:
            one.scheduler.propose("a", continuation(one, sequence, 3))
        one.step()
    one.finish()
    assert (one.tokens["a"], one.reason("a")) == one.expected("a")
    assert len([plan for plan in one.plans if plan.num_scheduled_tokens]) == 6  # the prompt, and 20 tokens by fours
    assert one.scheduler.stats().num_discarded_tokens == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_wrong_drafts_are_rolled_back_and_their_slots_reused(run, request_of, depth):
    one = run(depth=depth, block_size=2, num_blocks=8)
    one.add(request_of("a", 3, 9))
    one.step()
    for _ in range(40):
        sequence = one.scheduler.requests.get_sequence("a")
        if sequence is None:
            break
        right = continuation(one, sequence, 3)
        one.scheduler.propose("a", [right[0], (right[1] + 1) % VOCAB, right[2]])
        one.step()
        check_hashes(one)
    one.finish()
    assert (one.tokens["a"], one.reason("a")) == one.expected("a")
    assert one.most_blocks <= 7


def test_drafts_leave_budget_to_decodes_and_nobody_is_preempted_for_them(run, request_of):
    one = run(num_blocks=6, block_size=2, max_num_batched_tokens=4)
    one.add(request_of("a", 3, 6), request_of("b", 3, 6))
    one.step()
    one.step()
    assert one.scheduler.propose("a", [1, 2, 3]) == 3
    plan = one.step()
    assert plan.num_scheduled_tokens == {"a": 3, "b": 1}
    assert [len(data.draft_token_ids) for data in plan.continuing] == [2, 0]
    one.scheduler.propose("b", [1, 2, 3, 4])
    one.finish()
    assert one.tokens == {name: one.expected(name)[0] for name in "ab"}
    assert one.last["b"].num_preemptions <= 1 and one.last["a"].num_preemptions == 0


@pytest.mark.parametrize("options", [{"grammar": "any"}, {"n": 2}])
def test_drafts_are_taken_of_plain_decoding_sequences_only(run, request_of, options):
    one = run(max_num_batched_tokens=4)
    one.add(request_of("a", 6, 9, **options))
    assert one.scheduler.propose("a", [1]) == 0, "it waits"
    one.step()
    assert one.scheduler.propose("a", [1]) == 0, "its prompt is not computed"
    one.step()
    (request,) = one.scheduler.requests.running
    accepted = one.scheduler.propose(request.sequences[0].sequence_id, [1] * 20)
    assert accepted == (0 if "grammar" in options else 7)  # one token was sampled, one follows the drafts
    assert request.status is RequestStatus.RUNNING
    one.finish()
    for index, name in enumerate(request.engine_request.sequence_ids):
        assert one.tokens[name] == one.expected("a", index)[0]
