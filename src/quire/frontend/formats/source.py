"""`Source`: text that arrives in pieces, read from left to right by generators that yield when they need more.

Everything here takes time linear in the text, however it is cut, and decides only on what cannot change any more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from typing import Any, TypeVar

from quire.frontend.formats.parts import BLANKS

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
        # Then a text that is found is the marker.
        self.plain = self.anchors == tuple(sorted(self.texts)) and not any(
            one != other and one.startswith(other) for one in self.texts for other in self.anchors
        )
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Markers) and self.texts == other.texts

    def __hash__(self) -> int:
        return hash(self.texts)

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
        self._places: dict[Markers, _Places] = {}

    def push(self, text: str) -> None:
        """Add text behind."""
        self.text = self.text[self.pos :] + text
        self.pos = 0
        self._places.clear()

    def end(self) -> None:
        """No more text will come."""
        self.ended = True
        self._places.clear()

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
        wanted: str = "",
        rejected: Callable[[int], bool] | None = None,
        closed: bool = False,
    ) -> Reading[str]:
        """Read up to and including the first marker, "" if the end comes first; the text before it goes to `sink`.

        Args:
            dropped: markers that are left out, and do not end the text, but for `wanted`. rejected: called with where
                `wanted` ends, says whether it is none, however the text goes on. closed: a marker must come, so that
                the beginning of one at the end is none of the text.
        """
        start = self.pos
        while True:
            at, end = self._find(markers, start)
            found = self.text[at:end] if end else ""
            if found == wanted and rejected is not None and rejected(end):
                if found not in dropped:
                    start = end
                    continue
            elif found and (found == wanted or found not in dropped):
                self._pass(sink, at)
                self.pos = end
                return found
            if closed and self.ended and not found:
                at = max(start, _Places(self.text, markers, start, False).find(start)[0])
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

    def _find(self, markers: Markers, start: int) -> tuple[int, int]:
        """Return where the first marker from `start` on begins and ends; or where one may begin, and 0."""
        places = self._places.get(markers)
        if places is None or start < places.since:
            places = self._places[markers] = _Places(self.text, markers, start, self.ended)
        return places.find(start)


class _Places:
    """Where markers are in a text: each is searched for from where it was found last, and not again and again."""

    def __init__(self, text: str, markers: Markers, start: int, ended: bool) -> None:
        self._text = text
        self._markers = markers
        self.since = start
        self._next = [(text.find(anchor, start), anchor) for anchor in markers.anchors]
        self._next = [(at, anchor) for at, anchor in self._next if at >= 0]
        heapify(self._next)
        self._last = len(text) if ended else self._unfinished(start)

    def _unfinished(self, start: int) -> int:
        """Return where at the end of the text a marker may have begun, or its length."""
        text, markers = self._text, self._markers
        for at in range(max(start, len(text) - markers.longest + 1), len(text)):
            if text[at] in markers.firsts and markers.match(text, at, False) < 0:
                return at
        return len(text)

    def find(self, start: int) -> tuple[int, int]:
        """As `Source._find`."""
        self.since = start
        if start > self._last:
            self._last = self._unfinished(start)  # the one that was found was read as something else
        while self._next:
            at, anchor = self._next[0]
            if at >= self._last:
                break
            if at >= start:
                end = at + len(anchor) if self._markers.plain else self._markers.match(self._text, at, True)
                if end:
                    return at, end
                start = at + 1
            following = self._text.find(anchor, start)
            if following < 0:
                heappop(self._next)
            else:
                heapreplace(self._next, (following, anchor))
        return self._last, 0
