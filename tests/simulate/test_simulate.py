"""Replays in virtual time: by hand on a few requests, and properties on many."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from quire.cli import main as cli_main
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.resolve import load_info, resolve_config
from quire.errors import ConfigError
from quire.executor.ranks import create_executor
from quire.simulate.calibrate import measure
from quire.simulate.contents import StepContents
from quire.simulate.driver import VirtualClock
from quire.simulate.executor import SimulatedExecutor
from quire.simulate.report import as_csv, summarize, summarize_run, table
from quire.simulate.run import RunHasher
from quire.simulate.trace import Synthetic, TraceRequest, draw, read_trace
from quire.simulate.waste import BuddyAllocator, WasteMeter, waste_report
from quire.worker.footprint import Footprint
from tests.meta.source import ENVIRONMENT
from tests.simulate.conftest import PlainCost
from tests.simulate.test_cost import made_up_cost


def test_one_request_takes_its_steps(replay):
    run = replay([TraceRequest(0, 5.0, 10, 4)], PlainCost(base=1.0, token=0.1))
    record = run.log.records[0]
    assert (record.first_scheduled, record.first_token, record.finish) == (5.0, 7.0, pytest.approx(10.3))
    assert (record.ttft, record.tpot, record.e2e) == (2.0, pytest.approx(1.1), pytest.approx(5.3))
    assert run.executor.busy_seconds == pytest.approx(5.3)
    assert summarize_run(run)["utilization"] == pytest.approx(5.3 / 10.3)


def test_a_request_that_comes_during_a_step_waits_for_its_end(replay):
    first, second = replay([TraceRequest(0, 0.0, 10, 3), TraceRequest(1, 0.5, 10, 1)]).log.records
    assert (first.first_token, first.finish) == (1.0, 3.0)
    assert (second.first_scheduled, second.first_token, second.finish) == (1.0, 2.0, 2.0)
    assert second.tpot is None


def test_a_long_prompt_is_computed_in_chunks(replay):
    log = replay([TraceRequest(0, 0.0, 250, 1)], max_num_batched_tokens=100).log
    assert log.stats.num_scheduled_tokens == 250
    assert log.records[0].first_token == log.stats.num_steps >= 3


def test_shared_parts_of_prompts_are_found_in_the_cache(replay):
    requests = [TraceRequest(number, 10.0 * number, 100, 2, ((3, 64),)) for number in range(3)]
    run = replay(requests)
    assert [record.num_cached for record in run.log.records] == [0, 64, 64]
    assert summarize(run.log)["cache"]["hit_rate"] == pytest.approx(128 / 300)
    apart = replay([dataclasses.replace(request, prefix=()) for request in requests])
    assert [record.num_cached for record in apart.log.records] == [0, 0, 0]


def test_a_simulated_disk_tier_has_as_many_slots_as_a_real_one(replay, tmp_path):
    options = {"block_size": 4, "num_gpu_blocks_override": 40, "kv_disk_space": 2**20, "kv_disk_dir": str(tmp_path)}
    run = replay([TraceRequest(0, 0.0, 100, 4)], **options)
    config = EngineConfig.from_kwargs(**options)
    executor = create_executor(resolve_config(config, info := load_info(config)), info)
    executor.allocate(40, 160)
    assert run.executor.stored_blocks().num_slots == executor.stored_blocks().num_slots == 84
    executor.close()
    with pytest.raises(ConfigError, match="kv_disk_space: 1048576 bytes hold no block"):
        replay([TraceRequest(0, 0.0, 100, 4)], **options | {"block_size": 1024})


def test_a_request_that_can_never_fit_fails_alone(replay):
    requests = [TraceRequest(0, 0.0, 400, 4), TraceRequest(1, 0.0, 20, 4)]
    run = replay(requests, num_gpu_blocks_override=10)
    failed, served = run.log.records
    assert failed.error and failed.first_token is None
    assert served.error is None and served.num_generated == 4
    result = summarize(run.log)
    assert (result["completed"], result["failed"]) == (1, 1)


def test_too_few_blocks_lead_to_preemptions_and_everybody_ends_all_the_same(replay):
    requests = draw([Synthetic("burst", num=12, prompt=64, output=64)])
    run = replay(requests, num_gpu_blocks_override=24)
    assert run.log.stats.num_preemptions > 0
    assert sum(record.num_preemptions for record in run.log.records) == run.log.stats.num_preemptions
    assert all(record.num_generated == 64 for record in run.log.records)
    assert run.log.max_usage == 1.0


def test_goodput_counts_those_within_both_limits(replay):
    requests = [TraceRequest(0, 0.0, 10, 3), TraceRequest(1, 0.0, 10, 3), TraceRequest(2, 90.0, 10, 3)]
    log = replay(requests, max_num_seqs=1).log
    assert [record.ttft for record in log.records] == [1.0, 4.0, 1.0]
    assert summarize(log)["goodput"] is None
    assert summarize(log, slo_ttft=2.0)["goodput"] == {"share": 2 / 3, "rate": pytest.approx(2 / 93)}
    assert summarize(log, slo_ttft=2.0, slo_tpot=0.5)["goodput"]["share"] == 0.0


def test_queues_are_averaged_over_time(replay):
    requests = [TraceRequest(number, 100.0 * (number // 3), 10, 3) for number in range(6)]
    result = summarize(replay(requests, max_num_seqs=1).log)
    assert result["duration"] == 109.0
    assert (result["waiting"]["max"], result["running"]["max"]) == (2, 1)
    # At the ends of nine steps 2 2 2 1 1 1 0 0 0 wait and 1 1 0 1 1 0 1 1 0 run, twice.
    assert result["waiting"]["mean"] == pytest.approx(2 * 9 / 109)
    assert result["running"]["mean"] == pytest.approx(2 * 6 / 109)


def test_more_load_waits_longer(replay):
    def mean_ttft(rate: float) -> float:
        requests = draw([Synthetic("poisson", rate=rate, num=200, prompt=100, output=20)])
        return summarize(replay(requests, PlainCost(0.01, 0.0005)).log)["ttft"]["mean"]

    assert mean_ttft(1.0) < mean_ttft(10.0) < mean_ttft(50.0)


def test_priorities_and_tenants_reach_the_scheduler_and_the_report(replay):
    loads = [
        Synthetic("burst", num=10, prompt=50, output=5, priority=1, tenant="late"),
        Synthetic("burst", num=10, prompt=50, output=5, priority=0, tenant="early"),
    ]
    run = replay(draw(loads), max_num_seqs=2, scheduling_policy="priority")
    tenants = summarize(run.log)["tenants"]
    assert tenants["early"]["ttft"]["max"] < tenants["late"]["ttft"]["mean"]
    assert "early: ttft" in table(summarize_run(run))


def test_the_csv_has_a_line_for_each_request(replay):
    lines = as_csv(replay([TraceRequest(0, 0.5, 10, 3), TraceRequest(1, 1.0, 20000, 1)]).log.records).splitlines()
    assert lines[0].startswith("number,tenant,priority,prompt_tokens")
    assert lines[1] == "0,,0,10,3,0.500000,0.500000,1.500000,3.500000,3,0,0,"
    assert lines[2].startswith("1,,0,20000,1,1.000000,,,") and "context" in lines[2]


def test_another_process_prints_the_same_bytes(capsysbinary):
    words = ["simulate", "--synthetic", "poisson:rate=30,num=60,prompt=200,output=20,spread=0.5,prefix=64", "--json"]
    words += ["--cost-model", "roofline:bandwidth=20,gflops=500,memory=1,params=0.1", "--num-gpu-blocks-override", "99"]
    assert cli_main.main(words) == 0
    here = capsysbinary.readouterr().out
    other_hashes = {**ENVIRONMENT, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-m", "quire.cli.main", *words]
    there = subprocess.run(command, env=other_hashes, capture_output=True, check=True).stdout
    assert here == there and b'"preemptions"' in here


def test_block_names_depend_on_every_token_before():
    hasher = RunHasher(b"")
    root = hasher.root(None)
    names = {
        hasher.extend(parent, tokens)
        for parent in (root, hasher.root("salt"), hasher.extend(root, [1, 2]))
        for tokens in ([1, 2], [2, 1], [1], [1, 3])
    }
    assert len(names) == 12
    assert hasher.extend(root, [1, 2]) == RunHasher(b"").extend(root, [1, 2])
    assert {len(name) for name in names} == {len(root)}


# ---- waste ----


def test_a_paged_sequence_wastes_less_than_a_block(replay):
    requests = draw([Synthetic("poisson", rate=5, num=60, prompt=90, output=40, spread=0.9)])
    meter = WasteMeter(requests)
    run = replay(requests, PlainCost(0.02, 0.0001), meter, max_num_seqs=8, max_model_len=512, block_size=16)
    assert 0 < meter.max_paged_waste <= 15
    report = waste_report(meter.slots)
    for found in report.values():
        assert found["used"] + found["reserved"] + found["internal"] + found["external"] == pytest.approx(1.0)
    assert report["contiguous"]["peak_slots"] == 8 * 512
    used = [report[way]["used"] for way in ("contiguous", "power of two", "paged")]
    assert used == sorted(used) and used[-1] > 0.85
    assert report["paged"]["reserved"] == report["paged"]["external"] == 0.0
    assert run.log.stats.num_preemptions == 0


def test_waste_of_one_request_by_hand(replay):
    meter = WasteMeter([TraceRequest(0, 0.0, 10, 3)])
    replay(meter.requests, PlainCost(), meter, max_num_seqs=2, max_model_len=64, block_size=8)
    # Slots used in its three steps: 10, 11, 12, of 12 at last.
    contiguous, power, paged = (meter.slots[way] for way in ("contiguous", "power of two", "paged"))
    assert (contiguous.used, contiguous.reserved, contiguous.internal, contiguous.external) == (33, 3, 156, 192)
    assert (power.used, power.reserved, power.internal, power.external) == (33, 3, 12, 0)
    assert (paged.used, paged.reserved, paged.internal, paged.external) == (33, 0, 15, 0)


def test_shared_blocks_are_counted_once(replay):
    requests = [TraceRequest(number, 0.0, 40, 5, ((1, 32),)) for number in range(4)]
    meter = WasteMeter(requests)
    replay(requests, PlainCost(), meter, max_model_len=64)
    assert meter.slots["paged"].peak - meter.slots["paged, shared"].peak == 3 * 32


def test_buddies_split_join_and_leave_holes():
    buddies = BuddyAllocator()
    for name, size in (("a", 4), ("b", 4), ("c", 8)):
        buddies.allocate(name, size)
    assert buddies.extent == 16
    buddies.free("a")
    buddies.allocate("d", 8)  # no room in the hole of 4
    assert buddies.extent == 24
    buddies.free("b")
    buddies.allocate("e", 8)  # a and b have joined
    assert buddies.extent == 24
    for name in ("c", "d", "e"):
        buddies.free(name)
    assert buddies.extent == 0
    buddies.allocate("f", 32)
    assert buddies.extent == 32


# ---- calibration, on a machine that is a cost model itself ----


def test_calibration_finds_the_machine_it_runs_on():
    true = made_up_cost()
    config = EngineConfig.from_kwargs(max_num_seqs=16, max_num_batched_tokens=128, num_gpu_blocks_override=1000)
    info = load_info(config)
    clock = VirtualClock()

    class Machine:
        num_shapes = true.num_shapes

        def seconds(self, contents: StepContents) -> float:
            return true.device_seconds(contents) + 3e-4 * contents.num_moved_blocks

    core = EngineCore(
        config,
        executor=SimulatedExecutor(Footprint(resolve_config(config, info), info).spec, Machine(), clock, 2**40),
        info=info,
    )
    found = measure(core, info, 0.5, clock=clock)
    assert found.cost.error < 0.02
    assert found.cost.moved_block == pytest.approx(3e-4)
    for workload, measured, fitted in found.errors():
        assert fitted == pytest.approx(measured, rel=0.2), workload
    assert not core.has_unfinished()


# ---- the published trace ----


@pytest.mark.slow
def test_the_published_trace_has_the_hits_its_hash_ids_promise(replay, mooncake):
    requests = read_trace(str(mooncake), limit=300)
    apart = [dataclasses.replace(request, arrival=1000.0 * request.number) for request in requests]
    run = replay(apart, PlainCost(1e-3), block_size=512, num_gpu_blocks_override=40000, prefix_match_unit=512)
    seen: set[tuple[int, ...]] = set()
    promised = 0
    for request in requests:
        names = tuple(name for name, count in request.prefix if count == 512)
        usable = (request.num_prompt_tokens - 1) // 512
        promised += 512 * max((k for k in range(usable + 1) if names[:k] in seen or k == 0), default=0)
        seen |= {names[:k] for k in range(1, len(names) + 1)}
    assert promised > 0
    assert run.log.stats.prefix_cache_hits == promised
