"""Limits of one caller: rates and concurrency of an API key, and the deadline of a request. Clocks are monotonic."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from quire.checks import wrong_value
from quire.server.errors import HTTPProblem, retry_headers

TIMEOUT_HEADER = b"x-request-timeout"
MAX_SECONDS = 604800.0
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

Headers = list[tuple[bytes, bytes]]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key's name and limits; None is no limit.

    Attributes:
        name: the tenant of its requests, and what logs call it.
        max_concurrency: requests at a time. requests_per_minute, tokens_per_minute: over all routes that do work.
        weight: its share with the fair scheduling policy. min_priority: the most urgent `priority` of its requests.
    """

    name: str
    max_concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float | None = None
    min_priority: int | None = None

    @property
    def limited(self) -> bool:
        """Whether anything must be counted."""
        limits = (self.max_concurrency, self.requests_per_minute, self.tokens_per_minute)
        return any(limit is not None for limit in limits)


class RateLimitError(HTTPProblem):
    """429: the caller must wait, however idle the server is."""

    error_type = "rate_limit_error"

    def __init__(self, message: str, seconds: float | None) -> None:
        retry = {"X-Should-Retry": "false"} if seconds is None else retry_headers(max(seconds, 0.001))
        super().__init__(429, message, code="rate_limit_exceeded", headers=retry)


class TokenBucket:
    """A token bucket that holds a minute's worth: full at first, refilled evenly.

    Usage that is known only afterwards may overdraw it; it then refills from below zero.
    """

    __slots__ = ("_clock", "_latest", "_level", "per_minute")

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._latest = clock()

    @property
    def level(self) -> float:
        """The current level."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._latest) * self.per_minute / 60)
        self._latest = now
        return self._level

    def seconds_until(self, amount: float) -> float:
        """Return in how many seconds it will have `amount`; 0 if it has."""
        return max(0.0, amount - self.level) * 60 / self.per_minute

    def take(self, amount: float) -> None:
        """Take out `amount`, or put it back if it is negative."""
        self._level = min(self.per_minute, self.level - amount)

    def resize(self, per_minute: int) -> None:
        """Change the size; used tokens stay used."""
        taken = self.per_minute - self.level
        self.per_minute = per_minute
        self._level = per_minute - taken


class Quota:
    """The limits of one key, and how much of them is used."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.num_running = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.change(key)

    def change(self, key: ApiKey) -> None:
        """Apply other limits from now on."""
        self.key = key
        self.requests = self._resized(self.requests, key.requests_per_minute)
        self.tokens = self._resized(self.tokens, key.tokens_per_minute)

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None or bucket is None:
            return None if per_minute is None else TokenBucket(per_minute, self._clock)
        if bucket.per_minute != per_minute:
            bucket.resize(per_minute)
        return bucket

    @contextmanager
    def running(self) -> Iterator[ConcurrencySlot]:
        """Count a request while the block runs, or for longer if its slot is extended. Raises `RateLimitError`."""
        most = self.key.max_concurrency
        if most is not None and self.num_running >= most:
            raise RateLimitError(f"this key may have {most} requests at a time", 1.0)
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            wait = 0.0 if bucket is None else bucket.seconds_until(1)
            if bucket is not None and wait:
                raise RateLimitError(f"this key may have {bucket.per_minute} {what} per minute", wait)
        if self.requests is not None:
            self.requests.take(1)
        self.num_running += 1
        slot = ConcurrencySlot(self)
        try:
            yield slot
        finally:
            if not slot.extended:
                self.num_running -= 1

    def reserve(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Take `num_tokens`, those of the prompt and all that may be generated, before it is known how many will be.

        A reservation is at most a minute's worth; `refund` takes the rest once it has been used.

        Returns:
            What was taken, for `refund`.

        Raises:
            RateLimitError: so much is not left, or the prompt alone is more than a minute's worth.
        """
        if self.tokens is None:
            return 0
        most = self.tokens.per_minute
        if num_prompt_tokens > most:
            raise RateLimitError(f"the prompt has more tokens than this key may have in a minute, {most}", None)
        amount = min(num_tokens, most)
        wait = self.tokens.seconds_until(amount)
        if wait:
            raise RateLimitError(f"this key may have {most} tokens per minute; this request may use {amount}", wait)
        self.tokens.take(amount)
        return amount

    def refund(self, reserved: int, used: int) -> None:
        """Replace a reservation by what was used."""
        if self.tokens is not None:
            self.tokens.take(used - reserved)

    def headers(self) -> Headers:
        """Return OpenAI's rate limit headers."""
        headers: Headers = []
        for bucket, what in ((self.requests, b"requests"), (self.tokens, b"tokens")):
            if bucket is not None:
                left = max(0, math.floor(bucket.level))
                headers += [
                    (b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + what, b"%d" % left),
                    (b"x-ratelimit-reset-" + what, _duration(bucket.seconds_until(bucket.per_minute)).encode()),
                ]
        return headers


class ConcurrencySlot:
    """A request's slot of its key's `max_concurrency`.

    A request that outlives its HTTP response extends the slot and enters it as a context; the slot is free at its exit.
    """

    __slots__ = ("_quota", "extended")

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self.extended = False

    def extend(self) -> None:
        """Keep the slot beyond the response."""
        self.extended = True

    def __enter__(self) -> ConcurrencySlot:
        assert self.extended, "else it is freed twice"
        return self

    def __exit__(self, *_: object) -> None:
        self._quota.num_running -= 1


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 6m0s, 1.5s, 120ms, 0s."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the response to a request must be complete: `seconds` after its arrival [monotonic seconds]."""

    arrival: float
    seconds: float

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.arrival + self.seconds - time.monotonic())

    def exceeded(self) -> HTTPProblem:
        """Return the error for a response that is not complete in time."""
        return HTTPProblem(504, f"the answer was not complete within {self.seconds:g} s", code="request_timeout")


