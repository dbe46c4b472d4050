"""Requests that generate nothing: whole where they must be, in pieces where they may, and over with their prompt."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.engine_request import EngineRequest
from quire.executor.null import NullExecutor
from quire.kvcache.manager import KVCacheManager
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.admission import Admission
from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.unified import UnifiedPlanner
from quire.step import SchedulerOutput, SequenceOutput

BUDGET, LONGEST = 24, 20


def make(
    kind: Any = UnifiedPlanner,
    *,
    num_blocks: int = 24,
    caching: bool = False,
    planner: dict[str, Any] | None = None,
    **options: Any,
) -> Scheduler:
    kv = KVCacheManager(num_blocks, 4, enable_prefix_caching=caching, num_host_blocks=num_blocks)
    settings = {"max_model_len": LONGEST, "max_num_seqs": 4, "max_num_batched_tokens": BUDGET}
    return Scheduler(kind(Admission(kv, **{**settings, **options}), **(planner or {})))


def request(name: str, length: int, seed: int = 0) -> Request:
    rng = random.Random(seed)
    prompt = [rng.randrange(5, 99) for _ in range(length)]
    return Request(EngineRequest(name, prompt, SamplingParams(), pooling=PoolingParams(task="embed")))


def run(scheduler: Scheduler, look: Any = lambda plan: None) -> dict[str, SequenceOutput]:
    """Step until nothing is left; return the news, one for each request."""
    executor, told = NullExecutor(), {}
    for _ in range(1000):
        if not scheduler.has_unfinished():
            break
        plan = scheduler.schedule()
        look(plan)
        for news in scheduler.update_from_output(plan, executor.execute(plan)):
            assert news.sequence_id not in told
            told[news.sequence_id] = news
        scheduler.check_integrity()
    assert not scheduler.has_unfinished()
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_blocks
    return told


@pytest.mark.parametrize("kind", [UnifiedPlanner, PrefillFirstPlanner])
def test_whole_prompts_are_never_cut_and_come_in_order(kind: Any) -> None:
    scheduler = make(kind, planner={"whole_prompts": True} if kind is UnifiedPlanner else None)
    rng = random.Random(3)
    lengths = {f"{number}": rng.randint(1, LONGEST) for number in range(60)}
    for name, length in lengths.items():
        scheduler.add_request(request(name, length))
    order: list[str] = []

    def look(plan: SchedulerOutput) -> None:
        for name, count in plan.num_scheduled_tokens.items():
            assert count == lengths[name]
            order.append(name)
        assert sum(plan.num_scheduled_tokens.values()) <= BUDGET

    told = run(scheduler, look)
    assert order == list(lengths)
    for name, news in told.items():
        assert (news.finish_reason, news.new_token_ids, news.error) == ("stop", [], None)
        assert news.pooled is not None, name


def test_prompts_of_decoders_come_in_pieces_and_one_as_long_as_the_context_fits() -> None:
    scheduler = make(max_num_batched_tokens=8, caching=True)
    scheduler.add_request(request("long", LONGEST))
    scheduler.add_request(request("short", 3, seed=1))
    pieces: list[int] = []
    told = run(scheduler, lambda plan: pieces.append(plan.num_scheduled_tokens.get("long", 0)))
    assert sum(pieces) == LONGEST
    assert max(pieces) <= 8
    assert told.keys() == {"long", "short"}
    scheduler.add_request(request("again", LONGEST))
    assert run(scheduler)["again"].num_cached_tokens == LONGEST - 1


def test_one_longer_than_the_context_is_refused() -> None:
    scheduler = make()
    scheduler.add_request(request("long", LONGEST + 1))
    news = run(scheduler)["long"]
    assert news.error is not None and news.error.refused
    assert f"{LONGEST + 1} tokens" in news.error.message


def test_what_was_pooled_is_not_swapped_but_computed_again() -> None:
    scheduler = make(num_blocks=6, preemption_mode="swap", max_num_batched_tokens=8, watermark=0.0)
    for number in range(4):
        scheduler.add_request(request(f"{number}", 16, seed=number))
    assert run(scheduler).keys() == {"0", "1", "2", "3"}
    assert scheduler.stats().num_swapped_out == 0


def test_aborted_ones_leave_nothing() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add_request(request("a", 16))
    scheduler.add_request(request("b", 16, seed=1))
    plan = scheduler.schedule()
    scheduler.abort_requests(["a"])
    scheduler.update_from_output(plan, NullExecutor().execute(plan))
    scheduler.abort_requests(["b"])
    assert run(scheduler) == {}
