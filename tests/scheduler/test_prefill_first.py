"""The classic scheduler: whole prompts or decodes, room for prompts, budgets, swapping, delay, and what it refuses."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.prefill_first import AllocStatus, PrefillFirstPlanner
from quire.scheduler.scheduler import create_scheduler
from quire.scheduler.unified import UnifiedPlanner
from quire.step import KVCacheGroup
from tests.helpers.transfers import IN, disk_loads, disk_stores, moves


@pytest.fixture
def classic(run):
    return lambda **options: run(PrefillFirstPlanner, **options)


# ---- a step ----


def test_prompts_go_first_and_decodes_wait(classic, request_of):
    r = classic(max_num_batched_tokens=16)
    r.add(request_of("a", 10, 3))
    r.step()
    r.add(request_of("b", 10, 2), request_of("c", 6, 2))
    r.finish()
    assert r.scheduled() == [{"a": 10}, {"b": 10, "c": 6}, {"a": 1, "b": 1, "c": 1}, {"a": 1}, {}]


def test_a_prompt_is_never_cut(classic, request_of):
    r = classic(max_num_batched_tokens=16)
    r.add(*(request_of(name, 10, 1) for name in "abc"))
    r.finish()
    assert r.scheduled() == [{"a": 10}, {"b": 10}, {"c": 10}, {}]


def test_what_is_cached_of_a_prompt_does_not_count_into_the_step(classic, request_of):
    r = classic(max_num_batched_tokens=16)
    shared = [7] * 12
    r.add(*(request_of(name, [*shared, index], 1) for index, name in enumerate("abc")))
    r.finish()
    assert r.scheduled() == [{"a": 13, "b": 1, "c": 1}, {}]


def test_the_seats_bound_prompts_and_forks_count_as_many(classic, request_of):
    r = classic(max_num_seqs=4)
    r.add(request_of("a", 4, 2, n=3), request_of("b", 4, 2, n=2), request_of("c", 4, 2))
    r.finish()
    assert list(r.scheduled()[0]) == ["a-0"], "c fits, but does not overtake b"
    assert [sorted(names) for names in r.scheduled()[1:3]] == [["a-0", "a-1", "a-2"], ["b-0", "c"]]


def test_decodes_of_a_group_go_together_or_not_at_all(classic, request_of):
    """With fewer tokens in a step than sequences run, whole groups take turns as earlier ones end."""
    r = classic(max_num_batched_tokens=4, max_num_seqs=8)
    r.add(request_of("a", 4, 4, n=3), request_of("b", 4, 4, n=3))
    r.finish()
    decodes = [set(names) for names in r.scheduled()[2:] if names]
    assert decodes == [{"a-0", "a-1", "a-2"}] * 3 + [{"b-0", "b-1", "b-2"}] * 3


# ---- room ----


@pytest.mark.parametrize(
    ("length", "held", "room"),
    [
        (28, 0, AllocStatus.OK),  # 7 blocks of 10, 3 are kept free
        (29, 0, AllocStatus.NEVER),  # 8 would leave 2, even with nobody else there
        (24, 4, AllocStatus.OK),  # 6 beside 1
        (24, 5, AllocStatus.LATER),  # 6 beside 2: one too many today
        (28, 4, AllocStatus.LATER),
    ],
)
def test_room_for_a_prompt_is_now_or_later_or_never(classic, request_of, length, held, room):
    r = classic(num_blocks=10, watermark=0.3)
    if held:
        r.add(request_of("held", held, 9))
        r.step()
    request = request_of("a", length, 1)
    assert r.scheduler.planner.can_allocate(request, r.scheduler.kv.find_prefix(request.sequences[0])) is room
    r.add(request)
    names = r.step().num_scheduled_tokens
    assert ("a" in names) == (room is AllocStatus.OK)
    if room is AllocStatus.NEVER:
        assert r.reason("a") == "error"
        message = r.last["a"].error.message
        assert all(text in message for text in ("8 KV blocks", "10 blocks of 4 tokens", "3 are kept free"))
    r.finish()


def test_what_others_hold_of_a_prompt_takes_no_room(classic, request_of):
    """Five blocks of seven are shared with one who runs; free ones that are hit do take room."""
    r = classic(num_blocks=10)
    shared = [7] * 20
    r.add(request_of("held", [*shared, 1], 3))
    r.step()
    request = request_of("a", [*shared, *[2] * 8], 1)
    kv = r.scheduler.kv
    assert r.scheduler.planner.can_allocate(request, kv.find_prefix(request.sequences[0])) is AllocStatus.OK  # 2 of 4
    other = request_of("b", [3] * 20, 1)
    assert r.scheduler.planner.can_allocate(other, kv.find_prefix(other.sequences[0])) is AllocStatus.LATER  # 5 of 4
    r.finish()
    r.add(request_of("next", 24, 9))  # the free blocks of "held" that are left are four
    r.step()
    assert r.scheduler.planner.can_allocate(request, kv.find_prefix(request.sequences[0])) is AllocStatus.LATER
    r.finish()


def test_each_fork_must_have_a_block_to_go_on_with(classic, request_of):
    r = classic(num_blocks=4)
    for count, room in ((3, AllocStatus.OK), (4, AllocStatus.NEVER)):
        request = request_of("a", 8, 1, n=count)
        assert r.scheduler.planner.can_allocate(request, r.scheduler.kv.find_prefix(request.sequences[0])) is room


def test_who_waits_for_memory_is_not_looked_up_every_step(classic, request_of, monkeypatch):
    r = classic(num_blocks=8)
    r.add(request_of("a", 20, 8), request_of("b", 16, 1))
    looked_up = []
    find_prefix = r.scheduler.kv.find_prefix
    monkeypatch.setattr(r.scheduler.kv, "find_prefix", lambda q: (looked_up.append(q.sequence_id), find_prefix(q))[1])
    r.finish()
    assert looked_up == ["a", "b", "b"]


# ---- what is refused ----


def test_a_prompt_longer_than_a_step_is_refused_and_the_engine_goes_on(classic, request_of):
    r = classic(max_num_batched_tokens=16)
    r.add(request_of("a", 17, 2), request_of("b", 16, 2))
    r.finish()
    assert (r.reason("a"), r.tokens["a"]) == ("error", [])
    assert "17 tokens" in r.last["a"].error.message and "16 tokens" in r.last["a"].error.message
    assert r.tokens["b"] == r.expected("b")[0]


def test_a_cached_prompt_that_is_too_long_is_refused_like_any_other(classic, request_of):
    """Whether a request is served must not depend on who came before."""
    r = classic(max_num_batched_tokens=16)
    r.add(request_of("a", [5] * 16, 8))
    r.finish()
    r.add(request_of("b", [*[5] * 16, 6], 1))
    r.finish()
    assert r.reason("b") == "error"


def test_a_group_that_outgrows_the_pool_fails_alone(classic, request_of):
    r = classic(num_blocks=6, num_host_blocks=12)
    r.add(request_of("a", 5, 3), request_of("b", 4, 20, n=3), request_of("c", 5, 3))
    r.finish()
    for index in range(3):
        assert "6 blocks of 4 tokens" in r.last[f"b-{index}"].error.message
    assert [r.tokens[name] for name in "ac"] == [r.expected(name)[0] for name in "ac"]


# ---- preemption ----


@pytest.mark.parametrize(
    ("mode", "n", "swapped"), [("auto", 1, 0), ("auto", 2, 1), ("swap", 1, 1), ("recompute", 2, 0)]
)
def test_one_sequence_is_computed_again_and_a_group_is_swapped_unless_told_otherwise(
    classic, request_of, mode, n, swapped
):
    r = classic(num_blocks=6, num_host_blocks=6, preemption_mode=mode)
    r.add(request_of("a", 8, 9), request_of("b", 8, 7, n=n))
    r.finish()
    stats = r.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out > 0) == bool(swapped)
    for index, name in enumerate(r.requests["b"].engine_request.sequence_ids):
        assert r.tokens[name] == r.expected("b", index)[0]


def test_no_prompt_is_tried_while_anything_is_swapped_out(classic, request_of):
    r = classic(num_blocks=6, num_host_blocks=6, preemption_mode="swap")
    r.add(request_of("a", 8, 9), request_of("b", 8, 9))
    while not r.step().preempted_sequence_ids:
        pass
    assert r.scheduler.stats().num_swapped == 1
    r.add(request_of("tiny", 1, 1))
    while r.scheduler.stats().num_swapped:
        assert not r.tokens["tiny"]
        r.step()
    r.finish()
    assert len(r.tokens["tiny"]) == 1


def test_a_group_that_is_half_computed_again_is_not_swapped(classic, request_of):
    """Its second sequence finds no room, the first goes on meanwhile; when that has to stop, all begin anew."""
    r = classic(num_blocks=11, num_host_blocks=40, preemption_mode="recompute", enable_prefix_caching=False)
    r.add(request_of("a", 12, 24), request_of("b", 12, 12, n=2))
    while not r.requests["b"].num_preemptions:
        r.step()
    r.scheduler.preemption_mode = "swap"
    r.finish()
    preempted = [plan.preempted_sequence_ids for plan in r.plans if plan.preempted_sequence_ids]
    assert preempted == [["b-0", "b-1"], ["b-0"]], "the second time only one had got so far"
    assert r.scheduler.stats().num_swapped_out == 0
    for index in range(2):
        assert r.tokens[f"b-{index}"] == r.expected("b", index)[0]


def test_what_has_grown_into_the_watermark_is_resumed_all_the_same(classic, request_of):
    """Seven blocks of ten are the most for a new prompt; one that ran and grew was promised more."""
    r = classic(num_blocks=10, watermark=0.3)
    r.add(request_of("a", 4, 14), request_of("b", 20, 17))
    r.finish()
    assert r.last["b"].num_preemptions == 1
    assert r.tokens["b"] == r.expected("b")[0]


def test_a_hit_inside_a_block_needs_no_room_beside_its_copy(classic, request_of):
    r = classic(num_blocks=3, prefix_match_unit=1)
    r.add(request_of("a", [1, 2, 3, 4, 5, 6], 1))
    r.finish()
    r.add(request_of("b", [1, 2, 3, 4, 5, 6, 9, 9, 9, 9], 2))
    r.finish()
    assert r.first["b"].num_cached_tokens == 6
    assert r.tokens["b"] == r.expected("b")[0]


def test_a_load_from_disk_holds_up_nobody_else(classic, request_of):
    r = classic(num_blocks=6, num_disk_slots=50)
    prompt = list(range(16))
    r.add(request_of("a", prompt, 1))
    r.finish()
    r.add(request_of("filler", 20, 1))
    r.finish()
    r.worker.load_delay = 2
    r.add(request_of("b", [*prompt, 20], 1), request_of("c", 2, 1))
    r.finish()
    assert list(r.first)[-2:] == ["c", "b"]
    # The first block was on the device, and the loads of the others did not evict it.
    assert (r.first["b"].num_cached_tokens, r.scheduler.stats().disk_cache_hits) == (16, 12)


def test_a_step_waits_for_a_single_load_if_there_is_nothing_else_to_do(run, request_of):
    r = run(num_blocks=5, num_disk_slots=50)
    for name, prompt in (("a", [1, 2, 3, 4]), ("filler", 19), ("b", [1, 2, 3, 4, 9])):
        r.worker.load_delay = 3
        r.add(request_of(name, prompt, 1))
        r.finish()
    assert r.first["b"].num_cached_tokens == r.scheduler.stats().disk_cache_hits == 4
    assert [plan.wait_for_loads for plan in r.plans].count(True) == 1


def test_nothing_is_stored_on_a_full_disk_and_what_was_not_stored_is_not_looked_for(run, request_of):
    r = run(num_blocks=6, num_disk_slots=50)
    hits = []
    for name in "abcabc":
        r.worker.disk_is_full = name == "b" or r.worker.disk_is_full
        r.add(request_of(name, 20, 1))
        r.finish()
        del r.last[name]
        hits.append(r.scheduler.stats().disk_cache_hits)
    assert hits == [0, 0, 0, 16, 16, 16], "only what the first one computed could be stored"
    assert sum(bool(disk_stores(plan.transfers)) for plan in r.plans) == 2, "the second one tried"
    assert sum(bool(disk_loads(plan.transfers)) for plan in r.plans) == 1
    assert len(r.scheduler.kv.disk) == len(r.worker.disk) == 5


@pytest.mark.parametrize("windows", [(None,), (None, None, 8)])
def test_tokens_from_the_host_and_from_disk_count_once_for_each_request(run, request_of, windows):
    """However many groups of layers have blocks of them, and however often the request is resumed."""
    num_groups = len(windows)
    r = run(
        num_blocks=8 * num_groups,
        windows=windows,
        num_host_blocks=6 * num_groups,
        num_disk_slots=400,
        preemption_mode="recompute",
    )
    r.add(request_of("a", prompt := list(range(16)), 1))
    r.finish()
    for tier in ("host", "disk"):
        for number in range(1 if tier == "host" else 4):
            r.add(request_of(f"filler {tier} {number}", 28, 1))
            r.finish()
        before = r.scheduler.stats()
        name = f"b {tier}"
        r.add(request_of(f"beside {tier}", 7, 14), request_of(name, [*prompt, 20], 12))
        r.finish()
        after = r.scheduler.stats()
        assert (r.first[name].num_cached_tokens, r.last[name].num_preemptions) == (16, 1)
        num_host_tokens = after.host_cache_hits - before.host_cache_hits
        num_disk_tokens = after.disk_cache_hits - before.disk_cache_hits
        assert (num_host_tokens, num_disk_tokens) == ((16, 0) if tier == "host" else (0, 16))


@pytest.mark.parametrize("kind", [UnifiedPlanner, PrefillFirstPlanner])
def test_a_load_from_disk_leaves_blocks_to_those_who_run(run, request_of, kind):
    r = run(kind, num_blocks=8, num_disk_slots=50)
    prompt = list(range(24))
    r.add(request_of("a", prompt, 1))
    r.finish()
    r.add(request_of("filler", 28, 1))
    r.finish()
    r.add(request_of("runs", 7, 6))
    r.step()
    r.worker.load_delay = 3
    r.add(request_of("b", [*prompt, 30], 1))
    r.finish()
    assert r.last["runs"].num_preemptions == 0
    assert r.scheduler.stats().disk_cache_hits > 0


def test_priority_orders_the_queue_and_the_victims(classic, request_of):
    r = classic(num_blocks=6, policy="priority", max_num_seqs=2)
    r.add(request_of("late", 7, 9, priority=5))
    r.step()
    r.add(request_of("mid", 7, 9, priority=3), request_of("first", 7, 9, priority=1))
    assert list(r.step().num_scheduled_tokens) == ["first"]
    while not r.step().preempted_sequence_ids:
        pass
    assert r.plans[-1].preempted_sequence_ids == ["late"]
    r.finish()
    assert r.last["first"].num_preemptions == 0


# ---- delay ----


def time_to_first_tokens(r, request_of, *, gap: int) -> tuple[int, list[int]]:
    """Steps that computed prompts, and for each request the steps it waited, when one comes every `gap` steps."""
    came: dict[str, int] = {}
    while len(came) < 12 or r.scheduler.has_unfinished():
        if len(came) < 12 and len(r.plans) % gap == 0:
            name = f"r{len(came):02}"
            came[name] = len(r.plans)
            r.add(request_of(name, 4, 20, arrival_time=float(len(r.plans))))
        r.step()
    first = {name: next(i for i, names in enumerate(r.scheduled()) if name in names) for name in came}
    return len(set(first.values())), [first[name] - came[name] for name in came]


def test_a_delay_makes_fewer_and_larger_steps_of_prompts(classic, request_of):
    """Decodes are held up less often; the price is the time to first token."""
    results = {}
    for factor in (0.0, 3.0):
        r = classic(max_num_seqs=16, num_blocks=100, delay_factor=factor, clock=lambda: float(len(r.plans)))  # noqa: B023
        results[factor] = time_to_first_tokens(r, request_of, gap=2)
    assert results[0.0] == (12, [0] * 12)
    num_steps, waits = results[3.0]
    assert num_steps < 12 and sum(waits) > 12
    assert max(waits) <= 5, "once the first has waited long enough, all go"


def test_nobody_waits_for_a_delay_when_nothing_runs(classic, request_of):
    r = classic(delay_factor=100.0, clock=lambda: float(len(r.plans)))
    r.add(request_of("a", 4, 1))
    r.step()
    r.add(request_of("b", 4, 1, arrival_time=1.0))
    assert r.step().num_scheduled_tokens == {"b": 4}


def test_idle_time_after_a_prompt_is_not_taken_for_its_duration(classic, request_of):
    now = [0.0]
    r = classic(delay_factor=1.0, clock=lambda: now[0])
    r.add(request_of("a", 4, 1))
    r.step()
    now[0] = 1000.0
    r.add(request_of("b", 4, 9, arrival_time=1000.0))
    r.step()
    now[0] = 1000.5
    r.add(request_of("c", 4, 9, arrival_time=1000.2))
    assert r.step().num_scheduled_tokens == {"c": 4}


# ---- being chosen ----


def test_the_config_chooses_the_scheduler():
    def make(**options):
        config = EngineConfig.from_kwargs(**options)
        groups = [KVCacheGroup([0])]
        return create_scheduler(config, groups, num_blocks=100, max_model_len=64, clock=lambda: 0.0)

    assert isinstance(make().planner, UnifiedPlanner)
    scheduler = make(scheduler="prefill-first", delay_factor=0.5, watermark=0.2)
    assert isinstance(scheduler.planner, PrefillFirstPlanner)
    assert (scheduler.planner.delay_factor, scheduler.admission.watermark_blocks) == (0.5, 20)
    assert isinstance(scheduler.kv, KVCacheManager)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scheduler": "prefill-first", "scheduling_policy": "lpm"}, "scheduling_policy"),
        ({"scheduler": "prefill-first", "long_prefill_token_threshold": 8}, "long_prefill_token_threshold"),
        ({"delay_factor": 0.5}, "delay_factor"),
        ({"tenant_weights": {"a": 2.0}}, "tenant_weights"),
        ({"scheduler": "fifo"}, "scheduler"),
        ({"watermark": 1.0}, "watermark"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, named):
    with pytest.raises(ConfigError, match=named) as error:
        EngineConfig.from_kwargs(**options)
    assert error.value.param == named


def test_what_comes_back_and_is_passed_in_one_step_is_not_written_to_disk(request_of):
    """Writes to disk go first in a step: the block would hold something else still."""
    kv = KVCacheManager(6, 2, windows=(3,), max_step_tokens=8, num_host_blocks=8, num_disk_slots=1)
    a, b = (request_of(name, 9, 1).sequences[0] for name in "ab")
    kv.start_step()
    assert kv.allocate_slots(a, 7) is not None
    a.num_computed_tokens = 7
    kv.start_step()
    assert kv.swap_out([a])
    kv.start_step()
    kv.take_transfers()
    kv.swap_in([a])
    assert kv.allocate_slots(a, 1) is not None  # its window has passed the first two blocks
    assert kv.allocate_slots(b, 8) is not None  # which are reused at once
    transfers = kv.take_transfers()
    returned = {target for kind, _, target in moves(transfers) if kind == IN}
    assert len(returned) == 4
    assert not returned & {save.block_id for save in disk_stores(transfers)}