@asynccontextmanager
async def time_limit(deadline: Deadline | None) -> AsyncIterator[None]:
    """Cancel the block at the deadline, if there is one, and raise the error of a response that is not complete."""
    if deadline is None:
        yield
        return
    try:
        async with asyncio.timeout(deadline.left):
            yield
    except TimeoutError:
        raise deadline.exceeded() from None


def check_timeout(name: str, seconds: float, most: float | None) -> float:
    """Return `seconds` if a request may set this timeout; raise `RequestError` naming the field otherwise.

    Args:
        most: the server's `request_timeout`.
    """
    if seconds != seconds or seconds <= 0:
        raise wrong_value(name, "greater than 0 seconds", seconds, "decimal_below_min_value")
    limit = MAX_SECONDS if most is None else most
    if seconds > limit:
        hint = "" if most is None else " (--request-timeout of this server)"
        raise wrong_value(name, f"at most {limit:g} seconds{hint}", seconds, "decimal_above_max_value")
    return seconds


def set_deadline(scope: Scope, most: float | None) -> None:
    """Set the deadline of a request that its header or the server's `request_timeout`, `most`, demands.

    Raises:
        RequestError: the header is no number of seconds, or more than the server allows.
    """
    state = scope["state"]
    state["arrival"] = time.monotonic()
    seconds = most
    for name, value in scope["headers"]:
        if name == TIMEOUT_HEADER:
            text = value.decode("latin-1").strip()
            if not SECONDS.fullmatch(text):
                raise wrong_value("X-Request-Timeout", "a number of seconds", text)
            seconds = check_timeout("X-Request-Timeout", float(text), most)
    if seconds is not None:
        state["deadline"] = Deadline(state["arrival"], seconds)


def deadline_of(state: dict[str, Any], most: float | None, timeout: float | None = None) -> Deadline | None:
    """Return the deadline of a request, None if it has none; the body's `timeout` [s] may bring it forward.

    Raises:
        RequestError: `timeout` is not allowed; `most` is the server's `request_timeout`.
    """
    deadline: Deadline | None = state.get("deadline")
    if timeout is not None:
        seconds = check_timeout("timeout", timeout, most)
        if deadline is None or seconds < deadline.seconds:
            deadline = state["deadline"] = Deadline(state["arrival"], seconds)
    return deadline
