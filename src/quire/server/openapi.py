"""The description of the server at /openapi.json: FastAPI's, made true to what every route answers.

Routes read their bodies themselves, so FastAPI knows neither that streams exist nor which errors there are. The errors
of a route have the shape of its family (`errors`), and which statuses may come follows from what every request passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quire.server.errors import Family, family_of
from quire.server.json_io import JSON
from quire.server.paths import OPEN_PATHS

METHODS = ("get", "post", "put", "patch", "delete", "head", "options")
# Statuses that any request may get before a route sees it, and what they mean.
ANYWHERE = {
    "400": "The request is malformed; the error names the field.",
    "401": "No API key was sent, or one that is not valid.",
    "403": "The key may not do this.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "414": "The URL is too long.",
    "429": "A limit of the key is exceeded; Retry-After says for how long.",
    "431": "The headers are too large.",
    "500": "The server failed on this request.",
    "503": "Not now: overloaded, loading, or shutting down; Retry-After says when to come back.",
}
WITH_NAMES = {"404": "There is no such model or object.", "409": "The object's state does not allow it."}
WITH_BODY = {**WITH_NAMES, "415": "The body is not plain JSON."}
WITH_BODY |= {"501": "This server does not do that.", "504": "It was not done in the time that it was given."}
OVERLOADED = {"529": "The queues are full; Retry-After says when to come back."}  # Anthropic's status for it
PROBES = {"503": "Not able to serve; the body says why."}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that always has these properties, and no others."""
    return {"type": "object", "required": [*properties], "additionalProperties": False, "properties": properties}


STRING = {"type": "string"}
OPTIONAL_STRING = {"type": ["string", "null"]}
ERRORS: Mapping[Family, tuple[str, dict[str, Any]]] = {
    Family.OPENAI: (
        "Error",
        _object({"error": _object({"message": STRING, "type": STRING, "param": OPTIONAL_STRING, "code": STRING})}),
    ),
    Family.ANTHROPIC: (
        "MessagesError",
        _object(
            {
                "type": {"const": "error"},
                "request_id": OPTIONAL_STRING,
                "error": _object({"type": STRING, "message": STRING}),
            }
        ),
    ),
    Family.OLLAMA: ("ApiError", _object({"error": STRING})),
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the description of all routes of `app`, which is made once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    components = found.setdefault("components", {})
    components["schemas"] = dict(ERRORS.values())
    locked = app.state.context.keys.required
    if locked:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in found["paths"].items():
        for method in METHODS:
            if method in operations:
                _complete(path, operations[method])
                if locked and path not in OPEN_PATHS:
                    operations[method]["security"] = [{"key": []}]
    app.openapi_schema = found
    return found


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Say which statuses an operation answers with."""
    name = ERRORS[family_of(path)][0]
    if "requestBody" in operation:  # a null field is an absent one, also where it is unknown
        [content] = operation["requestBody"]["content"].values()
        body = content["schema"]
        if body.get("additionalProperties") is False:
            body["additionalProperties"] = {"type": "null"}
    responses = operation["responses"]
    responses.pop("422", None)
    if path in OPEN_PATHS:
        responses.update({status: {"description": text} for status, text in PROBES.items()})
    named = "{" in path or any(parameter["name"] == "model" for parameter in operation.get("parameters", ()))
    statuses = ANYWHERE | (WITH_BODY if "requestBody" in operation else WITH_NAMES if named else {})
    if family_of(path) is Family.ANTHROPIC:
        statuses = statuses | OVERLOADED
    for status, text in statuses.items():
        content = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        responses.setdefault(status, {"description": text, "content": content})
