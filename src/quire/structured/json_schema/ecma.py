"""Patterns of JSON Schema (ECMA-262 regular expressions with the `u` flag) as languages of whole strings.

`pattern_language` returns the strings that contain a match of the pattern. Anchors and look-ahead are exact: a pattern
is translated from its end to its beginning, each part given the language of what may follow it, once for the start
of the string and once for any later position. Back references, look-behind and word boundaries are refused.
`property_ranges` knows the character properties of \\p{...}: general categories and a few binary properties.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Any

from quire.structured.json_schema import regular
from quire.structured.json_schema.errors import MAX_PATTERN_CHARS, MAX_REPEATS
from quire.structured.json_schema.regular import ALL, ANY, EMPTY, EPSILON, Lang, Ranges, complement, ranges_of

Node = tuple[Any, ...]
Pair = tuple[Lang, Lang]

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    *((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_NEWLINE: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_SETS = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
MAX_GROUPS = 32


class PatternError(ValueError):
    """A pattern that is refused.

    Attributes:
        position: where in the pattern. kind: "invalid", "unsupported" or "complex".
    """

    def __init__(self, kind: str, position: int, message: str) -> None:
        super().__init__(f"{message} at position {position} of the pattern")
        self.kind = kind
        self.position = position


@lru_cache(maxsize=256)
def pattern_language(pattern: str) -> Lang:
    """Return the language of the strings in which `pattern` matches somewhere; raises `PatternError`."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError("complex", MAX_PATTERN_CHARS, f"more than {MAX_PATTERN_CHARS} characters")
    return read_pattern(pattern)


def read_pattern(pattern: str) -> Lang:
    """Do the same for a pattern of any length."""
    node = _Parser(pattern).parse()
    at_start, later = _translate(node, (ALL, ALL))
    if at_start == later:
        return regular.cat(ALL, at_start) if at_start != ALL else ALL
    return regular.alt(at_start, regular.cat(ANY, ALL, later))


def _simple(node: Node) -> bool:
    if node[0] == "lang":
        return True
    if node[0] in ("seq", "or"):
        return all(_simple(part) for part in node[1])
    return node[0] == "repeat" and _simple(node[1])


def _language(node: Node) -> Lang:
    """Return the language of a node without assertions."""
    if node[0] == "lang":
        return node[1]  # type: ignore[no-any-return]
    if node[0] == "seq":
        return regular.cat(*(_language(part) for part in node[1]))
    if node[0] == "or":
        return regular.alt(*(_language(part) for part in node[1]))
    return regular.rep(_language(node[1]), node[2], node[3])


def _translate(node: Node, behind: Pair) -> Pair:
    """Return the rests of strings from the start, and from later on, that begin with `node` and go on as `behind`."""
    start, later = behind
    if _simple(node):
        here = _language(node)
        after = regular.cat(here, later)
        if start == later or not regular.nullable(here):
            return after, after
        some = regular.both(here, regular.neg(EPSILON))
        return regular.alt(start, regular.cat(some, later)), after
    kind = node[0]
    if kind == "seq":
        for part in reversed(node[1]):
            behind = _translate(part, behind)
        return behind
    if kind == "or":
        pairs = [_translate(part, behind) for part in node[1]]
        return regular.alt(*(pair[0] for pair in pairs)), regular.alt(*(pair[1] for pair in pairs))
    if kind == "start":
        return start, EMPTY
    if kind == "end":
        ended = [EPSILON if regular.nullable(rest) else EMPTY for rest in behind]
        return ended[0], ended[1]
    if kind == "look":
        seen = _translate(node[2], (ALL, ALL))
        if not node[1]:
            seen = regular.neg(seen[0]), regular.neg(seen[1])
        return regular.both(seen[0], start), regular.both(seen[1], later)
    return _translate_repeat(node, behind)


def _translate_repeat(node: Node, behind: Pair) -> Pair:
    _, part, least, most, position = node
    if most is None or most > 3:
        raise PatternError("unsupported", position, "repetition of a group with anchors or look-ahead")
    result = behind
    for index in range(most, 0, -1):
        once = _translate(part, result)
        if index > least:
            once = regular.alt(behind[0], once[0]), regular.alt(behind[1], once[1])
        result = once
    return result


