"""The drafts of JSON Schema: which keywords each knows, where subschemas stand, and of which form values must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")
TYPE_NAMES = (*TYPES, "integer")

# Draft 2020-12 is the default. Its number is the year, so that drafts compare: 4, 6, 7, 2019, 2020.
_SCHEMES = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "draft/2019-09": 2019, "draft/2020-12": 2020}

SINGLE = frozenset(
    (
        "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
        "contains", "not", "if", "then", "else", "items",
    )
)  # fmt: skip
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))

_SINCE = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7,
    "dependentRequired": 2019, "dependentSchemas": 2019, "unevaluatedProperties": 2019, "unevaluatedItems": 2019,
    "minContains": 2019, "maxContains": 2019, "$anchor": 2019, "$recursiveRef": 2019,
    "prefixItems": 2020, "$dynamicRef": 2020, "$dynamicAnchor": 2020,
}  # fmt: skip


def draft_of(address: str) -> int | None:
    """Return the draft that `$schema` names, or None if it is none of those known."""
    address = address.removesuffix("#")
    for scheme, draft in _SCHEMES.items():
        for protocol in ("http", "https"):
            if address == f"{protocol}://json-schema.org/{scheme}/schema":
                return draft
    return None


def knows(draft: int, keyword: str) -> bool:
    """Tell whether `keyword` is more than an annotation in `draft`."""
    if keyword == "$recursiveRef":
        return draft == 2019
    return draft >= _SINCE.get(keyword, 0)


def _is_count(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return value >= 0 and (isinstance(value, int) or value.is_integer()) if isinstance(value, int | float) else False


def is_number(value: Any) -> bool:
    """Tell whether `value` is a number of JSON."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    return value in TYPE_NAMES if isinstance(value, str) else _is_names(value) and all(v in TYPE_NAMES for v in value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_limit(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_name_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _is_dependencies(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_schema(item) or _is_names(item) for item in value.values())


def _is_items(value: Any) -> bool:
    return _is_schema(value) or (isinstance(value, list) and all(map(_is_schema, value)))


def _is_multiple(value: Any) -> bool:
    return is_number(value) and value > 0


_COUNT = (_is_count, "a whole number that is not negative")
_SCHEMA = (_is_schema, "a schema (an object or a boolean)")
_MAP = (_is_schema_map, "an object of schemas")
_LIST = (_is_schemas, "an array of schemas that is not empty")
_NUMBER = (is_number, "a number")
_TEXT = (_is_text, "a string")

FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one or several of {', '.join(TYPE_NAMES)}"),
    "enum": (lambda value: isinstance(value, list), "an array"),
    "required": (_is_names, "an array of strings"),
    "dependentRequired": (_is_name_map, "an object of arrays of strings"),
    "dependencies": (_is_dependencies, "an object of schemas and arrays of strings"),
    "items": (_is_items, "a schema or an array of schemas"),
    "multipleOf": (_is_multiple, "a number above 0"),
    "minimum": _NUMBER, "maximum": _NUMBER,
    "exclusiveMinimum": (_is_limit, "a number"), "exclusiveMaximum": (_is_limit, "a number"),
    "pattern": _TEXT, "format": _TEXT, "$ref": _TEXT, "$id": _TEXT, "$anchor": _TEXT, "$dynamicRef": _TEXT,
    "$dynamicAnchor": _TEXT, "uniqueItems": (_is_bool, "a boolean"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _MAP),
    **dict.fromkeys(SINGLE - {"items"}, _SCHEMA),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
         "maxContains"), _COUNT,
    ),
}  # fmt: skip
