"""Every answer of the three dialects is what the vendors' own schemas say, nulls included.

OpenAI publishes a description of its API, which says where null is allowed, and all three have Python clients whose
types are read strictly here: no value is converted. A field that may be left out is absent or valid, since clients in
other languages than Python take a null where none is expected for an error. `/tokenize`, `/rerank` and the like have no
vendor with types.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from quire.demo import demo_model_path
from tests.helpers.live_server import LiveServer
from tests.helpers.pooling_checkpoints import add_modules
from tests.helpers.server import Server
from tests.server.responses.asking import LEAVE_CALL, LOOK_CALL, THOUGHT, says
from tests.server.responses.spec import SPEC, event_schemas, validator

pytestmark = pytest.mark.slow  # the types of the clients take many seconds to import

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA_CHAT, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["hall", "yard"]}},
    "required": ["place"],
    "additionalProperties": False,
}
# What models are served as, and what a request is like that all variants begin with.
MODELS = {"demo": "quire-demo", "family": "fake", "embed": "embed"}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 24},
    COMPLETIONS: {"prompt": "The king", "max_tokens": 24},
    RESPONSES: {"input": "hi", "max_output_tokens": 24},
    MESSAGES: {"messages": HI, "max_tokens": 24},
    OLLAMA_CHAT: {"messages": HI, "options": {"num_predict": 24}},
    GENERATE: {"prompt": "The king", "options": {"num_predict": 24}},
}
# The schema in OpenAI's description, None if there is none, and the type of the client: of whole answers, and of the
# events or parts of a stream.
Schema = tuple[str | None, str]
SCHEMAS: dict[str, tuple[Schema, Schema]] = {
    CHAT: (
        ("CreateChatCompletionResponse", "openai.types.chat.ChatCompletion"),
        ("CreateChatCompletionStreamResponse", "openai.types.chat.ChatCompletionChunk"),
    ),
    COMPLETIONS: (("CreateCompletionResponse", "openai.types.Completion"),) * 2,
    RESPONSES: (("Response", "openai.types.responses.Response"), (None, "openai.types.responses.ResponseStreamEvent")),
    MESSAGES: ((None, "anthropic.types.Message"), (None, "anthropic.types.RawMessageStreamEvent")),
    OLLAMA_CHAT: ((None, "ollama.ChatResponse"),) * 2,
    GENERATE: ((None, "ollama.GenerateResponse"),) * 2,
}
# Fields of ours or vLLM's in answers of OpenAI's API, and those that may be null.
EXTENSIONS = {
    *("reasoning", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs", "metrics", "system_fingerprint"),
    *("max_model_len", "parent", "root", "status", "id", "created", "completion_tokens", "prompt_tokens_details"),
    *("store", "bytes"),  # OpenAI's own, but not in all of its client's types that have them here
}
NULL_EXTENSIONS = {"stop_reason", "parent"}
# Nulls in answers of the two APIs without a description: Anthropic's says that these are required.
NULLS = {"stop_reason", "stop_sequence", "request_id"}


class Answer(NamedTuple):
    """A request, the server that it goes to, and what its answer is.

    `said`: what the model of `family` says. `status`: of the answer. `schema`: unless it is that of the route.
    """

    path: str
    body: dict[str, Any] | None = None
    server: str = "demo"
    said: str = ""
    schema: Schema | None = None
    status: int = 200

    def __str__(self) -> str:
        shown = json.dumps(self.body)[:50] if self.body else ""
        return f"{self.server} {self.path} {self.status} {self.said[:8]!r} {shown}"


def variants(path: str, *bodies: dict[str, Any], server: str = "demo", said: Sequence[str] = ("",)) -> list[Answer]:
    """Return each of these requests, for each text that the model says, whole and streamed."""
    return [
        Answer(path, {**BASES[path], **body, "stream": stream}, server, text)
        for text in said
        for body in bodies
        for stream in (False, True)
    ]


def failing(schema: Schema, path: str, body: dict[str, Any], status: int = 400, **base: Any) -> Answer:
    return Answer(path, {**base, **body}, schema=schema, status=status)


FUNCTION = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
FLAT_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
CLAUDE_TOOLS = {"tools": [{"name": "look", "input_schema": PARAMETERS}]}
OBJECT = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ONLY_WHOLE = {"stream": False}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
SEALED = {"include": ["reasoning.encrypted_content"]}
CALLS = "I look. " + LOOK_CALL + "\n" + LEAVE_CALL
SAID = ("hello world", "", THOUGHT + "so it is", THOUGHT, THOUGHT + CALLS, LOOK_CALL)
ERROR: Schema = ("ErrorResponse", "builtins.dict")
CLAUDE_ERROR: Schema = (None, "anthropic.types.ErrorResponse")
OLLAMA_ERROR: Schema = (None, "builtins.dict")
BASE = {"model": "quire-demo"}

ANSWERS = [
    *variants(CHAT, {}, {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}, {"max_tokens": 1}),
    *variants(CHAT, {"response_format": OBJECT}, {**TOOLS, "tool_choice": "required"}, {"stop": ["e"]}),
    *[answer for answer in variants(CHAT, USAGE) if answer.body and answer.body["stream"]],
    Answer(CHAT, {**BASES[CHAT], "prompt_logprobs": 1, "include_metrics": True}),
    *variants(CHAT, {"max_tokens": 90}, {**TOOLS, "max_tokens": 90, "logprobs": True}, server="family", said=SAID),
    *variants(COMPLETIONS, {}, {"n": 2, "logprobs": 2, "return_token_ids": True}, {"echo": True, "logprobs": 1}),
    *variants(COMPLETIONS, {"max_tokens": 0, "echo": True}, {"stop": ["e"]}, {"prompt": ["a", "b"]}),
    *[answer for answer in variants(COMPLETIONS, USAGE) if answer.body and answer.body["stream"]],
    Answer(COMPLETIONS, {**BASES[COMPLETIONS], "prompt_logprobs": 1, "include_metrics": True}),
    Answer(COMPLETIONS, {**BASES[COMPLETIONS], "use_beam_search": True, "n": 2, "temperature": 0}),
    *variants(RESPONSES, {}, LOGPROBS, {"max_output_tokens": 1}, {"background": True}, {"store": False}),
    *variants(RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}}}),
    *variants(RESPONSES, {**FLAT_TOOLS, "tool_choice": "required"}, {"truncation": "auto", "metadata": {"a": "b"}}),
    *variants(RESPONSES, {"max_output_tokens": 90}, {**FLAT_TOOLS, **SEALED, **LOGPROBS}, server="family", said=SAID),
    Answer(RESPONSES + "/input_tokens", {"input": "hi"}, schema=("TokenCountsResource", "builtins.dict")),
    Answer(
        "/v1/conversations",
        {"items": HI, "metadata": {"a": "b"}},
        schema=("ConversationResource", "openai.types.conversations.Conversation"),
    ),
    Answer("/v1/models", schema=("ListModelsResponse", "builtins.dict")),
    Answer("/v1/models/quire-demo", schema=("Model", "openai.types.Model")),
    *[
        Answer(
            "/v1/embeddings",
            {"input": ["a b", "c"], **more},
            "embed",
            schema=("CreateEmbeddingResponse", "openai.types.CreateEmbeddingResponse"),
        )
        for more in ({}, {"dimensions": 4})
    ],
    *variants(MESSAGES, {}, {"max_tokens": 1}, {"stop_sequences": ["e"]}),
    *variants(MESSAGES, {**CLAUDE_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 60}),
    *variants(MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}}),
    *variants(MESSAGES, {"max_tokens": 90}, {**CLAUDE_TOOLS, "max_tokens": 90}, server="family", said=SAID),
    Answer(MESSAGES + "/count_tokens", {"messages": HI}, schema=(None, "anthropic.types.MessageTokensCount")),
    *variants(OLLAMA_CHAT, {}, {"format": PARAMETERS}, {"options": {"num_predict": 1}}, {"messages": []}),
    *variants(OLLAMA_CHAT, {"options": {}}, {**TOOLS, "options": {}}, server="family", said=SAID),
    *variants(GENERATE, {}, {"raw": True}, {"prompt": ""}),
    *variants(GENERATE, {"options": {}}, {"think": True, "options": {}}, server="family", said=SAID[:4]),
    Answer("/api/tags", schema=(None, "ollama.ListResponse")),
    Answer("/api/ps", schema=(None, "ollama.ProcessResponse")),
    Answer("/api/version", schema=(None, "builtins.dict")),
    Answer("/api/show", {}, schema=(None, "ollama.ShowResponse")),
    Answer("/api/show", {}, "embed", schema=(None, "ollama.ShowResponse")),
    Answer("/api/embed", {"input": ["a b", "c"]}, "embed", schema=(None, "ollama.EmbedResponse")),
    Answer("/api/embeddings", {"prompt": "a b"}, "embed", schema=(None, "ollama.EmbeddingsResponse")),
    *[failing(ERROR, path, {"temperature": -1}, **BASES[path]) for path in (CHAT, COMPLETIONS, RESPONSES)],
    *[failing(ERROR, path, {"model": "nope"}, 404, **BASES[path]) for path in (CHAT, COMPLETIONS, RESPONSES)],
    failing(ERROR, "/v1/embeddings", {"input": "a"}),
    failing(ERROR, "/v1/conversations/conv_1", {"metadata": {}}, 404),
    failing(ERROR, "/v1/nowhere", {}, 404),
    failing(CLAUDE_ERROR, MESSAGES, {}),
    failing(CLAUDE_ERROR, MESSAGES, {"model": "nope"}, 404, **BASES[MESSAGES]),
    failing(OLLAMA_ERROR, OLLAMA_CHAT, {"messages": 5}),
    failing(OLLAMA_ERROR, GENERATE, {"model": "nope"}, 404, **BASES[GENERATE]),
]


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of the built-in model, with what makes vectors of its last hidden states."""
    folder = tmp_path_factory.mktemp("vectors")
    for file in demo_model_path().iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).symlink_to(file)
    add_modules(folder, "lasttoken")
    options: dict[str, Any] = {"engine": "inline", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 256}
    live = LiveServer(real=True, model=str(folder), served_model_name="embed", **options)
    yield live
    live.close()


