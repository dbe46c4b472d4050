"""Random schemas and values: what the grammar accepts is what a validator accepts, and what it writes is valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.structured.json_schema.errors import SchemaError
from tests.structured.json_schema.driver import Acceptor, byte_tokenizer, generate, grammar_of, natural, spellings

NAMES = st.sampled_from(["a", "b", "ab", "é", 'q"'])
TEXTS = st.sampled_from(["", "a", "b", "ab", "abc", "aab", "é", '"\\', "\n", "\U0001f600", "7", "a7"])
NUMBERS = st.one_of(
    st.integers(-12, 12), st.sampled_from([0.5, -0.5, 1.0, 2.5, -3.0, 2e22, 1e16, 1.5e-7, 10**20, 3.0000000000000004])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
# ECMAScript's, and what they are to the validator, which uses Python's `re`.
PYTHON_PATTERNS = {
    "b$": r"b\Z",
    "^[ab]*$": r"^[ab]*\Z",
    "^.{1,2}$": r"^[^\n\r\u2028\u2029]{1,2}\Z",
    r"\d": "[0-9]",
    r"^\w+$": r"^[A-Za-z0-9_]+\Z",
    "a+b?$": r"a+b?\Z",
} | {pattern: pattern for pattern in ("a", "^a", "^(a|b7)", "[^a]", "^(?!a)")}
PATTERNS = st.sampled_from(list(PYTHON_PATTERNS))
BOUNDS = st.one_of(st.integers(-5, 5), st.sampled_from([0.5, -1.5, 2.0]))
SMALL = st.integers(0, 3)


def _object(**parts: Any) -> Any:
    return st.fixed_dictionaries({}, optional=parts)


def _deeper(inner: Any) -> Any:
    schemas = st.one_of(inner, st.booleans())
    return st.one_of(
        _object(
            type=st.sampled_from(["object", ["object", "array"]]),
            properties=st.dictionaries(NAMES, schemas, max_size=3),
            required=st.lists(NAMES, max_size=2),
            additionalProperties=schemas,
            patternProperties=st.dictionaries(PATTERNS, schemas, max_size=2),
            propertyNames=_object(pattern=PATTERNS, maxLength=SMALL),
            minProperties=SMALL,
            maxProperties=SMALL,
            dependentRequired=st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=1),
        ),
        _object(
            type=st.just("array"),
            prefixItems=st.lists(schemas, min_size=1, max_size=2),
            items=schemas,
            contains=schemas,
            minContains=SMALL,
            maxContains=SMALL,
            minItems=SMALL,
            maxItems=SMALL,
            uniqueItems=st.booleans(),
        ),
        _object(
            allOf=st.lists(schemas, min_size=1, max_size=2),
            anyOf=st.lists(schemas, min_size=1, max_size=3),
            oneOf=st.lists(schemas, min_size=1, max_size=3),
        ),
        st.fixed_dictionaries({"not": schemas}),
        st.fixed_dictionaries({"if": schemas}, optional={"then": schemas, "else": schemas}),
        _object(properties=st.dictionaries(NAMES, schemas, max_size=2), unevaluatedProperties=schemas, anyOf=st.lists(
            schemas, min_size=1, max_size=2)),
    )  # fmt: skip


LEAVES = st.one_of(
    _object(
        type=st.sampled_from(["integer", "number", ["integer", "string"], "null"]),
        minimum=BOUNDS,
        exclusiveMaximum=BOUNDS,
        multipleOf=st.sampled_from([1, 2, 3, 0.5, 2.5]),
    ),
    _object(type=st.just("string"), minLength=SMALL, maxLength=SMALL, pattern=PATTERNS),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": VALUES}),
    st.fixed_dictionaries({"type": st.sampled_from(["string", "boolean", "object", "array", "number"])}),
)
SCHEMAS = st.recursive(LEAVES, _deeper, max_leaves=6)


def _with_python_patterns(part: Any) -> Any:
    match part:
        case dict():
            return {PYTHON_PATTERNS.get(key, key): _with_python_patterns(value) for key, value in part.items()}
        case list():
            return [_with_python_patterns(each) for each in part]
        case str():
            return PYTHON_PATTERNS.get(part, part)
    return part


def check(schema: dict[str, Any], values: list[Any], seed: int) -> str:
    """Compare grammar and validator; return what came of it."""
    try:
        grammar = grammar_of(schema)
    except SchemaError as error:
        assert error.pointer.startswith("#") and error.pointer in error.message
        return error.code
    validator = jsonschema.Draft202012Validator(_with_python_patterns(schema))
    acceptor = Acceptor(grammar)
    for value in values:
        valid = validator.is_valid(value)
        for text in spellings(natural(value) if valid else value):
            assert acceptor.accepts(text) == valid, (schema, text)
    text = generate(grammar, byte_tokenizer(), random.Random(seed), 150)
    if text is not None:
        assert validator.is_valid(json.loads(text)), (schema, text)
    return "accepted"


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(VALUES, min_size=6, max_size=12), st.integers(0, 1000))
def test_grammar_and_validator_agree(schema: dict[str, Any], values: list[Any], seed: int) -> None:
    check(schema, values, seed)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(VALUES, min_size=6, max_size=12), st.integers(0, 1000))
def test_grammar_and_validator_agree_on_many(schema: dict[str, Any], values: list[Any], seed: int) -> None:
    check(schema, values, seed)
