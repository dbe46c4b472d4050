"""`Source`: text that arrives in pieces, read from left to right by generators that yield when they need more.

Everything here takes time linear in the text, however it is cut, and decides only on what cannot change any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from quire.frontend.formats.parts import BLANKS

MAX_BLANKS = 64
MAX_ANCHORS = 24

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]


class Markers:
    """A set of texts to look for.

    Attributes:
        anchors: beginnings of all of them, few enough to search for each.
        longest: length of the longest.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(filter(None, texts))
        self.longest = max(map(len, self.texts), default=0)
        self.anchors = self._anchors()
        self.firsts = frozenset(text[0] for text in self.texts)
        self._tree: dict[str, Any] = {}
        for text in self.texts:
            node = self._tree
            for char in text:
                node = node.setdefault(char, {})
            node[""] = True

    def _anchors(self) -> tuple[str, ...]:
        # The longer, the rarer in text that is none of them; some vocabularies have a thousand special tokens.
        for length in (self.longest, 16, 8, 4, 2):
            anchors = {text[:length] for text in self.texts}
            if len(anchors) <= MAX_ANCHORS:
                break
        else:
            anchors = {text[0] for text in self.texts}
        return tuple(sorted(anchors))

    def match(self, text: str, at: int, ended: bool) -> int:
        """Return where the longest marker that begins at `at` ends, 0 if there is none, -1 if more text may tell."""
        node: dict[str, Any] = self._tree
        end, best = at, 0
        while True:
            if "" in node:
                best = end
            if end == len(text):
                # A leaf cannot go on, whatever comes.
                return best if ended or len(node) == ("" in node) else -1
            if text[end] not in node:
                return best
            node = node[text[end]]
            end += 1


class Source:
    """What has arrived and has not been read."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self._mark: int | None = None
        self._next: dict[str, tuple[int, int]] = {}

    def push(self, text: str) -> None:
        """Add text behind."""
        start = self.pos if self._mark is None else self._mark
        self.text = self.text[start:] + text
        self.pos -= start
        self._mark = None if self._mark is None else 0
        self._next.clear()

    def mark(self) -> None:
        """Remember this place, for `back`. What is read until `forget` or `back` must be bounded."""
        self._mark = self.pos

    def back(self) -> None:
        """Return to the marked place."""
        assert self._mark is not None, "a place was marked"
        self.pos, self._mark = self._mark, None

    def forget(self) -> None:
        """Do not return to the marked place."""
        self._mark = None

    def peek(self) -> Reading[str]:
        """Return the next character, "" at the end."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def blanks(self, most: int = MAX_BLANKS) -> Reading[str]:
        """Read at most so many blanks."""
        found: list[str] = []
        while len(found) < most:
            char = yield from self.peek()
            if not char or char not in BLANKS:
                break
            found.append(char)
            self.pos += 1
        return "".join(found)

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

    def marker(self, markers: Markers) -> Reading[str]:
        """Read the longest marker that comes next, "" if none does."""
        while True:
            end = markers.match(self.text, self.pos, self.ended)
            if end >= 0:
                found = self.text[self.pos : end] if end else ""
                self.pos += len(found)
                return found
            yield

    def until(self, markers: Markers, sink: Sink) -> Reading[str]:
        """Read up to and including the first marker, "" if the end comes first; the text before it goes to `sink`."""
        while True:
            at, end = self._find(markers)
            if at > self.pos:
                sink(self.text[self.pos : at])
                self.pos = at
            if end:
                found = self.text[at:end]
                self.pos = end
                return found
            if self.ended:
                return ""
            yield

    def _find(self, markers: Markers) -> tuple[int, int]:
        """Return where the first marker begins and ends; or where one may begin, and 0."""
        last = len(self.text) if self.ended else self._unfinished(markers)
        at = self.pos
        while True:
            at = min((self._next_at(anchor, at) for anchor in markers.anchors), default=sys.maxsize)
            if at >= last:
                return last, 0
            end = markers.match(self.text, at, True)
            if end:
                return at, end
            at += 1

    def _unfinished(self, markers: Markers) -> int:
        """Return where at the end of the text a marker may have begun, or its length."""
        text = self.text
        for at in range(max(self.pos, len(text) - markers.longest + 1), len(text)):
            if text[at] in markers.firsts and markers.match(text, at, False) < 0:
                return at
        return len(text)

    def _next_at(self, anchor: str, start: int) -> int:
        # Remembered, or text with many of one anchor would be searched for another one again and again.
        since, at = self._next.get(anchor, (0, -1))
        if not since <= start <= at:
            at = self.text.find(anchor, start)
            at = sys.maxsize if at < 0 else at
            self._next[anchor] = (start, at)
        return at
