"""Stop ids, lengths and `min_tokens`, in the order in which they count."""

from __future__ import annotations

import pytest

from quire.scheduler.request import RequestStatus
from quire.scheduler.stop import check_stop, stop_reason

STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH


@pytest.mark.parametrize(
    ("output", "options", "length_limit", "status"),
    [
        ([5], {}, 100, None),
        ([7], {}, 100, STOPPED),
        ([8], {}, 100, STOPPED),
        ([5, 5, 5, 5], {}, 100, LENGTH),
        ([5, 5, 5, 7], {}, 100, STOPPED),  # a stop id with the last token allowed
        ([5], {}, 3, LENGTH),  # prompt of 2 and 1
        ([7], {}, 3, STOPPED),
        ([5], {}, 4, None),
        ([5, 7], {"min_tokens": 3}, 100, None),
        ([5, 5, 7], {"min_tokens": 3}, 100, STOPPED),
        ([5, 5, 5, 7], {"min_tokens": 4}, 100, STOPPED),
        ([7], {"min_tokens": 3}, 3, LENGTH),  # no room left: min_tokens cannot hold it open
    ],
)
def test_check_stop(request_of, output, options, length_limit, status):
    request = request_of("r", [1, 2], 4, stop_ids=[7, 8], stop_token_ids=[8], **options)
    sequence = request.sequences[0]
    sequence.token_ids += output
    assert check_stop(sequence, output[-1], length_limit) is status


@pytest.mark.parametrize(("token_id", "reason"), [(7, None), (8, 8)])
def test_the_reason_is_the_token_only_if_the_caller_named_it(request_of, token_id, reason):
    request = request_of("r", [1, 2], 4, stop_ids=[7, 8], stop_token_ids=[8])
    sequence = request.sequences[0]
    sequence.token_ids.append(token_id)
    assert stop_reason(sequence) == reason
