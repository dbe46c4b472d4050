"""Token counts are those of the text; DRY finds repetitions, token by token as well as at once."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling.penalties import INITIAL_ROOM, Dry, TokenCounts, common_suffixes
from quire.sampling_params import SamplingParams
from tests.helpers.sampling_truth import dry_penalties

VOCAB = 20
SIZE = 200
LONG_TEXTS = st.lists(st.integers(0, SIZE - 1), max_size=150)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)  # of few letters, so that much repeats


def dry_of(params: SamplingParams, text: list[int], breakers: list[tuple[list[int], list[int]]] | None = None) -> Dry:
    return Dry(
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=params.dry_allowed_length,
        last_n=params.dry_penalty_last_n,
        breakers=breakers or [],
        token_ids=text,
        vocab_size=VOCAB,
    )


def taken(dry: Dry) -> dict[int, float]:
    ids, values = dry.penalties()
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def close(found: dict[int, float], hoped: dict[int, float]) -> bool:
    return found.keys() == hoped.keys() and all(abs(found[key] - hoped[key]) <= 1e-5 * hoped[key] for key in hoped)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=TEXTS,
    later=st.lists(st.integers(0, 3), max_size=50),
    allowed=st.integers(1, 4),
    last_n=st.sampled_from([-1, 0, 1, 5, 20, 1000]),
    base=st.sampled_from([1.0, 1.1, 1.75]),
    breaker=st.sampled_from([None, [3], [2, 3], [1, 1]]),
)
def test_every_step_takes_off_what_a_search_of_the_whole_text_finds(
    text: list[int], later: list[int], allowed: int, last_n: int, base: float, breaker: list[int] | None
) -> None:
    params = SamplingParams(dry_multiplier=0.7, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n)
    given_breakers = [] if breaker is None else [([breaker[0], 9], breaker[1:])]
    spelled = [] if breaker is None else [breaker, [9, *breaker[1:]]]
    dry = dry_of(params, text, given_breakers)
    assert close(taken(dry), dry_penalties(params, text, spelled))
    twin = dry.copy()
    for number, token in enumerate(later):
        dry.add(token)
        text = [*text, token]
        if number % 3 == 0:  # tokens may come several at a time
            assert close(taken(dry), dry_penalties(params, text, spelled))
    fresh = dry_of(params, text, given_breakers)
    assert taken(dry) == taken(fresh), "a preempted sequence comes back to the same"
    for token in later:  # a fork goes its own way
        twin.add(token)
    assert taken(twin) == taken(dry)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEXTS)
def test_common_suffixes_are_those_of_a_plain_comparison(text: list[int]) -> None:
    hoped = []
    for place in range(len(text)):
        length = 0
        while length <= place and text[place - length] == text[len(text) - 1 - length]:
            length += 1
        hoped.append(length)
    assert common_suffixes(text).tolist() == hoped


def test_longer_repetitions_cost_more_and_endless_ones_leave_numbers() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    assert taken(dry_of(params, [5, 6, 7, 8, 5, 6, 7])) == {8: 2.0}
    assert taken(dry_of(params, [4, 5, 6, 7, 8, 4, 5, 6, 7])) == {8: 4.0}
    assert taken(dry_of(params, [6, 8, 5, 6])) == {}
    params = SamplingParams(dry_multiplier=100.0, dry_base=100.0)
    values = dry_of(params, [1] * 5000).penalties()[1]
    assert np.isfinite(values).all() and values[0] > 1e29


def test_a_breaker_ends_what_counts_as_repeated() -> None:
    params = SamplingParams(dry_multiplier=1.0)
    text = [5, 6, 9, 7, 5, 6, 9, 7, 5, 6]
    assert taken(dry_of(params, text)) == {9: 1.75**4}
    assert taken(dry_of(params, text, [([9], [])])) == {9: 1.75}
    assert taken(dry_of(params, [*text, 9], [([9], [])])) == {}
    assert taken(dry_of(params, text, [([6], [9])])) == {9: 1.75}


def found(tokens: TokenCounts) -> dict[int, int]:
    assert len(set(tokens.ids.tolist())) == len(tokens.ids)
    return dict(zip(tokens.ids.tolist(), tokens.counts.tolist(), strict=True))


@given(prompt=LONG_TEXTS, known=LONG_TEXTS, added=LONG_TEXTS, of_twin=LONG_TEXTS)
def test_each_token_once_and_how_often_it_was_generated(
    prompt: list[int], known: list[int], added: list[int], of_twin: list[int]
) -> None:
    tokens = TokenCounts(prompt + known, len(prompt), SIZE)
    for token in added:
        tokens.add(token)
    twin = tokens.copy()
    for token in of_twin:
        twin.add(token)
    for whose, output in ((tokens, known + added), (twin, known + added + of_twin)):
        counts = Counter(output)
        assert found(whose) == {token: counts[token] for token in prompt + output}


def test_a_long_output_of_different_tokens_has_room() -> None:
    tokens, output = TokenCounts([1], 1, SIZE), [token for token in range(SIZE) if token != 1]
    for token in [*output, *output]:
        tokens.add(token)
    assert found(tokens) == {1: 0, **dict.fromkeys(output, 2)}


def test_it_takes_no_more_than_its_tokens_need() -> None:
    tokens = TokenCounts([5, 3, 5], 3, 10**6)
    assert tokens.ids.tolist() == [3, 5]
    assert tokens.ids.base is not None and tokens.ids.base.nbytes == 4 * (2 + INITIAL_ROOM)
