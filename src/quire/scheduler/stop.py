"""When a sequence ends by its final tokens: stop ids, `max_tokens`, the longest length, repetition.

Stop strings are the frontend's concern.
"""

from __future__ import annotations

from quire.sampling_params import RepetitionDetectionParams
from quire.scheduler.repetition import RepetitionDetector
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
    """Return the last token id if it is one of `stop_token_ids`; None for an EOS of the model."""
    last = sequence.token_ids[-1]
    return last if last in (sequence.request.spec.sampling_params.stop_token_ids or ()) else None


def _repeats(sequence: Sequence, detection: RepetitionDetectionParams) -> bool:
    if sequence.repetitions is None:
        sequence.repetitions = RepetitionDetector(detection, sequence.num_prompt_tokens)
    return sequence.repetitions.update(sequence.token_ids)
