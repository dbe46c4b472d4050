"""From a generated text to the message it is, for callers in Python; the server reads streams itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError
from quire.frontend.asking import message_spec
from quire.frontend.formats.message import Message
from quire.frontend.loading import FrontModel
from quire.frontend.tools import requested_tools
from quire.outputs import CompletionOutput, RequestOutput


def read_message(
    front: FrontModel, output: RequestOutput, completion: CompletionOutput, tools: Sequence[Any] | None = None
) -> Message:
    """Return reasoning, content and tool calls of a completion of a chat.

    Args:
        tools: those that were offered; without them there are no calls.

    Raises:
        RequestError: the engine runs without a tokenizer, or the tools are malformed.
    """
    if front.tokenizer is None:
        raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)")
    asked = requested_tools(None if tools is None else list(tools), None, True)
    ask = message_spec(front, output.prompt_token_ids, tools=asked.callable, choice=asked.choice)
    text = front.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
    if isinstance(completion.stop_reason, str) and completion.stop_reason in text:
        text = text[: text.rindex(completion.stop_reason)]
    parser = front.message_format.parser(ask)
    message = Message()
    message.add(parser.feed(text))
    message.add(parser.finish())
    return message
