"""When a sequence ends by its own tokens: stop ids, `max_tokens`, the longest length. Stop strings are the front's."""

from __future__ import annotations

from quire.scheduler.request import RequestStatus, Sequence


def check_stop(sequence: Sequence, token_id: int, length_limit: int) -> RequestStatus | None:
    """Return the finished status that `token_id`, just appended, brings about; None to go on.

    A stop id wins over a length reached with the same token, but counts only from the `min_tokens`-th output token on.
    `length_limit` is the most tokens, prompt included, that a sequence may have.
    """
    request = sequence.request
    num_tokens = len(sequence.token_ids)
    num_output_tokens = num_tokens - sequence.num_prompt_tokens
    if token_id in request.stop_ids and num_output_tokens >= request.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if num_output_tokens >= request.max_tokens or num_tokens >= length_limit:
        return RequestStatus.FINISHED_LENGTH
    return None


def stop_reason(sequence: Sequence) -> int | None:
    """Return the last token id if the caller asked to stop at it; None for an EOS of the model."""
    last = sequence.token_ids[-1]
    return last if last in (sequence.request.sampling_params.stop_token_ids or ()) else None
