"""The bodies of requests about responses and conversations: fields, types, what is refused by name.

Values are read in `translate`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SkipValidation

from quire.checks import Refused
from quire.sampling_params import OPTIONS
from quire.server.protocol import (
    REFUSED_EVERYWHERE,
    RESULT_FIELDS,
    BodyPart,
    ReasoningEffort,
    RequestModel,
    SamplingRequest,
    ShortText,
    Verbosity,
)

MAX_SAFETY_IDENTIFIER = 64
MAX_PAIRS, MAX_PAIR_KEY, MAX_PAIR_VALUE = 16, 64, 512

REFUSED: Refused = {
    **{name: accepted for name, accepted in REFUSED_EVERYWHERE.items() if name != "store"},
    # An option that needs one of the others is unknown here, as any other name is.
    **{name: () for name in RESULT_FIELDS if not OPTIONS[name].needs},
    "max_tokens": (),
    "best_of": (1,),
    "context_management": (),
    "echo": (False,),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": (),
    "response_format": (),
    "return_token_ids": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
# What chat completions take that has the same meaning here, besides the fields of `SamplingRequest`.
CHAT_FIELDS = ("chat_template", "chat_template_kwargs", "documents", "include_reasoning", "parallel_tool_calls")


class ResponseStreamOptions(BodyPart):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class Reasoning(BodyPart):
    """Options of reasoning. No summary of it is made: one that is asked for ("auto") is empty."""

    effort: ReasoningEffort | None = None
    summary: SkipValidation[Literal["auto"] | None] = None
    generate_summary: SkipValidation[Literal["auto"] | None] = None
    context: SkipValidation[Literal["auto"] | None] = None
    mode: SkipValidation[Literal["standard"] | None] = None


class TextOptions(BodyPart):
    """The format of the text."""

    format: SkipValidation[dict[str, Any] | None] = None
    verbosity: Verbosity | None = None


class InputRequest(RequestModel):
    """Fields of requests that make a response, or count the tokens of its prompt."""

    input: SkipValidation[str | list[dict[str, Any]] | None] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: SkipValidation[str | dict[str, Any] | None] = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: SkipValidation[list[dict[str, Any]] | None] = None
    tool_choice: SkipValidation[str | dict[str, Any] | None] = None
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"


class ResponseRequest(InputRequest, SamplingRequest):
    """POST /v1/responses."""

    refused: ClassVar[Refused] = REFUSED

    background: bool = False
    store: bool = True
    include: SkipValidation[list[str] | None] = None
    top_logprobs: SkipValidation[int | None] = None
    max_output_tokens: SkipValidation[int | None] = None
    # Counts calls of tools that the server itself runs. It runs none, so any number is kept to.
    max_tool_calls: SkipValidation[int | None] = None
    stream_options: ResponseStreamOptions | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: SkipValidation[list[dict[str, Any]] | None] = None
    include_reasoning: bool = True

    # Accepted without any effect.
    safety_identifier: Annotated[str, Field(max_length=MAX_SAFETY_IDENTIFIER)] | None = None
    prompt_cache_key: ShortText | None = None
    metadata: SkipValidation[dict[str, str] | None] = None


class InputTokensRequest(InputRequest):
    """POST /v1/responses/input_tokens."""

    refused: ClassVar[Refused] = {"personality": ()}

    model: str | None = None


class CreateConversationRequest(RequestModel):
    """POST /v1/conversations."""

    items: SkipValidation[list[dict[str, Any]] | None] = None
    metadata: SkipValidation[dict[str, str] | None] = None


class UpdateConversationRequest(RequestModel):
    """POST /v1/conversations/{conversation_id}. Null metadata is none."""

    not_null: ClassVar[frozenset[str]] = frozenset({"metadata"})

    metadata: SkipValidation[dict[str, str] | None]


class CreateItemsRequest(RequestModel):
    """POST /v1/conversations/{conversation_id}/items."""

    items: SkipValidation[list[dict[str, Any]]]
