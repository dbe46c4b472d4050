"""Limits of keys and of time, by the clock: buckets, quotas, the time to the first token, durations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.frontend.stats import FinishedRequest, TTFTEstimator
from quire.outputs import RequestMetrics
from quire.server.limits import ApiKey, Quota, RateLimitError, TokenBucket, check_timeout
from quire.step import SchedulerStats


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


def headers_of(quota: Quota) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in quota.headers()}


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


def test_a_key_may_have_so_many_requests_at_a_time_and_per_minute() -> None:
    clock = Clock()
    quota = Quota(ApiKey(name="a", max_concurrency=1, requests_per_minute=2), clock)
    with (
        quota.running(),
        pytest.raises(RateLimitError, match="1 requests at a time"),
        quota.running(),
    ):
        pass
    with quota.running():
        pass
    with pytest.raises(RateLimitError, match="2 requests per minute") as caught, quota.running():
        pass
    assert caught.value.headers == {"Retry-After": "30", "Retry-After-Ms": "30000"}
    clock.now += 30
    with quota.running():
        pass
    assert quota.num_running == 0


def test_tokens_are_reserved_and_settled_by_what_was_used() -> None:
    clock = Clock()
    quota = Quota(ApiKey(name="a", tokens_per_minute=600), clock)
    reserved = quota.reserve(100, 500)
    assert headers_of(quota) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "50s",
    }
    with pytest.raises(RateLimitError) as caught:
        quota.reserve(100, 150)
    assert caught.value.headers["Retry-After"] == "5"
    quota.refund(reserved, 110)
    assert headers_of(quota)["x-ratelimit-remaining-tokens"] == "490"


def test_what_can_never_be_had_is_said_so() -> None:
    quota = Quota(ApiKey(name="a", tokens_per_minute=10), Clock())
    assert quota.reserve(10, 10**6) == 10, "of a long answer a minute's worth is reserved"
    with pytest.raises(RateLimitError) as caught:
        quota.reserve(11, 12)
    assert caught.value.headers == {"X-Should-Retry": "false"}


def test_other_rules_leave_what_was_used() -> None:
    clock = Clock()
    quota = Quota(ApiKey(name="a", requests_per_minute=10), clock)
    for _ in range(4):
        with quota.running():
            pass
    quota.change(ApiKey(name="a", requests_per_minute=20, tokens_per_minute=5))
    assert headers_of(quota)["x-ratelimit-remaining-requests"] == "16"
    assert headers_of(quota)["x-ratelimit-remaining-tokens"] == "5"
    quota.change(ApiKey(name="a"))
    assert headers_of(quota) == {}


@pytest.mark.parametrize(("used", "shown"), [(0, "0s"), (1, "100ms"), (15, "1.5s"), (605, "1m0.5s"), (3600, "6m0s")])
def test_times_are_written_as_openai_writes_them(used: int, shown: str) -> None:
    quota = Quota(ApiKey(name="a", requests_per_minute=600), Clock())
    assert quota.requests is not None
    quota.requests.take(used)
    assert headers_of(quota)["x-ratelimit-reset-requests"] == shown


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
