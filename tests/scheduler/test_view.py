"""The picture of a scheduler at work: after every step of crowded runs it adds up, whatever moved."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from quire.sampling_params import BeamSearchParams
from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.unified import UnifiedPlanner
from quire.scheduler.view import describe, describe_map, draw_picture


def check(scheduler: Scheduler) -> dict[str, Any]:
    """Check a picture against itself and against what the scheduler counts; return it."""
    picture = describe(scheduler)
    device, kv = picture["device"], scheduler.kv
    states = Counter(row["state"] for row in picture["blocks"])
    assert len(picture["blocks"]) == device["num_blocks"] == kv.pool.num_blocks
    assert all(states[name] == device[name] for name in ("used", "cached", "free", "loading"))
    assert device["cached"] + device["free"] == kv.pool.num_free
    owned = Counter(owner for row in picture["blocks"] for owner in row.get("owners", []))
    sequences = [
        s for queue in picture["queues"].values() for request in queue["requests"] for s in request["sequences"]
    ]
    assert owned == Counter({s["sequence_id"]: s["blocks"] for s in sequences if s["blocks"]})
    for row in picture["blocks"]:
        assert row["refs"] == (len(row["owners"]) if "owners" in row else row["state"] == "loading")
    waste = picture["waste"]
    assert waste["filled_slots"] == sum(row["tokens"] for row in picture["blocks"] if row["state"] == "used")
    assert waste["reserved_slots"] == device["used"] * kv.block_size
    assert waste["most_in_a_table"] < kv.block_size
    num_running = sum(len(request["sequences"]) for request in picture["queues"]["running"]["requests"])
    stats = scheduler.stats()
    assert num_running == stats.num_running
    assert picture["queues"]["swapped"]["num_requests"] == stats.num_swapped
    assert sum(picture["preemptions"].values()) == stats.num_preemptions
    assert draw_picture(picture).startswith(f"device: {kv.pool.num_blocks} blocks of 4 tokens: {device['used']} used, ")
    return picture


@pytest.mark.parametrize("options", [{}, {"windows": (None, 10)}, {"num_host_blocks": 12, "preemption_mode": "swap"}])
@pytest.mark.parametrize("kind", [UnifiedPlanner, PrefillFirstPlanner])
def test_the_picture_adds_up_after_every_step(run: Any, request_of: Any, kind: Any, options: dict[str, Any]) -> None:
    crowd = run(kind, num_blocks=22 if "windows" in options else 12, **options)
    crowd.add(
        request_of("three", [7, 8, 9, 10, 11, 12], 9, n=3),
        request_of("beams", [7, 8, 9, 10, 11, 13], 8, beam=BeamSearchParams(beam_width=2, max_tokens=8)),
        request_of("long", 17, 12),
        request_of("more", 9, 12),
    )
    seen: Counter[str] = Counter()
    while crowd.scheduler.has_unfinished():
        crowd.step()
        picture = check(crowd.scheduler)
        seen["shared"] += picture["device"]["shared"]
        seen["waiting"] += picture["queues"]["waiting"]["num_requests"]
        seen["swapped"] += picture["queues"]["swapped"]["num_requests"]
        seen["on the host"] += sum(r["host_blocks"] for r in picture["queues"]["swapped"]["requests"])
    assert seen["shared"] and (seen["waiting"] or seen["swapped"])
    assert bool(seen["swapped"]) == bool(seen["on the host"]) == ("num_host_blocks" in options)


def test_blocks_that_come_from_disk_are_loading_and_held_by_nobody_yet(run: Any, request_of: Any) -> None:
    slow = run(num_blocks=8, num_disk_slots=20)
    slow.add(request_of("first", 17, 2))
    slow.finish()
    slow.add(request_of("other", 27, 2))  # takes all blocks but the first one's first; what they held is on disk
    slow.finish()
    picture = check(slow.scheduler)
    assert picture["disk"]["cached"] == 4 + 7 and picture["disk"]["num_blocks"] == 20
    assert any(row.get("copies") == ["disk"] for row in picture["blocks"])
    slow.worker.load_delay = 2
    slow.add(request_of("again", slow.prompts["first"], 2), request_of("beside", 3, 6))
    slow.step()
    picture = check(slow.scheduler)
    assert picture["queues"]["loading"]["requests"][0]["request_id"] == "again"
    assert picture["device"]["loading"] == 3
    slow.finish()
    assert check(slow.scheduler)["prefix_cache"]["disk_hits"] == 12


def test_forks_share_until_they_write(run: Any, request_of: Any) -> None:
    one = run(num_blocks=16)
    one.add(request_of("r", [1, 2, 3, 4, 5, 6], 8, n=3))
    one.step()
    names = ["r-0", "r-1", "r-2"]
    rows = [row for row in check(one.scheduler)["blocks"] if row["state"] == "used"]
    assert [row["owners"] for row in rows] == [names, names]
    one.step()
    rows = [row for row in check(one.scheduler)["blocks"] if row["state"] == "used"]
    assert sorted(row["owners"] for row in rows) == [["r-0"], names, ["r-1"], ["r-2"]]


def test_long_queues_are_counted_and_cut_off(run: Any, request_of: Any) -> None:
    many = run(max_num_seqs=1)
    many.add(*(request_of(f"r{index}", 3) for index in range(10)))
    many.step()
    picture = describe(many.scheduler, limit=4)
    waiting = picture["queues"]["waiting"]
    assert (waiting["num_requests"], len(waiting["requests"]), len(picture["blocks"])) == (9, 4, 4)
    assert waiting["requests"][0]["sequences"] == [
        {"sequence_id": "r1", "tokens_done": 0, "tokens_left": 3, "blocks": 0}
    ]
    assert describe(many.scheduler, limit=0)["blocks"] == []


def test_a_deferred_request_is_shown_among_the_waiting_ones(run: Any, request_of: Any) -> None:
    scheduler = run().scheduler
    scheduler.requests.defer(request := request_of("deferred", 3))
    assert list(scheduler.requests) == [request] and len(scheduler.requests) == 1
    picture = describe(scheduler)
    assert [each["request_id"] for each in picture["queues"]["waiting"]["requests"]] == ["deferred"]
    assert picture["queues"]["waiting"]["num_requests"] == scheduler.stats().num_waiting == 1
    assert describe_map(scheduler, cells=8)["queues"]["waiting"] == 1