@pytest.mark.parametrize("case", ANSWERS, ids=str)
def test_an_answer_is_what_the_vendor_says(case: Answer, request: pytest.FixtureRequest) -> None:
    server: Server | LiveServer = request.getfixturevalue("demo_server" if case.server == "demo" else case.server)
    if isinstance(server, LiveServer) and case.server == "family":
        says(server, case.said)
    answer = ask(server, case)
    assert answer.status_code == case.status, answer.text
    kind = answer.headers["content-type"].split(";")[0]
    if kind == "application/json":
        whole = case.schema or SCHEMAS[case.path][0]
        check(whole, answer.json())
        return
    parts = parts_of(answer.text, kind)
    assert parts
    for part in parts:
        check(SCHEMAS[case.path][1], part)


def ask(server: Server | LiveServer, case: Answer) -> httpx.Response:
    """Return the answer to a request."""
    body = None if case.body is None else {"model": MODELS[case.server], **case.body}
    if body is not None and case.path.startswith("/v1/conversations"):
        del body["model"]
    method = "GET" if body is None else "POST"
    url = f"{server.url}{case.path}"
    return httpx.request(method, url, json=body, timeout=120, trust_env=False, verify=False)


def parts_of(text: str, kind: str) -> list[Any]:
    """Return the events or lines of a stream, but for those without content."""
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    parts = [json.loads(item) for item in data if item != "[DONE]"]
    return [part for part in parts if part.get("type") != "ping"]  # which Anthropic's types do not have


