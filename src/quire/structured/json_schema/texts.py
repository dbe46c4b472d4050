"""The smallest parts of JSON as terminals: strings, names with their colon, numbers, brackets, commas, blanks."""

from __future__ import annotations

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.numbers import number_language
from quire.structured.json_schema.options import JsonOptions
from quire.structured.json_schema.regular import ALL, Lang
from quire.structured.json_schema.shapes import NumberShape
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
