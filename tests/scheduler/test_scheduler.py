"""What a step contains: budget, chunks, admission, sharing, preemption, ends, and the traps of each."""

from __future__ import annotations

import pytest

from quire.errors import QuireError, RequestError
from quire.scheduler.in_flight import InFlight, ScheduledStep
from quire.step import SEQUENCES_DO_NOT_FIT, ModelOutput, TokenTopLogprobs, TransferOp
from tests.scheduler.conftest import NOT_FINITE

# ---- budget and chunks ----


def test_a_prompt_is_computed_at_once_and_then_token_by_token(run, request_of):
    r = run()
    r.add(request_of("a", 10, 3))
    r.finish()
    assert r.scheduled() == [{"a": 10}, {"a": 1}, {"a": 1}, {}]
    assert len(r.tokens["a"]) == 3


def test_a_long_prompt_is_cut_to_the_budget_and_mixed_with_decodes(run, request_of):
    r = run(max_num_batched_tokens=8, long_prefill_token_threshold=8)
    r.add(request_of("a", 5, 9))
    r.step()
    r.add(request_of("b", 20, 2))
    for _ in range(4):
        r.step()
    assert r.scheduled() == [{"a": 5}, {"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}, {"a": 1, "b": 1}]


def test_a_chunk_that_ends_inside_the_prompt_brings_no_news(run, request_of):
    r = run(max_num_batched_tokens=4)
    r.add(request_of("a", 9))
    r.step()
    assert r.tokens["a"] == [] and "a" not in r.last


def test_a_prefill_resumed_after_preemption_does_not_stall_the_decodes_behind_it(run, request_of):
    """An older sequence with much to compute leaves one token of the budget to each younger one."""
    r = run(max_num_batched_tokens=6, max_model_len=100, long_prefill_token_threshold=12)
    r.add(request_of("old", 40, 2))
    r.step()
    r.scheduler.admission.max_num_batched_tokens = 12  # "old" alone would take all of a smaller budget for long
    r.add(request_of("young", 3, 20))
    r.step()
    r.scheduler.admission.max_num_batched_tokens = 6
    for _ in range(3):
        assert r.step().num_scheduled_tokens == {"old": 5, "young": 1}


@pytest.mark.parametrize(
    ("threshold", "first"), [(0, {"long": 4, "s1": 6, "s2": 6}), (3, {"long": 3, "s1": 3, "s2": 3})]
)
def test_short_prompts_go_beside_a_long_one_and_a_threshold_bounds_that(run, request_of, threshold, first):
    r = run(max_num_batched_tokens=32, long_prefill_token_threshold=threshold, max_model_len=200)
    r.add(request_of("long", 100), request_of("s1", 6), request_of("s2", 6))
    assert r.step().num_scheduled_tokens == first


def test_seats_are_limited(run, request_of):
    r = run(max_num_seqs=2)
    r.add(*(request_of(name, 4, 2) for name in "abc"))
    r.finish()
    assert r.scheduled()[:3] == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"c": 4}]


def test_the_first_that_does_not_fit_blocks_those_behind_it(run, request_of):
    """Strict order: a request is not overtaken for being large."""
    r = run(num_blocks=8)
    r.add(request_of("a", 20, 6), request_of("big", 16, 1), request_of("small", 2, 1))
    assert list(r.step().num_scheduled_tokens) == ["a"]
    r.finish()
    assert list(r.first) == ["a", "big", "small"]


def test_those_behind_one_that_does_not_fit_are_admitted_once_it_is_aborted(run, request_of):
    r = run(num_blocks=8)
    r.add(request_of("a", 20, 6), request_of("big", 16, 1), request_of("small", 2, 1))
    for _ in range(2):
        assert list(r.step().num_scheduled_tokens) == ["a"]
    r.scheduler.abort_requests(["big"])
    assert list(r.step().num_scheduled_tokens) == ["a", "small"]


