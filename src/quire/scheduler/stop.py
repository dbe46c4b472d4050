"""`check_stop` decides whether a sequence's final tokens end it: stop ids, `max_tokens`, its length, repetition.

Stop strings are the frontend's concern.
"""

from __future__ import annotations

from quire.scheduler.request import RequestStatus, Sequence


def check_stop(sequence: Sequence, token_id: int) -> RequestStatus | None:
    """Return the finished status that `token_id`, just appended, brings about; None to go on.

    A stop id wins over a length reached with the same token, and both over a repetition; stop ids and repetitions count
    only from the `min_tokens`-th output token on.
    """
    request, repetitions = sequence.request, sequence.repetitions
    if token_id in request.stop_ids and _has_min_tokens(sequence):
        return RequestStatus.FINISHED_STOPPED
    if len(sequence.token_ids) >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH
    if repetitions is not None and repetitions.update(sequence.token_ids) and _has_min_tokens(sequence):
        return RequestStatus.FINISHED_REPETITION
    return None


def stop_reason(sequence: Sequence) -> int | None:
    """Return the last token id if it is one of `stop_token_ids`; None for an EOS of the model."""
    last = sequence.token_ids[-1]
    return last if last in (sequence.request.engine_request.sampling_params.stop_token_ids or ()) else None


def _has_min_tokens(sequence: Sequence) -> bool:
    return sequence.num_output_tokens >= sequence.request.engine_request.sampling_params.min_tokens
