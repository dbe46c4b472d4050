"""The token sequences that spell a sequence breaker of DRY (`sampling.penalties`), found in a tokenizer's vocabulary.

A text can reach across tokens in many ways: any token may hold it whole, and any token that ends with its beginning may
be followed by the rest. As in llama.cpp, the rest is tokenized in one way only.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from quire.errors import RequestError
from quire.tokenizer.tokenizer import Tokenizer

MAX_TAIL = 20
MAX_IDS = 2**18
MAX_CACHED = 256

Spelling = tuple[list[int], list[int]]  # any of these tokens, then exactly these


class SequenceBreakerIndex:
    """Finds the spellings of texts in one vocabulary; what was found before is remembered.

    Args:
        vocab_size: ids from there on are left out.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        pieces = [tokenizer.token_bytes(index) for index in range(min(vocab_size, tokenizer.vocab_size))]
        self._vocab_size = vocab_size
        self._bytes = b"".join(pieces)
        self._array = np.frombuffer(self._bytes, dtype=np.uint8)
        self._starts = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum([len(piece) for piece in pieces], out=self._starts[1:])
        self._found = lru_cache(MAX_CACHED)(self._search)

    def spellings(self, texts: Iterable[str]) -> list[Spelling]:
        """Return the ways to spell any of `texts`. Raises `RequestError` if they are too many."""
        whole: set[int] = set()
        found: list[Spelling] = []
        for text in texts:
            for heads, tail in self._found(text):
                if tail:
                    found.append((heads, tail))
                else:
                    whole.update(heads)
        count = len(whole) + sum(len(heads) for heads, _ in found)
        if count > MAX_IDS:
            raise RequestError(
                f"dry_sequence_breakers can be spelled in {count} ways; at most {MAX_IDS} are supported",
                param="dry_sequence_breakers",
            )
        return [(sorted(whole), []), *found] if whole else found

    def _search(self, text: str) -> list[Spelling]:
        holding = self._holding(text.encode())
        found: list[Spelling] = [(holding, [])] if holding else []
        known = set(holding)
        ids = self._inside(text)
        if len(ids) > 1:
            found.append((ids[:1], ids[1 : 1 + MAX_TAIL]))
        for cut in range(1, len(text)):
            heads = [index for index in self._ending_with(text[:cut].encode()) if index not in known]
            tail = self._inside(text[cut:])[:MAX_TAIL]
            if heads and tail:
                found.append((heads, tail))
        return found

    def _holding(self, data: bytes) -> list[int]:
        """Return the tokens that hold `data`."""
        places = []
        at = self._bytes.find(data)
        while at >= 0:
            places.append(at)
            at = self._bytes.find(data, at + 1)
        starts = np.array(places, dtype=np.int64)
        tokens = np.searchsorted(self._starts, starts, side="right") - 1
        return np.unique(tokens[starts + len(data) <= self._starts[tokens + 1]]).tolist()

    def _ending_with(self, data: bytes) -> list[int]:
        """Return the tokens that end with `data`."""
        ends = self._starts[1:]
        tokens = np.flatnonzero(np.diff(self._starts) >= len(data))
        for offset, byte in enumerate(reversed(data), start=1):
            tokens = tokens[self._array[ends[tokens] - offset] == byte]
        return tokens.tolist()

    def _inside(self, text: str) -> list[int]:
        """Return the tokens that spell `text` inside another text; none if the tokenizer does not show them."""
        anchor = self._tokenizer.encode("\n", add_special_tokens=False)
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        if ids[: len(anchor)] != anchor or max(ids, default=0) >= self._vocab_size:
            return []
        return ids[len(anchor) :]