def test_what_does_not_fit_is_admitted_once_a_prompt_under_way_has_blocks_to_share(run, request_of):
    r = run(num_blocks=10, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    prompt = [token % 7 for token in range(24)]
    r.add(request_of("a", prompt, 12), request_of("b", [*prompt, 9], 1))
    assert list(r.step().num_scheduled_tokens) == ["a"]
    r.finish()
    assert list(r.last) == ["a", "b"] and list(r.first) == ["a", "b"]
    begun = next(number for number, plan in enumerate(r.plans) if "b" in plan.num_scheduled_tokens)
    assert "a" in r.plans[begun].num_scheduled_tokens


def test_a_prompt_is_admitted_only_if_all_of_it_fits_beside_what_others_were_promised(run, request_of):
    """Two long prompts that fit one at a time are not begun together, to preempt each other half-way."""
    r = run(num_blocks=10, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    r.add(request_of("a", 24, 1), request_of("b", 24, 1))
    assert r.step().num_scheduled_tokens == {"a": 4}
    r.finish()
    assert r.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, ["a", "b"]), (0.2, ["a"])])
def test_the_watermark_keeps_blocks_free_for_those_who_run(run, request_of, watermark, admitted):
    r = run(num_blocks=10, watermark=watermark)
    r.add(request_of("a", 20), request_of("b", 16))
    assert list(r.step().num_scheduled_tokens) == admitted


def test_the_watermark_does_not_keep_out_one_who_is_alone(run, request_of):
    r = run(num_blocks=10, watermark=0.5)
    r.add(request_of("a", 39, 1))
    assert list(r.step().num_scheduled_tokens) == ["a"]


# ---- the prefix cache ----

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # three blocks of four


def test_identical_prompts_admitted_in_one_step_share(run, request_of):
    r = run()
    r.add(*(request_of(name, [*PROMPT, 7], 2) for name in "abc"))
    plan = r.step()
    assert plan.num_scheduled_tokens == {"a": 13, "b": 1, "c": 1}
    tables = [new.block_ids[0] for new in plan.new_sequences]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({table[3] for table in tables}) == 3
    assert [r.first[name].num_cached_tokens for name in "abc"] == [0, 12, 12]


def test_the_next_turn_finds_the_answer_of_the_last_one(run, request_of):
    r = run()
    r.add(request_of("a", PROMPT, 9))
    r.finish()
    r.add(request_of("b", [*PROMPT, *r.tokens["a"], 2, 2, 2], 1))
    r.finish()
    assert r.first["b"].num_cached_tokens == 20  # 12 + 8 of 9: the last token was never computed


def test_counters_of_the_prefix_cache(run, request_of):
    r = run()
    for name in "ab":
        r.add(request_of(name, [*PROMPT, 7], 3))
        r.finish()
    stats = r.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (26, 12)


# ---- log-probabilities ----


@pytest.mark.parametrize("budget", [1, 3, 5, 64])
def test_prompt_logprobs_come_in_chunks_and_cover_the_prompt_once(run, request_of, budget):
    r = run(max_num_batched_tokens=budget)
    r.add(request_of("a", PROMPT, 1))
    r.finish()
    r.add(request_of("b", PROMPT, 2, prompt_logprobs=1, logprobs=2))
    r.finish()
    assert r.first["b"].num_cached_tokens == 0, "cached positions have no logits"
    assert [entry.token_ids[0] for entry in r.prompt_logprobs["b"]] == PROMPT[1:]
    assert r.first["b"].new_token_ids == ([] if budget < 12 else r.tokens["b"][:1])
    assert len(r.last["b"].logprobs) == 1


def test_prompt_logprobs_are_not_sent_twice_after_a_preemption(run, request_of):
    r = run(num_blocks=7, max_num_batched_tokens=4, enable_prefix_caching=False)
    r.add(request_of("a", 4, 20))
    r.step()
    r.add(request_of("b", PROMPT, 6, prompt_logprobs=0))
    r.finish()
    assert r.last["b"].num_preemptions > 0
    assert [entry.token_ids[0] for entry in r.prompt_logprobs["b"]] == PROMPT[1:]


# ---- preemption ----


