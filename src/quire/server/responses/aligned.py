"""`TokenQueue`: which tokens a piece of text was made of, however many of them a step has brought."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

TokenEntry = dict[str, Any]  # one of a chat's log-probabilities; `bytes` is what the token adds to the text


class TokenQueue:
    """Tokens in order, from when they come until the text that they make has come out of the parser.

    A parser keeps text back that may be a mark, and takes marks and blanks out; so one step may bring the end of the
    reasoning, all of the content and the beginning of a call.
    """

    def __init__(self) -> None:
        self._entries: list[TokenEntry] = []
        self._rest = b""  # of the last token that was taken: what has not come out yet

    def add(self, entries: Sequence[TokenEntry]) -> None:
        """Take up new tokens."""
        self._entries += entries

    def clear(self) -> None:
        """Forget all of them."""
        self._entries, self._rest = [], b""

    def skip(self, text: str) -> None:
        """Drop the tokens of a text that is not content, and all before."""
        data, ends = self._spelled()
        place = data.find(text.encode())
        if place < 0:
            self.clear()
            return
        behind = place + len(text.encode())
        self._rest = b""
        del self._entries[: sum(1 for end in ends if end <= behind)]

    def take(self, text: str, *, begun: bool, last: bool) -> list[TokenEntry]:
        """Return the tokens of a piece of content, and drop all before.

        Args:
            begun: whether content begins with it; else it goes on. last: whether nothing but content comes behind it.
        """
        wanted = text.encode()
        if begun:
            self._rest = b""
        elif self._rest:
            count = min(len(self._rest), len(wanted))
            fits = self._rest[:count] == wanted[:count]
            wanted, self._rest = (wanted[count:], self._rest[count:]) if fits else (wanted, b"")
        if not wanted:
            return []
        data, ends = self._spelled()
        place = self._place(data, ends, wanted, begun, last)
        if place < 0:  # parts of characters, which the text shows as U+FFFD
            taken = [] if begun and not last else self._entries
            self._entries = []
            return taken
        behind = place + len(wanted)
        first = sum(1 for end in ends if end <= place)
        stop = next(index for index, end in enumerate(ends) if end >= behind) + 1
        taken = self._entries[first:stop]
        self._rest = data[behind : ends[stop - 1]]
        del self._entries[:stop]
        return taken

    def _spelled(self) -> tuple[bytes, list[int]]:
        """Return what the tokens spell, and where each of them ends."""
        pieces = [bytes(entry["bytes"] or ()) for entry in self._entries]
        return b"".join(pieces), list(itertools.accumulate(map(len, pieces)))

    @staticmethod
    def _place(data: bytes, ends: Sequence[int], wanted: bytes, begun: bool, last: bool) -> int:
        """Return where a text begins in what the tokens spell, -1 for nowhere."""
        if not begun:
            return data.find(wanted)  # at 0, but for blanks that the parser took out
        # Behind marks: most likely with a token of its own, and not within a mark, which comes before.
        starts = [start for start in (0, *ends[:-1]) if data.startswith(wanted, start)]
        if starts:
            return starts[-1] if last else starts[0]
        return data.rfind(wanted) if last else data.find(wanted)
