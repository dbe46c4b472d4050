"""`match`: whether parts of a call stand at some place in a text. A pure function, so that it can be called again
when more text is there; what it reads is bounded, for between parts it takes only so many blanks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.frontend.formats.parts import BLANKS, Arguments, Blank, CallId, JsonObject, Maybe, Name, Part, Tagged, Text

MAX_BLANKS = 64
MAX_ID = 64

NO, MORE, CUT = -1, -2, -3


@dataclass
class Found:
    """What was found.

    Attributes:
        at: where the parts end; NO if they do not stand there, MORE if that is not sure yet, CUT if it never will be,
            for the text ends within them.
    """

    at: int
    name: str = ""
    call_id: str | None = None


def match(parts: Iterable[Part], text: str, at: int, ended: bool, names: Iterable[str] = (), stop: str = "") -> Found:
    """Look for these parts at `at`; for `Arguments`, which must be the last, only whether they can begin there.

    Args:
        ended: no more text will come. names: of the functions. stop: what stands behind the arguments.
    """
    found = Found(at)
    for part in parts:
        match part:
            case Text(text=expected):
                at = _text(expected, text, at, ended)
            case Blank():
                at = _blanks(text, at, ended)
            case Name():
                at, found.name = _name(names, text, at, ended)
            case CallId():
                at = _id(part, found, text, at, ended)
            case Maybe(parts=inner):
                assert isinstance(inner[0], Text), "what may be left out begins with a text"
                there = _text(inner[0].text, text, at, ended)
                if there >= 0:
                    more = match(inner[1:], text, there, ended, names)
                    at, found.call_id = more.at, more.call_id or found.call_id
                elif there != NO:
                    at = there
            case Arguments():
                at = _arguments(part, stop, text, at, ended)
        if at < 0:
            break
    found.at = at
    return found


def first_chars(parts: Iterable[Part], names: Iterable[str]) -> frozenset[str] | None:
    """Return the characters that these parts can begin with; None if that cannot be said."""
    found: set[str] = set()
    for part in parts:
        match part:
            case Text(text=text):
                return frozenset({*found, text[0]})
            case Blank():
                found.update(BLANKS)
            case Maybe(parts=(Text(text=text), *_)):
                found.add(text[0])
            case Name():
                return frozenset({*found, *(name[:1] for name in names)})
            case _:
                return None
    return None


def _text(expected: str, text: str, at: int, ended: bool) -> int:
    if text.startswith(expected, at):
        return at + len(expected)
    if len(text) - at < len(expected) and expected.startswith(text[at:]):
        return CUT if ended else MORE
    return NO


def _blanks(text: str, at: int, ended: bool) -> int:
    last = at + MAX_BLANKS
    while at < len(text) and text[at] in BLANKS and at < last:
        at += 1
    return MORE if at == len(text) and not ended else at


def _name(names: Iterable[str], text: str, at: int, ended: bool) -> tuple[int, str]:
    best, cut = "", NO
    for name in names:
        if text.startswith(name, at):
            best = max(best, name, key=len)
        elif len(text) - at < len(name) and name.startswith(text[at:]):
            if not ended:
                return MORE, ""
            cut = CUT
    return (at + len(best), best) if best else (cut, "")


def _id(part: CallId, found: Found, text: str, at: int, ended: bool) -> int:
    end = at
    while end < len(text) and end - at < MAX_ID and text[end].isascii():
        if not (text[end].isalnum() if part.length else text[end].isdigit()):
            break
        end += 1
    if end == len(text):
        return CUT if ended else MORE
    found.call_id = text[at:end] if part.bare else f"functions.{found.name}:{text[at:end]}"
    return end if end > at else NO


def _arguments(part: Arguments, stop: str, text: str, at: int, ended: bool) -> int:
    if isinstance(part.notation, Tagged):
        begin = _blanks(text, at, ended)
        outcomes = (
            [_text(expected, text, begin, ended) for expected in (part.notation.key_open, stop)] if begin >= 0 else []
        )
        if any(outcome >= 0 for outcome in outcomes):
            return at
        return max(outcomes, key=lambda outcome: outcome != NO) if outcomes else begin
    if isinstance(part.notation, JsonObject) or stop != ")":
        outcome = _text("{", text, at, ended)
        return at if outcome >= 0 else outcome
    return at
