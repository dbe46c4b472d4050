"""Assertion keywords of JSON Schema: the values that each allows, and those that its negation allows.

Keywords that combine subschemas (applicators) are in `expand`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.structured.json_schema.document import TYPES, Document, Node
from quire.structured.json_schema.ecma import PatternError, pattern_language
from quire.structured.json_schema.errors import (
    MAX_ALTERNATIVES,
    MAX_BOUND,
    MAX_ITEMS,
    MAX_LENGTH,
    MAX_MIN,
    SchemaError,
    step,
    too_complex,
    unsupported,
)
from quire.structured.json_schema.presence import all_of, has, negation
from quire.structured.json_schema.regular import Lang, alt, neg, text
from quire.structured.json_schema.shapes import (
    BOTTOM,
    EVERYTHING,
    NOTHING,
    TOP,
    ArrayShape,
    BooleanShape,
    Form,
    Keys,
    NumberShape,
    ObjectShape,
    Positions,
    StringShape,
    exact,
    intersect,
    just,
    node_demand,
    only,
    unite,
)


@dataclass(frozen=True)
class Assertion:
    """One assertion of a schema: the form of the values that fulfil it, and of the others. Both may raise
    `SchemaError`.
    """

    holds: Callable[[], Form]
    fails: Callable[[], Form]


def language_of(pattern: str, pointer: str) -> Lang:
    """Return the strings in which `pattern` is found; the error of a bad pattern names the schema's part."""
    try:
        return pattern_language(pattern)
    except PatternError as error:
        code = {"invalid": "invalid_json_schema", "unsupported": "unsupported_json_schema"}
        raise SchemaError(pointer, str(error), code=code.get(error.kind, "grammar_too_complex")) from None


def fixed(holds: Form, fails: Form) -> Assertion:
    """Return an assertion whose forms are known."""
    return Assertion(lambda: holds, lambda: fails)


def refusal(pointer: str, message: str) -> Callable[[], Form]:
    """Return a function that raises that this part is not supported."""

    def refuse() -> Form:
        raise unsupported(pointer, message)

    return refuse


def type_assertion(value: Any) -> Assertion:
    """`type`."""
    wanted = {value} if isinstance(value, str) else set(value)
    holds = {kind: TOP[kind] for kind in TYPES if kind in wanted}
    fails = {kind: TOP[kind] for kind in TYPES if kind not in wanted}
    if "integer" in wanted and "number" not in wanted:
        holds["number"] = (NumberShape(whole=True),)
        fails["number"] = (NumberShape(whole=False),)
    return fixed(holds, fails)


def bound_assertions(schema: dict[str, Any], pointer: str) -> list[Assertion]:
    """`minimum`, `maximum` and their exclusive forms, including the booleans of draft 4."""
    found = []
    for keyword, exclusive, low in (("minimum", "exclusiveMinimum", True), ("maximum", "exclusiveMaximum", False)):
        bounds = []
        if keyword in schema:
            bounds.append((schema[keyword], schema.get(exclusive) is True))
        if exclusive in schema and not isinstance(schema[exclusive], bool):
            bounds.append((schema[exclusive], True))
        for value, excluded in bounds:
            if abs(value) > MAX_BOUND:
                raise too_complex(pointer, f"a bound beyond {MAX_BOUND:.0e}")
            inside, outside = (value, excluded), (value, not excluded)
            holds = NumberShape(low=inside) if low else NumberShape(high=inside)
            fails = NumberShape(high=outside) if low else NumberShape(low=outside)
            found.append(fixed(only("number", holds), just("number", fails)))
    return found


def multiple_assertion(value: int | float, pointer: str) -> Assertion:
    """`multipleOf`."""
    if value == 1:
        return fixed(only("number", NumberShape(whole=True)), just("number", NumberShape(whole=False)))
    size = exact(value)
    if size.denominator & (size.denominator - 1) or size.denominator > 1 << 16:
        # Readers divide floats: to them 0.07 is no multiple of 0.01. Halves, quarters and so on have no such trouble.
        refuse = refusal(pointer, "a fraction that floats cannot hold; readers would disagree about its multiples")
        return Assertion(refuse, refuse)
    holds, fails = (NumberShape(multiples=frozenset(((value, wanted),))) for wanted in (True, False))
    if size.denominator > 1:
        refuse = refusal(pointer, "the negation of multiples of a fraction")
        return Assertion(lambda: only("number", holds), refuse)
    return fixed(only("number", holds), just("number", fails))


