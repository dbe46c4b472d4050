"""Chat templates: conversations to the text, and the token ids, that a model was trained on.

Templates are Jinja programs from model folders. They run sandboxed, without a loader, with bounds on their output and
on their steps, and see nothing but plain JSON data; for well-formed input the text is the one that the Transformers
library renders.

Control tokens in user text. What a caller writes into a message must not become a control token, or a user could end
their own turn and begin the system's. `ChatTemplate.encode` finds out by rendering a second time, with a mark (random
digits) after every character of the input that could begin a control token. Whatever the template does to the input
(trim it, split it, join it), no control token can arise from marked text, so those in the marked rendering are exactly
the template's own. If the ordinary rendering has the same control tokens, it is used as it is; that is nearly always
so, and when the input has no such character, there is no second rendering at all. Otherwise the text between the
template's control tokens is tokenized with control tokens disabled (`Tokenizer.encode_segments`).

Added tokens that a tokenizer does not call special (often <think> and the like) are ordinary vocabulary and stay so.
Roles are not marked, since some templates build control tokens from them; they must be plain words.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from quire.errors import ModelError, RequestError, echo
from quire.frontend.chat_sandbox import compile_template, render_bounded
from quire.frontend.controls import ControlFinder
from quire.frontend.processor import Processor
from quire.tokenizer.tokenizer import Tokenizer, check_text

MAX_DEPTH = 64
MARK_DIGITS = 24
ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_ .-]{0,63}")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
PROBE = "quire probe"

Marker = Callable[[str], str]


class ChatTemplate:
    """A compiled template together with the tokenizer it belongs to.

    Args:
        source: Jinja text. origin: the file it came from, for error messages.

    Raises:
        ModelError: a syntax error; the message names file and line.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, origin: str = "chat template") -> None:
        self.source = source
        self._tokenizer = tokenizer
        try:
            self._template = compile_template(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"{origin}: chat template, line {error.lineno}: {error.message}") from None
        self._controls = ControlFinder(tokenizer.control_tokens)
        self._takes_parts: bool | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: objects with "role", "content" and whatever else the template knows.
            add_generation_prompt: end with the beginning of an assistant's turn.
            continue_final_message: end within the last message, for the model to go on.
            tools: JSON schemas of functions. variables: what else the template may use, such as enable_thinking.

        Raises:
            RequestError: the messages are malformed, or the template refuses them; param is "messages".
        """
        options = _Options(messages, add_generation_prompt, continue_final_message, tools, variables)
        return self._render(options, lambda text: text)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        processor: Processor | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, in which every control token is the template's.

        Args:
            processor: refuses what cannot fit the context, early. truncate_prompt_tokens: keep only the last so many
                tokens. The others as for `render`.

        Raises:
            RequestError: as `render`. ContextLengthError: the conversation does not fit; param is "messages".
        """
        options = _Options(messages, add_generation_prompt, continue_final_message, tools, variables or {})
        seen = _Seen(self._controls.first_char)
        text = self._render(options, seen)
        if processor is not None:
            processor.check_chars(len(text), "messages")
            if truncate_prompt_tokens is None:
                processor.check_pieces(text, "messages")
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if seen.suspicious:
            token_ids = self._without_injection(options, token_ids)
        if truncate_prompt_tokens is not None:
            token_ids = token_ids[-truncate_prompt_tokens:]
        if processor is not None:
            processor.check_length(len(token_ids), "messages")
        return token_ids

    def _without_injection(self, options: _Options, token_ids: list[int]) -> list[int]:
        """Return `token_ids` if their control tokens are the template's own, and repaired ids otherwise."""
        mark = _random_digits()
        controls = self._controls

        def with_marked_tokens() -> str:
            return self._render(options, lambda text: controls.mark_tokens(text, mark))

        try:
            marked = self._render(options, lambda text: controls.mark_beginnings(text, mark))
        except RequestError:
            marked = with_marked_tokens()  # the template cannot do without what the marks hid from it
        genuine = controls.ids(marked)
        known = set(self._tokenizer.control_tokens.values())
        if [index for index in token_ids if index in known] == genuine:
            return token_ids
        # Marks may hide from the template what it looks for in the input ("</think>"), so prefer the text in which
        # only whole tokens are marked, if that was enough.
        sparse = with_marked_tokens()
        segments = controls.split(sparse if controls.ids(sparse) == genuine else marked)
        return self._tokenizer.encode_segments(
            [part.replace(mark, "") if isinstance(part, str) else part for part in segments]
        )

    def _render(self, options: _Options, mark: Marker) -> str:
        messages = [self._message(item, index, mark) for index, item in enumerate(options.messages)]
        end_mark = None
        if options.continue_final_message:
            end_mark = _mark_end(messages[-1])
        context = {
            **self._tokenizer.special_tokens,
            **_plain(options.variables, "chat_template_kwargs", mark),
            "messages": messages,
            "tools": None if options.tools is None else _plain(options.tools, "tools", mark),
            "add_generation_prompt": options.add_generation_prompt,
        }
        context.setdefault("documents", None)
        text = render_bounded(self._template, context)
        check_text(text, "messages")
        return text if end_mark is None else _cut_end(text, end_mark)

    def _message(self, message: Any, index: int, mark: Marker) -> dict[str, Any]:
        """Return a message as the template sees it: without nulls, text parts joined unless it handles parts."""
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object, got {echo(message)}", param=where, code="invalid_type")
        role = message.get("role")
        if role is None:
            raise RequestError(f"{where}.role is missing", param=f"{where}.role", code="missing_required_parameter")
        if not isinstance(role, str) or not ROLE.fullmatch(role):
            raise RequestError(f"{where}.role must be a plain word, got {echo(role)}", param=f"{where}.role")
        plain = {key: value for key, value in message.items() if value is not None and key != "role"}
        content = plain.get("content")
        if isinstance(content, list | tuple):
            texts = _texts_of(content, f"{where}.content")
            if not self._handles_parts():
                plain["content"] = "\n".join(texts)
        plain = {"role": role, **_plain(plain, where, mark)}
        reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
        if reasoning is not None:  # templates read it under either of two names
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        return plain

    def _handles_parts(self) -> bool:
        """Whether the template takes content as a list of parts; found out by trying."""
        if self._takes_parts is None:
            message = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
            context = {**self._tokenizer.special_tokens, "messages": [message], "tools": None, "documents": None}
            try:
                text = render_bounded(self._template, {**context, "add_generation_prompt": True})
            except RequestError:
                text = ""
            self._takes_parts = PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text
        return self._takes_parts