def test_the_latest_is_preempted_and_resumed_first(run, request_of):
    r = run(num_blocks=6)
    r.add(request_of("a", 7, 12), request_of("b", 7, 8))
    r.step()
    r.add(request_of("c", 3, 1))
    while not r.step().preempted_sequence_ids:
        pass
    plan = r.plans[-1]
    assert plan.preempted_sequence_ids == ["b"]
    assert list(plan.num_scheduled_tokens) == ["a"]
    r.finish()
    resumed = [new for later in r.plans for new in later.new_sequences if new.sequence_id == "b"][1]
    assert resumed.num_prompt_tokens == 7
    assert resumed.token_ids[7:] == r.tokens["b"][: len(resumed.token_ids) - 7] != []
    assert list(r.last)[-1] == "c", "what was preempted goes before what has not begun"
    assert r.last["b"].num_preemptions == 1
    assert r.scheduler.stats().num_preemptions >= 1


def test_a_resumed_sequence_finds_its_own_blocks_again(run, request_of):
    r = run(num_blocks=6)
    r.add(request_of("a", 7, 12), request_of("b", 7, 8))
    r.finish()
    resumed = [new for plan in r.plans for new in plan.new_sequences if new.sequence_id == "b"][1]
    assert resumed.num_computed_tokens > 0
    stats = r.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (14, 0), "its own earlier work is no prefix hit"


def test_a_prefill_preempted_before_any_output_does_not_report_its_own_work_as_cached(run, request_of):
    r = run(num_blocks=8, max_num_batched_tokens=4)
    r.add(request_of("a", 4, 28))
    r.step()
    r.add(request_of("b", 24, 1))
    r.finish()
    assert r.last["b"].num_preemptions > 0
    assert r.first["b"].num_cached_tokens == 0


def test_after_its_prompt_logprobs_are_sent_a_resumed_sequence_reads_the_cache(run, request_of):
    r = run(num_blocks=6)
    r.add(request_of("a", 7, 12), request_of("b", 7, 8, prompt_logprobs=1))
    r.finish()
    resumed = [new for plan in r.plans for new in plan.new_sequences if new.sequence_id == "b"][1]
    assert resumed.num_computed_tokens > 0
    assert len(r.prompt_logprobs["b"]) == 6


def test_nothing_is_admitted_in_a_step_that_preempts(run, request_of):
    r = run(num_blocks=6)
    r.add(request_of("a", 8, 12), request_of("b", 8, 12))
    r.step()
    r.add(request_of("tiny", 1, 1))
    while not r.step().preempted_sequence_ids:
        pass
    assert r.plans[-1].new_sequences == []
    r.finish()


def test_preemption_does_not_undo_ageing(run, request_of):
    """An old request of low rank that was admitted first is not preempted for a young one of higher rank."""
    r = run(num_blocks=6, policy="priority", ageing=10.0, max_num_seqs=1)
    r.add(request_of("old", 7, 12, priority=5, arrival_time=0.0))
    r.step()
    r.add(request_of("young", 7, 12, priority=3, arrival_time=100.0))
    r.step()
    r.add(request_of("first", 7, 12, priority=3, arrival_time=1.0))
    assert r.step().preempted_sequence_ids == ["old"]
    r.finish()
    assert list(r.last) == ["old", "first", "young"]


def test_a_request_of_high_rank_takes_the_place_of_another_though_cached_blocks_are_free(run, request_of):
    """Blocks of its prefix are free, but it needs them: they make no room for the rest of its prompt."""
    r = run(num_blocks=8, policy="priority")
    r.add(request_of("before", prompt := list(range(12)), 1))
    r.finish()
    r.add(request_of("low", 16, 9, priority=1))
    r.step()
    r.add(request_of("high", [*prompt, *range(40, 52)], 2))
    plan = r.step()
    assert (plan.preempted_sequence_ids, plan.num_scheduled_tokens) == (["low"], {"high": 12})
    r.finish()
    assert r.last["high"].num_preemptions == 0


def test_a_request_of_high_rank_does_not_wait_for_a_prompt_under_way(run, request_of):
    """The blocks that the rest of that prompt needs are not free for it."""
    r = run(num_blocks=8, policy="priority", max_num_batched_tokens=8)
    r.add(request_of("low", 26, 2, priority=1))
    r.step()
    r.add(request_of("high", 12, 2))
    assert r.step().preempted_sequence_ids == ["low"]
    r.finish()
    assert list(r.last) == ["high", "low"]


