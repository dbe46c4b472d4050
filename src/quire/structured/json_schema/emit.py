"""From demands to rules: every demand that is reached gets one rule, so schemas may refer to themselves."""

from __future__ import annotations

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema import arrays, multiples, objects, regular
from quire.structured.json_schema.emptiness import Emptiness, string_language
from quire.structured.json_schema.errors import unsupported
from quire.structured.json_schema.expand import Expander
from quire.structured.json_schema.numbers import number_language
from quire.structured.json_schema.options import JsonOptions
from quire.structured.json_schema.shapes import (
    EVERYTHING,
    All,
    ArrayShape,
    BooleanShape,
    NullShape,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
)
from quire.structured.json_schema.texts import Texts


class Emitter:
    """Writes the rules of one document into a builder.

    Attributes:
        texts: the terminals. expander, emptiness: what is known of the document. options: as given by the caller.
    """

    def __init__(self, builder: GrammarBuilder, expander: Expander, options: JsonOptions) -> None:
        self.builder = builder
        self.expander = expander
        self.emptiness = Emptiness(expander)
        self.options = options
        self.texts = Texts(builder, options)
        self._rules: dict[All, str] = {}

    def where(self, demand: All) -> str:
        """Return the pointer to (the first of) the schemas that demand it."""
        return self.expander.document.nodes[min(demand)[0]].pointer if demand else "#"

    def value(self, demand: All) -> str:
        """Return the name of a rule for the values that fulfil `demand`, of which there must be some."""
        if demand not in self._rules:
            name = self._rules[demand] = self.builder.declare("value")
            if demand == EVERYTHING:
                self.builder.define(name, self._any())
            else:
                self.builder.define(name, self._choices(demand))
        return self._rules[demand]

    def _any(self) -> str:
        texts, name = self.texts, self._rules[EVERYTHING]
        array = f"{texts.open_array} ({name} ({texts.comma} {name})*)? {texts.close_array}"
        return (
            f'{texts.any_string()} | {texts.any_number()} | "true" | "false" | "null" | {array} | {self.any_object()}'
        )

    def any_object(self) -> str:
        """Return an expression for any object."""
        texts = self.texts
        member = f"{texts.name(regular.ALL)} {self.value(EVERYTHING)}"
        return f"{texts.open_object} ({member} ({texts.comma} {member})*)? {texts.close_object}"

    def _choices(self, demand: All) -> str:
        pointer = self.where(demand)
        form = self.expander.form(demand)
        shapes = [shape for part in form.values() for shape in part if not self.emptiness.of_shape(shape, pointer)]
        if not shapes:
            raise unsupported(pointer, "it has no instances")
        self.expander.budget.spend(10 * len(shapes), pointer)
        choices = dict.fromkeys(choice for shape in shapes for choice in self._shape(shape, pointer) if choice)
        strings = [string_language(shape) for shape in shapes if isinstance(shape, StringShape)]
        if strings:
            choices[self.texts.string(regular.alt(*strings))] = None
        plain = [_listed(shape) for shape in shapes if isinstance(shape, NumberShape)]
        numbers = [self._number(shape) for shape in plain if not shape.multiples]
        if numbers:
            choices[self.texts.number(regular.alt(*numbers))] = None
        return " | ".join(choices)

    def _number(self, shape: NumberShape) -> regular.Lang:
        return number_language(shape, whole_as_floats=self.expander.document.draft != 4)

    def _shape(self, shape: Shape, pointer: str) -> list[str]:
        if isinstance(shape, NullShape):
            return ['"null"']
        if isinstance(shape, BooleanShape):
            return [f'"{str(value).lower()}"' for value in sorted(shape.values)]
        if isinstance(shape, ArrayShape):
            return arrays.choices(self, shape, pointer)
        if isinstance(shape, ObjectShape):
            return objects.choices(self, shape, pointer)
        if isinstance(shape, NumberShape) and _listed(shape).multiples:
            as_floats = self.expander.document.draft != 4
            return multiples.choices(self.builder, shape, whole_as_floats=as_floats, pointer=pointer)
        return []


def _listed(shape: NumberShape) -> NumberShape:
    """Return a shape with multiples as the list of its few values, where they are few."""
    values = multiples.listed_values(shape)
    return shape if values is None else NumberShape(values=values)
