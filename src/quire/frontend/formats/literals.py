"""The grammar of single values: raw text, JSON, and the literals of notations that are close to JSON.

`pairs` is the grammar of items that each occur at most once, some of them always, in a given order or in any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.errors import echo
from quire.frontend.formats.parameters import DEFINITIONS, NOTES, resolve
from quire.structured.builder import GrammarBuilder, literal
from quire.structured.json_schema.compiler import JsonOptions, add_schema
from quire.structured.json_schema.ecma import PatternError, pattern_language
from quire.structured.json_schema.errors import SchemaError, step, unsupported
from quire.structured.json_schema.formats import format_language
from quire.structured.json_schema.regular import ALL, ANY, Lang, alt, both, nullable, rep, text
from quire.structured.json_schema.spelling import terminal

MAX_ANY_ORDER = 60


def pairs(builder: GrammarBuilder, items: Sequence[tuple[str, bool]], separator: str, ordered: bool) -> str:
    """Return an expression for items of which some are required, each at most once.

    Args:
        items: rule and whether it is required. separator: a literal, or "" for none. ordered: in this order only.
    """
    if not items:
        return '""'
    if ordered or len(items) > MAX_ANY_ORDER:
        return _in_order(builder, items, separator)
    return _in_any_order(builder, items, separator)


def _in_order(builder: GrammarBuilder, items: Sequence[tuple[str, bool]], separator: str) -> str:
    first, rest = '""', '""'  # what may come when items[i] is next, and nothing or something stands before it
    for item, required in reversed(items):
        begun = builder.rule(f"{item} {rest}", "items")
        first = begun if required else builder.rule(f"{begun} | {first}", "items")
        going = builder.rule(f"{separator} {item} {rest}", "items")
        rest = going if required else builder.rule(f"{going} | {rest}", "items")
    return first


def _in_any_order(builder: GrammarBuilder, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """One bit per item says that it was there (parametric rules; they must be right-recursive)."""
    needed = [index for index, (_, required) in enumerate(items) if required]
    done = " and ".join(f"bit_set({index})" for index in needed)
    if len(needed) > 1:
        done = f"bit_set({needed[-1]})"
        for index in reversed(needed[:-1]):
            done = f"and(bit_set({index}), {done})"
    end = f'"" %if {done}' if needed else '""'
    more = builder.declare("more")
    ways = [f"{item} {more}::set_bit({index}) %if bit_clear({index})" for index, (item, _) in enumerate(items)]
    if not separator:
        builder.define(more, " | ".join([*ways, end]), "::_")
        return f"{more}::0x0"
    one = builder.declare("one")
    builder.define(one, " | ".join(ways), "::_")
    # Once all are there, nothing may begin another.
    builder.define(more, f"{separator} {one}::_ %if bit_count_lt(_, {len(items)}) | {end}", "::_")
    return f"{one}::0x0" if needed else f"({one}::0x0)?"


NUMBER_KEYS = {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
MAX_DEPTH = 16
MAX_LENGTH = 1 << 16
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
REFUSED = "cannot be enforced in the notation of this model's tool calls"
TEXT_KEYS = NOTES | {"type", "enum", "const", "format", "pattern", "minLength", "maxLength"}


def check_key(name: str, pointer: str, close: str | None = None) -> None:
    """Raise `SchemaError` unless a parameter of this name can be written without quotes, up to `close` if given."""
    odd = any(char in " \t\r\n=,:()[]{}\"'<>" or not char.isprintable() for char in name)
    if not name or (odd if close is None else close in name):
        raise unsupported(pointer, f"its name {REFUSED}")


def named_properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return the properties that an object schema names: name, schema, and whether it is required."""
    required = schema.get("required") or []
    properties = dict(schema.get("properties") or {})
    for name in required:
        properties.setdefault(name, schema.get("additionalProperties", True))
    return [(name, sub, name in required) for name, sub in properties.items() if sub is not False or name in required]


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
    references = set(references_in(schema))
    if references:
        definitions = {key: root[key] for key in DEFINITIONS if key in root}
        references.update(references_in(definitions))
        check_references(references, pointer)
        schema = {**schema, **definitions}
    try:
        return add_schema(builder, schema, options=options)
    except SchemaError as error:
        place = error.pointer.removeprefix("#")
        # Definitions are the root's, wherever they are used.
        where = "#" + place if place.startswith(("/$defs/", "/definitions/")) else pointer + place
        message = error.message.split(": ", 1)[-1]
        raise SchemaError(where, message, code=error.code or "unsupported_json_schema") from None


def references_in(schema: Any) -> Iterator[Any]:
    """Yield all references in a schema."""
    if isinstance(schema, Mapping):
        yield from (schema[key] for key in ("$ref", "$dynamicRef", "$recursiveRef") if key in schema)
        schema = list(schema.values())
    if isinstance(schema, list):
        for one in schema:
            yield from references_in(one)


def check_references(references: Iterable[Any], pointer: str) -> None:
    """Raise `SchemaError` unless all of these still mean the same when a part of a schema is taken out of it."""
    for one in references:
        if not str(one).startswith(tuple(f"#/{key}/" for key in DEFINITIONS)):
            raise unsupported(pointer, f"{echo(one)} {REFUSED}; definitions in $defs can be referred to")


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
            case "boolean" if rest == {"type"}:
                return f"({' | '.join(literal(self._word(value)) for value in (True, False))})"
            case "null" if rest == {"type"}:
                return literal(self._word(None))
            case "integer" | "number" if rest <= NUMBER_KEYS:
                return json_rule(self._builder, schema, self._root, self._options, pointer)
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
        rest = set(schema) - NOTES - {"type"}
        if rest not in ({"enum"}, {"const"}):
            return self._other(schema, pointer)
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types = schema.get("type", list(TYPES))
        types = [types] if isinstance(types, str) else types
        values = [value for value in values if any(isinstance(value, TYPES[one]) for one in types)]
        if not values or any(isinstance(value, float | list | dict) for value in values):
            return self._other(schema, pointer)
        return f"({' | '.join(self._constant(value, pointer) for value in values)})"

    def _constant(self, value: Any, pointer: str) -> str:
        if value is None or isinstance(value, bool):
            return literal(self._word(value))
        if isinstance(value, int):
            return literal(str(value))
        return self._other({"const": value}, pointer) if self._quote is None else self._quoted(text(value))

    def _text(self, schema: Mapping[str, Any], pointer: str) -> str:
        if self._quote is None:
            return json_rule(self._builder, schema, self._root, self._options, pointer)
        return self._quoted(text_language(schema, self._root, pointer))

    def _quoted(self, lang: Lang) -> str:
        assert self._quote is not None, "asked for only with quotes"
        quote = self._builder.marker(self._quote)
        body = f"{terminal(lang)} & ~(/(?s:.*)/ {literal(self._quote)} /(?s:.*)/)"
        if self._quote in self._builder.special_tokens:
            empty = "?" if nullable(lang) else ""
            return f"{quote} {self._builder.terminal(body, 'quoted')}{empty} {quote}"
        inner = self._builder.terminal(body, "quoted")
        return f"{quote} {self._builder.rule(f'{inner} {literal(self._quote)}', 'quoted', 'lazy')}"

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
        named = named_properties(schema)
        if not named:
            return self._anything_in_braces() if schema.get("additionalProperties") is not False else '"{}"'
        items = []
        for name, sub, required in named:
            where = step(pointer, "properties", name)
            items.append((self._pair(name, sub, where, depth), required))
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
