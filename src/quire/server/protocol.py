"""The bodies of requests: which fields exist, of which type, and which are known but refused.

Sampling fields are those of `SamplingParams`, which checks their values, so that a new one need not be declared here.
A field that exists in the OpenAI or vLLM interfaces but that this server cannot honour is
listed in `refused` with the values that ask for nothing; any other value is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    ValidationInfo,
    create_model,
    model_validator,
)

from quire.checks import Fields, Refused
from quire.sampling_params import OPTIONS, SamplingParams
from quire.sampling_params import REFUSED as REFUSED_OPTIONS

MAX_USER_LENGTH = 256
MAX_KEY_LENGTH = 1024
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]+$"
SALT_PATTERN = r"^[^/@\\\x00-\x1f\x7f]+$"

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
ShortText = Annotated[str, Field(max_length=MAX_USER_LENGTH)]

REFUSED_EVERYWHERE: Refused = {
    **dict.fromkeys(REFUSED_OPTIONS, ()),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "ec_transfer_params": (),
    "flat_logprobs": (False,),
    "guided_decoding_backend": ("auto", "guidance"),
    "kv_transfer_params": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "return_prompt_text": (False,),
    "service_tier": ("auto", "default"),
    "session_id": (),
    "store": (False,),
    "truncation_side": ("left",),
}
REFUSED_IN_CHAT: Refused = {
    **REFUSED_EVERYWHERE,
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prompt_cache_retention": ("in_memory",),
    "web_search_options": (),
}
REFUSED_IN_COMPLETIONS: Refused = {
    **REFUSED_EVERYWHERE,
    "documents": ([],),
    "include_reasoning": (True,),
}


class RequestModel(BaseModel):
    """A request body. Types are strict: nothing is converted.

    Attributes:
        refused: fields that are known but not honoured, with the values that are accepted because they ask for nothing.
        not_null: fields of which null is a value, or an error; elsewhere a null field is an absent one.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    refused: ClassVar[Refused] = {}
    not_null: ClassVar[frozenset[str]] = frozenset()
    _ignore_unknown: bool = PrivateAttr(default=False)

    @property
    def ignore_unknown(self) -> bool:
        """Whether unknown fields, also of objects within the body, are dropped instead of refused."""
        return self._ignore_unknown

    @property
    def fields(self) -> Fields:
        """The fields that were sent, to check what is within them. It is built anew each time."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return Fields(given, "", ignore_unknown=self._ignore_unknown)


class BodyPart(BaseModel):
    """An object within a body whose fields are declared. Types are strict.

    Unknown fields are refused, unless the validation's context has a true `ignore_unknown`.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and info.context is not None and info.context["ignore_unknown"]:
            return {name: item for name, item in value.items() if name in cls.model_fields}
        return value


class StreamOptions(BodyPart):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class EngineBody(RequestModel):
    """Fields of everything that an engine runs. Without API keys, `user` is the tenant."""

    model: str
    priority: int = 0
    user: ShortText | None = None


# Fields of `SamplingParams` that no request has under that name, or that a subclass below declares.
_NOT_SAMPLING_FIELDS = (
    *REFUSED_EVERYWHERE,
    *("output_kind", "skip_clone", "extra_args", "max_tokens", "logprobs", "skip_special_tokens"),
    *("structured_outputs", "guided_decoding"),
)
# Types of fields whose JSON is not described by their type in `SamplingParams`.
_JSON_TYPES: Mapping[str, Any] = {
    "logit_bias": dict[str, float],
    "repetition_detection": dict[str, int],
    "logits_processors": list[str | dict[str, Any]],
}


# Options of completions and chat completions only: they change other parts of the result than the text.
RESULT_FIELDS = tuple(
    name for name, option in OPTIONS.items() if option.affects != "text" and name not in _NOT_SAMPLING_FIELDS
)
# Those that decide themselves which log-probabilities a response has.
LOGPROBS_FIELDS = tuple(name for name in RESULT_FIELDS if OPTIONS[name].affects == "logprobs")


def _fields(names: Iterable[str]) -> dict[str, Any]:
    """Return a field for each of these fields of `SamplingParams`; null is its default."""
    types = {**get_type_hints(SamplingParams), **_JSON_TYPES}
    return {name: (SkipValidation[types[name] | None], None) for name in names}  # type: ignore[misc, valid-type]


if TYPE_CHECKING:
    _SamplingFields = EngineBody
