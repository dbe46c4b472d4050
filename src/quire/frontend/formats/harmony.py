"""Harmony, the format of gpt-oss: a turn is a run of messages, each with a channel and perhaps a recipient.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer, and calls as
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}, after which the model gives up its turn. The
recipient may also stand before the channel. Commentary without a recipient is meant for the user.
"""

from __future__ import annotations

from quire.frontend.formats.arguments import add_arguments
from quire.frontend.formats.events import ReadingParser
from quire.frontend.formats.grammar import Writer, allowed_tools, must_call
from quire.frontend.formats.message import MessageSpec
from quire.frontend.formats.parts import Arguments, Blank, CallFormat, JsonObject, Name, ReasoningFormat, parts
from quire.frontend.formats.source import Reading, Sink, markers_of
from quire.frontend.formats.values import read_json
from quire.structured.builder import GrammarBuilder
from quire.structured.compile import add_structured_output

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL, START, CHANNEL)
NAMESPACE = "functions."
BEGINNINGS = (CHANNEL, START, " to=", "to=")
MAX_BEGINNING = 16

CALLS = CallFormat(
    name="openai",
    call=parts(
        CHANNEL, "commentary to=" + NAMESPACE, Name(), Blank(" "), CONSTRAIN, "json", MESSAGE, Arguments(JsonObject())
    ),
    aliases=("gpt_oss", "harmony"),
    signs=((CHANNEL, MESSAGE, "analysis", "commentary"),),
)
REASONING = ReasoningFormat(
    name="openai_gptoss",
    start=CHANNEL + "analysis" + MESSAGE,
    end=END,
    aliases=("gpt_oss", "harmony", "openai"),
    signs=CALLS.signs,
)


def harmony_grammar(spec: MessageSpec, unenforced: frozenset[int]) -> str | None:
    """Return the grammar of a turn; None if there is nothing to constrain. Arguments as for `MessageGrammar`."""
    tools = allowed_tools(spec)
    if not tools and spec.structured_outputs is None:
        return None
    builder = GrammarBuilder(spec.special_tokens)
    writer = Writer(builder)
    mark = builder.marker
    ways = []
    if not must_call(spec):
        json_sign = f'(" "? {mark(CONSTRAIN)}? "json")?'
        answer = (
            writer.text(ENDS) + "?"
            if spec.structured_outputs is None
            else add_structured_output(builder, spec.structured_outputs)
        )
        ways.append(builder.rule(f'{mark(CHANNEL)} "final" {json_sign} {mark(MESSAGE)} ({answer})', "final"))
    if tools:
        calls = []
        for tool in tools:
            index = spec.tools.index(tool)
            arguments = add_arguments(builder, JsonObject(), tool, index, index in unenforced)
            kind = f'(" " {mark(CONSTRAIN)}? "json")?'
            recipient = f'" to={NAMESPACE}{tool.name}"'
            calls.append(f'{mark(CHANNEL)} "commentary" {recipient} {kind} {mark(MESSAGE)} {arguments}')
            calls.append(f'{recipient} {mark(CHANNEL)} "commentary" {kind} {mark(MESSAGE)} {arguments}')
        call = builder.rule(" | ".join(calls), "call")
        if must_call(spec) or spec.structured_outputs is not None:
            ways.append(call)
        else:
            ways.append(f"{_message(writer, 'commentary')}* {call}")
    body = builder.rule(" | ".join(ways), "body")
    thoughts = f"{_message(writer, 'analysis')}*" if spec.can_reason or spec.reasoning_open else ""
    opened = _rest(writer) if spec.reasoning_open else ""
    return builder.lark(builder.rule(f"{opened} {thoughts} {body}", "turn"))


def _message(writer: Writer, channel: str) -> str:
    """Return a rule for a message that others follow."""
    mark = writer.builder.marker
    return writer.builder.rule(f'{mark(CHANNEL)} "{channel}" {mark(MESSAGE)} {_rest(writer)}', channel)


def _rest(writer: Writer) -> str:
    """Return an expression for the text of a message and all that stands before the next channel."""
    return f'{writer.until(END, ENDS[1:])} {writer.builder.marker(START)} "assistant"'


class HarmonyParser(ReadingParser):
    """`MessageParser` for Harmony. What has no header is content, and so is a call where none may be."""

    def __init__(self, spec: MessageSpec) -> None:
        super().__init__()
        self._spec = spec
        self._names = {tool.name for tool in spec.tools} if spec.choice != "none" else set()
        self._unexpected = frozenset((*spec.special_tokens, *spec.end_tokens)) - {*ENDS}
        self._body_end = markers_of(self._unexpected | {*ENDS})
        self._header_end = markers_of(frozenset((MESSAGE, END, RETURN, CALL)))
        self._reader = self._turn()

    def _turn(self) -> Reading[None]:
        if self._spec.reasoning_open:
            found = yield from self._text(self._events.reasoning, closed=True)
        else:
            found = yield from self._source.literal(*BEGINNINGS)
            if not found and not self._is_cut():
                found = yield from self._text(self._events.content)
        while found:
            if found in (END, RETURN, CALL):
                found = yield from self._between()
            else:
                found = yield from self._message(found)

    def _is_cut(self) -> bool:
        """Whether all that is there is a part of a header."""
        rest = self._source.text[self._source.pos :][:MAX_BEGINNING]
        return self._source.ended and any(begin.startswith(rest) for begin in BEGINNINGS)

    def _between(self) -> Reading[str]:
        """Read on behind the end of a message; return what begins the next one."""
        yield from self._source.blanks()
        found = yield from self._source.literal(*BEGINNINGS, END, RETURN, CALL)
        if not found and self._is_cut():
            return ""
        return found or (yield from self._text(self._events.content))

    def _message(self, begun: str) -> Reading[str]:
        """Read the rest of a header that began with `begun`, and its message; return what ended it."""
        pieces = [begun]
        found = yield from self._source.until(self._header_end, pieces.append)
        header = "".join(pieces)
        if found != MESSAGE:
            return found
        channel = _word_after(header, CHANNEL)
        recipient = _word_after(header, "to=")
        name = recipient.removeprefix(NAMESPACE)
        if recipient.startswith(NAMESPACE) and name in self._names:
            return (yield from self._call(name))
        if channel == "analysis":
            return (yield from self._text(self._events.reasoning, closed=True))
        return (yield from self._text(self._events.content))

    def _text(self, sink: Sink, closed: bool = False) -> Reading[str]:
        """Read a message's text; return the marker that ended it."""
        return (yield from self._source.until(self._body_end, sink, self._unexpected, closed=closed))

    def _call(self, name: str) -> Reading[str]:
        yield from self._source.blanks()
        if (yield from self._source.peek()) == "{":
            self._events.start(name)
            if (yield from read_json(self._source, self._events.arguments)):
                self._events.end()
        return (yield from self._text(lambda text: None))


def _word_after(header: str, mark: str) -> str:
    """Return what follows `mark`, up to a blank or a special token."""
    _, found, rest = header.partition(mark)
    return (rest.split("<|")[0].split() or [""])[0] if found else ""
