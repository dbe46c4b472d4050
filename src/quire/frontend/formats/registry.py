"""Which format a model writes, found in its chat template or named by a flag; and `MessageFormat`, what servers use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from quire.errors import ConfigError, RequestError, UnsupportedError, echo
from quire.frontend.formats.arguments import ToolSchemaError, add_arguments
from quire.frontend.formats.families import CALLS, REASONING
from quire.frontend.formats.grammar import MessageGrammar, allowed_tools, must_call
from quire.frontend.formats.harmony import CALLS as HARMONY_CALLS
from quire.frontend.formats.harmony import REASONING as HARMONY_REASONING
from quire.frontend.formats.harmony import HarmonyParser, harmony_grammar
from quire.frontend.formats.message import MessageParser, MessageSpec
from quire.frontend.formats.parser import CallParser
from quire.frontend.formats.parts import CallFormat, ReasoningFormat
from quire.structured.builder import GrammarBuilder

Described = TypeVar("Described", CallFormat, ReasoningFormat)


TOOL_FORMATS: Mapping[str, CallFormat] = {
    name: form for form in (*CALLS, HARMONY_CALLS) for name in (form.name, *form.aliases)
}
VARIANTS = {"mistral": ("mistral", "mistral_ids", "mistral_list"), "phi4_mini_json": ("phi4_mini_json", "functools")}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    name: form for form in (*REASONING, HARMONY_REASONING) for name in (form.name, *form.aliases)
}


class MessageFormat:
    """How one model writes messages.

    Args:
        calls: None for a model whose template renders no tools. reasoning: None for one that does not reason.
        special_tokens: texts and ids of the tokenizer's special tokens.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        special_tokens: Mapping[str, int] | None = None,
    ) -> None:
        # Harmony is both, whichever of the two was named.
        self.harmony = calls is HARMONY_CALLS or reasoning is HARMONY_REASONING
        self.calls = HARMONY_CALLS if self.harmony else calls
        self.reasoning = HARMONY_REASONING if self.harmony else reasoning
        self._special_tokens = dict(special_tokens or {})

    @property
    def handles_tools(self) -> bool:
        """Whether the model can be offered tools."""
        return self.calls is not None

    @property
    def can_reason(self) -> bool:
        """Whether the model may reason."""
        return self.reasoning is not None

    @property
    def thinking_texts(self) -> tuple[str, str] | None:
        """The texts that begin and end reasoning."""
        return None if self.reasoning is None else (self.reasoning.start, self.reasoning.end)

    def reasoning_open(self, prompt_tail: str) -> bool:
        """Whether a prompt that ends in this text ends inside reasoning."""
        if self.reasoning is None:
            return False
        at = prompt_tail.rfind(self.reasoning.start)
        inside = prompt_tail[at + len(self.reasoning.start) :]
        if at < 0 or self.reasoning.end in inside:
            return False
        # A marker in an earlier turn is none: between it and the end there is a token that ends the turn.
        return not any(token in inside for token in self._special_tokens)

    def reasoning_closed(self, prompt_tail: str) -> bool:
        """Whether a prompt that ends in this text has had all its reasoning ("<think></think>"), so no more comes."""
        if self.reasoning is None:
            return True
        return not self.harmony and prompt_tail.rstrip().endswith(self.reasoning.end)

    def grammar(self, spec: MessageSpec) -> str | None:
        """Return the grammar of the message; None if there is nothing to constrain.

        Raises:
            RequestError: a tool's parameters cannot be enforced (invalid_function_parameters, with the pointer to the
                part), though the tool is strict or must be called; there is no such tool; or the form is unsound.
            UnsupportedError: a call is required, but the model has no way to write one.
        """
        if must_call(spec):
            if self.calls is None:
                raise UnsupportedError("tool_choice: this model's chat template has no tools", param="tool_choice")
            if not allowed_tools(spec):
                name = spec.choice.removeprefix("function:")
                raise RequestError(f"tool_choice names {echo(name)}, which is not in tools", param="tool_choice")
        try:
            return self._grammar(spec, frozenset())
        except ToolSchemaError:
            if must_call(spec):
                raise
        return self._grammar(spec, self._refused(spec))

    def _refused(self, spec: MessageSpec) -> frozenset[int]:
        """Return the numbers of the tools whose schemas cannot be enforced; raise for a strict one."""
        assert self.calls is not None, "there was a schema to enforce"
        refused = set()
        for index, tool in enumerate(spec.tools):
            try:
                add_arguments(GrammarBuilder(spec.special_tokens), self.calls.notation, tool, index)
            except ToolSchemaError:
                if tool.strict:
                    raise
                refused.add(index)
        return frozenset(refused)

    def _grammar(self, spec: MessageSpec, unenforced: frozenset[int]) -> str | None:
        if self.harmony:
            return harmony_grammar(spec, unenforced)
        return MessageGrammar(self.calls, self._reasoning_of(spec), spec, unenforced).text()

    def parser(self, spec: MessageSpec) -> MessageParser:
        """Return a parser for the message."""
        if self.harmony:
            return HarmonyParser(spec)
        calls = self.calls if allowed_tools(spec) else None
        return CallParser(calls, self._reasoning_of(spec), spec)

    def _reasoning_of(self, spec: MessageSpec) -> ReasoningFormat | None:
        return self.reasoning if spec.can_reason or spec.reasoning_open else None


