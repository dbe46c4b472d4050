"""Parses the bytes of a request into a checked protocol model. Sizes are checked before any work is done.

JSON is read strictly: UTF-8 only (a byte order mark is tolerated), no NaN or Infinity, at most 64 levels; of duplicate
keys the last one counts. No type is converted: "5" is not a number and true is not 1. A null field is an absent one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from quire.checks import (
    check_not_empty,
    check_refused,
    check_unicode,
    list_items,
    missing,
    unknown_field,
    wrong_type,
    wrong_value,
)
from quire.errors import RequestError, echo, kind_of
from quire.server.errors import HTTPProblem, release_body
from quire.server.json_io import (
    MAX_NUMBER_CHARS,
    MAX_VALUES,
    PIECE,
    BadNumberError,
    TooManyValuesError,
    decode,
    is_simple,
    run_in_thread_if,
)
from quire.server.protocol import RequestModel, responds_with
from quire.server_config import ServerConfig

MAX_DEPTH = 64
HUGE = 10**40  # stands for integers of more digits than are read; above every bound of every field
BODY_SECONDS = 20.0
BODY_RATE = 1024  # bytes per second that a body must come with in the long run
MAX_QUERY_DIGITS = 9
BROWSER_HEADERS = frozenset({"origin", "sec-fetch-site"})  # of a POST; a page cannot leave them out
FLAT = frozenset({str, int, float, bool, type(None)})  # types of values that hold no others
# Fields whose texts are checked elsewhere, where the position within them is known, or that need no check.
NAMED_ELSEWHERE = ("model", "prompt", "messages")
# Fields with schemas, of which depth is one measure of what they cost.
GRAMMAR_FIELDS = ("response_format", "structured_outputs", "guided_json", "tools")

M = TypeVar("M", bound=RequestModel)
T = TypeVar("T")


async def read_body(request: Request, limit: int, *, any_type: bool = False) -> bytes:
    """Return the body of a request, having read no more than `limit` bytes.

    Args:
        any_type: whether other programs than browsers may call JSON something else, as `curl -d` does. A page of
            another site can have a browser send a form to this server unasked, but not JSON that is called so.

    Raises:
        HTTPProblem: 413 too large, 415 not JSON or compressed, 408 too slow, 400 cut off.
    """
    _check_headers(request, any_type=any_type)
    return b"".join([part async for part in body_parts(request, limit)])


async def body_parts(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """Yield the body of a request as it comes, no more than `limit` bytes. Raises as `read_body`, but for its type."""
    _check_length(request, limit)
    size = 0
    started = time.monotonic()
    more = True
    while more:
        try:
            async with asyncio.timeout(min(BODY_SECONDS, started + BODY_SECONDS + size / BODY_RATE - time.monotonic())):
                part = await request.receive()
        except TimeoutError:
            message = f"the body did not arrive: nothing for {BODY_SECONDS:g} s, or too little in a longer time"
            headers = {"Connection": "close"}
            raise HTTPProblem(408, message, code="request_timeout", headers=headers) from None
        if part["type"] == "http.disconnect":
            raise HTTPProblem(400, "the connection ended within the body", code="incomplete_body", close=True)
        chunk = part.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        more = part.get("more_body", False)
        yield chunk


def _check_headers(request: Request, *, any_type: bool) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    any_type = any_type and not BROWSER_HEADERS.intersection(request.headers)
    if kind != "application/json" and not any_type:
        raise HTTPProblem(
            415,
            f"the body must be sent as Content-Type: application/json, not {echo(kind) if kind else 'without one'}",
            code="unsupported_content_type",
            close=True,
        )


def _check_length(request: Request, limit: int) -> None:
    """Raise `HTTPProblem` for a body that is compressed, or said to be larger than `limit`."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HTTPProblem(
            415, f"the body must not be compressed, got {echo(coding)}", code="unsupported_content_encoding", close=True
        )
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise _too_large(limit)


