"""`Quotas`: what each API key has used of its limits, counted in one place for all fronts.

A key is an opaque text here, and its limits come with each call: what keys there are is for the fronts to know. A
`QuotaShare` is what one front holds of the quotas, and gives back when it dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIN_FORGOTTEN = 1024  # keys, from which on those whose limits are untouched are forgotten

LIMITS = ("requests at a time", "requests per minute", "tokens per minute")
AT_A_TIME, REQUESTS, TOKENS = LIMITS

Clock = Callable[[], float]
Limits = Sequence[int | None]  # in the order of LIMITS; None is no limit
Answer = dict[str, Any]  # JSON-like


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


class KeyUsage:
    """What one key has used: requests that run, and the buckets of the rates that it has, or had, limits for."""

    __slots__ = ("_clock", "num_running", "requests", "tokens")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_running = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None

    def apply(self, limits: Limits) -> tuple[int | None, TokenBucket | None, TokenBucket | None]:
        """Return the limits: requests at a time, the buckets of requests and of tokens; None is no limit."""
        max_running, requests, tokens = limits
        self.requests = self._resized(self.requests, requests)
        self.tokens = self._resized(self.tokens, tokens)
        return max_running, None if requests is None else self.requests, None if tokens is None else self.tokens

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return bucket  # another front may have read the file of keys earlier or later
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        if bucket.per_minute != per_minute:
            bucket.resize(per_minute)
        return bucket

    @property
    def unused(self) -> bool:
        """Whether it says no more than a new one."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.num_running and all(bucket.level == bucket.per_minute for bucket in buckets)


class Quotas:
    """The quotas of all keys that are used. `clock`: monotonic seconds."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, KeyUsage] = {}
        self._forget_at = MIN_FORGOTTEN

    def __len__(self) -> int:
        return len(self._used)

    def get(self, key: str) -> KeyUsage:
        """Return what a key has used."""
        usage = self._used.get(key)
        if usage is None:
            if len(self._used) >= self._forget_at:  # keys come and go
                self._used = {key: usage for key, usage in self._used.items() if not usage.unused}
                self._forget_at = max(MIN_FORGOTTEN, 2 * len(self._used))
            usage = self._used[key] = KeyUsage(self._clock)
        return usage

    def share(self) -> QuotaShare:
        """Return what a new front holds: nothing."""
        return QuotaShare(self)


@dataclass(frozen=True, slots=True)
class _Held:
    usage: KeyUsage
    running: bool
    tokens: int


class QuotaShare:
    """What one front holds: requests that run and tokens that they have reserved, by numbers of the front's choice."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._held: dict[int, _Held] = {}

    def answer(self, method: str, arguments: Sequence[Any]) -> Answer:
        """Call one of the methods below, by its name."""
        return self._METHODS[method](self, *arguments)

    def begin(self, key: str, limits: Limits, number: int) -> Answer:
        """Count a request that begins, until `end`.

        Returns:
            Nothing, or if it must wait {"refused": one of `LIMITS`, "wait": seconds}.
        """
        usage = self._quotas.get(key)
        most, requests, tokens = usage.apply(limits)
        if most is not None and usage.num_running >= most:
            return {"refused": AT_A_TIME, "wait": 1.0}
        for bucket, name in ((requests, REQUESTS), (tokens, TOKENS)):
            wait = 0.0 if bucket is None else bucket.seconds_until(1)
            if wait:
                return {"refused": name, "wait": wait}
        if requests is not None:
            requests.take(1)
        usage.num_running += 1
        self._held[number] = _Held(usage, running=True, tokens=0)
        return {}

    def reserve(self, key: str, limits: Limits, number: int, amount: int) -> Answer:
        """Take `amount` tokens, until `end`. Returns as `begin`."""
        usage = self._quotas.get(key)
        _, _, tokens = usage.apply(limits)
        if tokens is None:
            return {}
        wait = tokens.seconds_until(amount)
        if wait:
            return {"refused": TOKENS, "wait": wait}
        tokens.take(amount)
        self._held[number] = _Held(usage, running=False, tokens=amount)
        return {}

    def end(self, number: int, used: int = 0) -> Answer:
        """End what `begin` or `reserve` began, if it did; of reserved tokens, those not `used` are given back."""
        held = self._held.pop(number, None)
        if held is not None:
            held.usage.num_running -= held.running
            if held.usage.tokens is not None:
                held.usage.tokens.take(used - held.tokens)
        return {}

    def levels(self, key: str, limits: Limits) -> Answer:
        """Return, for the limits per minute that there are, by name, [what is left, seconds until it is all there]."""
        _, requests, tokens = self._quotas.get(key).apply(limits)
        return {
            name: [bucket.level, bucket.seconds_until(bucket.per_minute)]
            for name, bucket in ((REQUESTS, requests), (TOKENS, tokens))
            if bucket is not None
        }

    def release(self) -> None:
        """Give everything back: what it was for ended with the front."""
        for number in list(self._held):
            self.end(number)

    _METHODS: dict[str, Callable[..., Answer]] = {"begin": begin, "reserve": reserve, "end": end, "levels": levels}
