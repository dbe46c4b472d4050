"""The state of one sequence's penalties: `TokenCounts` for repetition, presence and frequency, and `Dry`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np

INITIAL_ROOM = 64  # generated tokens that new arrays have room for
MAX_PENALTY = 1e30  # bans any token and stays finite
LOG_FLOAT_MAX = 88.0
MAX_STEPS = 32  # with more new tokens than that, one pass over the text is cheaper

Breakers = Sequence[tuple[Sequence[int], Sequence[int]]]  # (any of these tokens, then exactly these)


class TokenCounts:
    """The distinct tokens of a prompt and its output, with the number of times each was generated.

    Memory and time per step grow with the number of distinct tokens, not with the vocabulary. The prompt's tokens come
    first, sorted, and keep their index; the others follow in the order in which they were first generated.

    Args:
        token_ids: the prompt and the output so far. Tokens from `num_prompt_tokens` on count as generated.
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, vocab_size: int) -> None:
        mask = np.zeros(vocab_size, dtype=bool)
        mask[token_ids[:num_prompt_tokens]] = True
        prompt = np.flatnonzero(mask)
        self._index_of: dict[int, int] = {}  # of generated tokens that are not in the prompt
        self._size = self._num_prompt = len(prompt)
        self._ids = np.zeros(self._size + INITIAL_ROOM, dtype=np.int32)
        self._ids[: self._size] = prompt
        self._counts = np.zeros(self._size + INITIAL_ROOM, dtype=np.int32)
        for token_id in token_ids[num_prompt_tokens:]:
            self.add(token_id)

    @property
    def ids(self) -> np.ndarray:
        """A view of the distinct tokens, int32."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """A view of how often each of `ids` was generated, int32; 0 for those in the prompt only."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        index = self._index(token_id)  # first, since it may replace the arrays
        self._counts[index] += 1

    def _index(self, token_id: int) -> int:
        index = int(self._ids[: self._num_prompt].searchsorted(np.int32(token_id)))
        if index < self._num_prompt and self._ids[index] == token_id:
            return index
        known = self._index_of.get(token_id)
        if known is not None:
            return known
        if self._size == len(self._ids):
            room = np.zeros(max(INITIAL_ROOM, self._size), dtype=np.int32)
            self._ids, self._counts = np.concatenate([self._ids, room]), np.concatenate([self._counts, room])
        index = self._index_of[token_id] = self._size
        self._ids[index] = token_id
        self._size += 1
        return index

    def copy(self) -> TokenCounts:
        """Return an independent copy, for a fork."""
        twin = copy.copy(self)
        twin._index_of, twin._ids, twin._counts = self._index_of.copy(), self._ids.copy(), self._counts.copy()
        return twin


class Dry:
    """DRY: penalizes tokens that would extend a repetition of earlier text.

    "DRY: a modern repetition penalty" (text-generation-webui pull request 5677; llama.cpp pull request 9702). Where the
    last L tokens of the text occur earlier, the token that followed them there loses
    multiplier * base ** (L - allowed_length), if L is at least the allowed length. Sequence breakers, such as a
    newline, end a repetition.

    The length of the match at each earlier position changes with a new token by one or to zero, so that a step costs
    one pass over the text, not a search.

    Args:
        token_ids: prompt and output so far. last_n: tokens to look back; -1: all. breakers: the token sequences that
            spell a breaker, as (heads, tail): any of the heads, followed by the tail.
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
        self._allowed_length = allowed_length
        self._last_n = last_n
        self._breakers = [(_mask(heads, vocab_size), np.array(tail, dtype=np.int32)) for heads, tail in breakers]
        # Exponents are capped so that powers stay finite.
        self._max_exponent = int(LOG_FLOAT_MAX / math.log(base)) if base > 1.000001 else 0
        self._tokens = np.array(token_ids, dtype=np.int32)
        self._size = len(token_ids)
        self._matches = np.zeros(len(token_ids), dtype=np.int32)
        self._num_matched = 0  # tokens up to which `_matches` is current

    def copy(self) -> Dry:
        """Return an independent copy, for a fork."""
        twin = copy.copy(self)
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
        """Return (token ids int64 [E], penalties to subtract from their logits float32 [E])."""
        size = self._size
        start = 0 if self._last_n < 0 else max(0, size - self._last_n)
        if size - start <= self._allowed_length:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        self._update_matches()
        window = self._tokens[start:size]
        lengths = np.minimum(self._matches[start : size - 1], np.arange(1, len(window), dtype=np.int32))
        lengths = np.minimum(lengths, self._since_breaker(window))
        ends = np.flatnonzero(lengths >= self._allowed_length)
        tokens, inverse = np.unique(window[ends + 1], return_inverse=True)
        longest = np.zeros(len(tokens), dtype=np.int64)
        np.maximum.at(longest, inverse, lengths[ends])
        exponents = np.minimum(longest - self._allowed_length, self._max_exponent).astype(np.float64)
        penalties = np.minimum(self._multiplier * self._base**exponents, MAX_PENALTY)
        return tokens.astype(np.int64), penalties.astype(np.float32)

    def _update_matches(self) -> None:
        """Bring `_matches[j]`, the length of the common suffix of tokens[: j + 1] and the text, to the last token."""
        if self._size - self._num_matched > MAX_STEPS:
            self._matches[: self._size] = common_suffixes(self._tokens[: self._size].tolist())
        else:
            for last in range(self._num_matched, self._size):
                previous = self._matches[: last - 1] if last else self._matches[:0]
                longer = np.zeros(last, dtype=np.int32)
                longer[1:] = previous + 1
                longer[:1] = 1
                self._matches[:last] = np.where(self._tokens[:last] == self._tokens[last], longer, 0)
        self._num_matched = self._size

    def _since_breaker(self, window: np.ndarray) -> int:
        fewest = len(window)
        for heads, tail in self._breakers:
            num_starts = len(window) - len(tail)
            if num_starts < 1:
                continue
            found = heads[window[:num_starts]]
            for offset, token in enumerate(tail, start=1):
                found &= window[offset : offset + num_starts] == token
            starts = np.flatnonzero(found)
            if starts.size:
                fewest = min(fewest, num_starts - 1 - int(starts[-1]))
        return fewest


def common_suffixes(tokens: list[int]) -> np.ndarray:
    """Return for each j the length of the common suffix of tokens[: j + 1] and all tokens, int32 [n].

    The Z-algorithm (Gusfield 1997, section 1.4) on the reversed tokens.
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
