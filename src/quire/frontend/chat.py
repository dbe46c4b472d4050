"""Chat templates: conversations to the text, and the token ids, that a model was trained on.

Templates are Jinja programs from model folders. They run sandboxed, without a loader, within bounds (`chat_worker`),
and see nothing but plain JSON data; for well-formed input the text is the one that the Transformers library renders
(5.x; docs/chat_templates.md has the few differences). Messages are prepared in `chat_messages`.

Control tokens in user text. What a caller writes into a message must not become a control token, or a user could end
their own turn and begin the system's. `ChatTemplate.encode` finds out by rendering a second time, with a mark (random
digits) after every character of the input that could begin a control token, and after the first character of a text
that could go on with one ("<" + key + ">"). Whatever the template does to marked text (trim it, split it, join it),
no control token can begin in it, so those in the marked rendering are the template's own. If the ordinary rendering has
the same control tokens, it is used as it is; that is nearly always so, and when the input has no such character, there
is no second rendering at all. Otherwise the text between the template's control tokens is tokenized with control tokens
disabled (`Tokenizer.plain_text_encoder`). Templates that write more than the first character of a token and take the
rest from the input do so on purpose ("<|" + role + "|>"); roles are not marked, and must be plain words.

Control tokens are those that the tokenizer calls special, and other added tokens that have the looks of one (<|x|>,
[X]) and stand in the template: some families mark turns with such. Tags, often <think> and the like, are ordinary
vocabulary if they are not special: assistants' messages are full of them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from jinja2 import TemplateSyntaxError

from quire.checks import check_length, check_string, check_unicode, wrong_type
from quire.config import TEMPLATE_ARGUMENTS
from quire.errors import ModelError, RequestError, UnsupportedError, echo
from quire.frontend.chat_messages import (
    REASONING_KEYS,
    Marker,
    TemplateTraits,
    check_documents,
    plain_data,
    prepare_message,
)
from quire.frontend.chat_sandbox import TOO_COMPLEX
from quire.frontend.chat_worker import CompiledTemplate, TemplateWorkers
from quire.frontend.context_limit import ContextLimit
from quire.frontend.prompts import TokensOfText
from quire.tokenizer.tokenizer import PlainTextEncoder, Tokenizer, text_called

MARK_DIGITS = 24
MAX_REQUEST_TEMPLATE = 2**16
STRUCTURAL = re.compile(r"<[|\uff5c].+[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]", re.DOTALL)
REQUEST_TEMPLATES = 8


class ChatTemplate:
    """A compiled template together with the tokenizer it belongs to. Safe to use from several threads.

    Args:
        source: Jinja text. origin: the file it came from, for error messages.
        content_format: "string" or "openai" give content as a text or as parts; "auto" gives it as the message has it,
            but parts joined by line breaks where the template knows none.
        default_kwargs: variables for every rendering, unless it has others of the same name.
        for_tools: the model's template for conversations with tools, if it has another one for them.
        workers: where it is rendered if not in the front; None: it has its own.
        from_request: whether a request brought it. Then it is never rendered in the front.

    Raises:
        ModelError: a syntax error; the message names file and line.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        origin: str = "chat template",
        content_format: str = "auto",
        default_kwargs: Mapping[str, Any] | None = None,
        for_tools: ChatTemplate | None = None,
        workers: TemplateWorkers | None = None,
        from_request: bool = False,
    ) -> None:
        self.source = source
        self.for_tools = for_tools or self
        self._tokenizer = tokenizer
        try:
            self.workers = workers or TemplateWorkers()
            self._template = CompiledTemplate(source, self.workers, trusted=not from_request)
        except TemplateSyntaxError as error:
            raise ModelError(f"{origin}: chat template, line {error.lineno}: {error.message}") from None
        self._control_ids = {**tokenizer.control_tokens, **_structural(tokenizer, source)}
        self.controls = ControlTokenFinder(self._control_ids)
        self._defaults = dict(default_kwargs or {})
        self._traits = TemplateTraits(self._try, content_format)
        self._param = "chat_template" if from_request else "messages"

    def encode_segments(self, segments: Sequence[str | int]) -> list[int]:
        """Return the ids of plain text and the ids of control tokens in a row; plain text makes no control token."""
        return self._plain_text.encode(segments)

    def reads(self, name: str) -> bool:
        """Whether the template looks anywhere at a variable, such as "tools", "documents" or "enable_thinking"."""
        if self.for_tools is not self and name == "tools":
            return self.for_tools.reads(name)
        return name in self._template.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: objects with "role", "content" and whatever else the template knows.
            add_generation_prompt: end with the beginning of an assistant's turn.
            continue_final_message: end within the last message, for the model to go on; a text names the field that
                is to go on, such as "reasoning_content", in the place of "content".
            tools: JSON schemas of functions. documents: objects, commonly with "title" and "text", for templates that
                read them. variables: what else the template may use, such as enable_thinking.

        Raises:
            RequestError: the messages are malformed, or the template refuses them; param is "messages".
            UnsupportedError: there are documents, which the template does not read.
        """
        arguments = _Arguments(messages, add_generation_prompt, continue_final_message, tools, documents, variables)
        return self._chosen(arguments)._render(arguments, lambda text: text)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: ContextLimit | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, in which every control token is the template's.

        Args:
            limit: refuses what cannot fit the context, early. truncate_prompt_tokens: keep only the last so many
                tokens. The others as for `render`.

        Raises:
            RequestError: as `render`. ContextLengthError: the conversation does not fit; param is "messages".
        """
        arguments = _Arguments(
            messages, add_generation_prompt, continue_final_message, tools, documents, variables or {}
        )
        chosen = self._chosen(arguments)
        token_ids = chosen._encode(arguments, limit, cut=truncate_prompt_tokens is not None)
        if truncate_prompt_tokens is not None:
            token_ids = token_ids[-truncate_prompt_tokens:]
        if limit is not None:
            limit.check_length(len(token_ids), "messages")
        return TokensOfText(token_ids)

    def _chosen(self, arguments: _Arguments) -> ChatTemplate:
        """Return the template for these arguments. Raises `RequestError` if they are malformed."""
        chosen = self if arguments.tools is None else self.for_tools
        arguments.check(chosen)
        return chosen

    def _encode(self, arguments: _Arguments, limit: ContextLimit | None, cut: bool) -> list[int]:
        probe = _Probe(self.controls)
        text = self._render(arguments, probe)
        if limit is not None:
            limit.check_chars(len(text), "messages")
            if not cut:
                limit.check_pieces(text, "messages")
        # All renderings come first, so that none makes it necessary to tokenize once more, elsewhere.
        marks = self._marked(arguments) if probe.suspicious else None
        with text_called("messages"):
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            return token_ids if marks is None else self._without_injection(arguments, token_ids, marks)

    def _marked(self, arguments: _Arguments) -> _Marks:
        """Render with marks where the input could begin a control token, or in whole ones if the template needs it."""
        mark = _random_digits()
        try:
            text = self._render(arguments, lambda text: self.controls.mark_beginnings(text, mark), marked=True)
        except RequestError as error:
            if error.code == TOO_COMPLEX:
                raise
            text = self._with_marked_tokens(arguments, mark)  # it cannot do without what the marks hid from it
        return _Marks(mark, text)

    def _with_marked_tokens(self, arguments: _Arguments, mark: str) -> str:
        return self._render(arguments, lambda text: self.controls.mark_tokens(text, mark), marked=True)

    def _without_injection(self, arguments: _Arguments, token_ids: list[int], marks: _Marks) -> list[int]:
        """Return `token_ids` if their control tokens are the template's own, and repaired ids otherwise."""
        controls = self.controls
        genuine = controls.ids(marks.text)
        known = set(self._control_ids.values())
        if [index for index in token_ids if index in known] == genuine:
            return token_ids
        # Marks may hide from the template what it looks for in the input ("</think>"), so prefer the text in which
        # only whole tokens are marked, if that was enough.
        sparse = self._with_marked_tokens(arguments, marks.mark)
        segments = controls.split(sparse if controls.ids(sparse) == genuine else marks.text)
        parts = [part.replace(marks.mark, "") if isinstance(part, str) else part for part in segments]
        return self._plain_text.encode(parts)

    @cached_property
    def _plain_text(self) -> PlainTextEncoder:
        return self._tokenizer.plain_text_encoder(self._control_ids.values())

    def _render(self, arguments: _Arguments, mark: Marker, marked: bool = False) -> str:
        messages = [prepare_message(item, index, self._traits, mark) for index, item in enumerate(arguments.messages)]
        end = _mark_end(messages[-1], arguments.continued_field) if arguments.continued_field else None
        optional = {"tools": arguments.tools, "documents": arguments.documents}
        text = self._render_plain(
            messages,
            variables=plain_data(arguments.variables, "chat_template_kwargs", mark),
            add_generation_prompt=arguments.add_generation_prompt,
            **{name: None if item is None else plain_data(item, name, mark) for name, item in optional.items()},
        )
        self._check_unicode(text, arguments)
        if end is None:
            return text
        # Marks may stand where the template changed the text; whether it did shows in the rendering without them.
        return end.cut(text, strict=not marked)

    def _check_unicode(self, text: str, arguments: _Arguments) -> None:
        """Raise `RequestError`, naming the argument, if a rendering has lone surrogates."""
        try:
            check_unicode(text, "messages")
        except RequestError:
            check_unicode(arguments.tools, "tools")
            check_unicode(arguments.documents, "documents")
            check_unicode(arguments.variables, "chat_template_kwargs")
            raise

    def _render_plain(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any] = {},
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Run the template on data that was checked before."""
        context = {
            **self._tokenizer.special_tokens,
            **self._defaults,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except RequestError as error:
            if error.code == TOO_COMPLEX:
                error.param = self._param
            raise

    def _try(self, messages: list[dict[str, Any]]) -> str | None:
        """Render a small conversation; None if the template fails on it."""
        try:
            return self._render_plain(messages)
        except RequestError as error:
            if error.code == TOO_COMPLEX:  # it would be so again, and each time costs seconds
                raise
            return None


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of a rendering."""

    messages: Any
    add_generation_prompt: bool
    continue_final_message: bool | str
    tools: Any
    documents: Any
    variables: Mapping[str, Any]

    @property
    def continued_field(self) -> str | None:
        """The field of the last message that the model is to go on with."""
        if isinstance(self.continue_final_message, str):
            return self.continue_final_message or None
        return "content" if self.continue_final_message else None

    def check(self, template: ChatTemplate) -> None:
        """Raise `RequestError` for what no template can render, and for documents that this one does not read."""
        if not isinstance(self.messages, list | tuple):
            raise wrong_type("messages", "a list of objects", self.messages)
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages", code="empty_array")
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message contradicts add_generation_prompt; give one of them",
                param="continue_final_message",
            )
        taken = TEMPLATE_ARGUMENTS & set(self.variables)
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(sorted(taken))}", param="chat_template_kwargs"
            )
        if self.documents is not None:
            check_documents(self.documents)
            if self.documents and not template.reads("documents"):
                raise UnsupportedError("documents: the chat template of this model reads none", param="documents")


