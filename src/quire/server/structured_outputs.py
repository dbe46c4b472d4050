"""Structured output in requests: `response_format`, `structured_outputs`, and vLLM's older `guided_*` fields.

All become `StructuredOutputParams`. Errors about these, wherever they are found, name the field that the client sent
(`StructuredOutput.names`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.checks import Fields, wrong_value
from quire.errors import RequestError
from quire.sampling_params import check_structured_outputs
from quire.server.field_names import FieldNames
from quire.server.protocol import GenerationRequest
from quire.structured_outputs import KINDS, StructuredOutputParams

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Types of `response_format` -> the fields that belong to them.
RESPONSE_FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}
JSON_SCHEMA_FIELDS = ("name", "schema", "strict", "description")
GUIDED = ("json", "regex", "choice", "grammar")


class StructuredOutput:
    """The structured output of a request.

    Args:
        fields: of `StructuredOutputParams`. kind, field: the form, and the field that the client sent for it, if it is
            not `structured_outputs`.

    Attributes:
        names: the client's names of fields in errors, as for `FieldNames`. Options keep their names.

    Raises:
        RequestError: a field is malformed.
    """

    def __init__(self, fields: Mapping[str, Any], kind: str = "", field: str = "") -> None:
        self.names = {rf"structured_outputs(\.{kind}|(?!\.))": field} if field else {}
        with FieldNames(self.names).translating():
            self.params = check_structured_outputs("structured_outputs", fields)


def structured_output(body: GenerationRequest) -> StructuredOutput | None:
    """Return the structured output of a request, None for any text.

    Raises:
        RequestError: a field is malformed, or several fields ask for structured output.
    """
    params = _structured_outputs(body)
    options: dict[str, Any] = {}
    if params is not None and body.response_format is not None and not params.keys() & set(KINDS):
        options, params = params, None  # options of `response_format`
    requested: dict[str, Callable[[], StructuredOutput | None]] = {}
    if body.response_format is not None:
        requested["response_format"] = lambda: _response_format(body.fields.object("response_format"), options)
    if params is not None:
        requested["structured_outputs"] = lambda: StructuredOutput(params)
    for kind in GUIDED:
        name = f"guided_{kind}"
        if getattr(body, name) is not None:
            requested[name] = lambda kind=kind: _guided(body, kind)  # type: ignore[misc]
    found = {name: form for name, make in requested.items() if (form := make()) is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(f"{second} contradicts {first}; give one of them", param=second)
    if body.guided_whitespace_pattern is not None and "guided_json" not in found:
        raise RequestError("guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern")
    return next(iter(found.values()), None)


def _structured_outputs(body: GenerationRequest) -> dict[str, Any] | None:
    if body.structured_outputs is None:
        return None
    known = StructuredOutputParams.__struct_fields__
    fields = body.fields.object("structured_outputs", known)
    return {name: item for name, item in fields.values.items() if name in known}


def _guided(body: GenerationRequest, kind: str) -> StructuredOutput:
    name = f"guided_{kind}"
    fields: dict[str, Any] = {kind: getattr(body, name)}
    if kind == "json" and body.guided_whitespace_pattern is not None:
        fields["whitespace_pattern"] = body.guided_whitespace_pattern
    return StructuredOutput(fields, kind, name)


def _response_format(form: Fields, options: Mapping[str, Any]) -> StructuredOutput | None:
    kind = form.choice("type", RESPONSE_FORMATS)
    known = ("type", *RESPONSE_FORMATS[kind])
    form.only(known)
    match kind:
        case "json_schema":
            return _json_schema(form.object("json_schema", JSON_SCHEMA_FIELDS), options)
        case "json_object":
            return StructuredOutput({"json_object": True, **options}, kind, form.where)
        case "structural_tag":
            tag = {name: item for name, item in form.values.items() if name in known}
            return StructuredOutput({"structural_tag": tag, **options}, kind, form.where)
    if options:
        raise RequestError(f"structured_outputs needs one of {', '.join(KINDS)}", param="structured_outputs")
    return None


def _json_schema(fields: Fields, options: Mapping[str, Any]) -> StructuredOutput:
    name, place = fields.string("name"), fields.place("schema")
    if not NAME.fullmatch(name):
        raise wrong_value(fields.place("name"), "1 to 64 of the characters A-Za-z0-9_-", name)
    fields.string("description", "")
    # OpenAI's strict answers have their properties in the order of the schema.
    order = "schema" if fields.boolean("strict", False) else "any"
    schema = fields.object("schema").given
    return StructuredOutput({"json": schema, "property_order": order, **options}, "json", place)