def check_least(least: int, pointer: str) -> None:
    """Raise where a minimum is larger than a grammar should count."""
    if least > MAX_MIN:
        raise too_complex(pointer, f"{least} exceeds {MAX_MIN}")


def language_assertion(language: Lang) -> Assertion:
    """`pattern`, and the formats that are enforced."""
    return fixed(
        only("string", StringShape(languages=frozenset((language,)))),
        just("string", StringShape(languages=frozenset((neg(language),)))),
    )


_COUNTED: dict[str, tuple[str, type[StringShape] | type[ArrayShape] | type[ObjectShape], int]] = {
    "Length": ("string", StringShape, MAX_LENGTH),
    "Items": ("array", ArrayShape, MAX_ITEMS),
    "Properties": ("object", ObjectShape, MAX_ITEMS),
}


def count_assertions(schema: dict[str, Any], noun: str, pointer: str) -> Iterator[Assertion]:
    """`minLength` and `maxLength` for the noun "Length"; the same for "Items" and "Properties"."""
    kind, shape, limit = _COUNTED[noun]
    if f"min{noun}" in schema:
        least = int(schema[f"min{noun}"])
        check_least(least, step(pointer, f"min{noun}"))
        yield fixed(only(kind, shape(least=least)), just(kind, *([shape(most=least - 1)] if least else [])))
    if f"max{noun}" in schema:
        most = int(schema[f"max{noun}"])
        if most > limit:
            raise too_complex(step(pointer, f"max{noun}"), f"{most} exceeds {limit}")
        yield fixed(only(kind, shape(most=most)), just(kind, shape(least=most + 1)))


def required_assertion(names: list[str]) -> Assertion:
    """`required`."""
    demand = all_of(has(name) for name in names)
    return fixed(
        only("object", ObjectShape(presence=demand)),
        just("object", ObjectShape(presence=negation(demand))) if names else BOTTOM,
    )


def values_assertion(document: Document, values: list[Any], pointer: str) -> Assertion:
    """`enum`, and `const` as an enum of one."""
    if not values:
        return fixed(BOTTOM, TOP)
    return Assertion(
        lambda: unite(*(value_form(document, value, pointer) for value in values)),
        lambda: _other_values(document, values, pointer),
    )


def value_form(document: Document, value: Any, pointer: str) -> Form:
    """Return the form of exactly one value."""
    if value is None:
        return {"null": TOP["null"]}
    if isinstance(value, bool):
        return just("boolean", BooleanShape(frozenset((value,))))
    if isinstance(value, str):
        return just("string", StringShape(values=frozenset((value,))))
    if isinstance(value, list):
        prefix = tuple(node_demand(document.make({"const": item}, pointer)) for item in value)
        return just("array", ArrayShape(len(value), len(value), (Positions(prefix, NOTHING),)))
    if isinstance(value, dict):
        names = tuple((name, node_demand(document.make({"const": item}, pointer))) for name, item in value.items())
        keys = (Keys(names, (), NOTHING, explicit=True),)
        return just("object", ObjectShape(keys, all_of(has(name) for name in value), most=len(value)))
    return just("number", NumberShape(values=(value,)))


