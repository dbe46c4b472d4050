"""Structured output in requests: `response_format`, `structured_outputs`, and vLLM's older `guided_*` fields.

All become `StructuredOutputParams`. Errors about these, wherever they are found, name the field that the client sent
(`StructuredOutput.explain`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.checks import missing, required, unknown_field, wrong_type, wrong_value
from quire.errors import RequestError, translate_error
from quire.sampling_params import check_structured_outputs
from quire.server.protocol import GenerationRequest
from quire.structured_outputs import KINDS, StructuredOutputParams

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
GUIDED = ("json", "regex", "choice", "grammar")
# Not followed by another field: options keep their names.
PARAMS_FIELD = re.compile(
    r"\bstructured_outputs(?:\.(?:json_object|json|regex|choice|grammar|structural_tag)\b|(?![.\w]))"
)


class StructuredOutput:
    """The structured output of a request.

    Args:
        fields: of `StructuredOutputParams`. names: "structured_outputs.KIND", and the field that the client sent for
            it, which errors without a kind name, too.

    Raises:
        RequestError: a field is malformed.
    """

    def __init__(self, fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._names = names
        try:
            self.params = check_structured_outputs("structured_outputs", fields)
        except RequestError as error:
            raise self.explain(error) from None

    def explain(self, error: RequestError) -> RequestError:
        """Return `error` with the client's name of the field, if it is about this structured output."""
        if error.param is None or not PARAMS_FIELD.match(error.param):
            return error
        param = PARAMS_FIELD.sub(self._client_name, error.param, count=1)
        return translate_error(error, PARAMS_FIELD.sub(self._client_name, error.message), param)

    def _client_name(self, found: re.Match[str]) -> str:
        if found[0] == "structured_outputs":
            return next(iter(self._names.values()), found[0])
        return self._names.get(found[0], found[0])


def structured_output(body: GenerationRequest, *, ignore_unknown: bool = False) -> StructuredOutput | None:
    """Return the structured output of a request, None for any text.

    Raises:
        RequestError: a field is malformed, or several fields ask for structured output.
    """
    params = _structured_outputs(body.structured_outputs)
    options: dict[str, Any] = {}
    if params is not None and body.response_format is not None and not params.keys() & set(KINDS):
        options, params = params, None  # options of `response_format`
    requested: dict[str, Callable[[], StructuredOutput | None]] = {}
    if body.response_format is not None:
        requested["response_format"] = lambda: _response_format(body.response_format, options, ignore_unknown)
    if params is not None:
        requested["structured_outputs"] = lambda: StructuredOutput(params, {})
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


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    name = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong_type(name, "an object", value)
    for field in value:
        if field not in StructuredOutputParams.__struct_fields__:
            raise unknown_field(field, StructuredOutputParams.__struct_fields__, f"{name}.")
    return {field: item for field, item in value.items() if item is not None}


def _guided(body: GenerationRequest, kind: str) -> StructuredOutput:
    name = f"guided_{kind}"
    fields: dict[str, Any] = {kind: getattr(body, name)}
    if kind == "json" and body.guided_whitespace_pattern is not None:
        fields["whitespace_pattern"] = body.guided_whitespace_pattern
    return StructuredOutput(fields, {f"structured_outputs.{kind}": name})


def _response_format(value: Any, options: Mapping[str, Any], ignore_unknown: bool) -> StructuredOutput | None:
    where = "response_format"
    if not isinstance(value, Mapping):
        raise wrong_type(where, "an object", value)
    kind = required(value, "type", where)
    if kind not in RESPONSE_FORMATS:
        raise wrong_value(f"{where}.type", f"one of {', '.join(RESPONSE_FORMATS)}", kind)
    known = {"json_schema": ["json_schema"], "structural_tag": ["format", "structures", "triggers"]}.get(kind, [])
    if not ignore_unknown:
        for name in value:
            if name != "type" and name not in known:
                raise unknown_field(name, ["type", *known], f"{where}.")
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"), f"{where}.json_schema", options, ignore_unknown)
    if kind == "json_object":
        return StructuredOutput({"json_object": True, **options}, {"structured_outputs.json_object": where})
    if kind == "structural_tag":
        tag = {name: item for name, item in value.items() if item is not None and name in ("type", *known)}
        return StructuredOutput({"structural_tag": tag, **options}, {"structured_outputs.structural_tag": where})
    if options:
        raise RequestError(f"structured_outputs needs one of {', '.join(KINDS)}", param="structured_outputs")
    return None


def _json_schema(value: Any, where: str, options: Mapping[str, Any], ignore_unknown: bool) -> StructuredOutput:
    if value is None:
        raise missing(where)
    if not isinstance(value, Mapping):
        raise wrong_type(where, "an object", value)
    known = ("name", "schema", "strict", "description")
    for name in value:
        if name not in known and not ignore_unknown:
            raise unknown_field(name, known, f"{where}.")
    for name, kind, shown in (("name", str, "a string"), ("description", str, "a string"), ("strict", bool, "a bool")):
        if value.get(name) is not None and not isinstance(value[name], kind):
            raise wrong_type(f"{where}.{name}", f"{shown}", value[name])
    for name in ("name", "schema"):
        if value.get(name) is None:
            raise missing(f"{where}.{name}")
    if not NAME.fullmatch(value["name"]):
        raise wrong_value(f"{where}.name", "1 to 64 of the characters A-Za-z0-9_-", value["name"])
    schema = value["schema"]
    if not isinstance(schema, Mapping):
        raise wrong_type(f"{where}.schema", "an object", schema)
    # OpenAI's strict answers have their properties in the order of the schema.
    order = "schema" if value.get("strict") else "any"
    return StructuredOutput(
        {"json": schema, "property_order": order, **options}, {"structured_outputs.json": f"{where}.schema"}
    )
