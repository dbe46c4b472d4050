"""Limits of keys and of time, by the clock: buckets, quotas, the time to the first token, durations."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.frontend.stats import FinishedRequest, TTFTEstimator
from quire.outputs import RequestMetrics
from quire.server.key_file import ApiKey
from quire.server.limits import Quota, QuotaOwner, RateLimitError, check_timeout
from quire.step import SchedulerStats
from quire.supervisor.quotas import Answer, Quotas, TokenBucket


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def finished_request(**fields: Any) -> FinishedRequest:
    """Return a request that ended without a token."""
    counts = dict.fromkeys(FinishedRequest.__dataclass_fields__, 0)
    return FinishedRequest(**{**counts, "num_sequences": 1, "metrics": RequestMetrics(), **fields})


def quota_of(clock: Clock, **limits: int) -> Quota:
    """Return the quota of a key, which nobody has used."""
    return Quota("a", ApiKey(name="ann", **limits), QuotaOwner(Quotas(clock)))


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a plain test of a coroutine function."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


async def headers_of(quota: Quota) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in await quota.headers()}


def test_a_bucket_gives_a_minutes_worth_at_once_and_then_fills_evenly() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert bucket.seconds_until(1) == pytest.approx(1.0)
    clock.now += 0.5
    assert bucket.seconds_until(1) == pytest.approx(0.5)
    clock.now += 1000
    assert bucket.level == 60
    bucket.take(90)  # more than was there
    assert bucket.seconds_until(1) == pytest.approx(31.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=40))
def test_nobody_gets_more_than_burst_and_rate(asked: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    taken = 0
    for pause, amount in asked:
        clock.now += pause
        if not bucket.seconds_until(amount):
            bucket.take(amount)
            taken += amount
    assert taken <= 60 + (clock.now - 1000.0) + 1e-6


@on_a_loop
async def test_a_key_may_have_so_many_requests_at_a_time_and_per_minute() -> None:
    clock = Clock()
    quota = quota_of(clock, max_concurrency=1, requests_per_minute=2)
    async with quota.running():
        with pytest.raises(RateLimitError, match="this key may have 1 requests at a time"):
            async with quota.running():
                pass
    async with quota.running():
        pass
    with pytest.raises(RateLimitError, match="this key may have 2 requests per minute") as caught:
        async with quota.running():
            pass
    assert caught.value.headers == {"Retry-After": "30", "Retry-After-Ms": "30000"}
    clock.now += 30
    async with quota.running():
        pass


@on_a_loop
async def test_a_slot_can_outlive_its_block() -> None:
    quota = quota_of(Clock(), max_concurrency=1)
    async with quota.running() as slot:
        slot.extend()
    with pytest.raises(RateLimitError, match="at a time"):
        async with quota.running():
            pass
    with slot:
        pass
    async with quota.running():
        pass


@on_a_loop
async def test_tokens_are_reserved_and_settled_by_what_was_used() -> None:
    clock = Clock()
    quota = quota_of(clock, tokens_per_minute=600)
    reserved = await quota.reserve(100, 500)
    assert reserved is not None
    assert await headers_of(quota) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "50s",
    }
    with pytest.raises(RateLimitError, match="600 tokens per minute; this request may use 150") as caught:
        await quota.reserve(100, 150)
    assert caught.value.headers["Retry-After"] == "5"
    for _ in range(2):  # the second time is too much
        reserved.end(110)
        assert (await headers_of(quota))["x-ratelimit-remaining-tokens"] == "490"


@on_a_loop
async def test_what_can_never_be_had_is_said_so() -> None:
    quota = quota_of(Clock(), tokens_per_minute=10)
    await quota.reserve(10, 10**6)
    assert (await headers_of(quota))["x-ratelimit-remaining-tokens"] == "0", "a minute's worth is reserved"
    with pytest.raises(RateLimitError) as caught:
        await quota.reserve(11, 12)
    assert caught.value.headers == {"X-Should-Retry": "false"}


@on_a_loop
async def test_other_rules_leave_what_was_used() -> None:
    quota = quota_of(Clock(), requests_per_minute=10)
    for _ in range(4):
        async with quota.running():
            pass
    quota.key = ApiKey(name="a", requests_per_minute=20, tokens_per_minute=5)
    assert (await headers_of(quota))["x-ratelimit-remaining-requests"] == "16"
    assert (await headers_of(quota))["x-ratelimit-remaining-tokens"] == "5"
    quota.key = ApiKey(name="a")
    assert await headers_of(quota) == {}


@pytest.mark.parametrize(("used", "shown"), [(0, "0s"), (1, "100ms"), (15, "1.5s"), (605, "1m0.5s"), (3600, "6m0s")])
@on_a_loop
async def test_times_are_written_as_openai_writes_them(used: int, shown: str) -> None:
    quota = quota_of(Clock(), tokens_per_minute=600)
    reserved = await quota.reserve(0, 600)
    assert reserved is not None
    reserved.end(used)
    assert (await headers_of(quota))["x-ratelimit-reset-tokens"] == shown


@on_a_loop
async def test_what_is_cancelled_while_the_owner_decides_is_not_counted() -> None:
    owner = SlowOwner(Quotas(Clock()))
    quota = Quota("a", ApiKey(name="ann", max_concurrency=1, tokens_per_minute=10), owner)

    async def begin() -> None:
        async with quota.running():
            await quota.reserve(1, 10)

    for moment in (1, 2):  # while it begins, and while it reserves
        task = asyncio.create_task(begin())
        await owner.asked(moment)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        owner.count = 0
    owner.slow = False
    await begin()


class SlowOwner(QuotaOwner):
    """Counts at once, but answers late."""

    count = 0
    slow = True

    async def ask(self, method: str, *arguments: Any) -> Answer:
        answer = await super().ask(method, *arguments)
        self.count += 1
        await asyncio.sleep(0.01 if self.slow else 0)
        return answer

    async def asked(self, count: int) -> None:
        while self.count < count:  # noqa: ASYNC110 - it is over at once
            await asyncio.sleep(0)


def test_shares_add_up_and_a_front_that_dies_gives_back_what_it_holds() -> None:
    quotas = Quotas(Clock())
    first, second = quotas.share(), quotas.share()
    limits = (2, 10, 100)
    assert first.begin("a", limits, 1) == second.begin("a", limits, 1) == {}
    assert first.reserve("a", limits, 2, 60) == {}
    assert second.reserve("a", limits, 2, 60) == {"refused": "tokens per minute", "wait": 12.0}
    assert second.begin("a", limits, 3) == {"refused": "requests at a time", "wait": 1.0}
    assert second.begin("b", limits, 3) == {}, "another key"
    first.release()
    assert second.levels("a", limits) == {"requests per minute": [8, 12.0], "tokens per minute": [100, 0.0]}
    assert second.begin("a", limits, 4) == {}
    assert second.begin("a", limits, 5)["refused"] == "requests at a time"


def test_fronts_that_read_the_file_of_keys_at_different_times_do_not_forget() -> None:
    share = Quotas(Clock()).share()
    for number, limits in enumerate([(None, 2, None), (None, None, 5), (None, 2, None), (None, 3, None)]):
        assert share.begin("a", limits, number) == {}
    assert share.begin("a", (None, 3, None), 9)["refused"] == "requests per minute"


def test_keys_that_nobody_uses_any_more_take_no_memory() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    share = quotas.share()
    share.begin("kept", (1, None, None), 0)
    for number in range(1, 5000):
        share.begin(str(number), (None, 60, None), number)
        share.end(number)
        clock.now += 1
    assert len(quotas) < 1100
    assert share.begin("kept", (1, None, None), 5000)["refused"] == "requests at a time"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 10.5, 1e9])
def test_times_that_requests_may_not_ask_for(seconds: float) -> None:
    with pytest.raises(RequestError, match="timeout must be"):
        check_timeout("timeout", seconds, 10.0)
    assert check_timeout("timeout", 10.0, 10.0) == 10.0


def test_the_backlog_knows_how_fast_prompts_begin() -> None:
    clock = Clock()
    estimator = TTFTEstimator(clock)
    stats = SchedulerStats()
    assert estimator.estimate() is None
    estimator.add(1000)
    clock.now += 1
    assert estimator.estimate() is None, "nothing has begun yet"
    estimator.on_step(stats, 500, 1)
    assert estimator.num_queued_tokens == 500
    assert estimator.rate == pytest.approx(500, rel=0.1)
    assert estimator.estimate(500) == pytest.approx(2.0, rel=0.1)
    clock.now += 10
    slow = estimator.rate
    assert slow is not None and slow < 60, "an engine whose places are taken begins few prompts"
    estimator.on_finished(finished_request(num_prompt_tokens=500))
    assert estimator.num_queued_tokens == 0
    rate = estimator.rate
    clock.now += 1000
    begun = RequestMetrics(first_token_time=1.0, last_token_time=2.0)
    assert estimator.rate == rate, "time with an empty queue tells nothing of the rate"
    estimator.on_finished(finished_request(num_prompt_tokens=500, metrics=begun))
    assert estimator.num_queued_tokens == 0
