"""The way in: `add_schema` and `add_json_object` write the rules of a schema into a `GrammarBuilder`."""

from __future__ import annotations

from typing import Any

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema import arrays, multiples, objects, regular
from quire.structured.json_schema.document import Document
from quire.structured.json_schema.emit import Emitter, JsonOptions
from quire.structured.json_schema.emptiness import string_language
from quire.structured.json_schema.errors import Budget, SchemaError, too_complex, unsupported
from quire.structured.json_schema.expand import Expander
from quire.structured.json_schema.numbers import number_language
from quire.structured.json_schema.regular import TooLargeError
from quire.structured.json_schema.shapes import (
    ArrayShape,
    BooleanShape,
    Demand,
    NullShape,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
    node_demand,
)

__all__ = ["JsonOptions", "SchemaError", "add_json_object", "add_schema"]

DEFAULT = JsonOptions()


def add_schema(builder: GrammarBuilder, schema: dict[str, Any] | bool, *, options: JsonOptions = DEFAULT) -> str:
    """Add rules for the instances of `schema`.

    Returns:
        The name of a rule that matches one JSON value, without blanks before or behind it.

    Raises:
        SchemaError: code invalid_json_schema, unsupported_json_schema or grammar_too_complex; `pointer` and the
            message say where.
    """
    document = Document(schema)
    emitter = Emitter(builder, Expander(document, Budget()), options)
    try:
        return _add_value(emitter, node_demand(document.root))
    except TooLargeError:
        raise too_complex("#", "its patterns take too many states") from None
    except RecursionError:
        raise too_complex("#", "its parts refer to one another through too many levels") from None
    except SchemaError:
        raise
    except RequestError as error:
        raise too_complex("#", error.message) from None


def add_json_object(builder: GrammarBuilder, options: JsonOptions = DEFAULT) -> str:
    """Add rules for any JSON object, and return the name of the first."""
    return add_schema(builder, {"type": "object"}, options=options)


def _add_value(emitter: Emitter, demand: Demand) -> str:
    """Add a rule for the values that fulfil `demand`, and all rules that it needs; return its name."""
    name = emitter.value(demand)
    while emitter.pending:
        following = emitter.pending.pop()
        emitter.builder.define(emitter.value(following), _alternatives(emitter, following))
    return name


def _alternatives(emitter: Emitter, demand: Demand) -> str:
    """Return the body of the rule for the values that fulfil `demand`."""
    texts, pointer = emitter.texts, emitter.where(demand)
    shapes = [shape for part in emitter.expander.form(demand).values() for shape in part]
    shapes = [shape for shape in shapes if not emitter.emptiness.of_shape(shape, pointer)]
    if not shapes:
        raise unsupported(pointer, "it has no instances")
    emitter.expander.budget.spend(10 * len(shapes), pointer)
    found = dict.fromkeys(expression for shape in shapes for expression in _expressions(emitter, shape, pointer))
    # All strings are one terminal, and so are all numbers: the lexer pays for each terminal.
    strings = [string_language(shape) for shape in shapes if isinstance(shape, StringShape)]
    if strings:
        found[texts.string(regular.alt(*strings))] = None
    listed = [_listed(shape) for shape in shapes if isinstance(shape, NumberShape)]
    numbers = [number_language(shape) for shape in listed if not shape.multiples]
    if numbers:
        found[texts.number(regular.alt(*numbers))] = None
    return " | ".join(found)


def _expressions(emitter: Emitter, shape: Shape, pointer: str) -> list[str]:
    """Return expressions whose union is the values of `shape`; none for strings and most numbers, see above."""
    if isinstance(shape, NullShape):
        return ['"null"']
    if isinstance(shape, BooleanShape):
        return [f'"{str(value).lower()}"' for value in sorted(shape.values)]
    if isinstance(shape, ArrayShape):
        return arrays.choices(emitter, shape, pointer)
    if isinstance(shape, ObjectShape):
        return objects.choices(emitter, shape, pointer)
    if isinstance(shape, NumberShape) and _listed(shape).multiples:
        as_floats = emitter.expander.document.draft != 4
        return multiples.choices(emitter.texts, shape, whole_as_floats=as_floats, pointer=pointer)
    return []


def _listed(shape: NumberShape) -> NumberShape:
    """Return a shape with multiples as the list of its few values, where they are few."""
    values = multiples.listed_values(shape)
    return shape if values is None else NumberShape(values=values)
