"""Layerwise blocks: who may go on with them, who waits for whole ones; and none of it can be seen in the output."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.scheduler.unified import UnifiedPlanner
from tests.helpers.transfers import COPY, moves
from tests.scheduler.test_properties import OPERATIONS, RandomLoad, shared_options

SEEDS = 8  # of a group


def layerwise_options(seed: int) -> dict:
    """Random options with layerwise blocks, most often too many of them to go on with all."""
    rng = random.Random(seed)
    options = shared_options(rng)
    num_blocks = options["num_blocks"] = max(options["num_blocks"], 4)
    return options | {
        "windows": (None,),
        "deduplicate_blocks": False,
        "num_host_blocks": 0,
        "num_disk_slots": 0,
        "preemption_mode": "recompute",
        "num_layerwise_blocks": rng.randint(1, num_blocks - 1),
        "streamed_tokens": rng.choice((0, 1, 2, 4)) * options["block_size"],
    }


class LayerwiseLoad(RandomLoad):
    """Random operations with layerwise blocks, of which everything is as without but who is served in which step."""

    def __init__(self, run, request_of, seed: int) -> None:
        super().__init__(run, request_of, UnifiedPlanner, seed, layerwise_options(seed))
        self.num_waited = self.num_made_resident = self.num_offloaded = 0

    def step(self) -> None:
        scheduler = self.run.scheduler
        oldest = scheduler.requests.running[0] if scheduler.requests.running else None
        self.step_unchecked()
        plan, first_layerwise = self.run.plans[-1], scheduler.kv.pool.first_layerwise
        self.num_made_resident += sum(
            kind == COPY and source >= first_layerwise > target for kind, source, target in moves(plan.transfers)
        )
        self.num_offloaded += sum(
            kind == COPY and source < first_layerwise <= target for kind, source, target in moves(plan.transfers)
        )
        self.num_waited += sum(
            not set(plan.num_scheduled_tokens) & {sequence.sequence_id for sequence in request.sequences}
            for request in scheduler.requests.running
        )
        if oldest is not None and self.run.depth == 1 and not scheduler.admission.policy.preempts:
            named = {name.split("-")[0].split("#")[0] for name in plan.num_scheduled_tokens}
            assert oldest.request_id in named or oldest.status.finished, "the first in line always advances"


@pytest.mark.parametrize("group", [0, *(pytest.param(group, marks=pytest.mark.slow) for group in range(1, 6))])
def test_random_load_with_layerwise_blocks_yields_what_each_request_yields_alone(run, request_of, alone, group):
    counts: Counter[str] = Counter()
    for seed in range(group * SEEDS, (group + 1) * SEEDS):
        load = LayerwiseLoad(run, request_of, seed)
        for _ in range(OPERATIONS):
            load.operate()
        load.run.finish()
        load.check_outputs(alone)
        stats = load.run.scheduler.stats()
        assert stats.num_free_layerwise_blocks == stats.num_layerwise_blocks > 0
        counts += Counter(
            waited=load.num_waited,
            made_resident=load.num_made_resident,
            offloaded=load.num_offloaded,
            preempted=stats.num_preemptions,
            hits=stats.prefix_cache_hits,
            copies=load.run.worker.num_copies,
        )
    assert len(counts) == 6 and min(counts.values()) > 5, f"the load is too light to show anything: {counts}"


def layerwise_ids(load, name: str) -> list[int]:
    """The layerwise blocks of a sequence."""
    (table,) = load.scheduler.kv.block_ids(name)
    return [block for block in table if block >= load.scheduler.kv.pool.first_layerwise]


def test_without_pressure_nobody_has_a_layerwise_block(run, request_of):
    load = run(num_blocks=16, num_layerwise_blocks=8, enable_prefix_caching=False)
    load.add(*(request_of(f"r{i}", 7, 8) for i in range(2)))  # 4 blocks each in the end
    while load.scheduler.has_unfinished():
        load.step()
        assert load.scheduler.stats().num_used_layerwise_blocks == 0


def test_who_comes_late_has_its_first_token_early_and_the_second_once_others_have_ended(run, request_of):
    load = run(num_blocks=10, num_layerwise_blocks=6, enable_prefix_caching=False, streamed_tokens=0)
    load.add(request_of("early", 11, 6))
    load.step()
    load.add(request_of("late", 11, 6))
    load.step()
    assert len(load.tokens["late"]) == 1, "it waits for no block"
    assert len(layerwise_ids(load, "late")) == 2, "one whole block was left"
    while "early" not in load.last or load.last["early"].finish_reason is None:
        load.step()
        assert len(load.tokens["late"]) == 1, "its blocks are on the host, and would keep the other waiting"
    transfers = load.step().transfers
    assert [kind for kind, _, _ in moves(transfers)] == [COPY, COPY]
    assert layerwise_ids(load, "late") == []
    assert len(load.tokens["late"]) == 2


def test_few_layerwise_blocks_are_brought_with_every_step(run, request_of):
    load = run(num_blocks=10, num_layerwise_blocks=6, enable_prefix_caching=False, streamed_tokens=12)
    load.add(request_of("early", 11, 6), request_of("late", 11, 6))
    for number in (1, 2):
        load.step()
        assert len(load.tokens["late"]) == number
    assert len(layerwise_ids(load, "late")) == 2


def test_what_is_longer_than_all_whole_blocks_goes_on_all_the_same(run, request_of):
    load = run(num_blocks=10, num_layerwise_blocks=8, streamed_tokens=0)
    load.add(request_of("long", 20, 15))
    load.finish()
    assert load.tokens["long"] == load.expected("long")[0]


def test_prompts_leave_whole_blocks_to_those_that_wait_for_them(run, request_of):
    load = run(num_blocks=13, num_layerwise_blocks=8, enable_prefix_caching=False, streamed_tokens=4)
    load.add(request_of("first", 9, 20), request_of("short", 7, 2), request_of("waits", 15, 8))
    load.step()
    load.step()
    assert load.last["short"].finish_reason == "length", "its two whole blocks are free now"
    assert len(layerwise_ids(load, "waits")) == 4
    load.add(request_of("prompt", 8, 8))
    plan = load.step()
    assert len(layerwise_ids(load, "waits")) == 3, "one block in each step"
    assert len(layerwise_ids(load, "prompt")) == 2, "the other one is not for those that came later"
    assert set(plan.num_scheduled_tokens) == {"first", "prompt"}


def test_samples_that_share_layerwise_blocks_share_the_whole_ones_that_take_their_place(run, request_of):
    load = run(num_blocks=16, num_layerwise_blocks=10, enable_prefix_caching=False, streamed_tokens=0)
    load.add(request_of("early", 19, 3))
    load.step()
    load.add(request_of("samples", 12, 5, n=3))
    load.step()
    assert [len(layerwise_ids(load, f"samples-{index}")) for index in range(3)] == [2, 2, 2]
    load.finish()
    for index in range(3):
        assert load.tokens[f"samples-{index}"] == load.expected("samples", index)[0]
    assert load.worker.num_copies == 2, "each shared block once"


def test_who_came_first_takes_whole_blocks_of_the_last_when_it_grows(run, request_of):
    load = run(num_blocks=14, num_layerwise_blocks=8, enable_prefix_caching=False, streamed_tokens=8)
    load.add(request_of("early", 11, 20), request_of("late", 10, 20))  # three whole blocks each
    load.step()
    assert len(load.tokens["late"]) == 1 and load.scheduler.stats().num_used_layerwise_blocks == 0
    while not layerwise_ids(load, "early"):
        load.step()
    assert len(load.tokens["early"]) == 3, "its fourth block was a layerwise one"
    load.step()
    assert layerwise_ids(load, "early") == []
    assert load.scheduler.stats().num_used_layerwise_blocks > 0, "the other has some for it"
    load.finish()
    assert [load.tokens[name] for name in ("early", "late")] == [load.expected(name)[0] for name in ("early", "late")]