def _too_large(limit: int) -> HTTPProblem:
    return HTTPProblem(413, f"the body is larger than {limit} bytes", code="request_too_large", close=True)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; it takes long unless that `is_simple`.

    Raises:
        RequestError: invalid_json, or invalid_type for another value. HTTPProblem: 413, it has too many values.
    """
    simple = is_simple(body)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 (byte {error.start})") from None
    try:
        value = decode(text, simple=simple, parse_int=_parse_int)
    except TooManyValuesError:
        message = f"the body has more than {MAX_VALUES} values"
        raise HTTPProblem(413, message, code="request_too_large") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from None
    except BadNumberError as error:
        raise _invalid(str(error)) from None
    _check_depth(value)
    if not isinstance(value, dict):
        raise RequestError(
            f"the body must be a JSON object, got {kind_of(value)}",
            code="invalid_type",
        )
    return value


def _parse_int(digits: str) -> int:
    if len(digits) <= MAX_NUMBER_CHARS:
        return int(digits)
    return -HUGE if digits.startswith("-") else HUGE


def _check_depth(value: Any) -> None:
    """Raise `RequestError` for nesting that Python's parser tolerates but others should not meet."""
    if not _is_deep(value, MAX_DEPTH + 1):
        return
    if isinstance(value, dict):
        for name in GRAMMAR_FIELDS:
            if _is_deep(value.get(name), MAX_DEPTH):
                raise RequestError(
                    f"{name} is nested too deeply; at most {MAX_DEPTH} levels are read",
                    param=name,
                    code="grammar_too_complex",
                )
    raise _too_deep()


