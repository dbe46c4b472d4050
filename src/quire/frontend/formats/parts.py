"""The words in which a format is described: what it writes, part by part. The constraint (`grammar`) and the parser
(`parser`) both read these descriptions, so they cannot disagree. The descriptions themselves are in `families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class Text:
    """Exactly this text; perhaps a special token."""

    text: str


@dataclass(frozen=True)
class Blank:
    """Blanks between parts. The family writes `text`; `loose` ones the constraint leaves to the model, within bounds.

    The parser takes any blanks in their place.
    """

    text: str = ""
    loose: bool = False


@dataclass(frozen=True)
class Name:
    """The name of the function."""


@dataclass(frozen=True)
class CallId:
    """An id of `length` letters and digits (0: digits only, any number), which is `prefix` + name + `middle` + those.

    `bare`: the text holds only the letters and digits, and these alone are the id.
    """

    length: int = 0
    bare: bool = True


@dataclass(frozen=True)
class Maybe:
    """These parts, the first of which is a text, or nothing. The constraint leaves out what is not `written`."""

    parts: tuple[Part, ...]
    written: bool = True


@dataclass(frozen=True)
class JsonObject:
    """Arguments as a JSON object."""


@dataclass(frozen=True)
class Tagged:
    """Arguments as tagged parameters: texts as they are, everything else as JSON.

    One is `key_open` key `key_close` blanks `value_open` pad value pad `value_close`; blanks stand between them.
    """

    key_open: str
    key_close: str
    value_open: str
    value_close: str
    pad: str = ""
    between: str = "\n"


@dataclass(frozen=True)
class Kwargs:
    """Arguments as in a call in Python: key=value, and so on, values as Python literals."""


@dataclass(frozen=True)
class Braces:
    """Arguments in braces: {key:value,...} with bare keys; texts stand between two `quote`s, without escapes."""

    quote: str


Notation = JsonObject | Tagged | Kwargs | Braces


@dataclass(frozen=True)
class Arguments:
    """The arguments of the call."""

    notation: Notation


Part = Text | Blank | Name | CallId | Maybe | Arguments


def parts(*pieces: Part | str) -> tuple[Part, ...]:
    """Return parts, with a `Text` for each text."""
    return tuple(Text(piece) if isinstance(piece, str) else piece for piece in pieces)


def maybe(*pieces: Part | str, written: bool = True) -> Maybe:
    """Return `Maybe` of these parts, texts as in `parts`."""
    return Maybe(parts(*pieces), written)


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: `opens` call (`between` call)* `closes`.

    Attributes:
        name: as in vLLM's --tool-call-parser. aliases: other names of it.
        call: one call.
        at_start: calls make up the whole message, which then begins with one; else content may come first.
        signs: a chat template that contains all texts of one of these tuples is of this format.
    """

    name: str
    call: tuple[Part, ...]
    opens: tuple[Part, ...] = ()
    between: tuple[Part, ...] = ()
    closes: tuple[Part, ...] = ()
    aliases: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    at_start: bool = False

    @cached_property
    def trigger(self) -> str:
        """The text that begins calls amid content; empty if there is none, as calls stand only at the start."""
        first = (*self.opens, *self.call)[0]
        return first.text if isinstance(first, Text) and not self.at_start else ""

    @cached_property
    def notation(self) -> Notation:
        """How arguments are written."""
        return next(part.notation for part in self.call if isinstance(part, Arguments))


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is written: `start` text `end`.

    Attributes:
        name: as in vLLM's --reasoning-parser. aliases: other names of it.
        after: blanks that the family writes behind `end`.
        signs: as in `CallFormat`.
    """

    name: str
    start: str
    end: str
    after: str = ""
    aliases: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
