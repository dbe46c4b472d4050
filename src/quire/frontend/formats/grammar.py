"""The constraint of a message: one grammar of reasoning, content in its form, and calls, by its description (`parts`).

Markers that are special tokens are named by id. Spelled out as text they are kept out of free text all the same: the
parser sees only text. The grammar ends, accepting, where the message may end; end tokens are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quire.frontend.formats.arguments import add_arguments, add_json_call
from quire.frontend.formats.message import MessageSpec, Tool
from quire.frontend.formats.parts import (
    BLANKS as BLANK_CHARS,
)
from quire.frontend.formats.parts import (
    Arguments,
    Blank,
    CallFormat,
    CallId,
    JsonObject,
    Maybe,
    Name,
    Part,
    ReasoningFormat,
    Text,
)
from quire.structured.builder import GrammarBuilder, literal
from quire.structured.compile import add_structured_output
from quire.structured_outputs import StructuredOutputParams

ANY = "/(?s:.*)/"
BLANK = r"/[ \t\r\n]{1,3}/"
BLANKS = r"/[ \t\r\n]*/"
EMPTY = '""'


def allowed_tools(spec: MessageSpec) -> list[Tool]:
    """Return the tools that the message may call."""
    if spec.choice == "none":
        return []
    name = spec.choice.removeprefix("function:") if spec.choice.startswith("function:") else None
    return [tool for tool in spec.tools if name is None or tool.name == name]


def must_call(spec: MessageSpec) -> bool:
    """Whether the message must be a call."""
    return spec.choice == "required" or spec.choice.startswith("function:")


def ignores_leading_blanks(form: StructuredOutputParams | None) -> bool:
    """Whether blanks between reasoning and content belong to neither, as content in this form never begins with one."""
    if form is None or form.json is not None or form.json_object is not None:
        return True
    return form.choice is not None and not any(choice[0] in BLANK_CHARS for choice in form.choice)


class Writer:
    """Writes the parts of free text into a grammar."""

    def __init__(self, builder: GrammarBuilder) -> None:
        self.builder = builder

    def text(self, without: Iterable[str] = (), not_starting: Iterable[str] = ()) -> str:
        """Return a terminal for text, perhaps empty, in which `without` do not occur.

        It does not start, behind blanks, with any of `not_starting`, which are expressions of terminals.
        """
        return self.builder.terminal(self._text(without, not_starting), "text")

    def until(self, marker: str, without: Iterable[str] = (), not_starting: Iterable[str] = ()) -> str:
        """Return an expression for text up to and including the first `marker`."""
        text = self._text([marker, *without], not_starting)
        if marker in self.builder.special_tokens:
            return f"{self.builder.terminal(text, 'text')}? {self.builder.marker(marker)}"
        # One lexeme: text by itself would take the beginning of the marker with it. And a lazy one, which ends for sure
        # where the marker does: behind a longest match that the library believes could go on, it panics at a token.
        return self.builder.rule(f"{self.builder.terminal(text, 'text')} {literal(marker)}", "until", "lazy")

    def _text(self, without: Iterable[str], not_starting: Iterable[str]) -> str:
        # One complement of a union: an intersection of many complements is far dearer to the library's lexer.
        markers = [literal(marker) for marker in without if marker]
        starts = list(not_starting)
        outside = [f"{ANY} ({' | '.join(markers)}) {ANY}"] if markers else []
        outside += [f"{BLANKS} ({' | '.join(starts)}) {ANY}"] if starts else []
        return f"{ANY} & ~({' | '.join(outside)})" if outside else ANY

    def marks(self, text: str) -> str:
        """Return an expression for exactly `text`, in which there may be special tokens."""
        pieces, plain, at = [], "", 0
        longest_first = sorted(self.builder.special_tokens, key=len, reverse=True)
        while at < len(text):
            token = next((one for one in longest_first if text.startswith(one, at)), "")
            if token:
                pieces += [literal(plain)] if plain else []
                pieces.append(self.builder.marker(token))
                plain = ""
            else:
                plain += text[at]
            at += len(token) or 1
        return " ".join([*pieces, literal(plain)] if plain else pieces)

    def blank(self) -> str:
        """Return an expression for a few blanks, or none."""
        return self.builder.terminal(BLANK, "blank") + "?"


class MessageGrammar:
    """The grammar of one message.

    Args:
        unenforced: numbers of the tools whose arguments are not held to their schemas.

    Raises:
        ToolSchemaError: from `text`, for a schema that cannot be enforced. RequestError: as `add_structured_output`.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        spec: MessageSpec,
        unenforced: frozenset[int] = frozenset(),
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._spec = spec
        self._unenforced = unenforced
        self._arguments: dict[int, str] = {}
        self._tools = allowed_tools(spec) if calls is not None else []
        self._builder = GrammarBuilder(spec.special_tokens)
        self._writer = Writer(self._builder)

    def text(self) -> str | None:
        """Return the grammar, None if there is nothing to constrain."""
        if not self._tools and self._spec.structured_outputs is None:
            return None
        form = (
            None
            if self._spec.structured_outputs is None or must_call(self._spec)
            else add_structured_output(self._builder, self._spec.structured_outputs)
        )
        reasoning = self._reasoning
        if reasoning is None:
            return self._builder.lark(self._builder.rule(self._body(form, None), "message"))
        thoughts = self._writer.until(reasoning.end)
        if not ignores_leading_blanks(self._spec.structured_outputs):
            thoughts += " " + literal(reasoning.after) if reasoning.after else ""
        elif form is not None:
            thoughts += " " + self._writer.blank()
        after = self._builder.rule(self._body(form, None), "body")
        if self._spec.reasoning_open:
            return self._builder.lark(self._builder.rule(f"{thoughts} {after}", "message"))
        start = f"{self._writer.blank()} {self._writer.marks(reasoning.start)}"
        if not any(token in reasoning.start for token in self._spec.special_tokens):
            # One lexeme: free text may begin with the same blanks.
            start = self._builder.terminal(f"{BLANKS} {literal(reasoning.start)}", "start")
        first = self._builder.rule(self._body(form, reasoning.start), "body")
        thought = self._builder.rule(f"{start} {thoughts} {after}", "thought")
        return self._builder.lark(self._builder.rule(f"{thought} | {first}", "message"))

    def _body(self, form: str | None, not_start: str | None) -> str:
        """Return an expression for what follows reasoning; `not_start`: free text does not start with it."""
        starts = [] if not_start is None else [literal(not_start)]
        if not self._tools or self._calls is None:
            assert form is not None, "something is to be constrained"
            return self._form(form, starts)
        calls = self._calls
        marked = self._marked_run(calls)
        if must_call(self._spec):
            return f"{self._writer.blank()} {self._run(calls)}{marked}"
        if form is not None:
            begins = [literal(calls.trigger)] if calls.trigger else []
            begins = begins or [self._opening(calls, tool.name) for tool in self._tools]
            # Calls and content may both be JSON from the first character.
            both_json = not calls.trigger and isinstance(calls.notation, JsonObject)
            run = self._json_calls(calls) if both_json else self._run(calls)
            return f"{self._form(form, [*starts, *begins])} | {self._writer.blank()} {run}{marked}"
        if not calls.trigger:
            openings = {tool.name: self._opening(calls, tool.name) for tool in self._tools}
            text = self._writer.text(not_starting=[*starts, *openings.values()])
            begun = {name: self._builder.terminal(f"{BLANKS} {begin}", "begin") for name, begin in openings.items()}
            return f"{text}? | {self._run(calls, begun)}{marked}"
        text = self._writer.text([calls.trigger], starts)
        lead = self._writer.until(calls.trigger, (), starts)
        return f"{text}? | {lead} {self._run(calls, {})}"

    def _marked_run(self, calls: CallFormat) -> str:
        """Return a further way to begin calls: with a special token that the family's models write now and then."""
        first = (*calls.opens, *calls.call)[0]
        mark = first.parts[0] if isinstance(first, Maybe) else first
        if not isinstance(first, Maybe) or not isinstance(mark, Text) or mark.text not in self._builder.special_tokens:
            return ""
        return f" | {self._builder.marker(mark.text)} {self._writer.blank()} {self._run(calls)}"

    def _json_calls(self, calls: CallFormat) -> str:
        """Return a rule for one call that is JSON altogether, written by the same rules as content that is JSON.

        Two ways to cut the same text into lexemes would exclude each other: the library takes the longest.
        """
        names = [part.text.strip('"') for part in calls.call if isinstance(part, Text) and part.text[1:-1].isalpha()]
        ways = []
        for tool in self._tools:
            index = self._spec.tools.index(tool)
            ways.append(add_json_call(self._builder, tool, index, (names[-2], names[-1]), index in self._unenforced))
        return self._builder.rule(" | ".join(ways), "calls")

    def _run(self, calls: CallFormat, begun: Mapping[str, str] | None = None) -> str:
        """Return a rule for one run of calls.

        Args:
            begun: None for the run as it is written. Otherwise the trigger has been written; or, if there is none, the
                terminals that stand for everything up to the arguments, by tool. One lexeme, or free text, which may
                begin in the same way, would be taken for longer.
        """
        builder = self._builder
        whole = (*calls.opens, *calls.call)
        skip = 0 if begun is None else next(i for i, part in enumerate(whole) if isinstance(part, Arguments))
        skip = 1 if begun == {} else skip
        ways, firsts = [], []
        for tool in self._tools:
            index = self._spec.tools.index(tool)
            if index not in self._arguments:
                unenforced = index in self._unenforced
                self._arguments[index] = add_arguments(builder, calls.notation, tool, index, unenforced)
            arguments = self._arguments[index]
            ways.append(self._parts(calls.call, tool.name, arguments))
            first = self._parts(whole[skip:], tool.name, arguments)
            firsts.append(_joined([(begun or {}).get(tool.name, ""), first]))
        one = builder.rule(" | ".join(ways), "call")
        pieces = [builder.rule(" | ".join(firsts), "first")]
        if self._spec.parallel and not self._spec.choice.startswith("function:"):
            more = builder.rule(_joined([self._parts(calls.between), one]), "more")
            pieces.append(f"{more}*")
        pieces.append(self._parts(calls.closes))
        return builder.rule(_joined(pieces), "calls")

    def _parts(self, parts: Sequence[Part], name: str = "", arguments: str = "") -> str:
        """Return an expression for these parts."""
        pieces: list[str] = []
        plain = ""

        def flush() -> None:
            nonlocal plain
            if plain:
                pieces.append(literal(plain))
            plain = ""

        for part in parts:
            match part:
                case Text(text=text) if text not in self._builder.special_tokens:
                    plain += text
                case Name():
                    plain += name
                case Blank(text=text, loose=False):
                    plain += text
                case Maybe(written=False):
                    pass
                case _:
                    flush()
                    pieces.append(self._part(part, name, arguments))
        flush()
        return _joined(pieces)

    def _part(self, part: Part, name: str, arguments: str) -> str:
        match part:
            case Text(text=text):
                return self._builder.marker(text)
            case Blank():
                return self._writer.blank()
            case CallId(length=length):
                return self._builder.terminal(f"/[a-zA-Z0-9]{{{length}}}/" if length else "/0|[1-9][0-9]{0,3}/", "id")
            case Maybe(parts=inner):
                return f"({self._parts(inner, name, arguments)})?"
            case Arguments():
                return arguments
            case _:
                raise AssertionError(f"{part} is handled elsewhere")

    def _form(self, form: str, not_starting: Sequence[str]) -> str:
        """Return an expression for content in its form that cannot be taken for anything else."""
        if form.islower() or not not_starting:
            return form  # a rule; what could be done about terminals cannot be done about it
        return self._builder.terminal(f"{form} & ~({BLANKS} ({' | '.join(not_starting)}) {ANY})", "form")

    def _opening(self, calls: CallFormat, name: str) -> str:
        """Return an expression of terminals for what begins a call of `name`, up to its arguments."""
        pieces = []
        for part in (*calls.opens, *calls.call):
            match part:
                case Text(text=text):
                    pieces.append(literal(text))
                case Blank():
                    pieces.append(BLANKS)
                case Maybe(parts=inner):
                    texts = [literal(one.text) if isinstance(one, Text) else BLANKS for one in inner]
                    pieces.append(f"({' '.join(texts)})?")
                case Name():
                    pieces.append(literal(name))
                case _:
                    break
        return " ".join(pieces)


def _joined(pieces: Iterable[str]) -> str:
    return " ".join(piece for piece in pieces if piece)
