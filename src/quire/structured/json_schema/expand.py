"""From a schema to the normal form of its instances: combines assertions, and resolves allOf, anyOf, oneOf, not, if and
references. Subschemas of elements and properties are not entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from quire.structured.json_schema import assertions
from quire.structured.json_schema.assertions import Assertion, fixed, refusal
from quire.structured.json_schema.document import Document, Node, knows
from quire.structured.json_schema.errors import (
    MAX_ALTERNATIVES,
    Budget,
    SchemaError,
    invalid,
    step,
    too_complex,
    unsupported,
)
from quire.structured.json_schema.formats import format_language
from quire.structured.json_schema.presence import all_of, any_of, has, negation
from quire.structured.json_schema.shapes import (
    BOTTOM,
    EVERYTHING,
    TOP,
    ArrayShape,
    Demand,
    Form,
    Keys,
    ObjectShape,
    Positions,
    Shape,
    intersect,
    just,
    node_demand,
    only,
    unite,
)

MAX_ANY_WITH_UNEVALUATED = 4
PRUNE_FROM = 6
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


class SelfReference(SchemaError):
    """The form of a node depends on itself."""


class Expander:
    """Computes the forms of the nodes of one document, each once."""

    def __init__(self, document: Document, budget: Budget) -> None:
        self.document = document
        self.budget = budget
        # Tells whether a shape is known to have no values; set by `Emptiness`, which needs the forms to find out.
        self.is_empty: Callable[[Shape, str], bool] = lambda shape, pointer: False
        self._forms: dict[tuple[int, bool], Form | None] = {}
        self._demands: dict[Demand, Form] = {}
        # With unevaluated* about, it matters which branches of an anyOf hold; else only that one does.
        self._tracks = any(
            isinstance(node.schema, dict)
            and ("unevaluatedProperties" in node.schema or "unevaluatedItems" in node.schema)
            for node in document.nodes
        )

    def form(self, demand: Demand) -> Form:
        """Return the form of the values that fulfil all of `demand`."""
        if demand not in self._demands:
            result = TOP
            for number, holds in sorted(demand):
                result = self.meet(result, self.of(number, holds), self.document.nodes[number].pointer)
            self._demands[demand] = result
        return self._demands[demand]

    def of(self, number: int, holds: bool = True) -> Form:
        """Return the form of the instances of a node, or of what is none of them."""
        if number in (0, 1):
            return TOP if (number == 1) == holds else BOTTOM
        key = (number, holds)
        node = self.document.nodes[number]
        if key in self._forms:
            known = self._forms[key]
            if known is None:
                raise SelfReference(
                    node.pointer,
                    "it refers to itself before any part of a value is read",
                    code="unsupported_json_schema",
                )
            return known
        self._forms[key] = None
        self.budget.spend(10, node.pointer)
        try:
            result = self._positive(node) if holds else self._negative(node)
        finally:
            del self._forms[key]
        if any(len(shapes) > MAX_ALTERNATIVES for shapes in result.values()):
            raise too_complex(node.pointer, f"more than {MAX_ALTERNATIVES} alternatives")
        self._forms[key] = result
        return result

    def meet(self, first: Form, second: Form, pointer: str) -> Form:
        """Return the intersection of two forms."""
        result = intersect(first, second, lambda pairs: self.budget.spend(pairs, pointer))
        for kind, shapes in result.items():
            if len(shapes) > PRUNE_FROM:
                result[kind] = tuple(shape for shape in shapes if not self.is_empty(shape, pointer))
        if any(len(shapes) > 4 * MAX_ALTERNATIVES for shapes in result.values()):
            raise too_complex(pointer, f"more than {4 * MAX_ALTERNATIVES} alternatives")
        return result

    def _positive(self, node: Node) -> Form:
        result = TOP
        for assertion in self._assertions(node):
            result = self.meet(result, assertion.holds(), node.pointer)
        for keyword, kind in (("unevaluatedProperties", "object"), ("unevaluatedItems", "array")):
            if keyword in node.schema and knows(self.document.draft, keyword):
                result = self._unevaluated(node, keyword, kind, result)
        return result

    def _negative(self, node: Node) -> Form:
        for keyword in _UNEVALUATED:
            if keyword in node.schema and knows(self.document.draft, keyword):
                raise unsupported(step(node.pointer, keyword), "its negation")
        return unite(*(assertion.fails() for assertion in self._assertions(node)))

    def _assertions(self, node: Node) -> Iterator[Assertion]:
        schema, draft = node.schema, self.document.draft
        if "$ref" in schema and draft <= 7:
            yield self._same(self.document.resolve(node, schema["$ref"]))
            return
        known = {key: value for key, value in schema.items() if knows(draft, key)}
        if draft == 7:
            _refuse_content(node)
        yield from self._values(node, known)
        yield from self._arrays(node, known)
        yield from self._objects(node, known)
        yield from self._references(node, known)
        yield from self._combinations(node, known)

    def _values(self, node: Node, schema: dict[str, Any]) -> Iterator[Assertion]:
        pointer = node.pointer
        if "type" in schema:
            yield assertions.type_assertion(schema["type"])
        if "enum" in schema:
            yield assertions.values_assertion(self.document, schema["enum"], step(pointer, "enum"))
        if "const" in schema:
            yield assertions.values_assertion(self.document, [schema["const"]], step(pointer, "const"))
        yield from assertions.bound_assertions(schema, pointer)
        if "multipleOf" in schema:
            yield assertions.multiple_assertion(schema["multipleOf"], step(pointer, "multipleOf"))
        yield from assertions.count_assertions(schema, "Length", pointer)
        if "pattern" in schema:
            yield assertions.language_assertion(assertions.language_of(schema["pattern"], step(pointer, "pattern")))
        if "format" in schema:
            language = format_language(schema, step(pointer, "format"))
            if language is not None:
                refuse = refusal(step(pointer, "format"), "its negation")
                yield Assertion(assertions.language_assertion(language).holds, refuse)

    def _arrays(self, node: Node, schema: dict[str, Any]) -> Iterator[Assertion]:
        pointer = node.pointer
        yield from assertions.count_assertions(schema, "Items", pointer)
        if schema.get("uniqueItems"):
            refuse = refusal(step(pointer, "uniqueItems"), "the negation of uniqueItems")
            yield Assertion(lambda: only("array", ArrayShape(unique=True)), refuse)
        positions = self._positions(node, schema)
        if positions is not None:
            yield assertions.positions_assertion(node, positions, "items")
        if "contains" in schema:
            least = int(schema.get("minContains", 1))
            most = int(schema["maxContains"]) if "maxContains" in schema else None
            demand = node_demand(self.document.child(node, "contains"))
            yield assertions.contains_assertion(demand, least, most, step(pointer, "contains"))

    def _positions(self, node: Node, schema: dict[str, Any]) -> Positions | None:
        prefix_key, rest_key = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            if "prefixItems" in schema:
                raise invalid(step(node.pointer, "items"), "must be a schema beside prefixItems")
            prefix_key, rest_key = "items", "additionalItems"
        if prefix_key not in schema and rest_key not in schema:
            return None
        prefix = tuple(
            node_demand(self.document.child(node, prefix_key, i)) for i in range(len(schema.get(prefix_key, ())))
        )
        explicit = rest_key in schema
        rest = node_demand(self.document.child(node, rest_key)) if explicit else EVERYTHING
        return Positions(prefix, rest, explicit, marks=True)

    def _objects(self, node: Node, schema: dict[str, Any]) -> Iterator[Assertion]:
        yield from assertions.count_assertions(schema, "Properties", node.pointer)
        if "required" in schema:
            yield assertions.required_assertion(schema["required"])
        if any(key in schema for key in ("properties", "patternProperties", "additionalProperties")):
            yield assertions.keys_assertion(node, self._keys(node, schema))
        if "propertyNames" in schema:
            demand = node_demand(self.document.child(node, "propertyNames"))
            holds = only("object", ObjectShape(names=demand))
            other = ("has", ("name", assertions.negated(demand)))
            yield fixed(holds, just("object", ObjectShape(presence=other)) if demand != EVERYTHING else BOTTOM)
        yield from self._dependencies(node, schema)

    def _keys(self, node: Node, schema: dict[str, Any]) -> Keys:
        child = self.document.child
        names = tuple((name, node_demand(child(node, "properties", name))) for name in schema.get("properties", ()))
        patterns = []
        for pattern in schema.get("patternProperties", ()):
            language = assertions.language_of(pattern, step(node.pointer, "patternProperties", pattern))
            patterns.append((language, node_demand(child(node, "patternProperties", pattern))))
        explicit = "additionalProperties" in schema
        rest = node_demand(child(node, "additionalProperties")) if explicit else EVERYTHING
        return Keys(names, tuple(patterns), rest, explicit, marks=True)

    def _dependencies(self, node: Node, schema: dict[str, Any]) -> Iterator[Assertion]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, value in schema.get(keyword, {}).items():
                if isinstance(value, list):
                    yield _implied(name, all_of(has(other) for other in value))
                else:
                    yield self._dependent(node, keyword, name)

    def _dependent(self, node: Node, keyword: str, name: str) -> Assertion:
        number = self.document.child(node, keyword, name)
        there: Form = just("object", ObjectShape(presence=has(name)))

        def holds() -> Form:
            inside = self.meet(there, self.of(number), node.pointer)
            return unite(only("object", ObjectShape(presence=negation(has(name)))), inside)

        return Assertion(holds, lambda: self.meet(there, self.of(number, False), node.pointer))

    def _references(self, node: Node, schema: dict[str, Any]) -> Iterator[Assertion]:
        if "$ref" in schema:
            yield self._same(self.document.resolve(node, schema["$ref"]))
        if "$dynamicRef" in schema:
            yield self._same(self._dynamic(node, schema["$dynamicRef"]))
        if "$recursiveRef" in schema:
            pointer = step(node.pointer, "$recursiveRef")
            if schema["$recursiveRef"] != "#" or any(
                isinstance(other.schema, dict) and "$recursiveAnchor" in other.schema for other in self.document.nodes
            ):
                raise unsupported(pointer, "where it leads depends on how it was reached")
            yield self._same(self.document.resolve(node, "#", "$recursiveRef"))

    def _dynamic(self, node: Node, reference: str) -> int:
        anchor = reference.partition("#")[2]
        if len(self.document.dynamic.get(anchor, ())) > 1:
            raise unsupported(step(node.pointer, "$dynamicRef"), "where it leads depends on how it was reached")
        return self.document.resolve(node, reference, "$dynamicRef")

    def _same(self, number: int) -> Assertion:
        return Assertion(lambda: self.of(number), lambda: self.of(number, False))

    def _combinations(self, node: Node, schema: dict[str, Any]) -> Iterator[Assertion]:
        child, pointer = self.document.child, node.pointer
        for index in range(len(schema.get("allOf", ()))):
            yield self._same(child(node, "allOf", index))
        if "anyOf" in schema:
            yield self._any([child(node, "anyOf", index) for index in range(len(schema["anyOf"]))], pointer)
        if "oneOf" in schema:
            numbers = [child(node, "oneOf", index) for index in range(len(schema["oneOf"]))]
            yield Assertion(lambda: self._exactly_one(numbers, pointer), lambda: self._not_one(numbers, pointer))
        if "not" in schema:
            number = child(node, "not")
            yield Assertion(lambda: _unmarked(self.of(number, False)), lambda: _unmarked(self.of(number)))
        if "if" in schema and ("then" in schema or "else" in schema or self._tracks):
            yield self._conditional(node, schema)

    def _conditional(self, node: Node, schema: dict[str, Any]) -> Assertion:
        number = self.document.child(node, "if")
        then = self.document.child(node, "then") if "then" in schema else 1
        other = self.document.child(node, "else") if "else" in schema else 1

        def form(holds: bool) -> Form:
            yes = self.meet(self.of(number), self.of(then, holds), node.pointer)
            no = self.meet(self.of(number, False), self.of(other, holds), node.pointer)
            return unite(yes, no)

        return Assertion(lambda: form(True), lambda: form(False))

    def _any(self, numbers: list[int], pointer: str) -> Assertion:
        def holds() -> Form:
            if not self._tracks:
                return unite(*(self.of(number) for number in numbers))
            if len(numbers) > MAX_ANY_WITH_UNEVALUATED:
                raise unsupported(step(pointer, "anyOf"), "so many branches where unevaluated* is about")
            return unite(*(self._which(numbers, chosen) for chosen in range(1, 1 << len(numbers))))

        return Assertion(holds, lambda: self._meet_all((number, False) for number in numbers))

    def _which(self, numbers: list[int], chosen: int) -> Form:
        return self._meet_all((number, bool(chosen >> index & 1)) for index, number in enumerate(numbers))

    def _meet_all(self, items: Any) -> Form:
        result = TOP
        for number, holds in items:
            result = self.meet(result, self.of(number, holds), self.document.nodes[number].pointer)
        return result

    def overlap(self, first: Form, second: Form, pointer: str) -> bool:
        """Return whether two forms may have a value in common."""
        both = self.meet(first, second, pointer)
        return any(not self.is_empty(shape, pointer) for shapes in both.values() for shape in shapes)

    def _exactly_one(self, numbers: list[int], pointer: str) -> Form:
        where = step(pointer, "oneOf")
        forms = [self.of(number) for number in numbers]
        found = []
        for index, form in enumerate(forms):
            for other, second in enumerate(forms):
                if other != index and self.overlap(forms[index], second, where):
                    form = self.meet(form, self.of(numbers[other], False), where)
            found.append(form)
        return unite(*found)

    def _not_one(self, numbers: list[int], pointer: str) -> Form:
        where = step(pointer, "oneOf")
        found = [self._meet_all((number, False) for number in numbers)]
        for index, number in enumerate(numbers):
            found += [self.meet(self.of(number), self.of(other), where) for other in numbers[index + 1 :]]
        return unite(*found)

    def _unevaluated(self, node: Node, keyword: str, kind: str, form: Form) -> Form:
        demand = node_demand(self.document.child(node, keyword))
        make: Callable[[Any], Any]
        if kind == "object":
            make = lambda shape: _rest_of_keys(shape, demand)  # noqa: E731
        else:
            if self._mentions(node, "contains"):
                raise unsupported(step(node.pointer, keyword), "beside contains")
            make = lambda shape: _rest_of_positions(shape, demand)  # noqa: E731
        return {**form, **({kind: tuple(make(shape) for shape in form[kind])} if kind in form else {})}

    def _mentions(self, node: Node, keyword: str) -> bool:
        return any(
            isinstance(other.schema, dict) and keyword in other.schema and other.base == node.base
            for other in self.document.nodes
        )


def _refuse_content(node: Node) -> None:
    # Draft 7 lets validators look into strings; later drafts do not.
    for keyword in ("contentMediaType", "contentEncoding"):
        if keyword in node.schema:
            raise unsupported(step(node.pointer, keyword), "what strings contain")


def _implied(name: str, demand: Any) -> Assertion:
    formula = any_of((negation(has(name)), demand))
    return fixed(only("object", ObjectShape(presence=formula)), just("object", ObjectShape(presence=negation(formula))))


def _unmarked(form: Form) -> Form:
    """Return `form` without the marks that unevaluated* goes by: nothing inside `not` leaves any."""
    result = dict(form)
    if "object" in form:
        result["object"] = tuple(
            replace(shape, keys=tuple(replace(keys, marks=False) for keys in shape.keys))  # type: ignore
            for shape in form["object"]
        )
    if "array" in form:
        result["array"] = tuple(
            replace(shape, positions=tuple(replace(part, marks=False) for part in shape.positions))  # type: ignore
            for shape in form["array"]
        )
    return result


def _rest_of_keys(shape: ObjectShape, demand: Demand) -> ObjectShape:
    marked = [keys for keys in shape.keys if keys.marks]
    if any(keys.explicit for keys in marked):
        return shape
    names = tuple(dict.fromkeys((name, EVERYTHING) for keys in marked for name, _ in keys.names))
    patterns = tuple(dict.fromkeys((language, EVERYTHING) for keys in marked for language, _ in keys.patterns))
    return replace(shape, keys=(*shape.keys, Keys(names, patterns, demand, explicit=True, marks=True)))


def _rest_of_positions(shape: ArrayShape, demand: Demand) -> ArrayShape:
    marked = [positions for positions in shape.positions if positions.marks]
    if any(positions.explicit for positions in marked):
        return shape
    length = max((len(positions.prefix) for positions in marked), default=0)
    added = Positions((EVERYTHING,) * length, demand, explicit=True, marks=True)
    return replace(shape, positions=(*shape.positions, added))
