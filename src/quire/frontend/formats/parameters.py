"""Arguments of a call: which schema each parameter has, and reading the notations of `parts` as JSON text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.frontend.formats.match import MORE, match
from quire.frontend.formats.message import Tool
from quire.frontend.formats.parts import Blank, Braces, JsonObject, Kwargs, Notation, Tagged
from quire.frontend.formats.source import Reading, Sink, Source, markers_of
from quire.frontend.formats.values import WORDS, ValueReader, escaped, is_json, read_json

MAX_REFS = 16
# Keywords that say nothing about values.
NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"))
DEFINITIONS = ("$defs", "definitions")

STRING, JSON, MIXED = "string", "json", "mixed"


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow "$ref"s that stand alone and point into `root`; a schema that has others is returned as it is."""
    for _ in range(MAX_REFS):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str) or not ref.startswith("#/") or set(schema) - NOTES - {"$ref", *DEFINITIONS}:
            break
        target: Any = root
        for step in ref[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        if target is None:
            break
        schema = target
    return schema


def kind_of(schema: Any, root: Mapping[str, Any]) -> str:
    """Return how values of a schema stand in a tagged parameter.

    `STRING`: only texts are allowed; they stand as they are. `JSON`: no texts are. `MIXED`: texts among others, which
    stand as they are unless they could be taken for JSON.
    """
    texts, others = _allows(schema, root, {})
    if texts and not others:
        return STRING
    return MIXED if texts else JSON


def _allows(schema: Any, root: Mapping[str, Any], known: dict[int, tuple[bool, bool]]) -> tuple[bool, bool]:
    """Return whether a schema may allow texts, and whether it may allow anything else.

    `known`: what was found out about parts of it, by `id`; references may lead in circles, and to one part often.
    """
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return True, True
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = texts, others = True, True
    listed = schema.get("type")
    if isinstance(listed, str | list):
        types = [listed] if isinstance(listed, str) else listed
        texts, others = "string" in types, any(one != "string" for one in types)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts &= any(isinstance(value, str) for value in values)
        others &= not all(isinstance(value, str) for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        found = [_allows(one, root, known) for one in schema[key]] if isinstance(schema.get(key), list) else []
        if found:
            together = all if key == "allOf" else any
            texts &= together(one[0] for one in found)
            others &= together(one[1] for one in found)
    known[id(schema)] = texts, others
    return texts, others


def read_arguments(
    source: Source, sink: Sink, notation: Notation, tool: Tool, ends: frozenset[str], stop: str
) -> Reading[bool]:
    """Read the arguments of a call of `tool`; their JSON text goes to `sink`. Return whether they were sound.

    Args:
        ends: special tokens that end a message, and so cut off a text. stop: the text behind the arguments.
    """
    match notation:
        case JsonObject():
            return (yield from read_json(source, sink))
        case Tagged():
            return (yield from _TaggedReader(source, sink, notation, tool, ends, stop).read())
    pieces: list[str] = []

    def both(text: str) -> None:
        pieces.append(text)
        sink(text)

    both("{")
    if isinstance(notation, Kwargs):
        sound = yield from ValueReader(source, both, ("'", '"'), False).items(stop, "=")
    else:
        assert isinstance(notation, Braces), "there are no other notations"
        source.pos += 1  # the brace
        sound = yield from ValueReader(source, both, (notation.quote, '"'), True).items("}", ":")
        if sound:
            source.pos += 1
    if sound:
        both("}")
    return sound and is_json("".join(pieces))


class _TaggedReader:
    """Reads tagged parameters."""

    def __init__(self, source: Source, sink: Sink, tags: Tagged, tool: Tool, ends: frozenset[str], stop: str) -> None:
        self._source = source
        self._sink = sink
        self._tags = tags
        self._stop = stop
        self._ends = ends
        properties = tool.parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._root = tool.parameters
        self._value_end = markers_of(frozenset((tags.value_close, *ends)))
        self._key_end = markers_of(frozenset((tags.key_close, *ends)))

    def read(self) -> Reading[bool]:
        """Read all parameters."""
        self._sink("{")
        first = True
        while True:
            yield from self._source.blanks()
            opening = yield from self._source.literal(self._tags.key_open, self._stop)
            if opening != self._tags.key_open:
                break
            if not first:
                self._sink(", ")
            if not (yield from self._parameter()):
                return False
            first = False
        if not opening:
            return False
        self._source.pos -= len(opening)
        self._sink("}")
        return True

    def _parameter(self) -> Reading[bool]:
        chars: list[str] = []
        if (yield from self._source.until(self._key_end, chars.append)) != self._tags.key_close:
            return False
        key = "".join(chars)
        if self._tags.value_open:
            yield from self._source.blanks()
            if not (yield from self._source.literal(self._tags.value_open)):
                return False
        self._sink(f'"{escaped(key)}": ')
        kind = kind_of(self._properties[key], self._root) if key in self._properties else MIXED
        if kind == STRING:
            return (yield from self._raw(self._string_sink()))
        return (yield from self._value(kind))

    def _raw(self, sink: _Padded) -> Reading[bool]:
        """Read a text up to its end tag; pads around it are not part of it."""
        if self._tags.pad:
            yield from self._source.literal(self._tags.pad)
        marker = yield from self._source.until(self._value_end, sink.add, closed=True)
        if marker != self._tags.value_close:
            return False
        sink.end()
        return True

    def _string_sink(self) -> _Padded:
        self._sink('"')
        return _Padded(lambda text: self._sink(escaped(text)), self._tags.pad, lambda: self._sink('"'))

    def _value(self, kind: str) -> Reading[bool]:
        """Read a value that is JSON, or JSON or a text."""
        while True:
            found = match((Blank(),), self._source.text, self._source.pos, self._source.ended)
            if found.at != MORE:
                break
            yield
        if self._source.text[found.at : found.at + 1] in ("{", "[", '"'):
            self._source.pos = found.at
            sound = yield from read_json(self._source, self._sink)
            yield from self._source.blanks()
            return sound and bool((yield from self._source.literal(self._tags.value_close)))
        pieces: list[str] = []
        if not (yield from self._raw(_Padded(pieces.append, self._tags.pad, lambda: None))):
            return False
        text = "".join(pieces)
        word = WORDS.get(text.strip(), text.strip())
        self._sink(word if is_json(word) else f'"{escaped(text)}"')
        return True


class _Padded:
    """Passes text on, but for one pad at its end."""

    def __init__(self, sink: Sink, pad: str, end: Any) -> None:
        self._sink = sink
        self._pad = pad
        self._end = end
        self._buffered = ""

    def add(self, text: str) -> None:
        """Take more text."""
        text = self._buffered + text
        self._buffered = self._pad if self._pad and text.endswith(self._pad) else ""
        text = text[: len(text) - len(self._buffered)]
        if text:
            self._sink(text)

    def end(self) -> None:
        """The text is complete, and what is held back was the pad."""
        self._end()