def check(schema: Schema, value: Any) -> None:
    """Fail unless a value is what the vendor says."""
    name, type_name = schema
    if SPEC.exists() and type_name.endswith("ResponseStreamEvent"):
        name = event_schemas()[value["type"]]
    if SPEC.exists() and name is not None:
        errors = [f"{item.json_path}: {item.message[:300]}" for item in validator(name).iter_errors(tolerated(value))]
        assert errors == []
    package = type_name.partition(".")[0]
    pytest.importorskip(package)
    try:
        found = client_type(type_name).validate_json(json.dumps(tolerated(value)), strict=True)
    except ValidationError as error:
        pytest.fail(f"{error}\n{json.dumps(value)[:2000]}")
    extras = dict(unknown(found))
    if package == "openai":
        assert extras.keys() <= EXTENSIONS
        assert {field for field, item in extras.items() if item is None} <= NULL_EXTENSIONS
    else:
        assert not extras
        if name is None:
            assert set(nulls(value)) <= NULLS


@cache
def client_type(name: str) -> TypeAdapter[Any]:
    """Return what reads values of a type of a client."""
    module, _, attribute = name.rpartition(".")
    return TypeAdapter(getattr(importlib.import_module(module), attribute))


def tolerated(value: Any) -> Any:
    """Return a part of a completion without what OpenAI's API sends, but its description does not allow.

    Until a choice has ended its `finish_reason` is null in a stream; with `echo` the first token has no
    log-probability.
    """
    if not isinstance(value, dict) or value.get("object") != "text_completion":
        return value
    choices = []
    for choice in value["choices"]:
        logprobs = choice["logprobs"]
        if logprobs is not None:
            lists = {field: logprobs[field] for field in ("token_logprobs", "top_logprobs")}
            first = {field: items[1:] for field, items in lists.items() if items and items[0] is None}
            logprobs = {**logprobs, **first}
        choices.append({**choice, "logprobs": logprobs, "finish_reason": choice["finish_reason"] or "stop"})
    return {**value, "choices": choices}


def unknown(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields, with their values, that the types of a client do not have."""
    if isinstance(value, BaseModel):
        yield from (value.model_extra or {}).items()
        for field in type(value).model_fields:
            yield from unknown(getattr(value, field))
    elif isinstance(value, list):
        for item in value:
            yield from unknown(item)


def nulls(value: Any) -> Iterator[str]:
    """Yield the names of the fields that are null."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if item is None:
            yield str(name)
        yield from nulls(item)
