"""The constraint of a call's arguments, in each notation of `parts`, from the schema of the tool's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError
from quire.frontend.formats.literals import (
    REFUSED,
    ValueGrammar,
    check_key,
    check_references,
    json_rule,
    named_properties,
    pairs,
    references_in,
    text_language,
)
from quire.frontend.formats.message import Tool
from quire.frontend.formats.parameters import DEFINITIONS, JSON, NOTES, STRING, kind_of, resolve
from quire.frontend.formats.parts import Braces, JsonObject, Notation, Tagged
from quire.structured.builder import GrammarBuilder, literal
from quire.structured.json_schema.compiler import JsonOptions, add_json_object, add_schema
from quire.structured.json_schema.document import Document
from quire.structured.json_schema.errors import SchemaError, step, unsupported
from quire.structured.json_schema.regular import (
    ALL,
    EPSILON,
    Lang,
    alt,
    both,
    cat,
    chars,
    cls,
    complement,
    neg,
    nullable,
    ranges_of,
    rep,
    text,
)
from quire.structured.json_schema.spelling import terminal

MAX_NESTING = 4
BLANK_CHARS = " \t\r\n"
WORDS = ("true", "false", "null", "True", "False", "None")
OBJECT_KEYS = NOTES | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$schema",
    "$id",
    "$defs",
    "definitions",
}


class ToolSchemaError(RequestError):
    """The parameters of a tool cannot be enforced. `index`: the tool's number in the request."""

    default_code = "invalid_function_parameters"

    def __init__(self, index: int, error: SchemaError) -> None:
        where = f"tools[{index}].function.parameters"
        super().__init__(f"{where}: {error.message}", param=where + error.pointer)
        self.index = index


def add_arguments(builder: GrammarBuilder, notation: Notation, tool: Tool, index: int, unenforced: bool = False) -> str:
    """Add a rule for the arguments of a call of `tool`, which has number `index` in the request; return its name.

    Args:
        unenforced: whatever arguments the notation can express, instead of what the schema says.

    Raises:
        ToolSchemaError: for a part of the schema that cannot be enforced in this notation.
    """
    options = JsonOptions(additional_properties=False, ordered=tool.strict)
    schema: dict[str, Any] = {} if unenforced else dict(tool.parameters)
    try:
        if isinstance(notation, JsonObject):
            return _add_json(builder, schema, options)
        return _Parameters(builder, notation, schema, options).add()
    except SchemaError as error:
        raise ToolSchemaError(index, error) from None


def add_json_call(
    builder: GrammarBuilder, tool: Tool, index: int, keys: tuple[str, str], unenforced: bool = False
) -> str:
    """Add a rule for a call as one JSON object, of which `keys` name function and arguments; return its name.

    Raises as `add_arguments`.
    """
    schema: dict[str, Any] = {} if unenforced else dict(tool.parameters)
    definitions = {key: schema.pop(key) for key in DEFINITIONS if key in schema}
    name, arguments = keys
    whole = {
        "type": "object",
        "properties": {name: {"const": tool.name}, arguments: {**schema, "type": "object"}},
        "required": [name, arguments],
        "additionalProperties": False,
        **definitions,
    }
    try:
        Document(tool.parameters)  # raises for what is no schema
        check_references(references_in(tool.parameters), "#")
        return add_schema(builder, whole, options=JsonOptions(whitespace="none", ordered=True))
    except SchemaError as error:
        place = error.pointer.removeprefix(step("#/properties", arguments)).removeprefix("#")
        message = error.message.split(": ", 1)[-1]
        raise ToolSchemaError(index, SchemaError(f"#{place}", message, code="unsupported_json_schema")) from None


def _add_json(builder: GrammarBuilder, schema: dict[str, Any], options: JsonOptions) -> str:
    if not schema:
        return add_json_object(builder, options)
    _check_object(schema)
    return add_schema(builder, {**schema, "type": "object"}, options=options)


def _check_object(schema: Mapping[str, Any]) -> None:
    listed = schema.get("type", "object")
    if listed != "object" and not (isinstance(listed, list) and "object" in listed):
        raise unsupported("#/type", "arguments of a function are an object")