def test_nobody_is_preempted_for_a_request_for_which_that_makes_no_room(run, request_of):
    r = run(num_blocks=9, policy="priority")
    r.add(request_of("top", 20, 4), request_of("low", 6, 6, priority=5))
    r.step()
    r.add(request_of("high", 20, 2, priority=1))  # 5 blocks; all but those of "top" are 3
    r.finish()
    assert r.scheduler.stats().num_preemptions == 0
    assert list(r.first) == ["top", "low", "high"]


@pytest.mark.parametrize("resumed", [False, True])
def test_nobody_is_preempted_for_a_request_whose_sequences_do_not_fit_even_alone(run, request_of, resumed):
    """Nor for one whose first sequence has grown until the others do not fit beside it, when it was preempted."""
    r = run(num_blocks=9, policy="priority")
    wide = request_of("wide", 10, 2, n=8)
    if resumed:
        wide = request_of("wide", 10, 20, n=7)
        wide.sequences[0].token_ids += range(50, 55)  # 4 blocks and 6
    r.add(request_of("low0", 6, 6, priority=5), request_of("low1", 6, 6, priority=5))
    r.step()
    r.add(wide)
    assert r.step().num_scheduled_tokens == {"low0": 1, "low1": 1}
    r.finish()
    assert r.scheduler.stats().num_preemptions == 0
    assert {r.last[name].error.code for name in wide.engine_request.sequence_ids} == {SEQUENCES_DO_NOT_FIT}
    assert "side by side" in r.last["wide-0"].error.message and "9 blocks of 4 tokens" in r.last["wide-0"].error.message


def test_a_search_for_room_that_was_in_vain_is_not_repeated_for_blocks_that_it_freed_itself(
    run, request_of, monkeypatch
):
    r = run(num_blocks=4, policy="priority", windows=(5,))
    r.add(request_of("top", 7, 9), request_of("low", 2, 9, priority=5))
    r.step()
    r.step()  # the window of "top" has passed its first block now
    planner, searches = r.scheduler.planner, []
    fits_beside = planner._fits_beside
    monkeypatch.setattr(planner, "_fits_beside", lambda *args: searches.append(args) or fits_beside(*args))
    r.add(request_of("head", 14, 1, priority=1))
    r.step()
    r.step()
    assert len(searches) == 1
    r.finish()


def test_a_request_of_high_rank_that_fits_only_alone_takes_the_place_of_all_others(run, request_of):
    r = run(num_blocks=8, policy="priority", watermark=0.2)
    r.add(*(request_of(f"low{index}", 6, 12, priority=5) for index in range(3)))
    r.step()
    r.add(request_of("high", 30, 2))
    assert sorted(r.step().preempted_sequence_ids) == ["low0", "low1", "low2"]
    r.finish()
    assert next(iter(r.requests)) == "low0" and r.last["high"].num_preemptions == 0


def test_longer_prefixes_overtake_for_so_long_from_when_they_first_did(run, request_of):
    """The first in line may be overtaken from then on, not from when it was only looked at."""
    now = [0.0]
    prefix = list(range(500, 516))
    r = run(policy="lpm", max_num_seqs=1, max_overtake_seconds=10.0, clock=lambda: now[0])
    r.add(request_of("seed", [*prefix, 1], 1))
    r.finish()
    r.add(request_of("long", 5, 30))
    r.step()
    r.add(request_of("first", 5, 2), request_of("hit0", [*prefix, 2], 2), request_of("hit1", [*prefix, 3], 30))
    while r.reason("long") is None:  # nobody is overtaken: there is no slot
        now[0] += 1.0
        r.step()
    for name in ("hit0", "hit1"):
        while name not in r.first:
            r.step()
        assert "first" not in r.first
    now[0] += 10.0
    r.add(request_of("hit2", [*prefix, 4], 2))
    r.finish()
    assert list(r.first) == ["seed", "long", "hit0", "hit1", "first", "hit2"]


def test_priority_decides_who_is_admitted_and_who_is_preempted(run, request_of):
    r = run(num_blocks=6, policy="priority", max_num_seqs=2)
    r.add(request_of("late", 7, 12, priority=5))
    r.step()
    r.add(request_of("mid", 7, 12, priority=3), request_of("first", 7, 12, priority=1))
    assert list(r.step().num_scheduled_tokens) == ["late", "first"]
    while not r.step().preempted_sequence_ids:
        pass
    assert r.plans[-1].preempted_sequence_ids == ["late"]
    r.finish()
    assert r.last["first"].num_preemptions == 0
    admitted = [new.sequence_id for plan in r.plans for new in plan.new_sequences]
    assert admitted[:3] == ["late", "first", "mid"], "the preempted one queues behind those before it"
    assert admitted[-1] == "late"


