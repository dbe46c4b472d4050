"""Limits of one caller: rates and concurrency of an API key, and the deadline of a request. Clocks are monotonic.

What is used of a key's limits is counted by a `QuotaOwner`, for all fronts in the supervisor.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from quire.checks import wrong_value
from quire.server.errors import HTTPProblem, retry_headers
from quire.server.key_file import ApiKey
from quire.supervisor.quotas import LIMITS, Answer, Quotas

TIMEOUT_HEADER = b"x-request-timeout"
MAX_SECONDS = 604800.0
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

Headers = list[tuple[bytes, bytes]]


class RateLimitError(HTTPProblem):
    """429: the caller must wait, however idle the server is."""

    error_type = "rate_limit_error"

    def __init__(self, message: str, seconds: float | None) -> None:
        retry = {"X-Should-Retry": "false"} if seconds is None else retry_headers(max(seconds, 0.001))
        super().__init__(429, message, code="rate_limit_exceeded", headers=retry)


class QuotaOwner:
    """Where quotas are counted: here, in this process. A front of several asks the supervisor instead."""

    def __init__(self, quotas: Quotas | None = None) -> None:
        self._share = (Quotas() if quotas is None else quotas).share()
        self._numbers = itertools.count()

    def number(self) -> int:
        """Return a number for what is to begin."""
        return next(self._numbers)

    async def ask(self, method: str, *arguments: Any) -> Answer:
        """Return what a method of `QuotaShare` returns. Raises `HTTPProblem` if there is no answer in time."""
        return self._share.answer(method, arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of `QuotaShare`, after those that were called before."""
        self._share.answer(method, arguments)


class Quota:
    """The limits of one key, and the way to what is used of them.

    Args:
        name: what the owner calls the key.

    Attributes:
        key: with the limits that hold now.
    """

    def __init__(self, name: str, key: ApiKey, owner: QuotaOwner) -> None:
        self._name = name
        self.key = key
        self._owner = owner

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ConcurrencySlot]:
        """Count a request while the block runs, or for longer if its slot is extended. Raises `RateLimitError`."""
        slot = ConcurrencySlot(await self._hold("begin"))
        try:
            yield slot
        finally:
            if not slot.extended:
                slot.release()

    async def reserve(self, num_prompt_tokens: int, num_tokens: int) -> Held | None:
        """Take `num_tokens`, those of the prompt and all that may be generated, before it is known how many will be.

        A reservation is at most a minute's worth; it ends with what was used. None where tokens have no limit.

        Raises:
            RateLimitError: so much is not left, or the prompt alone is more than a minute's worth.
        """
        most = self.key.tokens_per_minute
        if most is None:
            return None
        if num_prompt_tokens > most:
            raise RateLimitError(f"the prompt has more tokens than this key may have in a minute, {most}", None)
        amount = min(num_tokens, most)
        return await self._hold("reserve", amount, hint=f"; this request may use {amount}")

    async def _hold(self, method: str, *arguments: int, hint: str = "") -> Held:
        """Return what is counted from now on. Raises `RateLimitError`, which ends with `hint`."""
        limits, held = self.key.limits, Held(self._owner)
        try:
            answer = await self._owner.ask(method, self._name, limits, held.number, *arguments)
        except BaseException:  # it may be counted, or will be
            held.end()
            raise
        if "refused" in answer:
            limit = str(answer["refused"])
            raise RateLimitError(f"this key may have {limits[LIMITS.index(limit)]} {limit}{hint}", answer["wait"])
        return held

    async def headers(self) -> Headers:
        """Return OpenAI's rate limit headers; none if the owner does not answer."""
        _, *per_minute = self.key.limits
        if not any(per_minute):
            return []
        try:
            levels = await self._owner.ask("levels", self._name, self.key.limits)
        except HTTPProblem:
            return []
        headers: Headers = []
        for (limit, (level, seconds)), most in zip(levels.items(), filter(None, per_minute), strict=True):
            what = limit.split()[0].encode()
            headers += [
                (b"x-ratelimit-limit-" + what, b"%d" % most),
                (b"x-ratelimit-remaining-" + what, b"%d" % max(0, math.floor(level))),
                (b"x-ratelimit-reset-" + what, _duration(seconds).encode()),
            ]
        return headers


class Held:
    """What an owner counts until it is ended: a request that runs, or reserved tokens."""

    __slots__ = ("_owner", "number")

    def __init__(self, owner: QuotaOwner) -> None:
        self._owner = owner
        self.number = owner.number()

    def end(self, used: int = 0) -> None:
        """Count it no longer; reserved tokens are charged as far as they were used."""
        self._owner.tell("end", self.number, used)


class ConcurrencySlot:
    """A request's slot of its key's `max_concurrency`.

    A request that outlives its HTTP response extends the slot and enters it as a context; the slot is free at its exit.
    """

    __slots__ = ("_held", "extended")

    def __init__(self, held: Held) -> None:
        self._held: Held | None = held
        self.extended = False

    def extend(self) -> None:
        """Keep the slot beyond the response."""
        self.extended = True

    def release(self) -> None:
        """Free the slot, once."""
        if self._held is not None:
            self._held.end()
            self._held = None

    def __enter__(self) -> ConcurrencySlot:
        assert self.extended, "else it is free already"
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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
