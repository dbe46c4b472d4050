"""Finding control tokens in text, in time linear in the text however many control tokens there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class ControlFinder:
    """The control tokens of a tokenizer, by text.

    Attributes:
        first_char: matches every character that begins a control token.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        self._lengths = sorted({len(text) for text in tokens}, reverse=True)
        self._tails = {text[1:] for text in tokens if len(text) > 1}
        self._tail_starts = {tail[:end] for tail in self._tails for end in range(1, len(tail))}
        firsts = "".join(sorted({text[0] for text in tokens}))
        self.first_char = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    def suspicious(self, text: str) -> bool:
        """Whether a text has a character that begins a control token, or could go on with one after its first."""
        return self.first_char.search(text) is not None or self.continues(text)

    def continues(self, text: str) -> bool:
        """Whether a control token may arise when the first character of one is put in front of a text.

        A template that writes "<" + key + ">" makes one of the key "|end|".
        """
        return text in self._tail_starts or any(text[: length - 1] in self._tails for length in self._lengths)

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, id) of each control token from left to right, the longest one at each place."""
        end = 0
        for hit in self.first_char.finditer(text):
            start = hit.start()
            if start < end:
                continue
            for length in self._lengths:
                token_id = self._tokens.get(text[start : start + length])
                if token_id is not None:
                    end = start + length
                    yield start, end, token_id
                    break

    def ids(self, text: str) -> list[int]:
        """Return the ids of the control tokens in a text."""
        return [token_id for _, _, token_id in self.find(text)]

    def split(self, text: str) -> list[str | int]:
        """Cut a text into what is not a control token and the ids of what is."""
        parts: list[str | int] = []
        end = 0
        for start, next_end, token_id in self.find(text):
            parts += [text[end:start], token_id]
            end = next_end
        parts.append(text[end:])
        return parts

    def mark_beginnings(self, text: str, mark: str) -> str:
        """Put `mark` after every character that could begin a control token, or go on with one at the very start."""
        marked = self.first_char.sub(lambda hit: hit[0] + mark, text)
        return marked[0] + mark + marked[1:] if self.continues(text) else marked

    def mark_tokens(self, text: str, mark: str) -> str:
        """Put `mark` after the first character of every control token, and of what could go on with one."""
        parts = []
        end = 0
        for start, _, _ in self.find(text):
            parts.append(text[end : start + 1])
            end = start + 1
        marked = mark.join([*parts, text[end:]])
        return marked[0] + mark + marked[1:] if self.continues(text) else marked
