"""The bodies of requests to /api: which fields exist, and which are known but refused. `translate` reads the values."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import SkipValidation

from quire.server.protocol import Harmless, RequestModel

REFUSED: Harmless = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "truncate": (),
    "shift": (),
    "dimensions": (),
}


class AnswerRequest(RequestModel):
    """What chats and single prompts have in common. A stream is what clients get unless they say otherwise."""

    model: str
    stream: bool = True
    format: SkipValidation[str | dict[str, Any] | None] = None
    options: SkipValidation[dict[str, Any] | None] = None
    think: SkipValidation[bool | str | None] = None
    keep_alive: SkipValidation[str | float | None] = None


class ChatRequest(AnswerRequest):
    """POST /api/chat."""

    refused: ClassVar[Harmless] = REFUSED

    messages: SkipValidation[list[dict[str, Any]] | None] = None
    tools: SkipValidation[list[dict[str, Any]] | None] = None


class GenerateRequest(AnswerRequest):
    """POST /api/generate."""

    refused: ClassVar[Harmless] = {
        **REFUSED,
        "context": ([],),
        "images": ([],),
        "suffix": ("",),
        "template": ("",),
        "width": (),
        "height": (),
        "steps": (),
    }

    prompt: str = ""
    system: str = ""
    raw: bool = False


class ShowRequest(RequestModel):
    """POST /api/show. `name` is the older name of `model`."""

    refused: ClassVar[Harmless] = {"system": ("",), "template": ("",), "options": ({},)}

    model: str | None = None
    name: str | None = None
    verbose: bool = False
