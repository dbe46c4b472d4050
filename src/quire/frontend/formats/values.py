"""Reading argument values, in JSON and in notations that are not JSON, and turning them into JSON text piece by piece.

Nothing here knows of calls or messages. Every reader returns whether the text was sound; once it was not, what it has
passed on stays, and the call is broken.
"""

from __future__ import annotations

import json
import re

import msgspec

from quire.frontend.formats.parts import BLANKS
from quire.frontend.formats.source import Reading, Sink, Source, markers_of

MAX_DEPTH = 128
MAX_WORD = 4096
MAX_PLAIN = 64
NUMERIC = frozenset("-0123456789")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "/": "/", "'": "'", '"': '\\"', "\\": "\\\\"}
ESCAPES |= {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}
STRUCTURE = re.compile(r'["\[\]{}]')
STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
HEX = {"x": 2, "u": 4, "U": 8}


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
    return True


def escaped(text: str) -> str:
    """Return `text` as it stands within quotes in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonScan:
    """Finds where a JSON value ends that begins with a bracket, a brace or a quote."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.stopped = 0

    def scan(self, text: str, at: int) -> int:
        """Return where the value ends, -1 if it goes on behind `text`, -2 if it is nested too deeply at `stopped`."""
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                if at < 0:
                    return -1
            else:
                found = STRUCTURE.search(text, at)
                if found is None:
                    return -1
                at = found.end()
                if found[0] == '"':
                    self._in_string = True
                    continue
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth > MAX_DEPTH:
                    self.stopped = at
                    return -2
            if self._depth <= 0:
                return at
        return -1

    def _string(self, text: str, at: int) -> int:
        """Return where the string ends, -1 if it goes on."""
        found = STRING_REST.match(text, at + 1 if self._escaped else at)
        assert found is not None, "it may be empty"
        end = found.end()
        self._in_string = text[end : end + 1] != '"'
        self._escaped = self._in_string and end < len(text)  # the text ends in a backslash
        return -1 if self._in_string else end + 1


def read_json(source: Source, sink: Sink) -> Reading[bool]:
    """Read a JSON value that begins with a bracket, a brace or a quote, as it is."""
    scan = JsonScan()
    pieces = []
    while True:
        end = scan.scan(source.text, source.pos)
        if end == -2:
            source.pos = scan.stopped
            return False
        piece = source.text[source.pos : end if end >= 0 else len(source.text)]
        source.pos += len(piece)
        if piece:
            pieces.append(piece)
            sink(piece)
        if end >= 0:
            return is_json("".join(pieces))
        if source.ended:
            return False
        yield


