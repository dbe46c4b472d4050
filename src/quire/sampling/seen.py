"""Which tokens a sequence has, and how often each was generated. What penalties do with it is in the backends."""

from __future__ import annotations

import copy

import numpy as np

ROOM = 64  # tokens that a sequence's arrays have room for beyond those of its prompt, at first


class SeenTokens:
    """The tokens of one prompt and of its output, each once.

    It takes memory, and a step time, by the number of different tokens, not by the vocabulary. The first are the
    prompt's, sorted, and stay where they are; the others follow in the order in which they were generated first.

    Args:
        token_ids: the prompt, and what was generated so far. Tokens from `num_prompt_tokens` on count as generated.
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, vocab_size: int) -> None:
        mask = np.zeros(vocab_size, dtype=bool)
        mask[token_ids[:num_prompt_tokens]] = True
        prompt = np.flatnonzero(mask)
        self._later: dict[int, int] = {}  # the places of generated tokens that are not in the prompt
        self._size = self._of_prompt = len(prompt)
        self._ids = np.zeros(self._size + ROOM, dtype=np.int32)
        self._ids[: self._size] = prompt
        self._counts = np.zeros(self._size + ROOM, dtype=np.int32)
        for token_id in token_ids[num_prompt_tokens:]:
            self.add(token_id)

    @property
    def ids(self) -> np.ndarray:
        """A view of the tokens, int32, none twice."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """A view of how often each of `ids` was generated, int32; 0 for those that are in the prompt only."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Note a generated token."""
        place = self._place(token_id)  # before anything is looked up: it may make the arrays anew
        self._counts[place] += 1

    def _place(self, token_id: int) -> int:
        place = int(self._ids[: self._of_prompt].searchsorted(np.int32(token_id)))
        if place < self._of_prompt and self._ids[place] == token_id:
            return place
        later = self._later.get(token_id)
        if later is not None:
            return later
        if self._size == len(self._ids):
            more = np.zeros(max(ROOM, self._size), dtype=np.int32)
            self._ids, self._counts = np.concatenate([self._ids, more]), np.concatenate([self._counts, more])
        place = self._later[token_id] = self._size
        self._ids[place] = token_id
        self._size += 1
        return place

    def copy(self) -> SeenTokens:
        """Return the same with counts of its own."""
        twin = copy.copy(self)
        twin._later, twin._ids, twin._counts = self._later.copy(), self._ids.copy(), self._counts.copy()
        return twin