class RequestTemplates:
    """Templates that requests bring, compiled; the last few are kept. Safe to use from several threads.

    Args:
        content_format, default_kwargs, workers: as for `ChatTemplate`.
    """

    def __init__(
        self,
        content_format: str = "auto",
        default_kwargs: Mapping[str, Any] | None = None,
        workers: TemplateWorkers | None = None,
    ) -> None:
        self.workers = workers or TemplateWorkers()
        make = partial(
            ChatTemplate,
            origin="this request",
            content_format=content_format,
            default_kwargs=default_kwargs,
            workers=self.workers,
            from_request=True,
        )
        self._compile = lru_cache(REQUEST_TEMPLATES)(make)

    def get(self, source: Any, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template with this Jinja text.

        Raises:
            RequestError: it is no text, too long, or has a syntax error; param is "chat_template".
        """
        check_length(check_string(source, "chat_template"), "chat_template", MAX_REQUEST_TEMPLATE)
        check_unicode(source, "chat_template")
        try:
            return self._compile(source, tokenizer)
        except ModelError as error:
            raise RequestError(error.message, param="chat_template") from None


class ControlTokenFinder:
    """Finds the control tokens of a tokenizer in text, in time linear in the text however many there are.

    Attributes:
        first_char: matches every character that begins a control token.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        self._lengths = sorted({len(text) for text in tokens}, reverse=True)
        self._tails = {text[1:] for text in tokens if len(text) > 1}
        self._tail_starts = {tail[:end] for tail in self._tails for end in range(1, len(tail))}
        firsts = "".join(sorted({text[0] for text in tokens}))
        self.first_char = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    def suspicious(self, text: str) -> bool:
        """Whether a text has a character that begins a control token, or could go on with one after its first."""
        return self.first_char.search(text) is not None or self.continues(text)

    def continues(self, text: str) -> bool:
        """Whether a control token may arise when the first character of one is put in front of a text.

        A template that writes "<" + key + ">" makes one of the key "|end|".
        """
        return text in self._tail_starts or any(text[: length - 1] in self._tails for length in self._lengths)

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, id) of each control token from left to right, the longest one at each place."""
        end = 0
        for hit in self.first_char.finditer(text):
            start = hit.start()
            if start < end:
                continue
            for length in self._lengths:
                token_id = self._tokens.get(text[start : start + length])
                if token_id is not None:
                    end = start + length
                    yield start, end, token_id
                    break

    def ids(self, text: str) -> list[int]:
        """Return the ids of the control tokens in a text."""
        return [token_id for _, _, token_id in self.find(text)]

    def split(self, text: str) -> list[str | int]:
        """Cut a text into what is not a control token and the ids of what is."""
        parts: list[str | int] = []
        end = 0
        for start, next_end, token_id in self.find(text):
            parts += [text[end:start], token_id]
            end = next_end
        parts.append(text[end:])
        return parts

    def mark_beginnings(self, text: str, mark: str) -> str:
        """Put `mark` after every character that could begin a control token, or go on with one at the very start."""
        marked = self.first_char.sub(lambda hit: hit[0] + mark, text)
        return marked[0] + mark + marked[1:] if self.continues(text) else marked

    def mark_tokens(self, text: str, mark: str) -> str:
        """Put `mark` after the first character of every control token, and of what could go on with one."""
        parts = []
        end = 0
        for start, _, _ in self.find(text):
            parts.append(text[end : start + 1])
            end = start + 1
        marked = mark.join([*parts, text[end:]])
        return marked[0] + mark + marked[1:] if self.continues(text) else marked


class _Probe:
    """A marker that marks nothing, but records whether other markers would."""

    def __init__(self, controls: ControlTokenFinder) -> None:
        self._controls = controls
        self.suspicious = False

    def __call__(self, text: str) -> str:
        if not self.suspicious and self._controls.suspicious(text):
            self.suspicious = True
        return text


def _structural(tokenizer: Tokenizer, source: str) -> dict[str, int]:
    """Return the added tokens that look like control tokens, and are ones to this template, but are not special.

    DeepSeek begins turns with such, and several families mark tool calls with them.
    """
    added = tokenizer.plain_added_tokens
    return {text: index for text, index in added.items() if STRUCTURAL.fullmatch(text) and text in source}


def _random_digits() -> str:
    return f"{secrets.randbelow(10**MARK_DIGITS):0{MARK_DIGITS}}"


@dataclass(frozen=True, slots=True)
class _Marks:
    """A mark, and the text in which it stands."""

    mark: str
    text: str


@dataclass(frozen=True, slots=True)
class _End:
    """Where the last message ends: the mark that stands there, and the text before it."""

    mark: str
    text: str

    def cut(self, rendered: str, strict: bool) -> str:
        """Return what is rendered before the mark. Raises `RequestError` if the text is not there unchanged."""
        position = rendered.rfind(self.mark)
        if position < 0 or (strict and self.text.strip() not in rendered):
            raise RequestError(
                "the chat template changes or drops the last message, so it cannot be continued",
                param="continue_final_message",
            )
        kept = rendered[:position]
        # The blank behind the mark shows whether the template trims content; then the end is trimmed here.
        return kept if rendered.startswith(self.mark + " ", position) else kept.rstrip()


def _mark_end(message: dict[str, Any], field: str) -> _End:
    """Put a mark behind a field of the last message, so that `_End.cut` finds where it ends."""
    mark = _random_digits()
    content = message.get(field)
    if isinstance(content, str):
        names = REASONING_KEYS if field in REASONING_KEYS else (field,)
        for name in names:
            if message.get(name) == content:
                message[name] = content + mark + " "
        return _End(mark, content)
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] = text + mark + " "
            return _End(mark, text)
    raise RequestError(
        f"continue_final_message needs a last message with {'text content' if field == 'content' else echo(field)}",
        param="messages",
    )
