"""The tokens that penalties go by, kept token by token, are those of the text."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quire.sampling import seen
from quire.sampling.seen import SeenTokens

VOCAB = 200
texts = st.lists(st.integers(0, VOCAB - 1), max_size=150)


def found(tokens: SeenTokens) -> dict[int, int]:
    assert len(set(tokens.ids.tolist())) == len(tokens.ids)
    return dict(zip(tokens.ids.tolist(), tokens.counts.tolist(), strict=True))


@given(prompt=texts, known=texts, added=texts, of_twin=texts)
def test_each_token_once_and_how_often_it_was_generated(
    prompt: list[int], known: list[int], added: list[int], of_twin: list[int]
) -> None:
    tokens = SeenTokens(prompt + known, len(prompt), VOCAB)
    for token in added:
        tokens.add(token)
    twin = tokens.copy()
    for token in of_twin:
        twin.add(token)
    for whose, output in ((tokens, known + added), (twin, known + added + of_twin)):
        counts = Counter(output)
        assert found(whose) == {token: counts[token] for token in prompt + output}


def test_a_long_output_of_different_tokens_has_room() -> None:
    tokens, output = SeenTokens([1], 1, VOCAB), [token for token in range(VOCAB) if token != 1]
    for token in [*output, *output]:
        tokens.add(token)
    assert found(tokens) == {1: 0, **dict.fromkeys(output, 2)}


def test_it_takes_no_more_than_its_tokens_need() -> None:
    tokens = SeenTokens([5, 3, 5], 3, 10**6)
    assert tokens.ids.tolist() == [3, 5]
    assert tokens.ids.base is not None and tokens.ids.base.nbytes == 4 * (2 + seen.ROOM)
