"""`StructuredOutputParams`: how the text of one request is constrained. Fields, defaults, and what excludes what.

Names are those of vLLM's `structured_outputs`. Whether a schema, regex or grammar is sound is found out where it is
compiled (`quire.structured`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.checks import check_bool, check_list, check_unicode, wrong_type, wrong_value
from quire.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
PROPERTY_ORDERS = ("any", "schema")
MAX_CHOICES = 1000


class StructuredOutputParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of a text. Exactly one of the first six must be given; raises `RequestError` naming the field.

    Attributes:
        json: a JSON schema, as an object, or as its JSON text. regex: the whole text must match it.
        choice: the text is one of these. grammar: Lark (as llguidance reads it), or GBNF/EBNF (rules with "::=").
        json_object: any JSON object; only True. structural_tag: free text with tagged parts, each with a schema: an
            object of the form {"type": "structural_tag", "format": ...}, or the older {"structures", "triggers"}; or
            its JSON text.
        disable_any_whitespace: no blanks between the parts of JSON.
        disable_additional_properties: properties that a schema does not name are forbidden, unless it allows them with
            `additionalProperties`. False: the default of JSON Schema, which allows any; models tend to invent some.
        whitespace_pattern: a regex for the blanks between the parts of JSON.
        property_order: "any" admits the properties of an object in any order, "schema" only in that of the schema.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    whitespace_pattern: str | None = None
    property_order: str = "any"

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            problem = "got none" if not given else f"got {' and '.join(given)}"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; {problem}", param="structured_outputs"
            )
        self._check_kind(given[0])
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_bool(f"structured_outputs.{name}", getattr(self, name))
        if self.whitespace_pattern is not None:
            _check_text("structured_outputs.whitespace_pattern", self.whitespace_pattern)
            check_unicode(self.whitespace_pattern, "structured_outputs.whitespace_pattern")
            if self.disable_any_whitespace:
                raise RequestError(
                    "structured_outputs.whitespace_pattern contradicts disable_any_whitespace; give one of them",
                    param="structured_outputs.whitespace_pattern",
                )
        if self.property_order not in PROPERTY_ORDERS:
            raise wrong_value(
                "structured_outputs.property_order", f"one of {', '.join(PROPERTY_ORDERS)}", self.property_order
            )

    def _check_kind(self, kind: str) -> None:
        where, value = f"structured_outputs.{kind}", getattr(self, kind)
        if kind == "json_object":
            if value is not True:
                raise wrong_value(where, "true or absent", value)
        elif kind == "choice":
            if not value and isinstance(value, list | tuple):
                raise RequestError(f"{where} must not be empty", param=where, code="empty_array")
            self.choice = check_list(where, value, MAX_CHOICES)
            for index, item in enumerate(self.choice):
                _check_text(f"{where}[{index}]", item)
        elif kind in ("regex", "grammar"):
            _check_text(where, value, code="invalid_grammar")
        elif kind == "json":
            if not isinstance(value, str | dict | bool):
                raise wrong_type(where, "a schema or its JSON text", value)
        elif not isinstance(value, str | dict):
            raise wrong_type(where, "an object or its JSON text", value)
        check_unicode(value, where)


def _check_text(where: str, value: Any, code: str = "string_below_min_length") -> None:
    if not isinstance(value, str):
        raise wrong_type(where, "a string", value)
    if not value:
        raise RequestError(f"{where} must not be empty", param=where, code=code)
