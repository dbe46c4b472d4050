"""When a sequence ends by its final tokens: stop ids, `max_tokens`, the longest length, repetition.

Stop strings are the frontend's concern.
"""

from __future__ import annotations

from quire.sampling_params import RepetitionDetectionParams
from quire.scheduler.request import RequestStatus, Sequence


def check_stop(sequence: Sequence, token_id: int) -> RequestStatus | None:
    """Return the finished status that `token_id`, just appended, brings about; None to go on.

    A stop id wins over a length reached with the same token, and both over a repetition; stop ids and repetitions count
    only from the `min_tokens`-th output token on.
    """
    request = sequence.request
    num_tokens = len(sequence.token_ids)
    num_output_tokens = num_tokens - sequence.num_prompt_tokens
    params = request.spec.sampling_params
    if token_id in request.stop_ids and num_output_tokens >= params.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if num_tokens >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH
    detection = params.repetition_detection
    if detection is not None and _repeats(sequence, detection) and num_output_tokens >= params.min_tokens:
        return RequestStatus.FINISHED_REPETITION
    return None


def stop_reason(sequence: Sequence) -> int | None:
    """Return the last token id if the caller asked to stop at it; None for an EOS of the model."""
    last = sequence.token_ids[-1]
    return last if last in (sequence.request.spec.sampling_params.stop_token_ids or ()) else None


def _repeats(sequence: Sequence, detection: RepetitionDetectionParams) -> bool:
    if sequence.repetitions is None:
        sequence.repetitions = RepetitionDetector(detection, sequence.num_prompt_tokens)
    return sequence.repetitions.update(sequence.token_ids)


class RepetitionDetector:
    """Finds patterns repeated at the end of one output, see `RepetitionDetectionParams`.

    For each size s it counts how many tokens up to the last one equal the token s before them, so that a new token
    costs one comparison for each size.
    """

    __slots__ = ("_count", "_high", "_low", "_runs", "_seen", "_start")

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
