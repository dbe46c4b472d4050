"""OpenAI's official schemas of answers and stream events, where the specification is at hand."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

SPEC = Path(__file__).resolve().parents[4] / "shared" / "data" / "openai_openapi.json.gz"
needs_spec = pytest.mark.skipif(not SPEC.exists(), reason="the official specification is not at hand")


@cache
def schemas() -> dict[str, Any]:
    """Return all schemas by name, as JSON schemas are written."""
    with gzip.open(SPEC, "rt") as file:
        found: dict[str, Any] = _modern(json.load(file)["components"]["schemas"])
    return found


def _modern(schema: Any) -> Any:
    """Return a schema with `nullable`, a keyword of OpenAPI's alone, written out."""
    if isinstance(schema, list):
        return [_modern(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: _modern(item) for name, item in schema.items() if name != "nullable"}
    return {"anyOf": [parts, {"type": "null"}]} if schema.get("nullable") is True else parts


@cache
def validator(name: str) -> Draft202012Validator:
    """Return what checks values against a schema; references are resolved within the specification."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas()}})


@cache
def event_schemas() -> dict[str, str]:
    """Return type of a stream event -> name of its schema."""
    names = [item["$ref"].rsplit("/", 1)[1] for item in schemas()["ResponseStreamEvent"]["anyOf"]]
    return {kind: name for name in names for kind in schemas()[name]["properties"]["type"]["enum"]}


def properties(name: str) -> dict[str, Any]:
    """Return all properties of a schema, those of its parts included."""

    def walk(schema: dict[str, Any]) -> dict[str, Any]:
        found = dict(schema.get("properties", {}))
        if "$ref" in schema:
            found |= walk(schemas()[schema["$ref"].rsplit("/", 1)[1]])
        for part in schema.get("allOf", ()):
            found |= walk(part)
        return found

    return walk(schemas()[name])


def check(name: str, value: Any) -> None:
    """Fail unless a value is what the schema says; without the specification nothing is checked."""
    if SPEC.exists():
        errors = [f"{error.json_path}: {error.message[:300]}" for error in validator(name).iter_errors(value)]
        assert errors == [], (name, errors)


def check_event(event: dict[str, Any]) -> None:
    """Fail unless a stream event is what its schema says."""
    if SPEC.exists():
        check(event_schemas()[event["type"]], event)
