"""One schema document: its dialect, limits and structure; its subschemas as numbered nodes; where references lead.

A draft of JSON Schema decides which keywords are known, where subschemas occur and which type a keyword's value has.
Nothing is ever fetched: a reference that leads out of the document is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from quire.errors import echo
from quire.structured.json_schema.errors import (
    MAX_DEPTH,
    MAX_ENUM,
    MAX_PROPERTIES,
    MAX_SCHEMA_CHARS,
    invalid,
    step,
    too_complex,
    unsupported,
)

TYPES = ("null", "boolean", "number", "string", "array", "object")
TYPE_NAMES = (*TYPES, "integer")

# Draft 2020-12 is the default. Its number is the year, so that drafts compare: 4, 6, 7, 2019, 2020.
_SCHEMES = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "draft/2019-09": 2019, "draft/2020-12": 2020}

# Keywords whose value is a schema, a list of schemas, or an object of schemas ("items" is either of the first two).
SINGLE = frozenset(("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems"))
SINGLE |= {"propertyNames", "contains", "not", "if", "then", "else", "items"}
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))

_NEW = {  # draft -> the keywords that it brought
    6: ("const", "contains", "propertyNames"),
    7: ("if", "then", "else"),
    2019: (
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
        *("minContains", "maxContains", "$anchor", "$recursiveRef"),
    ),
    2020: ("prefixItems", "$dynamicRef", "$dynamicAnchor"),
}
_SINCE = {keyword: draft for draft, keywords in _NEW.items() for keyword in keywords}


def draft_of(address: str) -> int | None:
    """Return the draft that `$schema` names, or None if it is none of those known."""
    address = address.removesuffix("#")
    for scheme, draft in _SCHEMES.items():
        for protocol in ("http", "https"):
            if address == f"{protocol}://json-schema.org/{scheme}/schema":
                return draft
    return None


def knows(draft: int, keyword: str) -> bool:
    """Return whether `keyword` is more than an annotation in `draft`."""
    if keyword == "$recursiveRef":
        return draft == 2019
    return draft >= _SINCE.get(keyword, 0)


Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return whether `value` is a number of JSON."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_a(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def _either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _map_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_is_schema, _is_text = _is_a(dict, bool), _is_a(str)
_is_type: Check = lambda value: isinstance(value, str) and value in TYPE_NAMES  # noqa: E731

# keyword -> (check of its value, what it must be)
FORMS: dict[str, tuple[Check, str]] = {
    "type": (_either(_is_type, _list_of(_is_type)), f"one or several of {', '.join(TYPE_NAMES)}"),
    "enum": (_is_a(list), "an array"),
    "required": (_list_of(_is_text), "an array of strings"),
    "dependentRequired": (_map_of(_list_of(_is_text)), "an object of arrays of strings"),
    "dependencies": (_map_of(_either(_is_schema, _list_of(_is_text))), "an object of schemas and arrays of strings"),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "uniqueItems": (_is_a(bool), "a boolean"),
}
FORMS |= dict.fromkeys(("minimum", "maximum"), (is_number, "a number"))
FORMS |= dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_either(is_number, _is_a(bool)), "a number"))
FORMS |= dict.fromkeys(
    ("pattern", "format", "$ref", "$id", "$anchor", "$dynamicRef", "$dynamicAnchor"), (_is_text, "a string")
)
FORMS |= dict.fromkeys(
    (end + what for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")),
    (_is_count, "a whole number that is not negative"),
)
FORMS |= dict.fromkeys(SINGLE, (_is_schema, "a schema (an object or a boolean)"))
FORMS |= dict.fromkeys(
    LISTS, (lambda value: bool(value) and _list_of(_is_schema)(value), "an array of schemas that is not empty")
)
FORMS |= dict.fromkeys(MAPS - {"dependencies"}, (_map_of(_is_schema), "an object of schemas"))
FORMS["items"] = (_either(_is_schema, _list_of(_is_schema)), "a schema or an array of schemas")


FALSE, TRUE = 0, 1


@dataclass(frozen=True)
class Node:
    """A subschema, where it stands, and the address that references in it start from."""

    schema: Any
    pointer: str
    base: str


class Document:
    """The nodes of a schema; raises `SchemaError` for what is no schema or beyond the limits.

    Attributes:
        nodes: number 0 is the schema false, 1 the schema true. root: the number of the whole. draft: 4, 6, 7, 2019
            or 2020.
    """

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        schema = _copy(schema)
        self.nodes = [Node(False, "#", ""), Node(True, "#", "")]
        self._numbers: dict[int, int] = {}
        self._made: dict[str, int] = {}
        self._resources: dict[str, int] = {}
        self._anchors: dict[tuple[str, str], int] = {}
        self.dynamic: dict[str, list[int]] = {}
        self._properties = 0
        self.draft = self._draft(schema)
        self.root = self._walk(schema, "#", "", 0)
        self._resources.setdefault("", self.root)

    def number(self, schema: Any, pointer: str, base: str) -> int:
        """Return the number of a subschema, giving it one if it has none."""
        if isinstance(schema, bool) or schema == {}:
            return FALSE if schema is False else TRUE
        if id(schema) not in self._numbers:
            self._numbers[id(schema)] = len(self.nodes)
            self.nodes.append(Node(schema, pointer, base))
        return self._numbers[id(schema)]

    def make(self, schema: dict[str, Any], pointer: str) -> int:
        """Return the number of a schema that the compiler made up; equal ones are one."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._made:
            self._made[key] = len(self.nodes)
            self.nodes.append(Node(schema, pointer, ""))
        return self._made[key]

    def child(self, node: Node, *keys: str | int) -> int:
        """Return the number of the subschema of `node` at `keys`."""
        schema = node.schema
        for key in keys:
            schema = schema[key]
        return self.number(schema, step(node.pointer, *keys), self._base(schema, node.base))

    def resolve(self, node: Node, reference: str, keyword: str = "$ref") -> int:
        """Return the number of the schema that `reference` in `node` leads to."""
        pointer = step(node.pointer, keyword)
        address, fragment = _join(node.base, reference)
        start = self._resources.get(address)
        if start is None:
            raise unsupported(pointer, f"{echo(reference)} leads out of the schema; nothing is fetched")
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((address, fragment))
            if found is None:
                raise invalid(pointer, f"there is no anchor {echo(fragment)}")
            return found
        return self._follow(start, unquote(fragment), pointer)

    def _follow(self, start: int, path: str, pointer: str) -> int:
        node = self.nodes[start]
        schema, where, base = node.schema, node.pointer, node.base
        for key in path.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, dict) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(schema):
                schema = schema[int(key)]
            else:
                raise invalid(pointer, f"it leads nowhere: there is no {echo(key)} at {where[:200]}")
            where = step(where, key)
            base = self._base(schema, base)
        if not isinstance(schema, dict | bool):
            raise invalid(pointer, f"what it leads to is no schema: {echo(schema)}")
        if isinstance(schema, dict) and schema and id(schema) not in self._numbers:
            # Schemas under unknown keywords count only once something refers to them.
            self._walk(schema, where, base, where.count("/"))
        return self.number(schema, where, base)

    def _draft(self, schema: Any) -> int:
        address = schema.get("$schema") if isinstance(schema, dict) else None
        if address is None:
            return 2020
        if not isinstance(address, str):
            raise invalid("#/$schema", f"must be a string, got {echo(address)}")
        draft = draft_of(address)
        if draft is None:
            raise unsupported("#/$schema", f"{echo(address)} is none of the drafts 4, 6, 7, 2019-09, 2020-12")
        return draft

    def _base(self, schema: Any, base: str) -> str:
        name = self._id(schema)
        return base if name is None or name.startswith("#") else _join(base, name)[0]

    def _id(self, schema: Any) -> str | None:
        if not isinstance(schema, dict) or ("$ref" in schema and self.draft <= 7):
            return None
        name = schema.get("id" if self.draft == 4 else "$id")
        return name if isinstance(name, str) else None

    def _walk(self, schema: Any, pointer: str, base: str, depth: int) -> int:
        """Check the subschema at `pointer` and those inside it, and remember their addresses and anchors."""
        if isinstance(schema, bool):
            if self.draft == 4 and not pointer.endswith(("/additionalProperties", "/additionalItems")):
                raise invalid(pointer, "draft 4 has no boolean schemas")
            return int(schema)
        if not isinstance(schema, dict):
            raise invalid(pointer, f"a schema must be an object or a boolean, got {echo(schema)}")
        if depth > MAX_DEPTH:
            raise too_complex(pointer, f"schemas are nested more than {MAX_DEPTH} deep")
        base = self._base(schema, base)
        number = self.number(schema, pointer, base)
        self._remember(schema, pointer, base, number)
        if "$ref" in schema and self.draft <= 7:
            self._check(schema, "$ref", pointer)
            kept = [key for key in ("definitions", "$defs") if key in schema]
        else:
            kept = [key for key in schema if knows(self.draft, key)]
        for keyword in kept:
            self._check(schema, keyword, pointer)
            self._descend(schema[keyword], keyword, step(pointer, keyword), base, depth + 1)
        return number

    def _descend(self, value: Any, keyword: str, pointer: str, base: str, depth: int) -> None:
        if keyword in MAPS:
            for key, part in value.items():
                if not isinstance(part, list):
                    self._walk(part, step(pointer, key), base, depth)
        elif keyword in LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                self._walk(part, step(pointer, index), base, depth)
        elif keyword in SINGLE:
            self._walk(value, pointer, base, depth)

    def _check(self, schema: dict[str, Any], keyword: str, pointer: str) -> None:
        form = FORMS.get(keyword)
        value = schema[keyword]
        if form is not None and not form[0](value):
            raise invalid(step(pointer, keyword), f"must be {form[1]}, got {echo(value)}")
        if keyword == "enum" and len(value) > MAX_ENUM:
            raise too_complex(step(pointer, keyword), f"more than {MAX_ENUM} values")
        if keyword in ("properties", "patternProperties"):
            self._properties += len(value)
            if self._properties > MAX_PROPERTIES:
                raise too_complex(step(pointer, keyword), f"more than {MAX_PROPERTIES} properties in all")

    def _remember(self, schema: dict[str, Any], pointer: str, base: str, number: int) -> None:
        named = self._id(schema) is not None
        if pointer != "#" and named and "$schema" in schema and draft_of(str(schema["$schema"])) != self.draft:
            raise unsupported(step(pointer, "$schema"), "another draft than that of the whole schema")
        name = self._id(schema)
        if name is not None and name.startswith("#") and self.draft <= 7:
            self._anchors[base, name[1:]] = number
        elif name is not None or pointer == "#":
            self._resources.setdefault(base, number)
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = schema.get(keyword)
            if knows(self.draft, keyword) and isinstance(anchor, str):
                self._anchors.setdefault((base, anchor), number)
                if keyword == "$dynamicAnchor":
                    self.dynamic.setdefault(anchor, []).append(number)


def _join(base: str, reference: str) -> tuple[str, str]:
    if reference.startswith("#"):
        return base, reference[1:]
    try:
        address, fragment = urldefrag(urljoin(base, reference) if base else reference)
    except ValueError:
        return "\0", ""
    return address, fragment


def _copy(schema: Any) -> Any:
    """Return a deep copy made of JSON only, so that no two parts are one object; checks depth and size."""
    _check_depth(schema)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise invalid("#", f"it is no JSON: {error}") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise too_complex("#", f"its text has more than {MAX_SCHEMA_CHARS} characters")
    return json.loads(text)


def _check_depth(schema: Any) -> None:
    # Without recursion, as the schema may be deeper than Python's stack, or contain itself.
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > 4 * MAX_DEPTH:
            raise too_complex("#", f"it is nested more than {MAX_DEPTH} deep")
        if len(level) > MAX_SCHEMA_CHARS:
            raise too_complex("#", f"its text has more than {MAX_SCHEMA_CHARS} characters")
        deeper: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                deeper.extend(part.values())
            elif isinstance(part, list | tuple):
                deeper.extend(part)
        level = deeper
