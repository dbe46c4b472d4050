"""`Court`: finds out which request kills engines, without ever condemning one that does not.

After the first death everybody is let go on. Who is suspected twice, without having come well past the point where the
engine died, is tried: alone in the engine, so that if it dies again there is no doubt. For a minute after that, once is
enough to be tried. Nothing here waits or sends; `recovery.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

WINDOW_SECONDS = 60.0
MOST_STRIKES = 2
PASSED_TOKENS = 8  # for each sequence; who is so far past the point where an engine died had nothing to do with it

Progress = Callable[[str], tuple[int, int] | None]  # tokens, and sequences that go on, of a request; None: it ended


class _Suspicion:
    __slots__ = ("goal", "strikes")

    def __init__(self) -> None:
        self.strikes = 0
        self.goal = 0  # tokens with which it is cleared


class Court:
    """Keeps what is suspected of whom.

    Args:
        max_restarts: most deaths within a minute that nobody was condemned for. With the last of them all that are
            suspected are tried at once: there is no other chance.

    Attributes:
        trial: who is alone in the engine; None: everybody runs. num_condemned: how many were found guilty so far.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.trial: str | None = None
        self.num_condemned = 0
        self._suspicions: dict[str, _Suspicion] = {}
        self._quarantine: list[str] = []
        self._deaths: list[tuple[float, frozenset[str]]] = []
        self._condemned_at: float | None = None

    @property
    def busy(self) -> bool:
        """Whether anybody is suspected."""
        return self.trial is not None or bool(self._suspicions)

    def note_death(self, now: float, suspects: Mapping[str, tuple[int, int] | None]) -> str | None:
        """Take note of a death; return who is to blame, if that is certain.

        Args:
            now: seconds. suspects: all that the engine may have been working on, with their `Progress`.
        """
        self._deaths = [item for item in self._deaths if item[0] > now - WINDOW_SECONDS]
        self._deaths.append((now, frozenset(suspects)))
        tried, self.trial = self.trial, None
        for request_id, progress in suspects.items():
            if progress is not None:
                suspicion = self._suspicions.setdefault(request_id, _Suspicion())
                suspicion.strikes += 1
                suspicion.goal = progress[0] + PASSED_TOKENS * progress[1]
        guilty = self._sole_culprit(suspects, tried)
        if guilty is not None:
            self._condemn(guilty)
            self._condemned_at = now
        if tried is not None and tried in self._suspicions:
            self._quarantine.insert(0, tried)
        alarmed = self._condemned_at is not None and self._condemned_at > now - WINDOW_SECONDS
        enough = 1 if alarmed or len(self._deaths) >= self._max_restarts else MOST_STRIKES
        for request_id in suspects:
            found = self._suspicions.get(request_id)
            if found is None or request_id in self._quarantine:
                continue
            if found.strikes >= enough:
                self._quarantine.append(request_id)
        return guilty

    def _sole_culprit(self, suspects: Mapping[str, tuple[int, int] | None], tried: str | None) -> str | None:
        if len(suspects) != 1:
            return None
        [request_id] = suspects
        suspicion = self._suspicions.get(request_id)
        certain = suspicion is not None and (request_id == tried or suspicion.strikes >= MOST_STRIKES)
        return request_id if certain else None

    def _condemn(self, request_id: str) -> None:
        """Forget a request, and the deaths that it explains."""
        self.num_condemned += 1
        self._forget(request_id)
        self._deaths = [item for item in self._deaths if request_id not in item[1]]

    def _forget(self, request_id: str) -> None:
        self._suspicions.pop(request_id, None)
        if request_id in self._quarantine:
            self._quarantine.remove(request_id)

    def too_many(self) -> bool:
        """Whether there were more deaths within a minute than are allowed, without those that are explained."""
        return len(self._deaths) > self._max_restarts

    def clear(self, progress: Progress) -> None:
        """Forget those who have ended, or, but for those to be tried, come past the point where they were suspected."""
        for request_id in list(self._suspicions):
            ended = progress(request_id) is None
            waiting = request_id == self.trial or request_id in self._quarantine
            if ended or (not waiting and self._passed(request_id, progress)):
                self._forget(request_id)

    def _passed(self, request_id: str, progress: Progress) -> bool:
        now = progress(request_id)
        return now is None or now[0] >= self._suspicions[request_id].goal

    def is_over(self, progress: Progress) -> bool:
        """Whether the one on trial has ended, or come past the point."""
        return self.trial is None or self.trial not in self._suspicions or self._passed(self.trial, progress)

    def waiting(self, progress: Progress) -> bool:
        """Whether anybody is still to be tried."""
        self.clear(progress)
        return bool(self._quarantine)

    def next_trial(self, progress: Progress) -> str | None:
        """End the trial that is over, if any, and begin the next one; None if there is nobody left to be tried."""
        if self.trial is not None:
            self._forget(self.trial)
            self.trial = None
        self.clear(progress)
        if self._quarantine:
            self.trial = self._quarantine.pop(0)
        return self.trial
