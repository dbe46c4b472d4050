"""`RepetitionDetector` finds out whether an output ends with a repeated pattern of tokens."""

from __future__ import annotations

from quire.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Finds patterns repeated at the end of one output, see `RepetitionDetectionParams`.

    For each size s it counts how many tokens up to the last one equal the token s before them, so that a new token
    costs one comparison for each size.
    """

    def __init__(self, detection: RepetitionDetectionParams, start: int) -> None:
        self._low = detection.min_pattern_size
        self._high = detection.max_pattern_size
        self._count = detection.min_count
        self._start = start  # index of the first output token
        self._seen = start
        self._runs = [0] * (self._high + 1)

    def update(self, token_ids: list[int]) -> bool:
        """Process what was appended to `token_ids`; return whether they now end with a repeated pattern."""
        found = False
        for place in range(self._seen, len(token_ids)):
            token, runs, found = token_ids[place], self._runs, False
            for size in range(self._low, min(self._high, place - self._start) + 1):
                if token_ids[place - size] == token:
                    runs[size] += 1
                    found = found or runs[size] >= size * (self._count - 1)
                else:
                    runs[size] = 0
        self._seen = len(token_ids)
        return found
