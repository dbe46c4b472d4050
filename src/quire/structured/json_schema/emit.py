"""What rules are written with: `JsonOptions` (how instances look), `Texts` (the terminals), and the `Emitter`.

The rules themselves are in `arrays`, `objects`, `multiples` and `compiler`. They name the rule of another value with
`Emitter.value`, which only puts it on the list of rules to be written, so a schema may refer to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.emptiness import Emptiness
from quire.structured.json_schema.expand import Expander
from quire.structured.json_schema.regular import Lang
from quire.structured.json_schema.shapes import Demand
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
        self._strings: dict[Lang, str] = {}
        self._numbers: dict[Lang, str] = {}

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
        if language not in self._strings:
            self._strings[language] = self.builder.terminal(quoted(language), "string")
        return self._strings[language]

    def name(self, language: Lang) -> str:
        """Return the terminals of a property name in `language` and the colon behind it.

        They are two: what follows a complement in one terminal would make every token a case of its own.
        """
        return f"{self.string(language)} {self._colon}"

    def number(self, language: Lang) -> str:
        """Return the terminal of the numbers whose texts are `language`."""
        if language not in self._numbers:
            self._numbers[language] = self.builder.terminal(terminal(language), "number")
        return self._numbers[language]


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
    """The rules of one document as they are written into a builder: one for each `Demand` that is reached.

    Attributes:
        texts: the terminals. expander, emptiness: what is known of the document. options: as given by the caller.
        pending: demands whose rules have a name but no body yet.
    """

    def __init__(self, builder: GrammarBuilder, expander: Expander, options: JsonOptions) -> None:
        self.builder = builder
        self.expander = expander
        self.emptiness = Emptiness(expander)
        self.options = options
        self.texts = Texts(builder, options)
        self.pending: list[Demand] = []
        self._rules: dict[Demand, str] = {}

    def where(self, demand: Demand) -> str:
        """Return the pointer to (the first of) the schemas that demand it."""
        return self.expander.document.nodes[min(demand)[0]].pointer if demand else "#"

    def value(self, demand: Demand) -> str:
        """Return the name of a rule for the values that fulfil `demand`, of which there must be some."""
        if demand not in self._rules:
            self._rules[demand] = self.builder.declare("value")
            self.pending.append(demand)
        return self._rules[demand]