class _Parameters:
    """Arguments in a notation in which parameters stand one by one."""

    def __init__(
        self, builder: GrammarBuilder, notation: Notation, schema: dict[str, Any], options: JsonOptions
    ) -> None:
        self._builder = builder
        self._notation = notation
        self._root = schema
        self._options = options
        quote = notation.quote if isinstance(notation, Braces) else None
        self._values = ValueGrammar(builder, schema, options, quote)

    def add(self) -> str:
        Document(self._root)  # raises for what is no schema
        schema = resolve(self._root, self._root)
        if not isinstance(schema, Mapping):
            raise unsupported("#", REFUSED)
        _check_object(schema)
        for key in schema:
            if key not in OBJECT_KEYS:
                raise unsupported(step("#", key), REFUSED)
        notation = self._notation
        if isinstance(notation, Braces):
            return self._builder.rule(self._values.mapping(schema, "#"), "arguments")
        named = named_properties(schema)
        if not named and schema.get("additionalProperties") is not False:
            return self._free()
        items = [(self._parameter(name, sub, step("#/properties", name)), required) for name, sub, required in named]
        separator = "" if isinstance(notation, Tagged) else '", "'
        return self._builder.rule(pairs(self._builder, items, separator, self._options.ordered), "arguments")

    def _free(self) -> str:
        """Return a rule for any parameters."""
        name = self._builder.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/", "name")
        if isinstance(self._notation, Tagged):
            one = self._builder.rule(f"{self._tagged(name, True, '#')}", "parameter")
            return self._builder.rule(f"{one}*", "arguments")
        one = self._builder.rule(f'{name} "=" {self._values.value(True, "#")}', "parameter")
        return self._builder.rule(f'({one} (", " {one})*)?', "arguments")

    def _parameter(self, name: str, schema: Any, pointer: str) -> str:
        check_key(name, pointer, self._notation.key_close if isinstance(self._notation, Tagged) else None)
        if isinstance(self._notation, Tagged):
            return self._builder.rule(self._tagged(literal(name), schema, pointer), "parameter")
        return self._builder.rule(f'{literal(name)} "=" {self._values.value(schema, pointer)}', "parameter")

    # Tagged parameters

    def _tagged(self, name: str, schema: Any, pointer: str) -> str:
        """Return an expression for a parameter with its tags."""
        tags = self._notation
        assert isinstance(tags, Tagged), "only called for these"
        marker = self._builder.marker
        begin = [literal(tags.between) + "?"] if tags.between else []
        begin += [marker(tags.key_open), name, marker(tags.key_close)]
        if tags.value_open:
            begin += [literal(tags.between) + "?"] if tags.between else []
            begin.append(marker(tags.value_open))
        if tags.pad:
            begin.append(literal(tags.pad))
        kind = kind_of(schema, self._root)
        if kind == STRING:
            lang, free = text_language(schema, self._root, pointer), False
            if lang == ALL:
                free = True
            ways = [self._raw(lang, free)]
        else:
            rule = self._json_value(schema, pointer)
            pad = literal(tags.pad) if tags.pad else ""
            ways = [f"{rule} {pad} {marker(tags.value_close)}"]
            if kind != JSON and _admits_any_text(schema, self._root):
                # One lexeme with words that are JSON, or these would be taken for the beginnings of longer texts.
                ways.append(self._raw(alt(_no_json(), *map(text, _words(schema, self._root))), False))
        return " ".join([*begin, ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"])

    def _raw(self, lang: Lang, free: bool) -> str:
        """Return an expression for a text as it is, its pad (which `free` texts may lack) and its end tag."""
        tags = self._notation
        assert isinstance(tags, Tagged), "only called for these"
        close = tags.value_close
        body = f"({terminal(lang)} & ~(/(?s:.*)/ {literal(close)} /(?s:.*)/))"
        if tags.pad and not free:
            body = f"({body} {literal(tags.pad)})"
        if close in self._builder.special_tokens:
            empty = "?" if nullable(lang) and (free or not tags.pad) else ""
            return f"{self._builder.terminal(body, 'value')}{empty} {self._builder.marker(close)}"
        # One lazy lexeme, as in `grammar.Writer.until`.
        return self._builder.rule(f"{self._builder.terminal(body, 'value')} {literal(close)}", "value", "lazy")

    def _json_value(self, schema: Any, pointer: str) -> str:
        resolved = resolve(schema, self._root)
        if isinstance(resolved, Mapping) and resolved.get("type") == "boolean" and set(resolved) <= NOTES | {"type"}:
            # The templates of these families write booleans as Python does.
            return self._builder.terminal(" | ".join(map(literal, ("true", "false", "True", "False"))), "bool")
        return json_rule(self._builder, schema, self._root, self._options, pointer)


def _admits_any_text(schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a schema allows every text, as far as that is easily seen."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return schema is True
    rest = set(schema) - NOTES
    if rest == {"anyOf"}:
        return depth < MAX_NESTING and any(_admits_any_text(one, root, depth + 1) for one in schema["anyOf"])
    if not rest <= {"type", "minimum", "maximum", "items", "properties", "required", "additionalProperties"}:
        return False
    return "type" not in rest or "string" in schema["type"]


def _words(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the words for booleans and null that a schema allows, as far as that is easily seen."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return {"true", "false", "null"} if schema is True else set()
    rest = set(schema) - NOTES
    if rest == {"anyOf"}:
        return set().union(*(_words(one, root, depth + 1) for one in schema["anyOf"] if depth < MAX_NESTING))
    if rest - {"type"} and not _admits_any_text(schema, root):
        return set()
    types = schema.get("type", ["boolean", "null"])
    return ({"true", "false"} if "boolean" in types else set()) | ({"null"} if "null" in types else set())


def _no_json() -> Lang:
    """Return the texts that cannot be the beginning of JSON."""
    odd = frozenset(map(ord, BLANK_CHARS + '"{[-0123456789'))
    plain = cat(cls(complement(ranges_of((point, point) for point in odd))), ALL)
    words = cat(alt(*map(text, WORDS)), rep(chars(BLANK_CHARS), 0, None))
    return both(alt(EPSILON, plain), neg(words))
