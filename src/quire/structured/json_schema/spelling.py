"""Writing regular languages as terminals of the grammar: as they are, or as spelled inside a JSON string.

Every character has a fixed set of spellings: itself, its short escape, and `\\uXXXX` unless it is printable ASCII. As
no two characters share a spelling, unions, intersections and complements of texts are those of their spellings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from quire.structured.json_schema.regular import ANY, EMPTY, Lang, Ranges, common, complement

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 47: "/", 92: "\\\\"}
_RAW = complement(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
_ESCAPED = ((0, 0x1F), (0x7F, 0xFFFF))


def terminal(lang: Lang) -> str:
    """Return the body of a Lark terminal for `lang` as it is."""
    return _Writer(plain_class).lark(lang)


def quoted(lang: Lang) -> str:
    """Return the body of a Lark terminal for the JSON strings whose text is in `lang`, with their quotes.

    The quotes stand inside of intersections and complements: so the lexer sees which tokens are all the same to it.
    """
    return _Writer(spelled_class, quotes=True).lark(lang)


class _Writer:
    """Writes languages as expressions of regexes, `&`, `~` and `|`.

    Args:
        char: writes a class of characters. quotes: whether quotation marks stand around each text.
    """

    def __init__(self, char: Callable[[Ranges], str], quotes: bool = False) -> None:
        self.char = char
        self.quotes = quotes
        self.every = self._leaf(f"(?:{char(ANY[1])})*")
        self._regexes: dict[int, str | None] = {}  # by identity: `lark` needs those of all parts at every level

    def _leaf(self, regex: str) -> str:
        return rf"/\"{regex}\"/" if self.quotes else f"/(?:{regex})/"

    def lark(self, lang: Lang) -> str:
        """Return an expression, in brackets where it needs them."""
        kind = lang[0]
        if lang == EMPTY:
            return "(/a/ & /b/)"
        regex = self.regex(lang)
        if regex is not None:
            return self._leaf(regex)
        if kind == "alt":
            return "(" + " | ".join(self.lark(part) for part in lang[1]) + ")"
        if kind in ("and", "not"):
            parts = lang[1] if kind == "and" else (lang,)
            inside = [self.lark(part) for part in parts if part[0] != "not"] or [self.every]
            outside = [f"~({self.lark(part[1])})" for part in parts if part[0] == "not"]
            return "(" + " & ".join([*inside, *outside]) + ")"
        if self.quotes:
            return rf"(/\"/ {_Writer(self.char).lark(lang)} /\"/)"
        if kind == "cat":
            return "(" + " ".join(self.lark(part) for part in lang[1]) + ")"
        _, part, least, most = lang
        return f"({self.lark(part)}){_repetition(least, most)}"

    def regex(self, lang: Lang) -> str | None:
        """Return one regex for `lang`, or None where it takes intersections or complements."""
        if id(lang) not in self._regexes:
            self._regexes[id(lang)] = self._regex(lang)
        return self._regexes[id(lang)]

    def _regex(self, lang: Lang) -> str | None:
        kind = lang[0]
        if kind == "cls":
            return self.char(lang[1])
        if kind in ("cat", "alt"):
            if lang == EMPTY:
                return None
            parts = [self.regex(part) for part in lang[1]]
            if any(part is None for part in parts):
                return None
            if kind == "cat":
                return "".join(part or "" for part in parts)
            return "(?:" + "|".join(part or "" for part in parts) + ")"
        if kind != "rep":
            return None
        _, part, least, most = lang
        inner = self.regex(part)
        if inner is None:
            return None
        if len(inner) > 1:
            inner = f"(?:{inner})"
        return inner + _repetition(least, most)


def _repetition(least: int, most: int | None) -> str:
    """Return the operator, of regexes as of Lark, that repeats `least` to `most` (None: any number of) times."""
    if most is None and least <= 1:
        return "+" if least else "*"
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


@lru_cache(maxsize=1 << 10)
def plain_class(ranges: Ranges) -> str:
    """Return the regex of one character of `ranges`, as it is."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _point(ranges[0][0])
    return "[" + "".join(_point(low) if low == high else f"{_point(low)}-{_point(high)}" for low, high in ranges) + "]"


@lru_cache(maxsize=1 << 10)
def spelled_class(ranges: Ranges) -> str:
    """Return the regex of one character of `ranges` in all its spellings inside a JSON string."""
    choices = []
    raw = common(ranges, _RAW)
    if raw:
        choices.append(plain_class(raw))
    short = [letter for point, letter in _SHORT.items() if any(low <= point <= high for low, high in ranges)]
    if short:
        choices.append(r"\\[" + "".join(short).replace("/", "\\/") + "]")
    choices += [r"\\u" + piece for low, high in common(ranges, _ESCAPED) for piece in _hex(low, high, 4)]
    for low, high in common(ranges, ((0x10000, 0x10FFFF),)):
        choices += _pairs(low - 0x10000, high - 0x10000)
    return choices[0] if len(choices) == 1 else "(?:" + "|".join(choices) + ")"


def _pairs(low: int, high: int) -> list[str]:
    """Return regexes of the surrogate pairs for the offsets `low` to `high` above U+10000."""
    first, last = low >> 10, high >> 10
    if first == last:
        return [_pair(first, first, low & 0x3FF, high & 0x3FF)]
    found = []
    if low & 0x3FF:
        found.append(_pair(first, first, low & 0x3FF, 0x3FF))
        first += 1
    tail = high & 0x3FF != 0x3FF
    if tail:
        last -= 1
    if first <= last:
        found.append(_pair(first, last, 0, 0x3FF))
    if tail:
        found.append(_pair(last + 1, last + 1, 0, high & 0x3FF))
    return found


def _pair(first: int, last: int, low: int, high: int) -> str:
    heads = "|".join(_hex(0xD800 + first, 0xD800 + last, 4))
    tails = "|".join(_hex(0xDC00 + low, 0xDC00 + high, 4))
    return rf"\\u(?:{heads})\\u(?:{tails})"


def _hex(low: int, high: int, digits: int) -> list[str]:
    """Return regexes of the hexadecimal numbers from `low` to `high` with so many digits, in either case."""
    if digits == 0:
        return [""]
    unit = 16 ** (digits - 1)
    first, last = low // unit, high // unit
    if first == last:
        return [_digit(first, first) + tail for tail in _hex(low % unit, high % unit, digits - 1)]
    found = []
    if low % unit:
        found += [_digit(first, first) + tail for tail in _hex(low % unit, unit - 1, digits - 1)]
        first += 1
    tails = [] if high % unit == unit - 1 else [_digit(last, last) + tail for tail in _hex(0, high % unit, digits - 1)]
    if tails:
        last -= 1
    if first <= last:
        found.append(_digit(first, last) + (f"[0-9a-fA-F]{{{digits - 1}}}" if digits > 1 else ""))
    return found + tails


def _digit(low: int, high: int) -> str:
    wanted = "".join(f"{digit:x}" if digit < 10 else f"{digit:x}{digit:X}" for digit in range(low, high + 1))
    return wanted if len(wanted) == 1 else "[0-9a-fA-F]" if high - low == 15 else f"[{wanted}]"


def _point(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\x{{{point:x}}}"