def test_a_preempted_one_does_not_eat_the_budget_of_the_step(run, request_of):
    """The classic scheduler lost the seats and tokens of the sequences it preempted (features, row 22)."""
    r = run(num_blocks=3, max_num_batched_tokens=2, max_num_seqs=2)
    r.add(request_of("a", 2, 8), request_of("b", 2, 8))
    while not r.step().preempted_sequence_ids:
        pass
    assert r.plans[-1].num_scheduled_tokens == {"a": 1}
    assert r.plans[-1].total_num_scheduled_tokens == 1
    r.finish()


# ---- ends ----


@pytest.mark.parametrize(("length", "fits"), [(15, True), (16, False), (40, False)])
def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(run, request_of, length, fits):
    r = run(num_blocks=4)
    r.add(request_of("a", length, 1), request_of("b", 3, 1))
    r.finish()
    assert r.reason("b") == "length"
    if fits:
        assert r.reason("a") == "length"
    else:
        needed = -(-(length + 1) // 4)
        assert r.reason("a") == "error"
        message = r.last["a"].error.message
        assert f"{needed} KV blocks" in message and "4 blocks of 4 tokens" in message


def test_a_refusal_alone_is_delivered(run, request_of):
    r = run(num_blocks=4)
    r.add(request_of("a", 50))
    assert r.scheduler.has_unfinished()
    r.finish()
    assert r.reason("a") == "error"


def test_a_refused_request_that_was_aborted_is_silent(run, request_of):
    r = run(num_blocks=4)
    r.add(request_of("a", 50))
    r.scheduler.abort_requests(["a"])
    assert not r.scheduler.has_unfinished()


def test_a_sequence_ends_where_the_pool_ends(run, request_of):
    r = run(num_blocks=4)
    r.add(request_of("a", 10, 50), request_of("b", 10, 50))
    r.finish()
    for name in "ab":
        assert (len(r.tokens[name]), r.reason(name)) == (7, "length")  # 16 slots, and a last token that needs none
        assert r.tokens[name] == r.expected(name)[0]


def test_a_sequence_ends_where_the_context_ends(run, request_of):
    r = run(max_model_len=14)
    r.add(request_of("a", 10, 50), request_of("b", 13, 50), request_of("c", 14, 50))
    r.finish()
    assert [(len(r.tokens[name]), r.reason(name)) for name in "abc"] == [(4, "length"), (1, "length"), (0, "error")]


def test_a_stop_token_ends_and_is_kept(run, request_of):
    other = run()
    other.add(request_of("a", PROMPT, 9))
    free = other.expected("a")[0]
    r = run()
    r.add(request_of("a", PROMPT, 9, stop_ids=[free[3]], stop_token_ids=[free[3]]))
    r.finish()
    assert r.tokens["a"] == free[: free.index(free[3]) + 1]
    assert (r.reason("a"), r.last["a"].stop_reason) == ("stop", free[3])


def test_ends_are_told_to_the_worker_once_even_in_an_empty_step(run, request_of):
    r = run()
    r.add(request_of("a", 3, 1))
    r.step()
    assert r.scheduler.has_unfinished(), "the worker has not been told"
    plan = r.step()
    assert (plan.finished_sequence_ids, plan.total_num_scheduled_tokens) == (["a"], 0)
    assert not r.scheduler.has_unfinished()
    assert r.step().finished_sequence_ids == []


def test_an_abort_frees_at_once_and_yields_nothing(run, request_of):
    r = run()
    r.add(request_of("running", 9, 9))
    r.step()
    r.add(request_of("waiting", 9, 9))
    r.scheduler.abort_requests(["running", "waiting", "nobody"])
    r.scheduler.check_integrity()
    assert r.scheduler.kv.pool.num_free == 64
    plan = r.step()
    assert plan.finished_sequence_ids == ["running"], "the worker never heard of the other one"
    assert len(r.tokens["running"]) == 1 and r.reason("running") is None and "waiting" not in r.last
    assert r.scheduler.stats().num_waiting == 0


def test_an_abort_while_the_step_runs_drops_its_result(run, request_of):
    r = run()
    r.add(request_of("a", 3, 5), request_of("b", 3, 5))
    plan = r.scheduler.schedule()
    output = r.worker.execute(plan)
    r.scheduler.abort_requests(["a"])
    r.scheduler.add_request(request_of("a", 5, 5))  # the same id again: the old result is not its own
    assert [news.sequence_id for news in r.scheduler.update_from_output(plan, output)] == ["b"]
    r.scheduler.check_integrity()
    plan = r.scheduler.schedule()
    assert plan.finished_sequence_ids == ["a"] and plan.num_scheduled_tokens == {"b": 1, "a": 5}


def test_ids_can_be_used_again_but_not_twice_at_once(run, request_of):
    r = run()
    r.add(request_of("a", 3, 2))
    with pytest.raises(RequestError, match="'a' is in use"):
        r.scheduler.add_request(request_of("a", 3, 2))
    r.finish()
    r.last.clear()
    r.add(request_of("a", 3, 2))
    r.finish()
    assert len(r.tokens["a"]) == 2


def test_a_broken_sequence_ends_with_an_error_and_its_kv_is_never_reused(run, request_of):
    r = run()
    r.add(request_of("a", [*PROMPT, 7], 5), request_of("b", 9, 5))
    r.step(broken=lambda plan: ["a"])
    assert (r.reason("a"), r.last["a"].error) == ("error", NOT_FINITE)
    r.add(request_of("c", [*PROMPT, 7], 5))
    r.finish()
    assert r.first["c"].num_cached_tokens == 0
    assert [r.reason(name) for name in "bc"] == ["length", "length"]


@pytest.mark.parametrize("fate", ["ended", "preempted"])
def test_a_sequence_that_is_not_running_any_more_loses_its_kv_when_it_breaks_and_others_keep_theirs(
    run, request_of, fate
):
    r = run(num_disk_slots=50)
    r.add(request_of("other", [*PROMPT, 7], 1))
    r.finish()
    scheduler = r.scheduler
    a = request_of("a", [5, *PROMPT, 7], 5)
    scheduler.add_request(a)
    plan = scheduler.schedule()
    if fate == "ended":
        scheduler.abort_requests(["a"])
    else:
        scheduler.admission.preempt(a, ScheduledStep(0, InFlight()))
    scheduler.update_from_output(plan, ModelOutput({}, errors={"a": NOT_FINITE}))
    assert not scheduler.kv.loads and len(scheduler.kv.disk) > 0
    scheduler.kv.start_step()
    found = [
        scheduler.kv.find_prefix(request_of("asks", prompt).sequences[0]).num_tokens
        for prompt in ([*PROMPT, 7], [5, *PROMPT, 7])
    ]
    assert found == [len(PROMPT) // 4 * 4, 0]
    assert TransferOp.CLEAR not in [each.op for each in scheduler.kv.take_transfers()]


def test_tokens_after_a_stop_are_dropped_with_their_logprobs(run, request_of):
    """A model may return several tokens for one sequence; those behind the stop were never generated."""
    scheduler = run().scheduler
    scheduler.add_request(request_of("a", 3, 9, stop_ids=[7], logprobs=0))
    logprobs = [TokenTopLogprobs([token], [-1.0], 1) for token in (5, 7, 6)]
    (news,) = scheduler.update_from_output(scheduler.schedule(), ModelOutput({"a": [5, 7, 6]}, {"a": logprobs}))
    assert (news.new_token_ids, news.finish_reason) == ([5, 7], "stop")
    assert news.logprobs == logprobs[:2]


@pytest.mark.parametrize("sampled", [{}, {"a": []}])
def test_a_model_that_owes_a_token_is_noticed(run, request_of, sampled):
    r = run()
    r.add(request_of("a", 3))
    with pytest.raises(QuireError, match="0 tokens"):
        r.scheduler.update_from_output(r.scheduler.schedule(), ModelOutput(sampled))


def test_news_of_the_first_output(run, request_of):
    r = run(clock=lambda: 42.0)
    r.add(request_of("a", 3, 2))
    r.finish()
    assert (r.first["a"].first_scheduled_time, r.first["a"].num_cached_tokens) == (42.0, 0)
    assert (r.last["a"].first_scheduled_time, r.last["a"].num_cached_tokens) == (None, None)


def test_an_empty_step_is_empty(run):
    plan = run().step()
    assert plan.total_num_scheduled_tokens == 0 and plan.num_scheduled_tokens == {}


def test_the_plan_is_not_tied_to_the_scheduler(run, request_of):
    """An inline worker appends to the token list it was given; that must not be the scheduler's own."""
    r = run()
    r.add(request_of("a", 3, 2))
    plan = r.scheduler.schedule()
    plan.new_sequences[0].output_token_ids.append(99)
    plan.new_sequences[0].block_ids[0].append(99)
    assert len(r.requests["a"].sequences[0].token_ids) == 3
    r.scheduler.check_integrity()


def test_an_empty_prompt_is_refused(request_of):
    with pytest.raises(RequestError, match="at least one token"):
        request_of("a", [])


def test_one_that_does_not_fit_is_overtaken_for_so_long_and_no_longer(run, request_of):
    now = [0.0]
    r = run(num_blocks=8, max_overtake_seconds=2.0, clock=lambda: now[0])
    r.add(request_of("a", 20, 12), request_of("big", 16, 1))
    r.step()
    r.add(request_of("small", 2, 1))
    assert set(r.step().num_scheduled_tokens) == {"a", "small"}
    now[0] = 2.0
    r.add(request_of("late", 2, 1))
    while "big" not in r.first:
        assert "late" not in r.step().num_scheduled_tokens or "big" in r.first
    r.finish()


def test_urgent_ones_that_wait_for_memory_are_not_overtaken_only_to_preempt_again(run, request_of):
    r = run(num_blocks=8, policy="priority", max_overtake_seconds=5.0)
    r.add(request_of("a", 20, 12))
    r.step()
    r.add(request_of("urgent", 16, 1), request_of("small", 2, 1, priority=1))
    r.finish()
    assert list(r.first) == ["a", "urgent", "small"]
    assert r.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize(("merges", "most"), [(True, 5), (False, 8)])
def test_sequences_that_say_the_same_come_to_share_what_they_say_if_asked_to(run, request_of, merges, most):
    """Two prompts that are one, computed apart: each has blocks of its own, until these are full."""
    r = run(deduplicate_blocks=merges, max_num_batched_tokens=9)
    r.add(request_of("a", PROMPT[:3], 13))
    r.step()
    r.add(request_of("b", PROMPT[:3], 13))
    r.finish()
    assert r.tokens["a"] == r.tokens["b"]
    assert r.most_blocks == most  # 16 tokens each: four blocks, or one more that is not full yet


# ---- cost ----


class CountingList(list):
    """A token list that counts how often it is read as a whole or by slice."""

    def __init__(self, items):
        super().__init__(items)
        self.reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()

    def __getitem__(self, index):
        self.reads += isinstance(index, slice)
        return super().__getitem__(index)


def test_a_decode_step_reads_tokens_only_when_a_block_fills_and_ignores_those_who_wait(run, request_of, monkeypatch):
    r = run(max_num_seqs=1, max_model_len=1000, num_blocks=300, max_num_batched_tokens=1000)
    r.add(request_of("a", 400, 50))
    r.step()
    (sequence,) = r.requests["a"].sequences
    tokens = sequence.token_ids = CountingList(sequence.token_ids)
    r.add(request_of("b", 400, 50))
    monkeypatch.setattr(type(r.scheduler.kv), "find_prefix", None)  # the seats are taken: nobody looks
    for _ in range(40):
        r.step()
    assert tokens.reads == 10  # once for each block that fills


def test_a_request_that_waits_for_memory_is_not_looked_up_every_step(run, request_of, monkeypatch):
    r = run(num_blocks=8)
    r.add(request_of("a", 20, 8), request_of("b", 16, 1))
    looked_up = []
    find_prefix = r.scheduler.kv.find_prefix
    monkeypatch.setattr(r.scheduler.kv, "find_prefix", lambda q: (looked_up.append(q.sequence_id), find_prefix(q))[1])
    r.finish()
    assert looked_up == ["a", "b", "b"]