class ValueReader:
    """Reads values of a notation that is close to JSON.

    Args:
        quotes: what texts stand between. bare: there are no escapes in texts, and keys have no quotes.
    """

    def __init__(self, source: Source, sink: Sink, quotes: tuple[str, ...], bare: bool) -> None:
        self._source = source
        self._sink = sink
        self._quotes = quotes
        self._ends = {quote: markers_of(frozenset((quote,) if bare else (quote, "\\"))) for quote in quotes}
        self._bare = bare

    def value(self, depth: int = 0) -> Reading[bool]:
        """Read one value."""
        yield from self._source.blanks()
        char = yield from self._source.peek()
        if char == "[":
            return (yield from self._items("[", "]", depth))
        if char == "{":
            return (yield from self._items("{", "}", depth))
        quote = yield from self._source.literal(*self._quotes)
        if quote:
            return (yield from self._text(quote, self._sink))
        word = yield from read_word(self._source, ",]}):")
        word = WORDS.get(word, word)
        if not (yield from self._source.peek()) or not is_json(word):
            return False
        self._sink(word)
        return True

    def items(self, close: str, equals: str, depth: int = 0, *, keyed: bool = True) -> Reading[bool]:
        """Read items, or pairs of key and value with `equals` between, up to `close`, which is left unread."""
        first = True
        while True:
            first = self._plain_items(equals if keyed else "", first)
            yield from self._source.blanks()
            char = yield from self._source.peek()
            if char == close:
                return True
            if not char:
                return False
            if not first:
                self._sink(", ")
            if keyed and not (yield from self._key(equals)):
                return False
            if not (yield from self.value(depth)):
                return False
            yield from self._source.blanks()
            comma = yield from self._source.literal(",")
            char = yield from self._source.peek()
            if not comma and char != close:
                return False
            first = False

    def _plain_items(self, equals: str, first: bool) -> bool:
        """Read the numbers, words and short texts that are there whole, with the commas behind; return `first`.

        It reads nothing that the slow way would read otherwise; it is there for lists of a million numbers.
        """
        if equals == ":" and not self._bare:
            return first
        text, at = self._source.text, self._source.pos
        pieces: list[str] = []
        while (comma := text.find(",", at, at + MAX_PLAIN)) >= 0:
            item = text[at:comma]
            key, found, value = item.partition(equals) if equals else ("", "", item)
            key, plain = key.strip(BLANKS), self._plain(value.strip(BLANKS))
            if not plain or (equals and not (found and key.isidentifier() and key.isascii())):
                break
            pieces.append(f'"{key}": {plain}' if equals else plain)
            at = comma + 1
        if pieces:
            self._sink(("" if first else ", ") + ", ".join(pieces))
            self._source.pos = at
        return first and not pieces

    def _plain(self, value: str) -> str:
        """Return the JSON of a number, a word or a text without escapes; "" for anything else."""
        if value[:1] in NUMERIC:
            return value if is_json(value) else ""
        for quote in self._quotes:
            inner = value[len(quote) : -len(quote)]
            if value == quote + inner + quote:
                return "" if quote in inner or "\\" in inner else f'"{escaped(inner)}"'
        return WORDS.get(value, "")

    def _items(self, opening: str, closing: str, depth: int) -> Reading[bool]:
        if depth >= MAX_DEPTH:
            return False
        self._source.pos += 1
        self._sink(opening)
        if not (yield from self.items(closing, ":", depth + 1, keyed=opening == "{")):
            return False
        self._source.pos += 1
        self._sink(closing)
        return True

    def _key(self, equals: str) -> Reading[bool]:
        """Read a key and what is behind it; it is passed on when it is known whole."""
        pieces: list[str] = []
        quote = yield from self._source.literal(*self._quotes)
        if quote:
            if not (yield from self._text(quote, pieces.append)):
                return False
        else:
            word = yield from read_word(self._source, equals + ",]})")
            if not word or not (self._bare or equals == "="):
                return False
            pieces.append(f'"{escaped(word)}"')
        yield from self._source.blanks()
        if not (yield from self._source.literal(equals)):
            return False
        self._sink("".join(pieces) + ": ")
        return True

    def _text(self, quote: str, sink: Sink) -> Reading[bool]:
        sink('"')
        while True:
            marker = yield from self._source.until(self._ends[quote], lambda text: sink(escaped(text)), closed=True)
            if marker == quote:
                sink('"')
                return True
            self._short_escapes(marker, sink)
            if not marker or not (yield from self._escape(sink)):
                return False

    def _short_escapes(self, marker: str, sink: Sink) -> None:
        """Read what is there of escapes of one letter, each with the backslash of the next, if it begins another."""
        text, at = self._source.text, self._source.pos
        pieces: list[str] = []
        while marker == "\\" and text[at + 1 : at + 2] == "\\" and text[at] in ESCAPES:
            pieces.append(ESCAPES[text[at]])
            at += 2
        if pieces:
            sink("".join(pieces))
        self._source.pos = at

    def _escape(self, sink: Sink) -> Reading[bool]:
        """Read what follows a backslash."""
        char = yield from self._source.peek()
        if not char:
            return False
        self._source.pos += 1
        if char not in HEX:
            sink(ESCAPES.get(char, "\\\\" + escaped(char)))
            return True
        digits = ""
        while len(digits) < HEX[char]:
            digit = yield from self._source.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                return False
            digits += digit
            self._source.pos += 1
        if char != "u":
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                return False
            sink(escaped(chr(code)))
            return True
        # Kept as it is: two of these may make up one character.
        sink("\\u" + digits)
        return True


def read_word(source: Source, stops: str) -> Reading[str]:
    """Read up to a blank or one of the characters `stops`, or the end; at most `MAX_WORD` characters."""
    chars: list[str] = []
    while len(chars) < MAX_WORD:
        char = yield from source.peek()
        if not char or char in stops or char in BLANKS:
            break
        chars.append(char)
        source.pos += 1
    return "".join(chars)
