"""`HeartbeatMonitor`: for how long a process, an engine or a front, has had no heartbeat. Imports nothing of others."""

from __future__ import annotations

MAX_POLL_SECONDS = 2.0  # of the time between two looks at a heartbeat, so much counts


class HeartbeatMonitor:
    """Measures the silence of one process.

    Silence between two looks counts for two seconds at most: if the whole machine, or the process that looks, was
    stopped, so was the other one, which needs time to continue.
    """

    def __init__(self) -> None:
        self._polled: float | None = None
        self._last_beat: float | None = None
        self._excused = 0.0

    def silent_for(self, now: float, beat: float) -> float:
        """Return the seconds of silence that count; negative before `beat`.

        Args:
            now: monotonic seconds. beat: when the last heartbeat was, or, before the first one, is to be.
        """
        unseen_since = now if self._polled is None else self._polled
        if beat != self._last_beat:
            self._last_beat, self._excused = beat, 0.0
            unseen_since = max(unseen_since, beat)
        self._excused += max(0.0, now - unseen_since - MAX_POLL_SECONDS)
        self._polled = now
        return now - beat - self._excused
