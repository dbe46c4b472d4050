"""One model of a server, loaded or not, and the requests that wait for it. `ModelPool` loads it."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.server.errors import HTTPProblem, retry_headers
from quire.server.model_entry import accepted_names, served_names

FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 300.0
SOON_SECONDS = 60.0  # a model that dies within so long after loading is as one that could not be loaded
RESUMING = "resuming"  # an engine that an earlier process has started is used again
PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+-]+)+/?")


class ServedModel:
    """One model.

    Args:
        config: its options, and the server's. llm: its engine, which need not be started.
        pinned, at_start: as in `ModelEntry`. essential: without it the server stops; never reloaded once it died.
        make_llm: makes an engine in place of a closed one; without it, the model is essential and cannot be unloaded.
        max_model_len: its context length [tokens], if it is known without loading it.

    Attributes:
        names: under which it is served, the first one is its own. created: when the server began to serve it [Unix
            seconds]. num_users: running requests that need it. waiters: requests that wait for it, in order; each gets
            None once it is a user, or an error.
        task: what loads or unloads it, if anything, and `action` in a word, or `RESUMING`.
        draining: it accepts no more users.
        last_used, last_acquired, ready_at: [clock seconds]. load_seconds: how long loading took.
        error: why it could not be loaded, or died; it is not loaded again before `retry_at`.
        view: what the front that decides about it has published of it; None in that front.
    """

    def __init__(
        self,
        config: EngineConfig,
        llm: AsyncLLM,
        *,
        pinned: bool = True,
        at_start: bool = True,
        essential: bool = False,
        make_llm: Callable[[], AsyncLLM] | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.llm = llm
        self.names = served_names(config)
        self.created = int(time.time())
        self.pinned, self.at_start, self.essential = pinned, at_start, essential or make_llm is None
        self.make_llm = make_llm
        self.num_users = 0
        self.waiters: deque[asyncio.Future[QuireError | None]] = deque()
        self.task: asyncio.Task[None] | None = None
        self.action = ""
        self.draining = False
        self.last_used = self.last_acquired = self.ready_at = self.load_seconds = 0.0
        self.error: QuireError | None = None
        self.retry_at = self.backoff = 0.0
        self.view: dict[str, Any] | None = None
        self._accepted = accepted_names(config)
        self._max_model_len = max_model_len
        self._was_ready = False
        self._kept_status = "loading"

    def answers_to(self, name: str) -> bool:
        """Whether it, or one of its adapters, is served under this name."""
        return name in self._accepted or self.llm.adapters.find(name) is not None

    # ---- state ----

    @property
    def available(self) -> bool:
        """Whether it accepts users now."""
        llm = self.llm
        return llm.ready and not llm.is_sleeping and not self.draining and self.task is None

    @property
    def in_memory(self) -> bool:
        """Whether it is in memory, or being loaded or unloaded."""
        return self.task is not None or self.llm.ready

    @property
    def in_use(self) -> bool:
        """Whether its engine has work, for running requests or for aborted ones."""
        return self.num_users > 0 or self.llm.num_unfinished > 0

    @property
    def can_sleep(self) -> bool:
        """Whether it is in memory and unused."""
        return self.in_memory and self.task is None and not self.in_use and not self.waiters

    @property
    def can_evict(self) -> bool:
        """Whether it may be unloaded for another one, perhaps after its requests have finished."""
        return self.in_memory and self.task is None and not self.pinned and self.make_llm is not None

    @property
    def was_ready(self) -> bool:
        """Whether it has been loaded at any time."""
        self._was_ready = self._was_ready or self.llm.ready
        return self._was_ready

    @property
    def status(self) -> str:
        """Its state as /v1/models shows it: loaded, loading, sleeping, failed or unloaded."""
        if self.view is not None:
            return str(self.view["status"])
        if self.action == RESUMING:
            return self._kept_status
        if self.action == "loading" or (self.at_start and not self.was_ready and not self.llm.errored):
            return "loading"
        if self.llm.ready and self.action != "unloading":
            return "sleeping" if self.llm.is_sleeping else "loaded"
        return "failed" if self.error is not None or (self.llm.errored and self.task is None) else "unloaded"

    @property
    def max_model_len(self) -> int | None:
        """Its context length [tokens]; None if it is not known yet."""
        if self.llm.ready:
            self._max_model_len = self.llm.max_model_len
        return self._max_model_len

    @property
    def max_waiting(self) -> int:
        """Most requests that may wait for it to be loaded."""
        return self.config.scheduler.resolved_max_num_queued_reqs

    # ---- several fronts ----

    def publication(self) -> dict[str, Any]:
        """Return what other fronts, and later ones, need to know, JSON-like."""
        return {
            "status": self.status,
            "draining": self.draining,
            "created": self.created,
            "max_model_len": self.max_model_len,
            "error": None if self.error is None else [self.error.message, self.error.code],
            "backoff": self.backoff,
            "retry_at": self.retry_at,
        }

    def follow(self, published: dict[str, Any]) -> None:
        """Show the state that the front has published which decides."""
        self.view = published
        self.created, self._max_model_len = published["created"], published["max_model_len"]

    def lead(self, published: dict[str, Any] | None) -> None:
        """Go on from the state that the front had published which decided before this one."""
        self.view = None
        if published is not None:
            self._kept_status = published["status"]
            self.created, self._max_model_len = published["created"], published["max_model_len"]
            self.backoff, self.retry_at = published["backoff"], published["retry_at"]
            if published["error"] is not None:
                message, code = published["error"]
                self.error = QuireError(message, code=code)

    # ---- events ----

    def note_started(self) -> None:
        """Note that an earlier process of this server has loaded it, or not, as it was to do at start."""
        self._was_ready = True

    def note_ready(self, now: float, seconds: float) -> None:
        """Note that it was loaded, or woken up, in so many seconds."""
        self.ready_at = self.last_used = now
        self.load_seconds = seconds
        self.error = None

    def note_failure(self, error: QuireError, now: float) -> None:
        """Note that it could not be loaded; each failure in a row doubles the time until the next try."""
        self.error = error
        self.backoff = min(max(2 * self.backoff, FIRST_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
        self.retry_at = now + self.backoff

    def note_death(self, now: float) -> None:
        """Note whether its engine has died. Soon after loading, that counts as a failure to load."""
        if self.error is None and self.llm.errored and self.task is None:
            error = QuireError("its engine has died")
            if now - self.ready_at < SOON_SECONDS:
                self.note_failure(error, now)
            else:
                self.error, self.backoff, self.retry_at = error, 0.0, now

    def resolve_waiters(self, outcome: QuireError | None) -> int:
        """Give all waiters this outcome; return how many there were."""
        count = 0
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(outcome)
                count += 1
        return count

    def remove_waiter(self, waiter: asyncio.Future[QuireError | None]) -> None:
        """Remove a waiter that was cancelled or has timed out."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)

    def unavailable(self, error: QuireError, seconds: float) -> HTTPProblem:
        """Return the error for clients while it cannot be loaded: the reason, without paths of this machine."""
        message = f"the model {self.names[0]} cannot be loaded: {self._without_paths(error.message)}"
        headers = retry_headers(max(1.0, seconds))
        return HTTPProblem(503, message, code="model_unavailable", param="model", headers=headers)

    def _without_paths(self, text: str) -> str:
        given = self.config.model.model
        for path in (os.path.abspath(os.path.expanduser(given)), given):
            if os.sep in path:
                text = text.replace(path, self.names[0])
        return PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), text)