def _is_deep(value: Any, most: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        level = [
            item
            for parent in level
            for piece in ([parent.values()] if isinstance(parent, dict) else _pieces(parent))
            if not FLAT.issuperset(map(type, piece))
            for item in piece
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _pieces(items: list[Any]) -> Iterator[list[Any]]:
    """Yield a list in pieces, so that other threads can run while each is looked at in C."""
    for start in range(0, len(items), PIECE):
        yield items[start : start + PIECE]


def _too_deep() -> RequestError:
    return _invalid(f"it is nested too deeply; at most {MAX_DEPTH} levels are read")


def _invalid(reason: str) -> RequestError:
    return RequestError(f"the body is not valid JSON: {reason}", code="invalid_json")


async def parse_request(request: Request, model: type[M], *, any_type: bool = False) -> M:
    """Read, decode and validate a request's body within the bounds that the server's options set.

    Args:
        any_type: see `read_body`.

    Raises:
        RequestError: naming the field, the value, and what is allowed. HTTPProblem: as `read_body`.
    """
    server: ServerConfig = request.app.state.context.config.server
    body = await read_body(request, server.max_body_bytes, any_type=any_type)

    def parse() -> M:
        data = parse_json(body)
        if b"\\ud" in body or b"\\uD" in body:
            _check_surrogates(data)
        return validate(model, data, ignore_unknown=server.ignore_unknown_fields)

    request.scope["state"]["large_body"] = not is_simple(body)
    try:
        return await process_body(request, parse)
    finally:
        release_body(request.scope)


async def process_body(request: Request, work: Callable[[], T]) -> T:
    """Return `work()`, which visits every value of a request's body: in a thread if the body has many values."""
    return await run_in_thread_if(request.scope["state"].get("large_body"), work)


def _check_surrogates(data: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a lone surrogate, which cannot be encoded as UTF-8."""
    for name, value in data.items():
        if name in NAMED_ELSEWHERE:
            continue
        check_unicode(value, echo(name)[1:-1])


def validate(model: type[M], data: Mapping[str, Any], *, ignore_unknown: bool = False) -> M:
    """Return the model of a decoded body; fields this engine cannot honour are refused by name."""
    present = {name: value for name, value in data.items() if value is not None or name in model.not_null}
    known: dict[str, Any] = {}
    for name, value in present.items():
        if name in model.model_fields:
            known[name] = value
        elif name in model.refused:
            check_refused(name, value, model.refused[name])
        elif not ignore_unknown:
            raise unknown_field(name, [*model.model_fields, *model.refused])
    try:
        body = model.model_validate(known, context={"ignore_unknown": ignore_unknown})
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False, include_context=True)[0]) from None
    body._ignore_unknown = ignore_unknown
    return body


# Name of a parameter of the query -> the part of JSON schema that describes it.
QuerySchema = Mapping[str, Mapping[str, Any]]


def describe_query(schema: QuerySchema, kind: str | None = None) -> dict[str, Any]:
    """Return the `openapi_extra` of a route with these optional query parameters; `kind` as for `responds_with`."""
    parameters = [{"name": name, "in": "query", "required": False, "schema": item} for name, item in schema.items()]
    return {"parameters": parameters, **responds_with(kind)}


def read_query(request: Request, schema: QuerySchema) -> dict[str, Any]:
    """Return the query's parameters in the types of their schemas, and the defaults of absent ones.

    A parameter is an integer, a boolean, one of some values, a list (given several times, also as `NAME[]`), or a text.

    Raises:
        RequestError: naming a parameter that is unknown, given twice, or of another value.
    """
    query = {name: item["default"] for name, item in schema.items() if "default" in item}
    given: set[str] = set()
    for key, text in request.query_params.multi_items():
        name = key.removesuffix("[]")
        item = schema.get(name, {})
        if name not in schema or (key != name and item.get("type") != "array"):
            raise unknown_field(key, list(schema))
        if item.get("type") == "array":
            query.setdefault(name, []).append(text)
        elif name in given:
            raise RequestError(f"{name} must be given once", param=name)
        else:
            query[name] = _query_value(name, text, item)
        given.add(name)
    return query


def _query_value(name: str, text: str, item: Mapping[str, Any]) -> Any:
    if "enum" in item:
        found = [value for value in item["enum"] if str(value) == text]
        if not found:
            raise wrong_value(name, f"one of {', '.join(map(str, item['enum']))}", text)
        return found[0]
    if item.get("type") == "boolean":
        if text not in ("true", "false"):
            raise wrong_type(name, "true or false", text)
        return text == "true"
    if item.get("type") != "integer":
        return text
    low, high = item.get("minimum", 0), item.get("maximum")
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_QUERY_DIGITS:
        raise wrong_type(name, expected, text)
    value = int(text)
    if value < low or (high is not None and value > high):
        raise wrong_value(name, expected, text, f"integer_{'below_min' if value < low else 'above_max'}_value")
    return value


def split_prompts(value: Any, name: str, most: int) -> list[tuple[str | list[int], str]]:
    """Return the prompts of a field, one or several texts or lists of token ids, each with its name in errors.

    Raises:
        RequestError: it is something else, or more than `most`. Token ids are checked where the vocabulary is known.
    """
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return [(value, name)]
    check_not_empty(value, name)
    if isinstance(value, list) and not isinstance(value[0], str | list):
        return [(value, name)]
    expected = "a string, a list of strings, of token ids, or of such lists"
    prompts = [(item, where) for where, item in list_items(value, name, expected, most=most)]
    kind = type(value[0])
    for item, where in prompts:
        if type(item) is not kind:
            expected = "a string" if kind is str else "a list of token ids"
            raise wrong_type(where, f"{expected}, as {name}[0] is", item)
    return prompts


# pydantic's error type -> (our code, what the value must be). Numeric bounds of sampling fields are SamplingParams'.
_KINDS: dict[str, tuple[str, str]] = {
    "string_type": ("invalid_type", "a string"),
    "int_type": ("invalid_type", "an integer"),
    "int_from_float": ("invalid_type", "an integer"),
    "float_type": ("invalid_type", "a number"),
    "bool_type": ("invalid_type", "true or false"),
    "list_type": ("invalid_type", "a list"),
    "dict_type": ("invalid_type", "an object"),
    "model_type": ("invalid_type", "an object"),
    "string_too_long": ("string_above_max_length", "at most {max_length} characters long"),
    "string_too_short": ("string_below_min_length", "at least {min_length} characters long"),
    "too_long": ("array_above_max_length", "a list of at most {max_length} items"),
    "too_short": ("empty_array", "a list of at least {min_length} items"),
    "literal_error": ("invalid_value", "one of {expected}"),
    "string_pattern_mismatch": ("invalid_value", "a string that matches {pattern}"),
}


def _request_error(details: ErrorDetails) -> RequestError:
    param = _path(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return missing(param)
    if kind == "extra_forbidden":
        return RequestError(f"unknown parameter {param}", param=param, code="unknown_parameter")
    code, allowed = _KINDS.get(kind, ("invalid_value", "a valid value"))
    allowed = allowed.format(**details.get("ctx", {}))
    return wrong_value(param, f"{allowed}", details["input"], code)


def _path(location: Sequence[str | int]) -> str:
    """Return "messages[0].content" for ("messages", 0, "content")."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
