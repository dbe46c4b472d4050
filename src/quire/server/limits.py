"""What one caller may have of a server: rates and concurrency of a key, and the time until which an answer is of use.

Clocks are monotonic: a change of the date neither frees nor blocks anybody.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from quire.checks import wrong_value
from quire.server.errors import HTTPProblem, retry_headers

TIMEOUT_HEADER = b"x-request-timeout"
MOST_SECONDS = 604800.0
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

Headers = list[tuple[bytes, bytes]]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """What the holder of one API key may do; None is no limit.

    Attributes:
        name: on whose account its requests run, and what logs call it.
        max_concurrency: requests at a time. requests_per_minute, tokens_per_minute: over all routes that do work.
        weight: its share with the fair policy. min_priority: the most urgent `priority` it may ask for.
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
        again = {"X-Should-Retry": "false"} if seconds is None else retry_headers(max(seconds, 0.001))
        super().__init__(429, message, code="rate_limit_exceeded", headers=again)


class Bucket:
    """A token bucket: full at first, filled evenly, so that a minute's worth may be had at once.

    It may be overdrawn by what is only known afterwards; then it fills from below zero.
    """

    __slots__ = ("_clock", "_latest", "_level", "per_minute")

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._latest = clock()

    @property
    def level(self) -> float:
        """What is in it now."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._latest) * self.per_minute / 60)
        self._latest = now
        return self._level

    def lacks(self, amount: float) -> float:
        """Return in how many seconds it will have so much; 0 if it has."""
        return max(0.0, amount - self.level) * 60 / self.per_minute

    def take(self, amount: float) -> None:
        """Take out so much, or with a negative amount put it back."""
        self._level = min(self.per_minute, self.level - amount)

    def resize(self, per_minute: int) -> None:
        """Go on with another size; what was taken stays taken."""
        taken = self.per_minute - self.level
        self.per_minute = per_minute
        self._level = per_minute - taken


class Quota:
    """What the holder of one key has used of what `rules` give."""

    def __init__(self, rules: KeyRules, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.rules = rules
        self.num_running = 0
        self.requests = _bucket(None, rules.requests_per_minute, clock)
        self.tokens = _bucket(None, rules.tokens_per_minute, clock)

    def change(self, rules: KeyRules) -> None:
        """Go by other rules from now on."""
        self.rules = rules
        self.requests = _bucket(self.requests, rules.requests_per_minute, self._clock)
        self.tokens = _bucket(self.tokens, rules.tokens_per_minute, self._clock)

    @contextmanager
    def running(self) -> Iterator[Slot]:
        """Count a request while the block runs, or for longer if its slot is kept. Raises `RateLimitError`."""
        most = self.rules.max_concurrency
        if most is not None and self.num_running >= most:
            raise RateLimitError(f"this key may have {most} requests at a time", 1.0)
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            wait = 0.0 if bucket is None else bucket.lacks(1)
            if bucket is not None and wait:
                raise RateLimitError(f"this key may have {bucket.per_minute} {what} per minute", wait)
        if self.requests is not None:
            self.requests.take(1)
        self.num_running += 1
        slot = Slot(self)
        try:
            yield slot
        finally:
            if not slot.kept:
                self.num_running -= 1

    def reserve(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Take `num_tokens`, the prompt's and all that may be generated, before it is known how many will be used.

        Of more than a minute's worth, that much is taken; the rest is settled when it has been used.

        Returns:
            What was taken, for `settle`.

        Raises:
            RateLimitError: so much is not left, or the prompt alone is more than a minute's worth.
        """
        if self.tokens is None:
            return 0
        most = self.tokens.per_minute
        if num_prompt_tokens > most:
            raise RateLimitError(f"the prompt has more tokens than this key may have in a minute, {most}", None)
        amount = min(num_tokens, most)
        wait = self.tokens.lacks(amount)
        if wait:
            raise RateLimitError(f"this key may have {most} tokens per minute; this request may use {amount}", wait)
        self.tokens.take(amount)
        return amount

    def settle(self, reserved: int, used: int) -> None:
        """Replace what was reserved by what was used."""
        if self.tokens is not None:
            self.tokens.take(used - reserved)

    def headers(self) -> Headers:
        """Return OpenAI's headers about what is left."""
        headers: Headers = []
        for bucket, what in ((self.requests, b"requests"), (self.tokens, b"tokens")):
            if bucket is not None:
                left = max(0, math.floor(bucket.level))
                headers += [
                    (b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + what, b"%d" % left),
                    (b"x-ratelimit-reset-" + what, _duration(bucket.lacks(bucket.per_minute)).encode()),
                ]
        return headers


class Slot:
    """A request's place among those that its key may have at a time.

    Whoever goes on with the request beyond its answer keeps it, and enters it: it is free when that block ends.
    """

    __slots__ = ("_quota", "kept")

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self.kept = False

    def keep(self) -> None:
        """Go on counting the request when its answer has been given."""
        self.kept = True

    def __enter__(self) -> Slot:
        assert self.kept, "else it is freed twice"
        return self

    def __exit__(self, *_: object) -> None:
        self._quota.num_running -= 1


def _bucket(old: Bucket | None, per_minute: int | None, clock: Clock) -> Bucket | None:
    if per_minute is None:
        return None
    if old is None:
        return Bucket(per_minute, clock)
    if old.per_minute != per_minute:
        old.resize(per_minute)
    return old


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 6m0s, 1.5s, 120ms, 0s."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


def timed_out(seconds: float) -> HTTPProblem:
    """Return the error for an answer that was not complete in time."""
    return HTTPProblem(504, f"the answer was not complete within {seconds:g} s", code="request_timeout")


def timeout_of(name: str, seconds: float, most: float | None) -> float:
    """Return `seconds` if a request may ask for so long; raise `RequestError` naming the field otherwise.

    Args:
        most: the server's `request_timeout`.
    """
    if seconds != seconds or seconds <= 0:
        raise wrong_value(name, "greater than 0 seconds", seconds, "decimal_below_min_value")
    limit = MOST_SECONDS if most is None else most
    if seconds > limit:
        hint = "" if most is None else " (--request-timeout of this server)"
        raise wrong_value(name, f"at most {limit} seconds{hint}", seconds, "decimal_above_max_value")
    return seconds


class Deadline:
    """Until when the answer to one request is of use.

    Args:
        arrival: when it came, on the monotonic clock. seconds: how long it may take from then on.
    """

    __slots__ = ("arrival", "seconds")

    def __init__(self, arrival: float, seconds: float) -> None:
        self.arrival = arrival
        self.seconds = seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.arrival + self.seconds - time.monotonic())


def set_deadline(scope: Scope, most: float | None) -> None:
    """Note until when a request's answer is of use, as its header or the server's option says.

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
            seconds = timeout_of("X-Request-Timeout", float(text), most)
    if seconds is not None:
        state["deadline"] = Deadline(state["arrival"], seconds)


def deadline_of(request: Request, most: float | None, timeout: float | None = None) -> Deadline | None:
    """Return until when a request's answer is of use; None: always.

    Args:
        most: the server's `request_timeout`. timeout: the field of the body [s].

    Raises:
        RequestError: `timeout` is not allowed.
    """
    state = request.scope["state"]
    deadline: Deadline | None = state.get("deadline")
    if timeout is not None:
        seconds = timeout_of("timeout", timeout, most)
        if deadline is None or seconds < deadline.seconds:
            deadline = state["deadline"] = Deadline(state["arrival"], seconds)
    return deadline
