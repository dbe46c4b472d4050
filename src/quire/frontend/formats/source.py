"""`Source`: text that arrives in pieces, read from left to right by generators that yield when they need more.

Everything here takes time linear in the text, however it is cut, and decides only on what cannot change any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from itertools import groupby
from os.path import commonprefix
from typing import TypeVar

from quire.frontend.formats.parts import BLANKS

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]


class Markers:
    """A set of texts to look for."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = sorted(filter(None, texts))
        self._pattern = re.compile(_pattern(texts) if texts else "(?!)")
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, start: int, ended: bool) -> tuple[int, int]:
        """Return where the first marker from `start` on begins and ends, the longest one there.

        If there is none, or more text may yet make an earlier or a longer one, return where one may begin, and 0.
        """
        found = self._pattern.search(text, start)
        at, end = found.span() if found else (len(text), 0)
        if not ended:
            for place in range(max(start, len(text) - self._longest), min(at + 1, len(text))):
                if text[place:] in self._beginnings:
                    return place, 0
        return at, end


def _pattern(texts: list[str]) -> str:
    """Return a regular expression for the longest of these sorted texts; no alternatives in it begin alike."""
    prefix = commonprefix(texts)  # noqa: RUF071 - character by character is what is meant
    rest = [text[len(prefix) :] for text in texts if text != prefix]
    if not rest:
        return re.escape(prefix)
    ways = "|".join(_pattern(list(group)) for _, group in groupby(rest, key=lambda text: text[0]))
    return f"{re.escape(prefix)}(?:{ways}){'?' if prefix in texts else ''}"


@lru_cache(maxsize=256)
def markers_of(texts: frozenset[str]) -> Markers:
    """Return the markers of these texts; made once, for there may be a thousand of them."""
    return Markers(texts)


class Source:
    """What has arrived and has not been read."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False

    def push(self, text: str) -> None:
        """Add text behind."""
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def end(self) -> None:
        """No more text will come."""
        self.ended = True

    def peek(self) -> Reading[str]:
        """Return the next character, "" at the end."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def blanks(self) -> Reading[None]:
        """Read all blanks that come."""
        while True:
            while self.pos < len(self.text) and self.text[self.pos] in BLANKS:
                self.pos += 1
            if self.pos < len(self.text) or self.ended:
                return
            yield

    def literal(self, *options: str) -> Reading[str]:
        """Read the longest of these texts that comes next, "" if none does."""
        longest = max(map(len, options))
        while True:
            have = self.text[self.pos : self.pos + longest]
            if self.ended or not any(len(option) > len(have) and option.startswith(have) for option in options):
                found = max((option for option in options if have.startswith(option)), key=len, default="")
                self.pos += len(found)
                return found
            yield

    def until(
        self,
        markers: Markers,
        sink: Sink,
        dropped: frozenset[str] = frozenset(),
        target: str = "",
        rejected: Callable[[int], bool] | None = None,
        closed: bool = False,
    ) -> Reading[str]:
        """Read up to and including the first marker, "" if the end comes first; the text before it goes to `sink`.

        Args:
            dropped: markers that are left out, and do not end the text, but for `target`. rejected: called with where
                `target` ends, says whether it is none, however the text goes on. closed: a marker must come, so that
                the beginning of one at the end is none of the text.
        """
        start = self.pos
        while True:
            at, end = markers.find(self.text, start, self.ended)
            found = self.text[at:end] if end else ""
            if found == target and rejected is not None and rejected(end):
                if found not in dropped:
                    start = end
                    continue
            elif found and (found == target or found not in dropped):
                self._pass(sink, at)
                self.pos = end
                return found
            if closed and self.ended and not found:
                at = markers.find(self.text, start, False)[0]
            self._pass(sink, at)
            start = self.pos = end or at
            if found:
                continue
            if self.ended:
                self.pos = len(self.text)
                return ""
            yield
            start = self.pos

    def _pass(self, sink: Sink, at: int) -> None:
        if at > self.pos:
            sink(self.text[self.pos : at])
            self.pos = at
