"""What the scheduler's policies are for, on small loads: hit rates, and who waits for whom."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.simulate.driver import Record
from quire.simulate.report import summarize
from quire.simulate.trace import Synthetic, TraceRequest, draw, read_trace
from tests.simulate.conftest import PlainCost


def shuffled_groups(num_groups: int, each: int, prefix: int, own: int) -> list[TraceRequest]:
    """Requests of `num_groups` groups with a prefix each, all there from the start, in random order."""
    groups = [group for group in range(num_groups) for _ in range(each)]
    random.Random(0).shuffle(groups)
    return [TraceRequest(number, 0.0, prefix + own, 4, ((group, prefix),)) for number, group in enumerate(groups)]


def hit_rate(run) -> float:
    return summarize(run.log)["cache"]["hit_rate"]


def test_longest_prefix_first_finds_more_than_first_come_first_served(replay):
    requests = shuffled_groups(num_groups=20, each=8, prefix=256, own=32)
    options = {"num_gpu_blocks_override": 110, "max_num_seqs": 4, "max_overtake_seconds": 1e6, "swap_space": 0}
    fcfs = replay(requests, PlainCost(0.001, 0.0001), **options)
    lpm = replay(requests, PlainCost(0.001, 0.0001), scheduling_policy="lpm", **options)
    assert hit_rate(lpm) > hit_rate(fcfs) + 0.2
    assert lpm.log.duration < fcfs.log.duration
    assert all(record.num_generated == 4 for record in lpm.log.records)


def test_tokens_find_more_than_blocks_of_them(replay):
    requests = [TraceRequest(n, 10.0 * n, 150, 2, ((n % 3, 100),)) for n in range(30)]
    found = {
        unit: replay(requests, block_size=64, prefix_match_unit=unit, swap_space=0).log.records for unit in (1, 64)
    }
    assert {record.num_cached for record in found[64][3:]} == {64}
    assert {record.num_cached for record in found[1][3:]} == {100}


def test_evicted_prefixes_are_found_in_the_tiers_below(replay):
    requests = [TraceRequest(n, 10.0 * n, 200, 2, ((n % 8, 192),)) for n in range(40)]
    options = {"num_gpu_blocks_override": 40, "block_size": 16}
    alone = summarize(replay(requests, swap_space=0, **options).log)["cache"]
    with_host = summarize(replay(requests, swap_space=2**30, **options).log)["cache"]
    assert alone["hit_rate"] == 0.0
    assert with_host["host_hit_rate"] == with_host["hit_rate"] > 0.7


FAIR = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 4000, "max_num_seqs": 32}


def fair_requests(kind: str, short: bool, long: bool) -> list[TraceRequest]:
    loads = []
    if long:
        loads.append(Synthetic("burst", num=1, prompt=30000, output=32, tenant="long"))
    if short:
        loads.append(Synthetic(kind, rate=4.0, num=20, start=1.0, prompt=200, output=16, spread=0.5, tenant="short"))
    return draw(loads)


def of_tenant(records: list[Record], tenant: str) -> list[Record]:
    return [record for record in records if record.request.tenant == tenant]


@pytest.mark.parametrize("kind", ["burst", "uniform"])
def test_a_long_prompt_does_not_hold_up_short_ones_nor_they_it(replay, kind):
    cost = PlainCost(0.002, 0.0002)
    both, short, long = (
        replay(fair_requests(kind, *which), cost, **FAIR).log.records
        for which in ((True, True), (True, False), (False, True))
    )
    beside = np.percentile([record.ttft for record in of_tenant(both, "short")], 99)
    alone = np.percentile([record.ttft for record in short], 99)
    assert beside <= 2 * alone
    (slowed,) = of_tenant(both, "long")
    assert slowed.e2e <= 1.2 * long[0].e2e


@pytest.mark.slow
def test_hit_rates_on_the_published_trace(replay, mooncake):
    requests = read_trace(str(mooncake), limit=1000, time_scale=0.25)  # hundreds wait, and few prefixes survive
    options = {"num_gpu_blocks_override": 40000, "max_num_batched_tokens": 8192, "swap_space": 0}
    cost = PlainCost(0.001, 0.000012)
    blocks = replay(requests, cost, prefix_match_unit=16, **options)
    tokens = replay(requests, cost, **options)
    longest = replay(requests, cost, scheduling_policy="lpm", max_overtake_seconds=60.0, **options)
    assert 0 < hit_rate(blocks) < hit_rate(tokens)
    assert hit_rate(longest) > 1.2 * hit_rate(tokens)


def test_a_delay_factor_gathers_prompts_for_later_first_tokens_and_quicker_next_ones(replay):
    requests = draw([Synthetic("uniform", rate=6.0, num=120, prompt=300, output=60, spread=0.5)])

    def measure(delay_factor: float) -> tuple[float, float, float]:
        prefills: list[int] = []

        def observe(plan, contents, seconds) -> None:
            if contents.prefill_pairs:
                prefills.append(contents.num_sequences)

        options = {"scheduler": "prefill-first", "delay_factor": delay_factor, "max_num_seqs": 64}
        run = replay(requests, PlainCost(0.02, 0.0004), observe, num_gpu_blocks_override=5000, **options)
        found = summarize(run.log)
        return float(np.mean(prefills)), found["ttft"]["mean"], found["tpot"]["p99"]

    (size, ttft, tpot), (delayed_size, delayed_ttft, delayed_tpot) = measure(0.0), measure(2.0)
    assert delayed_size > 1.2 * size
    assert delayed_ttft > 2 * ttft
    assert delayed_tpot < 0.9 * tpot


@pytest.mark.parametrize(
    ("rate", "cost", "num_tokens"),
    [
        (4.0, PlainCost(0.006, 0.000025), 8192),
        (20.0, PlainCost(0.006, 0.000025), 8192),
        (1.0, PlainCost(0.01, 0.001), 2048),
    ],
)
def test_batches_hardly_delay_first_tokens(replay, rate, cost, num_tokens):
    """Two costs of steps, as of a GPU that reads weights most of the time, and of a CPU that computes."""
    options = {"num_gpu_blocks_override": 8000, "max_num_seqs": 64, "max_num_batched_tokens": num_tokens}
    talk = Synthetic("poisson", rate=rate, num=300, prompt=256, output=64, spread=0.5)
    lines = Synthetic("burst", num=100, prompt=500, output=200, background=True)
    first = {}
    for loads in ([talk], [talk, lines]):
        log = replay(draw(loads), cost, **options).log
        waits = [record.ttft for record in log.records if not record.request.background]
        first[len(loads)] = np.percentile(waits, 99)
    assert first[2] <= 1.2 * first[1]
    begun = [record.first_token for record in log.records if record.request.background]
    last = max(record.finish for record in log.records if not record.request.background)
    assert min(begun) < last  # and they get on meanwhile