class _Parser:
    """Reads a pattern into nodes: lang, seq, or, repeat, start, end, look."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0

    def parse(self) -> Node:
        node = self.alternatives()[0]
        if self.at < len(self.pattern):
            raise self.error("invalid", "unmatched )")
        return node

    def error(self, kind: str, message: str) -> PatternError:
        return PatternError(kind, self.at, message)

    def peek(self, length: int = 1) -> str:
        return self.pattern[self.at : self.at + length]

    def take(self, expected: str) -> bool:
        if self.pattern.startswith(expected, self.at):
            self.at += len(expected)
            return True
        return False

    def alternatives(self) -> tuple[Node, int]:
        """Return a node, and how often repetitions in it multiply what they repeat."""
        self.depth += 1
        if self.depth > MAX_GROUPS:
            raise self.error("complex", f"more than {MAX_GROUPS} groups inside one another")
        choices, weight = [], 0
        while True:
            parts: list[Node] = []
            while self.at < len(self.pattern) and self.peek() not in "|)":
                part, cost = self.term()
                parts.append(part)
                weight += cost
            choices.append(parts[0] if len(parts) == 1 else ("seq", tuple(parts)))
            if not self.take("|"):
                break
        self.depth -= 1
        return (choices[0] if len(choices) == 1 else ("or", tuple(choices))), max(weight, 1)

    def term(self) -> tuple[Node, int]:
        position = self.at
        node, weight = self.atom()
        least, most, given = self.quantifier()
        if not given:
            return node, weight
        if node[0] in ("start", "end"):
            raise PatternError("invalid", position, "nothing to repeat")
        bound = max(least, most or 0, 1)
        if bound * weight > MAX_REPEATS:
            raise PatternError("complex", position, f"more than {MAX_REPEATS} repetitions")
        return ("repeat", node, least, most, position), bound * weight

    def quantifier(self) -> tuple[int, int | None, bool]:
        found: tuple[int, int | None] | None = None
        if self.take("*"):
            found = (0, None)
        elif self.take("+"):
            found = (1, None)
        elif self.take("?"):
            found = (0, 1)
        elif self.peek() == "{":
            found = self.counts()
        if found is None:
            return 1, 1, False
        self.take("?")
        if self.peek() and self.peek() in "*+?":
            raise self.error("invalid", "nothing to repeat")
        return *found, True

    def counts(self) -> tuple[int, int | None] | None:
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not _is_number(low) or (high and not _is_number(high)):
            return None
        least = int(low)
        most = least if not comma else int(high) if high else None
        if most is not None and most < least:
            raise self.error("invalid", "numbers out of order in {}")
        if max(least, most or 0) > MAX_REPEATS:
            raise self.error("complex", f"more than {MAX_REPEATS} repetitions")
        self.at = end + 1
        return least, most

    def atom(self) -> tuple[Node, int]:
        char = self.peek()
        if char == "(":
            return self.group()
        if char in "*+?":
            raise self.error("invalid", "nothing to repeat")
        if char == "[":
            return ("lang", regular.cls(self.char_class())), 1
        self.at += 1
        if char == "^":
            return ("start",), 1
        if char == "$":
            return ("end",), 1
        if char == ".":
            return ("lang", regular.cls(complement(_NEWLINE))), 1
        if char == "\\":
            return ("lang", regular.cls(self.escape(in_class=False))), 1
        return ("lang", regular.cls(((ord(char), ord(char)),))), 1

    def group(self) -> tuple[Node, int]:
        start = self.at
        look: bool | None = None
        if self.take("(?=") or self.take("(?!"):
            look = self.pattern[self.at - 1] == "="
        elif self.take("(?:"):
            pass
        elif self.pattern.startswith(("(?<=", "(?<!"), self.at):
            raise self.error("unsupported", "look-behind")
        elif self.take("(?<"):
            end = self.pattern.find(">", self.at)
            if not self.pattern[self.at : max(end, 0)].isidentifier():
                raise self.error("invalid", "bad group name")
            self.at = end + 1
        elif self.take("(?"):
            raise self.error("invalid", "unknown kind of group")
        else:
            self.at += 1
        node, weight = self.alternatives()
        if not self.take(")"):
            raise PatternError("invalid", start, "unclosed group")
        return (node if look is None else ("look", look, node)), weight

    def escape(self, in_class: bool) -> Ranges:
        """Return the characters that the escape behind a backslash stands for."""
        position = self.at - 1
        char = self.peek()
        self.at += 1
        if char == "":
            raise PatternError("invalid", position, "backslash at the end")
        if char.lower() in _SETS:
            found = _SETS[char.lower()]
            return found if char.islower() else complement(found)
        if char in "pP":
            return self.property(position, negated=char == "P")
        if char in "bB" and not (in_class and char == "b"):
            raise PatternError("unsupported" if not in_class else "invalid", position, "word boundary")
        if char == "k" or char in "123456789":
            raise PatternError("unsupported", position, "back reference")
        point = self.point(char, position)
        return ranges_of([(point, point)])

    def point(self, char: str, position: int) -> int:
        if char == "b":
            return 8
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "0" and not self.peek().isdigit():
            return 0
        if char == "c" and self.peek().isascii() and self.peek().isalpha():
            self.at += 1
            return ord(self.pattern[self.at - 1]) % 32
        if char == "x":
            return self.hexadecimal(2, position)
        if char == "u":
            return self.unicode_escape(position)
        if char.isascii() and char.isalnum():
            raise PatternError("invalid", position, f"unknown escape \\{char}")
        return ord(char)

    def unicode_escape(self, position: int) -> int:
        if self.take("{"):
            end = self.pattern.find("}", self.at)
            digits = self.pattern[self.at : max(end, 0)]
            if not digits or len(digits) > 8 or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise PatternError("invalid", position, "bad \\u{} escape")
            self.at = end + 1
            if int(digits, 16) > 0x10FFFF:
                raise PatternError("invalid", position, "bad \\u{} escape")
            return int(digits, 16)
        point = self.hexadecimal(4, position)
        if 0xD800 <= point < 0xDC00 and self.peek(2) == "\\u":
            self.at += 2
            low = self.hexadecimal(4, position)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((point & 0x3FF) << 10) + (low & 0x3FF)
            raise PatternError("unsupported", position, "lone surrogate")
        return point

    def hexadecimal(self, length: int, position: int) -> int:
        digits = self.peek(length)
        if len(digits) < length or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise PatternError("invalid", position, "bad hexadecimal escape")
        self.at += length
        return int(digits, 16)

    def property(self, position: int, negated: bool) -> Ranges:
        end = self.pattern.find("}", self.at)
        if not self.take("{") or end < 0:
            raise PatternError("invalid", position, "bad \\p escape")
        name = self.pattern[self.at : end]
        self.at = end + 1
        found = property_ranges(name)
        if found is None:
            raise PatternError("unsupported", position, f"character property {name[:40]!r}")
        return complement(found) if negated else found

    def char_class(self) -> Ranges:
        start = self.at
        self.at += 1
        negated = self.take("^")
        pairs: list[tuple[int, int]] = []
        while not self.take("]"):
            if self.at >= len(self.pattern):
                raise PatternError("invalid", start, "unclosed [")
            low = self.class_atom()
            if self.peek() == "-" and self.peek(2) != "-]" and len(self.peek(2)) == 2:
                self.at += 1
                high = self.class_atom()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    # Annex B reads the hyphen beside a set such as \w as itself.
                    pairs += [*low, *high, (0x2D, 0x2D)]
                elif low[0][0] > high[0][0]:
                    raise self.error("invalid", "range out of order")
                else:
                    pairs.append((low[0][0], high[0][0]))
            else:
                pairs += low
        found = ranges_of(pairs)
        return complement(found) if negated else found

    def class_atom(self) -> Ranges:
        char = self.peek()
        self.at += 1
        if char == "\\":
            return self.escape(in_class=True)
        return ranges_of([(ord(char), ord(char))])


def _is_number(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= 9


_CATEGORIES = dict(
    pair.split("=")
    for line in (
        "L=Letter LC=Cased_Letter Lu=Uppercase_Letter Ll=Lowercase_Letter Lt=Titlecase_Letter Lm=Modifier_Letter",
        "Lo=Other_Letter M=Mark Mn=Nonspacing_Mark Mc=Spacing_Mark Me=Enclosing_Mark N=Number Nd=Decimal_Number",
        "Nl=Letter_Number No=Other_Number P=Punctuation Pc=Connector_Punctuation Pd=Dash_Punctuation",
        "Ps=Open_Punctuation Pe=Close_Punctuation Pi=Initial_Punctuation Pf=Final_Punctuation Po=Other_Punctuation",
        "S=Symbol Sm=Math_Symbol Sc=Currency_Symbol Sk=Modifier_Symbol So=Other_Symbol Z=Separator",
        "Zs=Space_Separator Zl=Line_Separator Zp=Paragraph_Separator",
    )
    for pair in line.split()
)
_ALIASES = {**{long: short for short, long in _CATEGORIES.items()}, "digit": "Nd", "punct": "P", "Combining_Mark": "M"}


def property_ranges(name: str) -> Ranges | None:
    """Return the characters of the property `name` ("Lu", "Letter", "gc=L", "ASCII"), or None if it is not known."""
    if name == "ASCII":
        return ((0, 0x7F),)
    if name == "Any":
        return ((0, 0xD7FF), (0xE000, 0x10FFFF))
    for prefix in ("General_Category=", "gc="):
        name = name.removeprefix(prefix)
    short = _ALIASES.get(name, name)
    return _category(short) if short in _CATEGORIES else None


@lru_cache(maxsize=40)
def _category(short: str) -> Ranges:
    wanted = ("Lu", "Ll", "Lt") if short == "LC" else (short,)
    points = [point for point in range(0x110000) if unicodedata.category(chr(point)).startswith(wanted)]
    return ranges_of((point, point) for point in points)
