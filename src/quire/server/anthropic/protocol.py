"""The bodies of POST /v1/messages and /v1/messages/count_tokens: which fields exist, and which are known but refused.

What is within messages, tools and the like is checked where it is translated, so that errors name the place.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import SkipValidation

from quire.server.protocol import Harmless, RequestModel

REFUSED: Harmless = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}


class ConversationRequest(RequestModel):
    """What both routes have in common: a conversation and what may follow it."""

    refused: ClassVar[Harmless] = REFUSED

    model: str
    messages: SkipValidation[list[dict[str, Any]]]
    system: SkipValidation[str | list[dict[str, Any]] | None] = None
    tools: SkipValidation[list[dict[str, Any]] | None] = None
    tool_choice: SkipValidation[dict[str, Any] | None] = None
    thinking: SkipValidation[dict[str, Any] | None] = None
    output_config: SkipValidation[dict[str, Any] | None] = None
    cache_control: SkipValidation[dict[str, Any] | None] = None


class MessagesRequest(ConversationRequest):
    """POST /v1/messages."""

    max_tokens: SkipValidation[int]
    stop_sequences: SkipValidation[list[str] | None] = None
    stream: bool = False
    temperature: SkipValidation[float | None] = None
    top_k: SkipValidation[int | None] = None
    top_p: SkipValidation[float | None] = None
    metadata: SkipValidation[dict[str, Any] | None] = None
    service_tier: Literal["auto", "standard_only"] = "auto"


class CountTokensRequest(ConversationRequest):
    """POST /v1/messages/count_tokens."""