else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=EngineBody,
        **_fields([name for name in OPTIONS if name not in (*_NOT_SAMPLING_FIELDS, *RESULT_FIELDS)]),
    )


class SamplingRequest(_SamplingFields):
    """Fields of everything that generates text. Those of `SamplingParams` have its types, and are checked there."""

    skip_special_tokens: SkipValidation[bool] = True
    vllm_xargs: SkipValidation[dict[str, Any] | None] = None

    # Checked in `structured_outputs`.
    structured_outputs: SkipValidation[dict[str, Any] | None] = None
    guided_json: SkipValidation[str | dict[str, Any] | None] = None
    guided_regex: SkipValidation[str | None] = None
    guided_choice: SkipValidation[list[str] | None] = None
    guided_grammar: SkipValidation[str | None] = None
    guided_whitespace_pattern: SkipValidation[str | None] = None

    stream: bool = False
    timeout: float | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=REQUEST_ID_PATTERN)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_KEY_LENGTH, pattern=SALT_PATTERN)] | None = None


if TYPE_CHECKING:
    _ResultFields = SamplingRequest
else:
    _ResultFields = create_model("_ResultFields", __base__=SamplingRequest, **_fields(RESULT_FIELDS))


class GenerationRequest(_ResultFields):
    """Fields of completions and chat completions."""

    # Checked by SamplingParams.
    n: SkipValidation[int] = 1
    best_of: SkipValidation[int | None] = None
    max_tokens: SkipValidation[int | None] = None
    prompt_logprobs: SkipValidation[int | None] = None
    truncate_prompt_tokens: SkipValidation[int | None] = None

    # Checked in `structured_outputs`.
    response_format: SkipValidation[dict[str, Any] | None] = None

    include_metrics: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    # Accepted without any effect.
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    metadata: SkipValidation[dict[str, Any] | None] = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    refused: ClassVar[Refused] = REFUSED_IN_COMPLETIONS

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]] | None] = None
    suffix: str | None = None
    echo: bool = False
    logprobs: SkipValidation[int | None] = None
    add_special_tokens: bool = True


class TemplateRequest(RequestModel):
    """Fields of everything that renders a conversation."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: SkipValidation[list[dict[str, Any]] | None] = None
    tools: SkipValidation[list[dict[str, Any]] | None] = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None


class Prediction(BodyPart):
    """What the client expects of the text."""

    type: Literal["content"]
    content: SkipValidation[str | list[dict[str, Any]]]


class ChatCompletionRequest(TemplateRequest, GenerationRequest):
    """POST /v1/chat/completions."""

    refused: ClassVar[Refused] = REFUSED_IN_CHAT
    not_null: ClassVar[frozenset[str]] = frozenset({"messages"})

    messages: SkipValidation[list[dict[str, Any]]]
    max_completion_tokens: SkipValidation[int | None] = None
    logprobs: bool = False
    top_logprobs: SkipValidation[int | None] = None
    add_special_tokens: bool = False
    tool_choice: SkipValidation[str | dict[str, Any] | None] = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    # Accepted without any effect: it promises nothing but speed.
    prediction: Prediction | None = None


class TokenizeRequest(TemplateRequest):
    """POST /tokenize: a prompt or a conversation."""

    refused: ClassVar[Refused] = {"mm_processor_kwargs": ()}

    model: str | None = None
    prompt: str | None = None
    messages: SkipValidation[list[dict[str, Any]] | None] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize: token ids back to text."""

    model: str | None = None
    tokens: SkipValidation[list[int]]


def body_schema(model: type[RequestModel], stream: str | None = None) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that parses this body itself; `stream`: content type of its streams."""
    schema = model.model_json_schema()
    for name, nested in schema.pop("$defs", {}).items():
        schema = _inline(schema, f"#/$defs/{name}", nested)
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, **responds_with(stream)}


def responds_with(kind: str | None) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose response may have another content type than JSON."""
    return {} if kind is None else {"responses": {"200": {"content": {kind: {"schema": {"type": "string"}}}}}}


def _inline(value: Any, reference: str, nested: dict[str, Any]) -> Any:
    """Replace references to a nested model by the model itself: $defs are unknown at the place in OpenAPI."""
    if isinstance(value, dict):
        if value.get("$ref") == reference:
            return nested
        return {key: _inline(item, reference, nested) for key, item in value.items()}
    return [_inline(item, reference, nested) for item in value] if isinstance(value, list) else value
