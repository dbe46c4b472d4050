"""Stop ids, lengths and `min_tokens`, in the order in which they count."""

from __future__ import annotations

import random

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
    request.max_total_tokens = min(2 + 4, length_limit)
    sequence = request.sequences[0]
    sequence.token_ids += output
    assert check_stop(sequence, output[-1]) is status


@pytest.mark.parametrize(("token_id", "reason"), [(7, None), (8, 8)])
def test_the_reason_is_the_token_only_if_the_caller_named_it(request_of, token_id, reason):
    request = request_of("r", [1, 2], 4, stop_ids=[7, 8], stop_token_ids=[8])
    sequence = request.sequences[0]
    sequence.token_ids.append(token_id)
    assert stop_reason(sequence) == reason


REPETITION = RequestStatus.FINISHED_REPETITION


def ends_at(request_of, output, **fields):
    """Return (number of output tokens, status) where the output ends; None for neither."""
    options = {key: fields.pop(key) for key in ("min_tokens",) if key in fields}
    request = request_of("r", [1, 2, 1, 2], 40, stop_ids=[7], repetition_detection=fields, **options)
    request.max_total_tokens = 4 + 40
    sequence = request.sequences[0]
    for number, token in enumerate(output, start=1):
        sequence.token_ids.append(token)
        status = check_stop(sequence, token)
        if status is not None:
            return number, status
    return None


@pytest.mark.parametrize(
    ("output", "fields", "end"),
    [
        ([5, 5], {"max_pattern_size": 3}, (2, REPETITION)),
        ([5, 6, 5, 6, 5], {"max_pattern_size": 3}, (4, REPETITION)),
        ([5, 6, 5, 6, 5, 6], {"max_pattern_size": 3, "min_count": 3}, (6, REPETITION)),
        ([5, 6, 5, 6, 5, 6], {"max_pattern_size": 1}, None),
        ([5, 5, 5, 5], {"max_pattern_size": 3, "min_pattern_size": 2}, (4, REPETITION)),
        ([1, 2, 5, 1, 2], {"max_pattern_size": 2}, None),  # the prompt, which ends in 1, 2, does not count
        ([9, 3, 4, 3, 4, 8, 3, 4], {"max_pattern_size": 4, "min_count": 3}, None),
        ([9, 3, 3, 4, 3, 3, 4], {"max_pattern_size": 3, "min_pattern_size": 3}, (7, REPETITION)),
        ([5, 5, 5, 5], {"max_pattern_size": 3, "min_tokens": 4}, (4, REPETITION)),
        ([5, 6, 5, 7], {"max_pattern_size": 3}, (4, STOPPED)),
        ([7], {"max_pattern_size": 3}, (1, STOPPED)),
        (list(range(10, 50)), {"max_pattern_size": 3}, (40, LENGTH)),
        ([*range(10, 49), 48], {"max_pattern_size": 3}, (40, LENGTH)),  # length wins
    ],
)
def test_an_output_that_repeats_itself_ends(request_of, output, fields, end):
    assert ends_at(request_of, output, **fields) == end


def test_repetitions_are_those_that_a_search_of_the_whole_output_finds(request_of):
    rng = random.Random(4)
    found = 0
    for _ in range(300):
        output = [rng.choice([5, 6]) for _ in range(30)]
        low, count = rng.randint(1, 3), rng.randint(2, 4)
        high = rng.randint(low, 6)

        def repeats(text, low=low, high=high, count=count):
            return any(
                len(text) >= size * count and text[-size * count :] == text[-size:] * count
                for size in range(low, high + 1)
            )

        hoped = next((number for number in range(1, 31) if repeats(output[:number])), None)
        end = ends_at(request_of, output, max_pattern_size=high, min_pattern_size=low, min_count=count)
        assert (end and end[0]) == hoped
        found += end is not None
    assert 20 < found < 300


def test_the_word_for_it_is_repetition():
    assert REPETITION.finished and REPETITION.finish_reason == "repetition"