def _other_values(document: Document, values: list[Any], pointer: str) -> Form:
    """Return the form of everything but `values`."""
    result: Form = dict(TOP)
    strings = frozenset(value for value in values if isinstance(value, str))
    numbers = tuple(value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    booleans = frozenset(value for value in values if isinstance(value, bool))
    if strings:
        listed = neg(alt(*(text(value) for value in sorted(strings))))
        result["string"] = (StringShape(languages=frozenset((listed,))),)
    if numbers:
        result["number"] = (NumberShape(excluded=numbers),)
    if booleans:
        left = frozenset((False, True)) - booleans
        result["boolean"] = (BooleanShape(left),) if left else ()
    if None in values:
        result["null"] = ()
    for kind, python in (("array", list), ("object", dict)):
        for value in values:
            if isinstance(value, python):
                other: Form = {kind: _not_this(document, value, pointer)}
                result[kind] = intersect(result, other, lambda pairs: None).get(kind, ())
            if len(result.get(kind, ())) > MAX_ALTERNATIVES:
                raise too_complex(pointer, "the negation of so many values")
    return {kind: shapes for kind, shapes in result.items() if shapes}


def _not_this(document: Document, value: Any, pointer: str) -> tuple[Any, ...]:
    length = len(value)
    if isinstance(value, list):
        arrays = [ArrayShape(least=length + 1)] + ([ArrayShape(most=length - 1)] if length else [])
        for index, item in enumerate(value):
            other = node_demand(document.make({"const": item}, pointer), False)
            arrays.append(ArrayShape(index + 1, None, (Positions((*[EVERYTHING] * index, other), EVERYTHING),)))
        return tuple(arrays)
    everyone = all_of(has(name) for name in value)
    objects = [ObjectShape(presence=everyone, least=length + 1)]
    if value:
        objects.append(ObjectShape(presence=negation(everyone)))
    for name, item in value.items():
        other = node_demand(document.make({"const": item}, pointer), False)
        objects.append(ObjectShape((Keys(((name, other),), (), EVERYTHING),), has(name)))
    return tuple(objects)


def keys_assertion(node: Node, keys: Keys) -> Assertion:
    """`properties`, `patternProperties` and `additionalProperties` of one schema."""

    def fails() -> Form:
        found = []
        for name, demand in keys.names:
            if demand == EVERYTHING:
                continue
            # A property may be named and match a pattern, too: each alternative demands one failure only.
            found.append(ObjectShape((Keys(((name, negated(demand)),), (), EVERYTHING),), has(name)))
        others = [text(name) for name, _ in keys.names]
        demands = [(language, demand, "patternProperties") for language, demand in keys.patterns]
        rest = neg(alt(*others, *(language for language, _ in keys.patterns)))
        for language, demand, keyword in [*demands, (rest, keys.rest, "additionalProperties")]:
            if demand == NOTHING:
                found.append(ObjectShape(presence=("has", ("language", language))))
            elif demand != EVERYTHING:
                # A name may be written again with another value; only where there is one property does it prove much.
                kind = ("value", language, negated(demand), step(node.pointer, keyword))
                found.append(ObjectShape(presence=("has", kind)))
        return just("object", *found)

    return Assertion(lambda: only("object", ObjectShape((keys,))), fails)


def negated(demand: frozenset[tuple[int, bool]]) -> frozenset[tuple[int, bool]]:
    """Return the negation of a demand that is one node."""
    if demand in (NOTHING, EVERYTHING):
        return EVERYTHING if demand == NOTHING else NOTHING
    ((number, holds),) = demand
    return node_demand(number, not holds)


def positions_assertion(node: Node, positions: Positions, keyword: str) -> Assertion:
    """`prefixItems` and `items`, in the spelling of any draft."""

    def fails() -> Form:
        found = []
        for index, demand in enumerate(positions.prefix):
            if demand != EVERYTHING:
                prefix = (*[EVERYTHING] * index, negated(demand))
                found.append(ArrayShape(index + 1, None, (Positions(prefix, EVERYTHING),)))
        if positions.rest == NOTHING:
            found.append(ArrayShape(least=len(positions.prefix) + 1))
        elif positions.rest != EVERYTHING:
            if positions.prefix:
                raise unsupported(step(node.pointer, keyword), "its negation")
            found.append(ArrayShape(contains=((negated(positions.rest), 1, None),)))
        return just("array", *found)

    return Assertion(lambda: only("array", ArrayShape(positions=(positions,))), fails)


def contains_assertion(demand: frozenset[tuple[int, bool]], least: int, most: int | None, pointer: str) -> Assertion:
    """`contains` with `minContains` and `maxContains`."""
    check_least(least, pointer)
    if most is not None and most > MAX_ITEMS:
        raise too_complex(pointer, f"{most} exceeds {MAX_ITEMS}")
    if least == 0 and most is None:
        return fixed(TOP, BOTTOM)
    fails = []
    if least == 1:
        fails.append(ArrayShape(positions=(Positions((), negated(demand)),)))
    elif least > 1:
        fails.append(ArrayShape(contains=((demand, 0, least - 1),)))
    if most is not None:
        fails.append(ArrayShape(contains=((demand, most + 1, None),)))
    return fixed(only("array", ArrayShape(contains=((demand, least, most),))), just("array", *fails))
