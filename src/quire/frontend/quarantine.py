"""`Quarantine`: finds the poison request that kills engines, and never ends another request for it.

After the first death of an engine all requests continue. A request that the engine was computing at two deaths, and
that did not get well past the point of the first death in between, is quarantined: it runs alone in the engine, so that
only it can have caused another death. For a minute after a poison request was found, one death is enough for
quarantine. This module only decides; `recovery.py` waits and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW_SECONDS = 60.0
MAX_DEATHS = 2
CLEARED_TOKENS = 8  # of each sequence: a request so far past the point of a death did not cause it

# Returns how many tokens a request has generated and how many of its sequences are unfinished; None: it has ended.
ProgressOf = Callable[[str], tuple[int, int] | None]


@dataclass(slots=True)
class _Suspect:
    """A request that an engine was computing when it died, and the number of tokens that will clear it."""

    num_deaths: int = 0
    cleared_at: int = 0


class Quarantine:
    """Decides which requests run alone after an engine's death, and which one is ended as poison.

    Args:
        max_restarts: most deaths within a minute that no poison request explains. The last of them quarantines all
            suspects at once, because the next death would be the end.

    Attributes:
        isolated: the request that runs alone in the engine; None: all requests run.
        num_poison_requests: poison requests found so far.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.isolated: str | None = None
        self.num_poison_requests = 0
        self._suspects: dict[str, _Suspect] = {}
        self._queue: list[str] = []  # quarantined requests that still wait to be isolated
        self._deaths: list[tuple[float, frozenset[str]]] = []
        self._poison_found_at: float | None = None

    @property
    def has_suspects(self) -> bool:
        """Whether any request is isolated or suspected."""
        return self.isolated is not None or bool(self._suspects)

    def note_death(
        self, now: float, working_on: Mapping[str, tuple[int, int] | None], *, others_wait: bool = False
    ) -> str | None:
        """Record a death; return the poison request that caused it, if that is certain.

        Args:
            now: seconds. working_on: the requests that the engine may have been working on, with their progress: None
                for those of other clients. others_wait: whether another client had a request isolated.
        """
        self._deaths = [item for item in self._deaths if item[0] > now - WINDOW_SECONDS]
        self._deaths.append((now, frozenset(working_on)))
        isolated, self.isolated = self.isolated, None
        for request_id, progress in working_on.items():
            if progress is not None:
                suspect = self._suspects.setdefault(request_id, _Suspect())
                suspect.num_deaths += 1
                suspect.cleared_at = progress[0] + CLEARED_TOKENS * progress[1]
        poison = self._only_cause(working_on, isolated)
        if poison is not None:
            self.num_poison_requests += 1
            self._forget(poison)
            self._explain(poison)
            self._poison_found_at = now
        elif self._is_others_poison(working_on, others_wait):
            self._explain(*working_on)
        if isolated is not None and isolated in self._suspects:
            self._queue.insert(0, isolated)
        alarmed = self._poison_found_at is not None and self._poison_found_at > now - WINDOW_SECONDS
        enough = 1 if alarmed or len(self._deaths) >= self._max_restarts else MAX_DEATHS
        for request_id in working_on:
            found = self._suspects.get(request_id)
            if found is not None and request_id not in self._queue and found.num_deaths >= enough:
                self._queue.append(request_id)
        return poison

    def _only_cause(self, working_on: Mapping[str, tuple[int, int] | None], isolated: str | None) -> str | None:
        if len(working_on) != 1:
            return None
        [request_id] = working_on
        suspect = self._suspects.get(request_id)
        certain = suspect is not None and (request_id == isolated or suspect.num_deaths >= MAX_DEATHS)
        return request_id if certain else None

    def _is_others_poison(self, working_on: Mapping[str, tuple[int, int] | None], others_wait: bool) -> bool:
        """Whether another client has found out, by this death, that a request of its own is poison."""
        if len(working_on) != 1:
            return False
        [(request_id, progress)] = working_on.items()
        num_deaths = sum(request_id in names for _, names in self._deaths)
        return progress is None and (others_wait or num_deaths >= MAX_DEATHS)

    def _explain(self, poison: str) -> None:
        """Count the deaths that a request has caused no longer."""
        self._deaths = [item for item in self._deaths if poison not in item[1]]

    def _forget(self, request_id: str) -> None:
        self._suspects.pop(request_id, None)
        if request_id in self._queue:
            self._queue.remove(request_id)

    def too_many_deaths(self) -> bool:
        """Whether more deaths within a minute than are allowed have no explanation."""
        return len(self._deaths) > self._max_restarts

    def clear(self, progress_of: ProgressOf) -> None:
        """Clear suspects that have ended, and those past the point of the death that are not quarantined."""
        for request_id in list(self._suspects):
            quarantined = request_id == self.isolated or request_id in self._queue
            if progress_of(request_id) is None or (not quarantined and self._past(request_id, progress_of)):
                self._forget(request_id)

    def _past(self, request_id: str, progress_of: ProgressOf) -> bool:
        progress = progress_of(request_id)
        return progress is None or progress[0] >= self._suspects[request_id].cleared_at

    def is_over(self, progress_of: ProgressOf) -> bool:
        """Whether the isolated request has ended or got past the point of the death."""
        return self.isolated is None or self.isolated not in self._suspects or self._past(self.isolated, progress_of)

    def has_queue(self, progress_of: ProgressOf) -> bool:
        """Whether a quarantined request waits to be isolated."""
        self.clear(progress_of)
        return bool(self._queue)

    def isolate_next(self, progress_of: ProgressOf) -> str | None:
        """Release the isolated request, if any, and isolate the next one; None if there is none."""
        if self.isolated is not None:
            self._forget(self.isolated)
            self.isolated = None
        self.clear(progress_of)
        if self._queue:
            self.isolated = self._queue.pop(0)
        return self.isolated
