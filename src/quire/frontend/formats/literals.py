"""The constraint of single values: texts as they are, JSON, and the literals of notations that are close to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.frontend.formats.pairs import pairs
from quire.frontend.formats.parameters import resolve
from quire.structured.builder import GrammarBuilder, literal
from quire.structured.json_schema.compiler import JsonOptions, add_schema
from quire.structured.json_schema.ecma import PatternError, pattern_language
from quire.structured.json_schema.errors import SchemaError, step, unsupported
from quire.structured.json_schema.formats import format_language
from quire.structured.json_schema.regular import ALL, ANY, Lang, alt, both, nullable, rep, text
from quire.structured.json_schema.spelling import terminal

MAX_DEPTH = 16
MAX_LENGTH = 1 << 16
REFUSED = "cannot be enforced in the notation of this model's tool calls"
NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"))
TEXT_KEYS = NOTES | {"type", "enum", "const", "format", "pattern", "minLength", "maxLength"}
DEFINITIONS = ("$defs", "definitions")


def check_key(name: str, pointer: str) -> None:
    """Raise `SchemaError` unless a parameter of this name can be written without quotes."""
    if not name or any(char in " \t\r\n=,:()[]{}\"'<>" or not char.isprintable() for char in name):
        raise unsupported(pointer, "its name cannot be written in the notation of this model's tool calls")


def text_language(schema: Any, root: Mapping[str, Any], pointer: str) -> Lang:
    """Return the texts that a schema allows. Raises `SchemaError` for keywords beyond those of texts."""
    schema = resolve(schema, root)
    assert isinstance(schema, Mapping), "other schemas allow more than texts"
    for key in schema:
        if key not in TEXT_KEYS:
            raise unsupported(step(pointer, key), REFUSED)
    found = ALL
    if "enum" in schema:
        found = alt(*(text(value) for value in schema["enum"] if isinstance(value, str)))
    if "const" in schema:
        found = both(found, text(schema["const"]))
    if "format" in schema:
        known = format_language(dict(schema), pointer)
        found = found if known is None else both(found, known)
    if "pattern" in schema:
        try:
            found = both(found, pattern_language(schema["pattern"]))
        except PatternError as error:
            raise unsupported(step(pointer, "pattern"), str(error)) from None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        if max(least, most or 0) > MAX_LENGTH:
            raise unsupported(step(pointer, "maxLength" if most else "minLength"), REFUSED)
        found = both(found, rep(ANY, int(least), None if most is None else int(most)))
    return found


def json_rule(builder: GrammarBuilder, schema: Any, root: Mapping[str, Any], options: JsonOptions, pointer: str) -> str:
    """Add a rule for the JSON values that a part of the schema `root` allows; return its name."""
    if isinstance(schema, Mapping) and _has_refs(schema):
        schema = {**{key: root[key] for key in DEFINITIONS if key in root}, **schema}
    try:
        return add_schema(builder, schema, options=options)
    except SchemaError as error:
        place = error.pointer.removeprefix("#")
        # Definitions are the root's, wherever they are used.
        where = "#" + place if place.startswith(("/$defs/", "/definitions/")) else pointer + place
        message = error.message.split(": ", 1)[-1]
        raise SchemaError(where, message, code=error.code or "unsupported_json_schema") from None


def _has_refs(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_has_refs, schema.values()))
    return isinstance(schema, list) and any(map(_has_refs, schema))


class ValueGrammar:
    """Rules for the values of a notation that is close to JSON.

    Args:
        root: the schema that "$ref"s point into. quote: what stands around texts, which then have no escapes and are
            the only things in quotes; None for Python, whose texts are written as in JSON.
    """

    def __init__(
        self, builder: GrammarBuilder, root: Mapping[str, Any], options: JsonOptions, quote: str | None
    ) -> None:
        self._builder = builder
        self._root = root
        self._options = options
        self._quote = quote
        self._any = ""

    def value(self, schema: Any, pointer: str, depth: int = 0) -> str:
        """Return an expression for the values that `schema` allows."""
        schema = resolve(schema, self._root)
        if depth > MAX_DEPTH:
            raise unsupported(pointer, "nested too deeply")
        if schema is True or (isinstance(schema, Mapping) and not set(schema) - NOTES):
            return self._anything()
        if not isinstance(schema, Mapping):
            raise unsupported(pointer, REFUSED)
        rest = set(schema) - NOTES
        if "enum" in rest or "const" in rest:
            return self._listed(schema, pointer)
        if rest == {"anyOf"}:
            ways = [
                self.value(one, step(pointer, "anyOf", index), depth + 1) for index, one in enumerate(schema["anyOf"])
            ]
            return f"({' | '.join(ways)})"
        listed = schema.get("type")
        if isinstance(listed, list):
            return "(" + " | ".join(self.value({**schema, "type": one}, pointer, depth + 1) for one in listed) + ")"
        match listed:
            case "boolean":
                return f"({' | '.join(literal(self._word(value)) for value in (True, False))})"
            case "null":
                return literal(self._word(None))
            case "integer" | "number":
                known = rest & {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
                numbers = {key: schema[key] for key in known}
                return json_rule(self._builder, numbers, self._root, self._options, pointer)
            case "string":
                return self._text(schema, pointer)
            case "array":
                return self._list(schema, pointer, depth)
            case "object":
                return self.mapping(schema, pointer, depth)
            case _:
                return self._other(schema, pointer)

    def _other(self, schema: Any, pointer: str) -> str:
        if self._quote is not None:
            raise unsupported(pointer, REFUSED)
        return json_rule(self._builder, schema, self._root, self._options, pointer)

    def _word(self, value: bool | None) -> str:
        word = {True: "True", False: "False", None: "None"}[value]
        return word if self._quote is None else {"None": "null"}.get(word, word.lower())

    def _listed(self, schema: Mapping[str, Any], pointer: str) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        ways = []
        for value in values:
            if value is None or isinstance(value, bool):
                ways.append(literal(self._word(value)))
            elif isinstance(value, str) and self._quote is not None:
                ways.append(self._quoted(text(value)))
            else:
                ways.append(
                    self._other({"const": value}, pointer) if not isinstance(value, int) else literal(str(value))
                )
        if set(schema) - NOTES - {"enum", "const", "type"} or {"enum", "const"} <= set(schema):
            return self._other(schema, pointer)
        return f"({' | '.join(ways)})"

    def _text(self, schema: Mapping[str, Any], pointer: str) -> str:
        if self._quote is None:
            return json_rule(self._builder, schema, self._root, self._options, pointer)
        return self._quoted(text_language(schema, self._root, pointer))

    def _quoted(self, lang: Lang) -> str:
        assert self._quote is not None, "asked for only with quotes"
        quote = self._builder.marker(self._quote)
        body = f"{terminal(lang, spelled=False)} & ~(/(?s:.*)/ {literal(self._quote)} /(?s:.*)/)"
        if self._quote in self._builder.special_tokens:
            empty = "?" if nullable(lang) else ""
            return f"{quote} {self._builder.terminal(body, 'quoted')}{empty} {quote}"
        return f"{quote} {self._builder.terminal(f'({body}) {literal(self._quote)}', 'quoted')}"

    def _list(self, schema: Mapping[str, Any], pointer: str, depth: int) -> str:
        if set(schema) - NOTES - {"type", "items", "minItems", "maxItems"}:
            return self._other(schema, pointer)
        item = self._builder.rule(self.value(schema.get("items", True), step(pointer, "items"), depth + 1), "item")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if max(least, most or 0) > MAX_LENGTH:
            raise unsupported(step(pointer, "maxItems" if most else "minItems"), REFUSED)
        if most == 0:
            return '"[]"'
        comma = self._comma()
        bounds = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        filled = f'"[" {item} ({comma} {item}){{{bounds}}} "]"'
        return filled if least else f'("[]" | {filled})'

    def _comma(self) -> str:
        return '", "' if self._quote is None else '","'

    def mapping(self, schema: Mapping[str, Any], pointer: str, depth: int = 0) -> str:
        """Return an expression for objects, braces included."""
        properties = schema.get("properties") or {}
        odd = set(schema) - NOTES - {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
        if odd or (self._quote is None and not properties):
            return self._other(schema, pointer)
        required = schema.get("required") or []
        if not properties and not required:
            return self._anything_in_braces() if schema.get("additionalProperties") is not False else '"{}"'
        items = []
        for name, sub in {**{name: True for name in required if name not in properties}, **properties}.items():
            if sub is False and name not in required:
                continue
            where = step(pointer, "properties", name)
            items.append((self._pair(name, sub, where, depth), name in required))
        return f'"{{" {pairs(self._builder, items, self._comma(), self._options.ordered)} "}}"'

    def _pair(self, name: str, schema: Any, pointer: str, depth: int) -> str:
        value = self.value(schema, pointer, depth + 1)
        if self._quote is None:
            key = json_rule(self._builder, {"const": name}, {}, self._options, pointer)
            return self._builder.rule(f'{key} ": " {value}', "pair")
        check_key(name, pointer)
        return self._builder.rule(f'{literal(name)} ":" {value}', "pair")

    def _anything(self) -> str:
        if self._quote is None:
            return json_rule(self._builder, True, {}, self._options, "#")
        if not self._any:
            self._any = self._builder.declare("any")
            words = " | ".join(literal(self._word(value)) for value in (True, False, None))
            number = json_rule(self._builder, {"type": "number"}, {}, self._options, "#")
            items = f'"[" ({self._any} ("," {self._any})*)? "]"'
            ways = (self._quoted(ALL), number, words, items, self._anything_in_braces())
            self._builder.define(self._any, " | ".join(ways))
        return self._any

    def _anything_in_braces(self) -> str:
        key = self._builder.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/", "name")
        one = self._builder.rule(f'{key} ":" {self._anything()}', "pair")
        return f'"{{" ({one} ("," {one})*)? "}}"'
