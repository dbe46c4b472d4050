"""The bodies of requests: which fields exist, of which type, and which are known but refused.

Fields that map onto `SamplingParams` are typed here for the API description only; `SamplingParams` checks them, so that
bounds stand in one place. A field that exists in the OpenAI or vLLM interfaces but that this server cannot honour is
listed in `refused` with the values that ask for nothing; any other value is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

MAX_USER_LENGTH = 256
MAX_KEY_LENGTH = 1024
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]+$"
SALT_PATTERN = r"^[^/@\\\x00-\x1f\x7f]+$"

Harmless = Mapping[str, tuple[Any, ...]]
ShortText = Annotated[str, Field(max_length=MAX_USER_LENGTH)]

REFUSED_EVERYWHERE: Harmless = {
    "custom_logit_processor": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "service_tier": ("auto", "default"),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
}
REFUSED_IN_CHAT: Harmless = {
    **REFUSED_EVERYWHERE,
    "audio": (),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
REFUSED_IN_COMPLETIONS: Harmless = {
    **REFUSED_EVERYWHERE,
    "suffix": ("",),
}


class RequestModel(BaseModel):
    """A request body. Types are strict: nothing is converted.

    Attributes:
        refused: fields that are known but not honoured, with the values that are accepted because they ask for nothing.
        not_null: fields for which null is an error; elsewhere a null field is an absent one.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    refused: ClassVar[Harmless] = {}
    not_null: ClassVar[frozenset[str]] = frozenset()


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class GenerationRequest(RequestModel):
    """What completions and chat completions have in common."""

    model: str

    # Checked by SamplingParams or, the last two of them, by BeamSearchParams.
    n: SkipValidation[int] = 1
    best_of: SkipValidation[int | None] = None
    max_tokens: SkipValidation[int | None] = None
    min_tokens: SkipValidation[int] = 0
    temperature: SkipValidation[float | None] = None
    top_p: SkipValidation[float | None] = None
    top_k: SkipValidation[int | None] = None
    min_p: SkipValidation[float | None] = None
    presence_penalty: SkipValidation[float] = 0.0
    frequency_penalty: SkipValidation[float] = 0.0
    repetition_penalty: SkipValidation[float | None] = None
    seed: SkipValidation[int | None] = None
    stop: SkipValidation[str | list[str] | None] = None
    stop_token_ids: SkipValidation[list[int] | None] = None
    bad_words: SkipValidation[list[str] | None] = None
    allowed_token_ids: SkipValidation[list[int] | None] = None
    logit_bias: SkipValidation[dict[str, float] | None] = None
    prompt_logprobs: SkipValidation[int | None] = None
    ignore_eos: SkipValidation[bool] = False
    skip_special_tokens: SkipValidation[bool] = True
    include_stop_str_in_output: SkipValidation[bool] = False
    truncate_prompt_tokens: SkipValidation[int | None] = None
    length_penalty: SkipValidation[float | None] = None
    early_stopping: SkipValidation[bool | Literal["never"] | None] = None

    use_beam_search: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=REQUEST_ID_PATTERN)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_KEY_LENGTH, pattern=SALT_PATTERN)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    # Accepted, without any effect on what is generated. Without API keys, `user` is the tenant.
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    metadata: SkipValidation[dict[str, Any] | None] = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    refused: ClassVar[Harmless] = REFUSED_IN_COMPLETIONS

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]] | None] = None
    echo: bool = False
    logprobs: SkipValidation[int | None] = None
    add_special_tokens: bool = True


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    refused: ClassVar[Harmless] = REFUSED_IN_CHAT
    not_null: ClassVar[frozenset[str]] = frozenset({"messages"})

    messages: SkipValidation[list[dict[str, Any]]]
    max_completion_tokens: SkipValidation[int | None] = None
    logprobs: bool = False
    top_logprobs: SkipValidation[int | None] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(RequestModel):
    """POST /tokenize: a prompt or a conversation."""

    refused: ClassVar[Harmless] = {"chat_template": (), "mm_processor_kwargs": (), "tools": ([],)}

    model: str | None = None
    prompt: str | None = None
    messages: SkipValidation[list[dict[str, Any]] | None] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize: token ids back to text."""

    model: str | None = None
    tokens: SkipValidation[list[int]]


def body_schema(model: type[RequestModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads this body itself."""
    schema = model.model_json_schema()
    for name, nested in schema.pop("$defs", {}).items():
        schema = _inline(schema, f"#/$defs/{name}", nested)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inline(value: Any, reference: str, nested: dict[str, Any]) -> Any:
    """Replace references to a nested model by the model itself: $defs are unknown at the place in OpenAPI."""
    if isinstance(value, dict):
        if value.get("$ref") == reference:
            return nested
        return {key: _inline(item, reference, nested) for key, item in value.items()}
    return [_inline(item, reference, nested) for item in value] if isinstance(value, list) else value
