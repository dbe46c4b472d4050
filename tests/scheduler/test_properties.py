"""Under random load, with tiny pools and any budget, every request yields exactly what it would yield alone.

The worker of `conftest` checks each position that each sequence attends to; the scheduler checks itself each step.
"""

from __future__ import annotations

import random

import pytest

OPERATIONS = 150
GROUPS = 12
SEEDS_PER_GROUP = 15  # 27,000 operations in all, and the steps to finish


def random_options(rng: random.Random) -> dict:
    """Options under which memory, seats, and budget are all scarce at times."""
    block_size = rng.choice((1, 2, 3, 4, 8))
    return {
        "block_size": block_size,
        "num_blocks": max(rng.randint(12, 90) // block_size, 2),
        "max_num_seqs": rng.choice((1, 3, 4, 6, 8)),
        "max_num_batched_tokens": rng.choice((1, 2, 3, 5, 8, 16, 40)),
        "max_model_len": rng.choice((12, 60, 60)),
        "enable_prefix_caching": rng.random() < 0.8,
        "policy": rng.choice(("fcfs", "priority")),
        "long_prefill_token_threshold": rng.choice((0, 0, 1, 5)),
        "watermark": rng.choice((0.0, 0.1)),
    }


# Few tokens and shared beginnings, so that prefixes meet in every way.
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 4, 4, 4, 4, 4, 4], [5] * 17]


def random_request(rng: random.Random, name: str, request_of):
    prompt = rng.choice(PROMPTS)[: rng.randint(1, 21)] + rng.choices(range(3), k=rng.choice((0, 0, 1, 3)))
    max_tokens = rng.randint(1, 40)
    return request_of(
        name,
        prompt,
        max_tokens,
        stop_ids=rng.sample(range(29), k=rng.choice((0, 0, 2))),
        arrival_time=float(rng.randint(0, 3)),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice((None, None, "alice", "bob")),
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
        prompt_logprobs=rng.choice((None, None, None, 2)),
        logprobs=rng.choice((None, 1)),
    )


class RandomLoad:
    """Random operations on a `Run`; remembers which requests were aborted or broken, whose output is cut short."""

    def __init__(self, run, request_of, options: dict, seed: int) -> None:
        self.run = run(**options)
        self.rng = random.Random(seed)
        self.request_of = request_of
        self.aborted: set[str] = set()
        self.broken: set[str] = set()

    def operate(self) -> None:
        draw = self.rng.random()
        if draw < 0.3:
            self.run.add(random_request(self.rng, f"r{len(self.run.requests)}", self.request_of))
        elif draw < 0.33:
            names = self.rng.sample(sorted(self.run.requests), k=min(2, len(self.run.requests)))
            live = [name for name in names if name not in self.run.last or self.run.reason(name) is None]
            self.aborted.update(live)
            self.run.scheduler.abort_requests([*names, "unknown"])
            self.run.scheduler.check_integrity()
        elif draw < 0.34:
            self.run.scheduler.reset_prefix_cache()
            self.run.scheduler.check_integrity()
            self.run.worker.version += 1
        else:
            self.step()

    def step(self) -> None:
        scheduler, live_before = self.run.scheduler, list(self.run.scheduler._running)
        oldest = live_before[0] if live_before else None
        computed = oldest.num_computed_tokens if oldest else 0
        plan = self.run.step(self.pick_broken if self.rng.random() < 0.03 else lambda plan: ())
        self.broken.update(name for name in plan.num_scheduled_tokens if self.run_failed(name))
        assert plan.total_num_scheduled_tokens <= scheduler.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= scheduler.max_num_seqs
        assert not (plan.preempted_sequence_ids and plan.new_sequences)
        if oldest is not None:  # the first in line always advances
            assert oldest.request_id in plan.num_scheduled_tokens
            assert oldest.status.finished or oldest.num_computed_tokens > computed
        for request in live_before:  # and so does everybody who was not preempted: budgets never starve a decode
            assert (request.request_id in plan.num_scheduled_tokens) != (
                request.request_id in plan.preempted_sequence_ids
            )

    def pick_broken(self, plan):
        return self.rng.sample(sorted(plan.num_scheduled_tokens), k=min(1, len(plan.num_scheduled_tokens)))

    def run_failed(self, name: str) -> bool:
        return name in self.run.last and self.run.reason(name) == "error"

    def check_outputs(self, expected) -> None:
        scheduler = self.run.scheduler
        for name, request in self.run.requests.items():
            got = self.run.tokens[name]
            if request.num_prompt_tokens + 1 > min(scheduler.max_model_len, scheduler.kv.capacity):
                assert got == []
                assert name in self.aborted or "tokens" in self.run.last[name].error
                continue
            tokens, reason = expected(request, scheduler.length_limit)
            if name in self.broken or (name in self.aborted and self.run.last.get(name) is None):
                assert got == tokens[: len(got)]
            elif name in self.aborted:
                assert got == tokens[: len(got)]
                assert self.run.reason(name) is None
            else:
                assert (got, self.run.reason(name)) == (tokens, reason)
                if request.wants_prompt_logprobs:
                    assert len(self.run.prompt_logprobs[name]) == request.num_prompt_tokens - 1
                    positions = [entry.token_ids[0] for entry in self.run.prompt_logprobs[name]]
                    assert positions == request.token_ids[1 : request.num_prompt_tokens]


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_load_yields_what_each_request_yields_alone(run, request_of, expected, group):
    num_preemptions = num_hits = 0
    for seed in range(group * SEEDS_PER_GROUP, (group + 1) * SEEDS_PER_GROUP):
        load = RandomLoad(run, request_of, random_options(random.Random(seed)), seed)
        for _ in range(OPERATIONS):
            load.operate()
        load.run.finish()
        load.check_outputs(expected)
        num_preemptions += load.run.scheduler.stats().num_preemptions
        num_hits += load.run.scheduler.stats().prefix_cache_hits
    assert num_preemptions > 20 and num_hits > 100, "the load is too light to show anything"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 64])
def test_budget_and_pool_size_do_not_change_tokens(run, request_of, budget, caching):
    """Eight requests beside each other, at every budget and under memory pressure, against each one run alone."""

    def requests():
        return [request_of(f"r{i}", PROMPTS[i % 3][: 5 + i], 6 + i) for i in range(8)]

    alone = {}
    for request in requests():
        single = run(num_blocks=64, max_num_batched_tokens=64)
        single.add(request)
        single.finish()
        alone |= single.tokens
    preemptions = 0
    for num_blocks in (7, 9, 14, 64):
        together = run(num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=caching)
        together.add(*requests())
        together.finish()
        assert together.tokens == alone
        preemptions += together.scheduler.stats().num_preemptions
    if budget > 4:
        assert preemptions > 0


def test_ten_times_more_than_fits_still_finishes_in_order(run, request_of):
    """Overload: every request finishes, and first come is first finished when all are alike."""
    load = run(num_blocks=6, max_num_seqs=4, max_num_batched_tokens=16)
    names = [f"r{i:02}" for i in range(40)]
    load.add(*(request_of(name, 6, 8) for name in names))
    finished = []
    while load.scheduler.has_unfinished():
        load.step()
        finished += [n for n in names if n in load.last and load.reason(n) == "length" and n not in finished]
    assert finished == names
    assert load.scheduler.stats().num_preemptions > 0
