"""From the outputs of a chat to Anthropic's message, whole or streamed.

`ContentBlocks.add` is the only way from events to blocks; a whole message is all blocks at the end. Both have
the same content.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from quire.frontend.formats.message import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from quire.outputs import CompletionOutput
from quire.server.chat import ChatCompletion
from quire.server.dialects import DialectAnswer
from quire.server.generation import Usage

OUR_CALL, THEIR_CALL = "call_", "toolu_"


class ContentBlocks:
    """The content blocks of a message so far.

    Args:
        shows_thinking: whether the text of reasoning is shown.

    Attributes:
        complete_call: whether there is at least one complete call of a tool.
    """

    def __init__(self, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._open: str | None = None  # type of the last block while it is open
        self.complete_call = False

    def add(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Add events of the chat; return those of the stream."""
        made: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ReasoningDelta():
                    made += self._add_text("thinking", event.text, "thinking_delta", "thinking")
                case ContentDelta():
                    made += self._add_text("text", event.text, "text_delta", "text")
                case CallStart():
                    call_id = event.id or ""
                    if call_id.startswith(OUR_CALL):
                        call_id = THEIR_CALL + call_id.removeprefix(OUR_CALL)
                    made += self.close()
                    made += self._begin({"type": "tool_use", "id": call_id, "name": event.name, "input": {}})
                case CallArguments():
                    made.append(self._delta({"type": "input_json_delta", "partial_json": event.text}))
                    self._texts[-1].append(event.text)
                case CallEnd():
                    self.complete_call = True
                    made += self.close()
        return made

    def _add_text(self, kind: str, text: str, delta: str, field: str) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if self._open != kind:
            made += self.close()
            empty = {"signature": ""} if kind == "thinking" else {}  # no citations: some clients refuse null
            made += self._begin({"type": kind, field: "", **empty})
        self._texts[-1].append(text)
        if kind != "thinking" or self._shows_thinking:
            made.append(self._delta({"type": delta, field: text}))
        return made

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._open = block["type"]
        self._blocks.append(block)
        self._texts.append([])
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def close(self) -> list[dict[str, Any]]:
        """Return the events that end the last block, if it has not ended."""
        if self._open is None:
            return []
        made = []
        block, text = self._blocks[-1], "".join(self._texts[-1])
        match self._open:
            case "thinking":
                block["thinking"] = text if self._shows_thinking else ""
                block["signature"] = signature(text)
                made.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
            case "text":
                block["text"] = text
            case "tool_use":
                block["input"] = _read_input(text)
        self._open = None
        return [*made, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def content(self) -> list[dict[str, Any]]:
        """Return all blocks, the last one closed."""
        self.close()
        return self._blocks


def signature(thinking: str) -> str:
    """Return the signature of a thinking block: a digest, which is never checked, as any text is accepted back."""
    return base64.b64encode(hashlib.sha256(b"thinking\x00" + thinking.encode()).digest()).decode()


def _read_input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} for one that was cut off."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage: the three kinds of input tokens add up to the prompt."""
    counts = usage.as_json()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    answer: dict[str, Any] = {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }
    if usage.reasoning_tokens is not None:
        answer["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return answer


class Answer(DialectAnswer):
    """The answer to one request.

    Args:
        chat: started. max_tokens: of the request.
    """

    def __init__(self, chat: ChatCompletion, max_tokens: int, shows_thinking: bool) -> None:
        super().__init__(chat)
        self._max_tokens = max_tokens
        self._blocks = ContentBlocks(shows_thinking)
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": "msg_" + self.generation.response_id.partition("-")[2],
            "type": "message",
            "role": "assistant",
            "model": self.generation.model,
            "content": content,
            **self._ending,
            "usage": {**usage_json(self.generation.usage), "service_tier": "standard"},
        }

    def begin(self) -> list[dict[str, Any]]:
        """As `DialectAnswer.begin`."""
        return [{"type": "message_start", "message": self._message([])}, {"type": "ping"}]

    def add(self, output: CompletionOutput, events: list[Event]) -> list[dict[str, Any]]:
        """As `DialectAnswer.add`."""
        made = self._blocks.add(events)
        if output.finished:
            made += self._blocks.close()
            self._ending = self._end(output)
        return made

    def end(self) -> list[dict[str, Any]]:
        """As `DialectAnswer.end`."""
        usage = usage_json(self.generation.usage)
        return [{"type": "message_delta", "delta": self._ending, "usage": usage}, {"type": "message_stop"}]

    def result(self) -> dict[str, Any]:
        """As `DialectAnswer.result`."""
        return self._message(self._blocks.content())

    def _end(self, output: CompletionOutput) -> dict[str, Any]:
        """Return why the message ended."""
        reason, sequence = "end_turn", None
        if output.finish_reason == "length":
            generated = self.generation.usage.as_json()["completion_tokens"]
            reason = "max_tokens" if generated >= self._max_tokens else "model_context_window_exceeded"
        elif isinstance(output.stop_reason, str):
            reason, sequence = "stop_sequence", output.stop_reason
        elif self._blocks.complete_call:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}
