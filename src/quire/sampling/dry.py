"""DRY: makes tokens less likely that would go on repeating what the text has said before.

"DRY: a modern repetition penalty" (text-generation-webui pull request 5677; llama.cpp pull request 9702). Wherever the
end of the text, L tokens of it, occurs earlier, the token that followed there loses multiplier * base ** (L - allowed
length), if L is at least the allowed length. Sequence breakers, such as a newline, end what counts as repeated.

How long the text's end is at each earlier place changes with a token by one or to none, so that a step costs one look
at the text, not a search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MOST_PENALTY = 1e30  # bars any token, and leaves a number
LOG_FLOAT_MAX = 88.0
MOST_STEPS = 32  # with more new tokens than that, one pass over the text is cheaper

Breakers = Sequence[tuple[Sequence[int], Sequence[int]]]  # (any of these tokens, then exactly these)


class Dry:
    """The text of one sequence, and where its end occurred before.

    Args:
        token_ids: prompt and output so far. last_n: tokens to look back; -1: all. breakers: token sequences that spell
            a breaker, as (heads, tail): any of the heads, followed by the tail.
    """

    def __init__(
        self,
        *,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Breakers,
        token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed = allowed_length
        self._last_n = last_n
        self._breakers = [(_mask(heads, vocab_size), np.array(tail, dtype=np.int32)) for heads, tail in breakers]
        self._most = int(LOG_FLOAT_MAX / math.log(base)) if base > 1.000001 else 0  # powers stay finite
        self._tokens = np.array(token_ids, dtype=np.int32)
        self._size = len(token_ids)
        self._matches = np.zeros(len(token_ids), dtype=np.int32)
        self._matched = 0  # tokens at which `_matches` stands

    def copy(self) -> Dry:
        """Return what a fork of the sequence begins with."""
        twin = Dry.__new__(Dry)
        twin.__dict__.update(self.__dict__)
        twin._tokens, twin._matches = self._tokens.copy(), self._matches.copy()
        return twin

    def add(self, token_id: int) -> None:
        """Append a token."""
        if self._size == len(self._tokens):
            room = np.zeros(max(64, self._size), dtype=np.int32)
            self._tokens = np.concatenate([self._tokens, room])
            self._matches = np.concatenate([self._matches, room])
        self._tokens[self._size] = token_id
        self._size += 1

    def penalties(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids int64 [E], what to take off their logits float32 [E])."""
        size = self._size
        start = 0 if self._last_n < 0 else max(0, size - self._last_n)
        if size - start <= self._allowed:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        self._advance()
        window = self._tokens[start:size]
        lengths = np.minimum(self._matches[start : size - 1], np.arange(1, len(window), dtype=np.int32))
        lengths = np.minimum(lengths, self._since_breaker(window))
        places = np.flatnonzero(lengths >= self._allowed)
        tokens, which = np.unique(window[places + 1], return_inverse=True)
        longest = np.zeros(len(tokens), dtype=np.int64)
        np.maximum.at(longest, which, lengths[places])
        powers = np.minimum(longest - self._allowed, self._most).astype(np.float64)
        taken = np.minimum(self._multiplier * self._base**powers, MOST_PENALTY)
        return tokens.astype(np.int64), taken.astype(np.float32)

    def _advance(self) -> None:
        """Bring `_matches[j]`, how long a common end tokens[: j + 1] and the whole text have, to the last token."""
        if self._size - self._matched > MOST_STEPS:
            self._matches[: self._size] = common_ends(self._tokens[: self._size].tolist())
        else:
            for last in range(self._matched, self._size):
                before = self._matches[: last - 1] if last else self._matches[:0]
                longer = np.zeros(last, dtype=np.int32)
                longer[1:] = before + 1
                longer[:1] = 1
                self._matches[:last] = np.where(self._tokens[:last] == self._tokens[last], longer, 0)
        self._matched = self._size

    def _since_breaker(self, window: np.ndarray) -> int:
        """Return how many tokens follow the last breaker."""
        fewest = len(window)
        for heads, tail in self._breakers:
            starts = len(window) - len(tail)
            if starts < 1:
                continue
            found = heads[window[:starts]]
            for offset, token in enumerate(tail, start=1):
                found &= window[offset : offset + starts] == token
            last = np.flatnonzero(found)
            if last.size:
                fewest = min(fewest, starts - 1 - int(last[-1]))
        return fewest


def common_ends(tokens: list[int]) -> np.ndarray:
    """Return for each j how long a common end tokens[: j + 1] and all tokens have, int32 [n].

    The Z-algorithm (Gusfield 1997, sec. 1.4) on the tokens read backwards.
    """
    text = tokens[::-1]
    size = len(text)
    found = [0] * size
    if size:
        found[0] = size
    left = right = 0
    for i in range(1, size):
        length = min(found[i - left], right - i) if i < right else 0
        if i + length >= right:
            while i + length < size and text[length] == text[i + length]:
                length += 1
            left, right = i, i + length
        found[i] = length
    return np.array(found[::-1], dtype=np.int32)


def _mask(ids: Sequence[int], size: int) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[list(ids)] = True
    return mask