class _Options:
    """What to render, checked as far as it does not depend on the template."""

    def __init__(
        self,
        messages: Any,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Any,
        variables: Mapping[str, Any],
    ) -> None:
        if not isinstance(messages, list | tuple):
            raise RequestError(
                f"messages must be a list of objects, got {echo(messages)}", param="messages", code="invalid_type"
            )
        if not messages:
            raise RequestError("messages must not be empty", param="messages", code="empty_array")
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message contradicts add_generation_prompt; give one of them",
                param="continue_final_message",
            )
        taken = {"messages", "tools", "add_generation_prompt"} & set(variables)
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(sorted(taken))}", param="chat_template_kwargs"
            )
        self.messages = messages
        self.add_generation_prompt = add_generation_prompt
        self.continue_final_message = continue_final_message
        self.tools = tools
        self.variables = variables


class _Seen:
    """A marker that marks nothing, but notes whether any text has a character to mark."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.suspicious = False

    def __call__(self, text: str) -> str:
        if not self.suspicious and self._pattern.search(text):
            self.suspicious = True
        return text


def _plain(value: Any, path: str, mark: Marker, depth: int = 0) -> Any:
    """Copy JSON-like data, every text marked. Raises `RequestError` for anything else: templates see only data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return mark(str.__str__(value))
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth >= MAX_DEPTH:
        raise RequestError(f"{path[:100]} is nested deeper than {MAX_DEPTH} levels", param=path.split("[")[0])
    if isinstance(value, Mapping):
        return {_key(key, path, mark): _plain(item, f"{path}.{key}", mark, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", mark, depth + 1) for index, item in enumerate(value)]
    raise RequestError(f"{path} must be JSON data, got {type(value).__name__}", param=path, code="invalid_type")


def _key(key: Any, path: str, mark: Marker) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{path} has key {echo(key)}; keys must be texts", param=path, code="invalid_type")
    return mark(key)


def _texts_of(parts: Sequence[Any], where: str) -> list[str]:
    """Return the texts of content parts. Raises `RequestError` for parts of another kind."""
    texts = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{index}] is not a text; this model takes text only",
                param=f"{where}[{index}]",
                code="unsupported_content_type",
            )
        texts.append(text)
    return texts


def _random_digits() -> str:
    return f"{secrets.randbelow(10**MARK_DIGITS):0{MARK_DIGITS}}"


def _mark_end(message: dict[str, Any]) -> str:
    """Put a mark behind the content of the last message, so that `_cut_end` finds where it ends."""
    end_mark = _random_digits()
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + end_mark + " "
        return end_mark
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] = part["text"] + end_mark + " "
            return end_mark
    raise RequestError("continue_final_message needs a last message with text content", param="messages")


def _cut_end(text: str, end_mark: str) -> str:
    position = text.rfind(end_mark)
    if position < 0:
        raise RequestError(
            "the chat template drops the end of the last message, so it cannot be continued",
            param="continue_final_message",
        )
    kept = text[:position]
    # The blank behind the mark shows whether the template trims content; then the end is trimmed here.
    return kept if text.startswith(end_mark + " ", position) else kept.rstrip()