def detect(template_source: str, special_tokens: Mapping[str, int] | None = None) -> MessageFormat:
    """Return the format that a chat template's text shows; a template that renders no tools has none for calls."""
    calls = _best((*CALLS, HARMONY_CALLS), template_source) if "tools" in template_source else None
    reasoning = _best((*REASONING, HARMONY_REASONING), template_source)
    return MessageFormat(calls, reasoning, special_tokens)


def format_named(
    tool_parser: str | None,
    reasoning_parser: str | None,
    template_source: str = "",
    special_tokens: Mapping[str, int] | None = None,
) -> MessageFormat:
    """Return the format of these names; what is not named is found in the chat template.

    Raises:
        ConfigError: for a name that is not known; the message lists those that are.
    """
    found = detect(template_source, special_tokens)
    calls, reasoning = found.calls, found.reasoning
    if tool_parser is not None:
        calls = _named(TOOL_FORMATS, tool_parser, "tool_call_parser")
        calls = _variant(calls, template_source, special_tokens or {})
        if calls is not HARMONY_CALLS and found.harmony:
            reasoning = None
    if reasoning_parser is not None:
        reasoning = _named(REASONING_FORMATS, reasoning_parser, "reasoning_parser")
        if reasoning is not HARMONY_REASONING and found.harmony and tool_parser is None:
            calls = None
    return MessageFormat(calls, reasoning, special_tokens)


def _named(formats: Mapping[str, Described], name: str, option: str) -> Described:
    if name not in formats:
        raise ConfigError(f"{option} must be one of {', '.join(sorted(formats))}, got {echo(name)}", param=option)
    return formats[name]


def _variant(named: CallFormat, template_source: str, special_tokens: Mapping[str, int]) -> CallFormat:
    """Return the variant of a format that matches the template, of those that share its name."""
    variants = VARIANTS.get(named.name, ())
    found = _best([TOOL_FORMATS[name] for name in variants], template_source)
    if found is not None:
        return found
    if named.name == "mistral" and special_tokens and "[ARGS]" not in special_tokens:
        return TOOL_FORMATS["mistral_list"]  # the older models know no [ARGS]
    return named


def _best(formats: Iterable[Described], text: str) -> Described | None:
    """Return the format most of whose signs are in `text`, the first of equals."""
    found: Described | None = None
    most = 0
    for one in formats:
        for sign in one.signs:
            if len(sign) > most and all(part in text for part in sign):
                found, most = one, len(sign)
    return found
