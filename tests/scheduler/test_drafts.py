"""Tentative tokens that somebody guessed: whatever the guesses, the text is the one without them."""

from __future__ import annotations

import pytest

from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.request import RequestStatus
from quire.scheduler.unified import UnifiedPlanner
from tests.scheduler.conftest import POISON, VOCAB, VOID, next_prefix, prefixes, sample
from tests.scheduler.test_properties import RandomLoad

PLANNERS = [UnifiedPlanner, PrefillFirstPlanner]


def continuation(run, sequence, count):
    """The next `count` tokens after all that a sequence has, tentative ones included, by definition."""
    request = sequence.request
    prefix = prefixes(sequence.token_ids, request.engine_request.cache_salt)[-1]
    index = request.engine_request.sequence_ids.index(sequence.sequence_id)
    following = []
    for _ in range(sequence.num_tentative_tokens + count):
        following.append(sample(prefix, request.engine_request.seeds[index]))
        prefix = next_prefix(prefix, following[-1])
    return following[sequence.num_tentative_tokens :]


def check_hashes(run):
    """Every block that can be found holds what its hash stands for, all of it of final tokens."""
    pool = run.scheduler.kv.pool
    for block in pool.blocks:
        if block.block_hash is None or block.step > len(run.plans):
            continue
        held = [run.worker.blocks[block.block_id].get(offset) for offset in range(len(block.token_ids))]
        chain = [content.prefix for content in held if content is not None]
        assert VOID not in chain
        for before, token_id, after in zip(chain, block.token_ids[1:], chain[1:], strict=False):
            # Logits that are not finite are known when the step's result is processed.
            assert POISON in (before, after) or after == next_prefix(before, token_id)


class DraftLoad(RandomLoad):
    """Random operations, with several steps in flight, and drafts of which some are right."""

    def __init__(self, run, request_of, kind, seed, depth):
        super().__init__(lambda *args, **options: run(*args, depth=depth, **options), request_of, kind, seed)
        self.num_proposed = 0

    def step(self):
        self.propose()
        plan = self.run.step(self.pick_broken if self.rng.random() < 0.03 else lambda plan: ())
        assert plan.total_num_scheduled_tokens <= self.run.scheduler.admission.max_num_batched_tokens
        check_hashes(self.run)

    def propose(self):
        scheduler = self.run.scheduler
        for request in scheduler.requests.running:
            for sequence in request.sequences:
                if self.rng.random() < 0.3 or request.beam is not None:
                    continue
                drafts = continuation(self.run, sequence, self.rng.randint(1, 6))
                if self.rng.random() < 0.6:
                    drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(VOCAB)
                self.num_proposed += scheduler.propose(sequence.sequence_id, drafts)
        assert scheduler.propose("nobody", [1]) == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", PLANNERS)
def test_random_load_with_random_drafts_yields_what_each_request_yields_alone(run, request_of, alone, kind, depth):
    num_proposed = num_preemptions = num_discarded = num_ahead = num_hits = 0
    for seed in range(12):
        load = DraftLoad(run, request_of, kind, seed, depth)
        for _ in range(100):
            load.operate()
        while load.run.scheduler.has_unfinished() or load.run.in_flight:
            load.step()
        load.run.finish()
        load.check_outputs(alone)
        stats = load.run.scheduler.stats()
        num_proposed += load.num_proposed
        num_preemptions += stats.num_preemptions
        num_discarded += stats.num_discarded_tokens
        num_ahead += load.run.num_ahead
        num_hits += stats.prefix_cache_hits
    assert num_proposed > 500 and num_preemptions > 5 and num_hits > 100
    assert (num_ahead > 100 and num_discarded > 100) or depth == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", PLANNERS)
def test_right_drafts_save_steps(run, request_of, kind, depth):
    one = run(kind, depth=depth)
    one.add(request_of("a", 6, 21))
    one.step()
    while one.scheduler.has_unfinished() or one.in_flight:
        sequence = one.scheduler.requests.find("a")
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
        sequence = one.scheduler.requests.find("a")
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
