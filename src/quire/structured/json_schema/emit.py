"""From assertions to grammar rules: each `All` that is reached gets one rule, so a schema may refer to itself.

`JsonOptions` says how instances are written, `Texts` holds the terminals: strings, names, numbers, punctuation.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema import arrays, multiples, objects, regular
from quire.structured.json_schema.emptiness import Emptiness, string_language
from quire.structured.json_schema.errors import unsupported
from quire.structured.json_schema.expand import Expander
from quire.structured.json_schema.numbers import number_language
from quire.structured.json_schema.regular import ALL, Lang
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
from quire.structured.json_schema.spelling import quoted, terminal

# What writers of JSON put between its parts. If more could follow, an unsure model would go on with blanks for ever.
_BLANKS = r"/( |\r?\n[ \t]{0,40})?/"


class Texts:
    """Terminals of one grammar, written once each."""

    def __init__(self, builder: GrammarBuilder, options: JsonOptions) -> None:
        self.builder = builder
        gap = self._gap(options.whitespace)
        # Nobody writes blanks before a colon or comma, so these are forced; a pattern of the caller's goes everywhere.
        before = gap if options.whitespace != "flexible" else ""
        self._colon = builder.terminal(f'{before} ":" {gap}'.strip(), "colon")
        self.comma = builder.terminal(f'{before} "," {gap}'.strip(), "comma")
        self.open_object = builder.terminal(f'"{{" {gap}'.strip(), "open")
        self.close_object = builder.terminal(f'{gap} "}}"'.strip(), "close")
        self.open_array = builder.terminal(f'"[" {gap}'.strip(), "open")
        self.close_array = builder.terminal(f'{gap} "]"'.strip(), "close")
        self._values: dict[Lang, str] = {}

    def _gap(self, whitespace: str) -> str:
        if whitespace == "none":
            return ""
        if whitespace == "flexible":
            return self.builder.terminal(_BLANKS, "blanks")
        escaped = whitespace.replace("/", "\\/")
        # Anything but blanks between the parts would be no JSON.
        return self.builder.terminal(rf"/(?:{escaped})/ & /[ \t\n\r]*/", "blanks")

    def string(self, language: Lang) -> str:
        """Return the terminal of the JSON strings whose text is in `language`."""
        if language not in self._values:
            self._values[language] = self.builder.terminal(quoted(language), "string")
        return self._values[language]

    def name(self, language: Lang) -> str:
        """Return the terminals of a property name in `language` and the colon behind it.

        They are two: what follows a complement in one terminal would make every token a case of its own.
        """
        return f"{self.string(language)} {self._colon}"

    def number(self, language: Lang) -> str:
        """Return the terminal of the numbers whose texts are `language`."""
        if language not in self._values:
            self._values[language] = self.builder.terminal(terminal(language, spelled=False), "number")
        return self._values[language]

    def any_string(self) -> str:
        """Return the terminal of any string."""
        return self.string(ALL)

    def any_number(self) -> str:
        """Return the terminal of any number."""
        return self.number(number_language(NumberShape()))


@dataclass(frozen=True)
class JsonOptions:
    """How instances may be written.

    Attributes:
        whitespace: between the parts of JSON: "flexible" (nothing, a blank, or a new line and its indentation; nothing
            before colons and commas), "none", or a regex for one gap, of which only blanks are kept.
        additional_properties: False forbids properties that no schema names, unless the schema says something about
            them. ordered: properties come in the order of the schema, others last.
    """

    whitespace: str = "flexible"
    additional_properties: bool = True
    ordered: bool = False


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
